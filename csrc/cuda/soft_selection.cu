// Soft selection: one launch forward and one backward, a block per row of scores. A row of a few thousand stays in the cache; a
// pass over it takes a microsecond or two. Forward makes about six (more at very small temperatures), backward three. Bytes
// moved: forward reads the scores and writes the weights, once; backward reads scores and gradients, writes one of them.
#include "soft_selection.h"

#include "reduce.cuh"

namespace texvlm::cuda {
namespace {

struct Block {
  static constexpr int64_t size = kReduceThreads;
  int64_t rank;
  __device__ void wait() const { __syncthreads(); }
  template <class F>
  __device__ typename F::template Part<1> total(const F& f, int64_t row, int64_t count) const {
    typename F::template Part<1> part;
    part.clear();
    for (int64_t x = rank; x < count; x += size) f.add(row, x, 1, part);
    return block_join(part);
  }
};

template <class F>
__global__ void __launch_bounds__(kReduceThreads) soft_rows_kernel(F f, int64_t batch) {
  const Block team{static_cast<int64_t>(threadIdx.x)};
  for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
    f(team, b);
    __syncthreads();
  }
}

}  // namespace

template <class F>
void launch_soft_rows(const F& f, int64_t batch, void* stream) {
  launch(soft_rows_kernel<F>, dim3(at_most(batch, 1 << 20)), dim3(kReduceThreads), 0, stream, f, batch);
}

#define TEXVLM_SOFT_ROWS(A)                                                                   \
  template void launch_soft_rows(const SoftTopK<Link::logistic, A>&, int64_t, void*);         \
  template void launch_soft_rows(const SoftTopK<Link::gumbel, A>&, int64_t, void*);           \
  template void launch_soft_rows(const SoftTopKBackward<Link::logistic, A>&, int64_t, void*); \
  template void launch_soft_rows(const SoftTopKBackward<Link::gumbel, A>&, int64_t, void*)
TEXVLM_SOFT_ROWS(float);
TEXVLM_SOFT_ROWS(double);

}  // namespace texvlm::cuda
