// Gradients of foveated tokens. Each is a sum over tokens, taken in gather form and in a fixed order: a block per fixation, a
// thread per offset, one block for m0 and e0. Bytes moved: the incoming gradients twice; that is little.
#include "fovea.h"

#include "scatter.cuh"

namespace texvlm::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads) fixation_kernel(FoveaTokensAdjoint<T, 0> f, int64_t all, T* partial) {
  for (int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    const int64_t b = i / f.view.fixations, first = (i - b * f.view.fixations) * f.view.count;
    FoveaTerms<T> sum{};
    for (int64_t n = threadIdx.x; n < f.view.count; n += kThreads) {
      const FoveaTerms<T> t = f.terms(b, first + n);
      sum.fixation[0] += t.fixation[0];
      sum.fixation[1] += t.fixation[1];
      sum.m0 += t.m0;
      sum.e0 += t.e0;
    }
    const T u = block_sum(sum.fixation[0]), v = block_sum(sum.fixation[1]), m0 = block_sum(sum.m0), e0 = block_sum(sum.e0);
    if (threadIdx.x != 0) continue;
    if (f.fixation) f.fixation[2 * i] = u, f.fixation[2 * i + 1] = v;
    partial[2 * i] = m0;
    partial[2 * i + 1] = e0;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) offsets_kernel(FoveaTokensAdjoint<T, 0> f, int64_t all) {
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; n < f.view.count;
       n += static_cast<int64_t>(gridDim.x) * kThreads) {
    T sum[2] = {};
    for (int64_t i = 0; i < all; ++i) {
      const int64_t b = i / f.view.fixations;
      const FoveaTerms<T> t = f.terms(b, (i - b * f.view.fixations) * f.view.count + n);
      sum[0] += t.offset[0];
      sum[1] += t.offset[1];
    }
    f.offsets[2 * n] = sum[0];
    f.offsets[2 * n + 1] = sum[1];
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) law_kernel(const T* partial, int64_t all, T* m0, T* e0) {
  T sum[2] = {};
  for (int64_t i = threadIdx.x; i < all; i += kThreads) {
    sum[0] += partial[2 * i];
    sum[1] += partial[2 * i + 1];
  }
  const T first = block_sum(sum[0]), second = block_sum(sum[1]);
  if (threadIdx.x != 0) return;
  if (m0) *m0 = first;
  if (e0) *e0 = second;
}

}  // namespace

template <class T>
void fovea_adjoint(const FoveaTokensAdjoint<T, 0>& f, int64_t batch, T* partial, void* stream) {
  const int64_t all = batch * f.view.fixations;
  if (all <= 0 || f.view.count <= 0) return;
  if (f.fixation || f.m0 || f.e0) launch(fixation_kernel<T>, dim3(at_most(all, 1 << 20)), kThreads, 0, stream, f, all, partial);
  if (f.offsets) launch(offsets_kernel<T>, dim3(blocks_for(f.view.count)), kThreads, 0, stream, f, all);
  if (f.m0 || f.e0) launch(law_kernel<T>, dim3(1), kThreads, 0, stream, static_cast<const T*>(partial), all, f.m0, f.e0);
}

template void fovea_adjoint<float>(const FoveaTokensAdjoint<float, 0>&, int64_t, float*, void*);
template void fovea_adjoint<double>(const FoveaTokensAdjoint<double, 0>&, int64_t, double*, void*);

TEXVLM_QUERIES(FoveaTokens<float, 0>);
TEXVLM_QUERIES(FoveaTokens<double, 0>);

}  // namespace texvlm::cuda
