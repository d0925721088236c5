// Mipmaps by the driver: 2D-array textures with storage that stays, filled, halved by glGenerateMipmap, and read.
#pragma once

#include <cstdint>
#include <list>
#include <string>

#include "../cuda/gl.h"
#include "../export.h"
#include "../math/texture.h"
#include "context.h"

namespace texvlm::gl {

// An immutable texture: RGBA32F or RGBA16F, `layers` pictures of four channels.
struct Shape {
  int64_t width, height, layers;
  int levels;
  bool half;

  int64_t texel_bytes() const { return half ? 8 : 16; }
  int64_t bytes() const { return make_levels(height, width, levels).texels * layers * texel_bytes(); }
  bool operator==(const Shape& o) const {
    return width == o.width && height == o.height && layers == o.layers && levels == o.levels && half == o.half;
  }
};

// One batch: level 0 is read from `level[0]`, the levels above it are written. In host memory, or on the CUDA device that the
// context is on; then everything is ordered by `stream`.
struct Job {
  Shape shape;
  bool on_cuda = false;
  void* stream = nullptr;
  struct {
    void* data;
    int64_t layer_bytes;  // from one layer to the next
  } level[kMaxLevels] = {};
};

// How far the driver's filter is from ours (the polyphase box) and from bilinear at the destination's centre: the largest
// difference of a weight, found by impulses. Even and odd sides apart.
struct Filter {
  double even_from_ours = 0, odd_from_ours = 0, odd_from_bilinear = 0;
};

// What this process has done so far, and what it holds now. `layered`: of the registered textures, those whose levels CUDA sees
// as one array each.
struct Statistics {
  int64_t contexts = 0, textures_made = 0, textures = 0, texture_bytes = 0, registered = 0, layered = 0, generated = 0;
  // Of the calls made while the profile was on: each step is then waited for.
  double upload_seconds = 0, generate_seconds = 0, read_seconds = 0;
};
TEXVLM_API Statistics statistics();
TEXVLM_API void profile(bool on);

// A context and its textures. Everything happens in the thread that made it.
class Device {
 public:
  explicit Device(int cuda_device);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();

  void reserve(const Shape& shape) { texture(shape); }  // storage, so that what does not fit is refused before anything else
  void generate(const Job& job);

  Context context;
  Filter filter;

 private:
  struct Texture {
    Shape shape;
    unsigned name;
    cuda::GlImage image;
  };
  Texture& texture(const Shape& shape);
  void release(std::list<Texture>::iterator t);
  void shrink(int64_t bytes);
  void upload(const Job& job, unsigned name);
  void read(const Job& job, unsigned name, int level);
  void generate_on_cuda(const Job& job, Texture& t);
  Filter probe();

  int cuda_device_;
  std::list<Texture> textures_;  // the one used last comes first
  int64_t held_ = 0, limit_;
};

}  // namespace texvlm::gl
