// Rows reduced by blocks, in the order of math/reduce.h. Included by the .cu files only; torch-free.
//
// Reads what add() reads, once, neighbouring lanes neighbouring places; a row is a block of as many warps as it has groups.
#pragma once

#include "reduce.h"
#include "scan.cuh"

namespace texvlm::cuda {

namespace {

template <class P>
__device__ P of_lane_across(const P& part, int step) {
  static_assert(sizeof(P) % sizeof(unsigned) == 0);
  unsigned words[sizeof(P) / sizeof(unsigned)];
  memcpy(words, &part, sizeof(P));
#pragma unroll
  for (unsigned& word : words) word = __shfl_xor_sync(kAllLanes, word, step);
  P other;
  memcpy(&other, words, sizeof(P));
  return other;
}

// What all threads of the block have, joined: lanes as a tree, then warps one after another. All threads get it, and the block is
// in step after.
template <class P>
__device__ P block_join(P part) {
  TEXVLM_SHARED(parts, P[kThreads / kLanes]);
  for (int step = kLanes / 2; step > 0; step /= 2) part.join(0, of_lane_across(part, step), 0, 1);
  if (threadIdx.x % kLanes == 0) parts[threadIdx.x / kLanes] = part;
  __syncthreads();
  P total;
  total.clear();
  for (int w = 0; w < static_cast<int>(blockDim.x) / kLanes; ++w) total.join(0, parts[w], 0, 1);
  __syncthreads();
  return total;
}

constexpr int kReduceThreads = kReduceLanes * kReduceGroups;
static_assert(kReduceLanes == kLanes && kReduceThreads <= kThreads);

template <class F>
__global__ void __launch_bounds__(kReduceThreads) reduce_kernel(F f, int64_t rows, int64_t count) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    typename F::template Part<1> part;
    part.clear();
    for (int64_t x = threadIdx.x; x < count; x += blockDim.x) f.add(row, x, 1, part);
    const auto total = block_join(part);
    if (threadIdx.x == 0) f.finish(row, total);
  }
}

}  // namespace

template <class F>
void launch_rows_reduced(const F& f, int64_t rows, int64_t count, void* stream) {
  launch(reduce_kernel<F>, dim3(at_most(rows, 1 << 20)), dim3(reduce_groups(count) * kLanes), 0, stream, f, rows, count);
}

// Instantiates a functor of rows, or of planes.
#define TEXVLM_ROWS_REDUCED(...) template void launch_rows_reduced(const __VA_ARGS__&, int64_t, int64_t, void*)
#define TEXVLM_PLANES_REDUCED(...)            \
  TEXVLM_ROWS_REDUCED(RowParts<__VA_ARGS__>); \
  TEXVLM_ROWS_REDUCED(PlaneParts<__VA_ARGS__>)
// A functor of for_each_gathered (enlarge.h).
#define TEXVLM_GATHERED(...)  \
  TEXVLM_TEXELS(__VA_ARGS__); \
  TEXVLM_ROWS_REDUCED(GatheredTexels<__VA_ARGS__>)

}  // namespace texvlm::cuda
