// The generic kernel: one thread per texel (or query) and slice of 4 channels. Included by the .cu files only; torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "../math/scalar.h"
#include "launch.h"

namespace texvlm::cuda {

constexpr int kThreads = 256;
constexpr int kLanes = 32;             // of a warp
constexpr int64_t kSlice = 4;          // channels a thread handles: neighbouring lanes then read neighbouring 16 bytes
constexpr int64_t kMaxGridYZ = 65535;  // a grid is at most this long in y and z; the kernels loop over the rest

// Threads of a row of `width` texels. Neighbouring lanes have neighbouring slices of a texel; where channels go ways of their
// own (kHasOwnWays), neighbouring texels, and the next warp their next slice: no lane waits for another's channel, and the lines
// of the output, which several warps share, are whole before they leave the cache.
template <class F>
TEXVLM_HD int64_t lanes_of(int64_t width, int64_t slices) {
  return (kHasOwnWays<F> ? (width + kLanes - 1) / kLanes * kLanes : width) * slices;
}

template <class F>
__global__ void __launch_bounds__(kThreads)
    texels_kernel(F f, int64_t batch, int64_t y0, int64_t y1, int64_t x0, int64_t x1, int64_t channels) {
  const int64_t slices = (channels + kSlice - 1) / kSlice, lanes = lanes_of<F>(x1 - x0, slices);
  for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    for (int64_t y = y0 + blockIdx.y; y < y1; y += gridDim.y) {
      for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < lanes;
           i += static_cast<int64_t>(gridDim.x) * kThreads) {
        int64_t x = i / slices, slice = i - x * slices;
        if constexpr (kHasOwnWays<F>) {
          const int64_t warp = i / kLanes;
          x = warp / slices * kLanes + i % kLanes, slice = warp % slices;
          if (x >= x1 - x0) continue;
        }
        const int64_t c0 = slice * kSlice;
        if constexpr (HasPixels<F>::value) {
          f.template pixels<1>(b, y, x0 + x, 1);
        } else {
          f(b, y, x0 + x, c0, c0 + kSlice < channels ? c0 + kSlice : channels);
        }
      }
    }
  }
}

template <class F>
__global__ void __launch_bounds__(kThreads) queries_kernel(F f, int64_t batch, int64_t count, int64_t channels) {
  const int64_t slices = (channels + kSlice - 1) / kSlice, lanes = count * slices;
  for (int64_t b = blockIdx.y; b < batch; b += gridDim.y) {
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < lanes;
         i += static_cast<int64_t>(gridDim.x) * kThreads) {
      const int64_t n = i / slices, c0 = (i - n * slices) * kSlice;
      f(b, n, c0, c0 + kSlice < channels ? c0 + kSlice : channels);
    }
  }
}

inline unsigned blocks_for(int64_t lanes) {
  const int64_t blocks = (lanes + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < 1048576 ? blocks : 1048576);
}

inline unsigned at_most(int64_t n, int64_t limit) { return static_cast<unsigned>(n < limit ? n : limit); }

inline void check_launch() {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string("texvlm: CUDA launch failed: ") + cudaGetErrorString(error));
}

// The one function through which kernels are launched: asynchronous on `stream`, an error is thrown. (The tests have another,
// which runs the threads of each block as fibers on the host: tests/shim.)
#if !defined(TEXVLM_EMULATE)
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, void* stream, const A&... args) {
  kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(args...);
  check_launch();
}

// Shared memory of a kernel: `TEXVLM_SHARED(tile, float[64][65]);` declares float tile[64][65]. The dynamic kind, one declaration
// a kernel, is a pointer to as many bytes as launch() was told.
template <class T>
struct Same {
  using type = T;
};
#define TEXVLM_SHARED(name, ...) __shared__ typename ::texvlm::cuda::Same<__VA_ARGS__>::type name
#define TEXVLM_DYNAMIC_SHARED(name, ...)                        \
  extern __shared__ __align__(16) unsigned char name##_bytes[]; \
  __VA_ARGS__* const name = reinterpret_cast<__VA_ARGS__*>(name##_bytes)
#endif

template <class F>
void launch_texels(const F& f, int64_t batch, int64_t y0, int64_t y1, int64_t x0, int64_t x1, int64_t channels, void* stream) {
  const dim3 grid(blocks_for(lanes_of<F>(x1 - x0, (channels + kSlice - 1) / kSlice)), at_most(y1 - y0, kMaxGridYZ),
                  at_most(batch, kMaxGridYZ));
  launch(texels_kernel<F>, grid, kThreads, 0, stream, f, batch, y0, y1, x0, x1, channels);
}

template <class F>
void launch_queries(const F& f, int64_t batch, int64_t count, int64_t channels, void* stream) {
  const dim3 grid(blocks_for(count * ((channels + kSlice - 1) / kSlice)), at_most(batch, kMaxGridYZ));
  launch(queries_kernel<F>, grid, kThreads, 0, stream, f, batch, count, channels);
}

// Instantiates a functor F<T, 0> for one or for all texel types.
#define TEXVLM_TEXELS(...) \
  template void launch_texels(const __VA_ARGS__&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, void*)
#define TEXVLM_QUERIES(...) template void launch_queries(const __VA_ARGS__&, int64_t, int64_t, int64_t, void*)
#define TEXVLM_FOR_TEXEL_TYPES(KIND, F) \
  KIND(F<float, 0>);                    \
  KIND(F<double, 0>);                   \
  KIND(F<Half, 0>);                     \
  KIND(F<BFloat16, 0>)

}  // namespace texvlm::cuda
