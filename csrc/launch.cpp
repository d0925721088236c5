#include "launch.h"

#include <c10/util/Exception.h>

#include <cstdlib>

#if defined(TEXVLM_WITH_CUDA) && !defined(TEXVLM_EMULATE) && __has_include(<c10/cuda/impl/cuda_cmake_macros.h>)
#include <c10/cuda/CUDAStream.h>
#define TEXVLM_TORCH_HAS_CUDA 1
#endif

namespace texvlm {

#if defined(TEXVLM_EMULATE)
bool on_cuda(c10::Device device) {
  static const bool emulate = [] {
    const char* value = std::getenv("TEXVLM_EMULATE");
    return value != nullptr && value[0] == '1';
  }();
  return device.is_cuda() || emulate;
}
#elif defined(TEXVLM_WITH_CUDA)
bool on_cuda(c10::Device device) { return device.is_cuda(); }
#endif

void* current_stream([[maybe_unused]] c10::Device device) {
#if defined(TEXVLM_EMULATE)
  if (!device.is_cuda()) return nullptr;
#endif
#if defined(TEXVLM_TORCH_HAS_CUDA)
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
#else
  TORCH_CHECK(false, "texvlm: this build of PyTorch has no CUDA; build texvlm beside one that has");
#endif
}

namespace host {

Isa isa() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const Isa found = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
      return Isa::v4;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return Isa::v3;
    return Isa::base;
  }();
  return found;
#else
  return Isa::base;
#endif
}

}  // namespace host
}  // namespace texvlm
