// The cut of quadtrees: one launch, a block per picture. The nodes are those of cells, a few thousand and at most 1 / 192 of the
// picture's pixels, and stay in the cache; a pass over them by a block of 1024 takes a microsecond or two, a search some 40
// passes.
#include "quadtree.h"

#include "scan.cuh"

namespace texvlm::cuda {
namespace {

constexpr int kTreeThreads = 1024;

struct Block {
  int64_t rank, size;
  __device__ void wait() const { __syncthreads(); }
  template <class V>
  __device__ V before(V own, V& total) const {
    return block_exclusive<kTreeThreads>(own, total);
  }
  template <class A>
  __device__ int64_t best(A rate, int64_t index) const {
    TEXVLM_SHARED(rates, A[kTreeThreads]);
    TEXVLM_SHARED(indices, int64_t[kTreeThreads]);
    const int me = static_cast<int>(threadIdx.x);
    rates[me] = rate, indices[me] = index;
    __syncthreads();
    for (int step = kTreeThreads / 2; step > 0; step /= 2) {
      if (me < step && indices[me + step] >= 0 &&
          (indices[me] < 0 || rates[me + step] > rates[me] ||
           (rates[me + step] == rates[me] && indices[me + step] < indices[me]))) {
        rates[me] = rates[me + step];
        indices[me] = indices[me + step];
      }
      __syncthreads();
    }
    const int64_t found = indices[0];
    __syncthreads();
    return found;
  }
};

template <class A>
__global__ void __launch_bounds__(kTreeThreads) quadtree_kernel(QuadTreeCut<A> cut, int64_t batch) {
  const Block team{static_cast<int64_t>(threadIdx.x), kTreeThreads};
  for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
    cut(team, b);
    __syncthreads();
  }
}

}  // namespace

template <class A>
void quadtree_cut(const QuadTreeCut<A>& cut, int64_t batch, void* stream) {
  launch(quadtree_kernel<A>, dim3(at_most(batch, 1 << 20)), dim3(kTreeThreads), 0, stream, cut, batch);
}
template void quadtree_cut(const QuadTreeCut<float>&, int64_t, void*);
template void quadtree_cut(const QuadTreeCut<double>&, int64_t, void*);

}  // namespace texvlm::cuda
