// What host code knows of CUDA: two launchers, defined in launch.cuh and instantiated per functor in the .cu of its stem.
// Without nvcc (TEXVLM_WITH_CUDA unset) on_cuda() raises before any of these headers' functions is reached, and none is linked.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace texvlm::cuda {

[[noreturn]] inline void not_built() {
  throw std::runtime_error("texvlm was built without CUDA kernels: install the CUDA toolkit (nvcc) and build it again");
}

// Each thread gets one texel (or query) and a slice of 4 channels. Asynchronous on `stream`; a launch error is thrown.
template <class F>
void launch_texels(const F& f, int64_t batch, int64_t y0, int64_t y1, int64_t x0, int64_t x1, int64_t channels, void* stream);
template <class F>
void launch_queries(const F& f, int64_t batch, int64_t count, int64_t channels, void* stream);

}  // namespace texvlm::cuda
