// Texture hardware as host code knows it: an array of mip levels that samplers read and surfaces write. Torch-free; hardware.cu
// is the only file that speaks of it to the CUDA runtime.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "../math/footprint.h"

namespace texvlm::cuda {

// The device has no memory for an array.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What arrays are cached by.
struct ArrayShape {
  int device;  // -1: the current one
  int64_t height, width, layers;
  int levels;
  int channels;  // of a layer: 4 or 1
  bool half;     // 16-bit floats, else 32-bit

  int64_t texel_bytes() const { return channels * (half ? 2 : 4); }
  int64_t bytes() const {  // of the texels; the driver pads them as it likes
    return make_levels(height, width, levels).texels * layers * texel_bytes();
  }
  bool operator==(const ArrayShape& o) const {
    return std::tie(device, height, width, layers, levels, channels, half) ==
           std::tie(o.device, o.height, o.width, o.layers, o.levels, o.channels, o.half);
  }
};

// The largest layered texture of a device that can be filtered, mipmapped and written.
struct ArrayLimits {
  int width, height, layers;
};
ArrayLimits array_limits(int device);

struct SamplerState {
  Filter filter;
  Address address;
  int max_anisotropy;

  bool operator<(const SamplerState& o) const {
    return std::tie(filter, address, max_anisotropy) < std::tie(o.filter, o.address, o.max_anisotropy);
  }
};

// A stream, and the CUDA graph that it is capturing; capture is 0 when it is not.
struct Stream {
  void* handle;
  unsigned long long capture;
  void* graph;
};
Stream stream_of(void* handle);

// What both kinds of queries share. Picture b of the queries reads picture b of the array, or its only one.
template <class T>
struct Fetch {
  T* out;  // [batch, count, channels]
  int64_t batch, count, channels, pictures;
  Levels levels;
  Reducers reducers;
  Address address;
};

// The samplers that a fetch needs, in the order of its launches: the smooth channels, then the nearest ones.
inline std::vector<SamplerState> samplers_for(Filter filter, Address address, int max_anisotropy, const Reducers& reducers) {
  std::vector<SamplerState> states;
  if (filter != Filter::nearest && !(reducers.uniform && reducers.any_mode)) states.push_back({filter, address, max_anisotropy});
  if (filter == Filter::nearest || reducers.any_mode) states.push_back({Filter::nearest, Address::clamp, 1});
  return states;
}

// A layered array of mip levels, its surfaces and samplers. Not thread-safe: the cache has the lock.
//
// Streams: a fill waits for the fills and reads of other streams, a read for fills. Graphs: hold() binds the array to a captured
// graph until that is destroyed, because every replay writes into it.
class MipArray {
 public:
  explicit MipArray(const ArrayShape& shape);  // throws what CUDA says
  ~MipArray();  // leaks in a child process, and where CUDA has been torn down: there is nothing to give back to
  MipArray(const MipArray&) = delete;
  MipArray& operator=(const MipArray&) = delete;

  const ArrayShape& shape() const { return shape_; }
  bool has(const std::vector<SamplerState>& states) const;
  void create(const std::vector<SamplerState>& states);  // those that are missing

  // All levels of `pictures` pictures, from the packed buffer. Asynchronous.
  template <class T>
  void fill(const TextureView<const T>& data, int64_t pictures, const Stream& stream);
  // Asynchronous; the samplers must be there.
  template <class T>
  void sample_lod(const Fetch<T>& fetch, const QueryView<float>& queries, Filter filter, const Stream& stream);
  template <class T>
  void sample_grad(const Fetch<T>& fetch, const FootprintView<float>& queries, int max_anisotropy, const Stream& stream);

  void hold(const Stream& stream);  // until the graph that it captures is destroyed
  bool held() const { return *graphs_ != 0; }
  bool held_by(const Stream& stream) const { return held() && stream.capture == capture_; }

 private:
  struct Use {
    void* stream;
    void* event;
  };
  void release() noexcept;
  void begin(const Stream& stream, bool write);
  void end(const Stream& stream, bool write);

  ArrayShape shape_;
  int process_;
  void* array_ = nullptr;
  uint64_t surfaces_[kMaxLevels] = {};
  std::map<SamplerState, uint64_t> samplers_;
  Use fill_ = {};                   // the last fill; no event: none
  std::vector<Use> reads_;          // since then, the last of each stream
  std::vector<void*> spare_;        // events for reuse
  unsigned long long capture_ = 0;  // in which these events were recorded; 0: outside of any
  std::shared_ptr<std::atomic<int>> graphs_ = std::make_shared<std::atomic<int>>(0);  // that hold the array
};

}  // namespace texvlm::cuda
