// What nvcc includes by itself at the beginning of a .cu: the language. Here it makes g++ a compiler for CUDA sources, in its pass
// for the device. (Sources that ask for __CUDA_ARCH__ get sm_90; -D__CUDA_ARCH__=750 shows them another.)
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#if !defined(__CUDA_ARCH__)
#define __CUDA_ARCH__ 900
#endif
#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__
#define __constant__ static const
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static_assert(false, "shared memory is declared by TEXVLM_SHARED of csrc/cuda/launch.cuh");

#include "atomics.h"
#include "cuda_runtime_api.h"
#include "grid.h"
#include "intrinsics.h"
#include "warps.h"

// Shared memory comes from the heap, exactly as large as declared, for each block: so AddressSanitizer guards its ends, and blocks
// that run at the same time each have their own.
#define TEXVLM_SHARED(name, ...)                                                             \
  static const char name##_key = 0;                                                          \
  auto& name = *static_cast<typename ::texvlm::shim::Same<__VA_ARGS__>::type*>(              \
      ::texvlm::shim::shared(&name##_key, sizeof(typename ::texvlm::shim::Same<__VA_ARGS__>::type)))
#define TEXVLM_DYNAMIC_SHARED(name, ...) __VA_ARGS__* const name = static_cast<__VA_ARGS__*>(::texvlm::shim::dynamic_shared())

namespace texvlm::shim {

template <class T>
struct Same {
  using type = T;
};

// The source that is being compiled; a kernel is told from others by the types of its parameters.
#if !defined(TEXVLM_SHIM_SOURCE)
#define TEXVLM_SHIM_SOURCE __BASE_FILE__
#endif

namespace {
template <class... P>
struct SiteOf {
  static const char* name() { return __PRETTY_FUNCTION__; }
  static inline Site site{TEXVLM_SHIM_SOURCE, name()};
};
}  // namespace

}  // namespace texvlm::shim

namespace texvlm::cuda {

// In the place of the launch() of csrc/cuda/launch.cuh.
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, void*, const A&... arguments) {
  struct Call {
    void (*kernel)(P...);
    std::tuple<P...> arguments;
  };
  const Call call{kernel, std::tuple<P...>(arguments...)};
  const auto thread = [](const void* p) {
    const Call& c = *static_cast<const Call*>(p);
    std::apply(c.kernel, c.arguments);
  };
  shim::run({grid, block, shared_bytes, thread, &call, &shim::SiteOf<P...>::site});
}

}  // namespace texvlm::cuda
