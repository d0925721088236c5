// How kernels add to gradients that several threads touch.
//
// Sinks have start(), called once, and add(live, at, value): W neighbouring values, at element `at`. All lanes of a warp call it
// together, those without something to add with live = false: below sm_90 lanes that hit one texel are matched, and one of them
// adds for all.
#pragma once

#include <cmath>
#include <type_traits>

#include "radix.cuh"
#include "reduce.cuh"
#include "scatter.h"

namespace texvlm::cuda {

// W neighbouring values, loaded and stored at once.
template <class T, int W>
struct alignas(sizeof(T) * W) Pack {
  T v[W];
};

template <int W, class T>
inline bool packs(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % (sizeof(T) * W) == 0;
}

namespace {

template <int W, class A>
__device__ void atomic_add(A* target, const A (&value)[W]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (W == 4 && std::is_same_v<A, float>) {
    atomicAdd(reinterpret_cast<float4*>(target), float4{value[0], value[1], value[2], value[3]});
  } else
#endif
  {
#pragma unroll
    for (int w = 0; w < W; ++w) atomicAdd(target + w, value[w]);
  }
}

// Sums over the lanes with the same `at`, in the lowest of them, which is told so. Each round every lane takes the next peer's
// sum and every second peer retires. Method: A. Adinetz, "Voting and shuffling to optimize atomic operations", 2015.
template <int W, class A>
__device__ bool sum_of_peers(bool live, int64_t at, A (&value)[W]) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const unsigned peers = __match_any_sync(kAllLanes, static_cast<long long>(live ? at : -1));
  unsigned above = peers & ~((2u << lane) - 1u);
  const unsigned below = peers & lanes_below();
  int rank = __popc(below);
  while (__any_sync(kAllLanes, above != 0)) {
    const int from = above ? __ffs(static_cast<int>(above)) - 1 : lane;
#pragma unroll
    for (int w = 0; w < W; ++w) {
      const A other = __shfl_sync(kAllLanes, value[w], from);
      if (above) value[w] += other;
    }
    above &= __ballot_sync(kAllLanes, (rank & 1) == 0);
    rank >>= 1;
  }
  return live && below == 0;
}

template <class A>
struct FloatSink {
  A* target;

  __device__ void start() {}
  template <int W>
  __device__ void add(bool live, int64_t at, A (&value)[W]) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    live = sum_of_peers(live, at, value);
#endif
    if (live) atomic_add(target + at, value);
  }
};

// 2^e with largest * count * 2^e < 2^61.
__device__ inline double fixed_scale(const FixedPoint& fixed) {
  double largest;
  const unsigned long long bits = *fixed.largest;
  memcpy(&largest, &bits, 8);
  int exponent = 0, doublings = 0;
  frexp(largest, &exponent);
  while (doublings < 62 && (int64_t{1} << doublings) < fixed.count) ++doublings;
  return ldexp(1.0, minimum(61 - exponent - doublings, 1000));
}

template <class A>
struct FixedSink {
  A* target;
  FixedPoint fixed;
  double scale;

  __device__ void start() { scale = fixed_scale(fixed); }
  template <int W>
  __device__ void add(bool live, int64_t at, A (&value)[W]) const {
    if (!live) return;
#pragma unroll
    for (int w = 0; w < W; ++w) {
      if (finite(value[w])) {
        const long long term = llrint(static_cast<double>(value[w]) * scale);
        if (term) atomicAdd(fixed.sums + at + w, static_cast<unsigned long long>(term));
      } else {
        atomicAdd(target + at + w, value[w]);
      }
    }
  }
};

// The block's sum, always in the same order. The block is in step after.
template <class A>
__device__ A block_sum(A value) {
  return block_join(Sums<A, 1, 1>{{{value}}}).of[0][0];
}

}  // namespace
}  // namespace texvlm::cuda
