// OpenGL textures as CUDA arrays: registered once, then mapped and unmapped around each use. Torch-free; no GL header either.
// The calling thread has the GL context current.
#pragma once

#include <cstddef>
#include <cstdint>

#include "launch.h"

namespace texvlm::cuda {

// One 2D-array texture. `layered`: whether CUDA sees all layers of a level as one array (otherwise each is fetched by itself).
struct GlImage {
  void* resource = nullptr;  // cudaGraphicsResource_t
  void* event = nullptr;     // recorded after the last use, so that another stream waits for it
  bool layered = false;
};

// Texels [layers][height][width], `layer_bytes` from one layer to the next, beside one level of the texture.
struct GlLevel {
  int level;
  int64_t width, height, layers, texel_bytes, layer_bytes;
};

#if defined(TEXVLM_WITH_CUDA) && !defined(TEXVLM_EMULATE)
bool stream_is_capturing(void* stream);
void stream_wait(void* stream);  // on the host
// Whether the current GL context runs on this CUDA device, which becomes the one of this thread; the thread captures no graphs.
bool gl_context_is_on(int device);
GlImage gl_register(unsigned texture, unsigned target, int64_t layers, void* stream);
void gl_unregister(GlImage& image);  // never throws: the context may be gone
// Map: GL commands issued before are done before what follows in the stream. Unmap: what is in the stream is done before GL
// commands that follow.
void gl_map(const GlImage& image, void* stream);
void gl_unmap(const GlImage& image, void* stream);
// Only while it is mapped.
void gl_write(const GlImage& image, const GlLevel& level, const void* texels, void* stream);
void gl_read(const GlImage& image, const GlLevel& level, void* texels, void* stream);
#else
inline bool stream_is_capturing(void*) { return false; }
inline void stream_wait(void*) {}
inline bool gl_context_is_on(int) { return false; }
inline GlImage gl_register(unsigned, unsigned, int64_t, void*) { throw std::runtime_error("texvlm was built without CUDA"); }
inline void gl_unregister(GlImage&) {}
inline void gl_map(const GlImage&, void*) {}
inline void gl_unmap(const GlImage&, void*) {}
inline void gl_write(const GlImage&, const GlLevel&, const void*, void*) {}
inline void gl_read(const GlImage&, const GlLevel&, void*, void*) {}
#endif

}  // namespace texvlm::cuda
