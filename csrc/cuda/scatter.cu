#include "scatter.cuh"

namespace texvlm::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads) largest_kernel(const T* values, int64_t count, unsigned long long* largest) {
  double most = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const double v = static_cast<double>(static_cast<Acc<T>>(values[i]));
    if (finite(v)) most = maximum(most, fabs(v));
  }
  for (int step = kLanes / 2; step > 0; step /= 2) most = maximum(most, __shfl_xor_sync(kAllLanes, most, step));
  unsigned long long bits;  // of positive numbers, ordered as the numbers
  memcpy(&bits, &most, 8);
  if (threadIdx.x % kLanes == 0 && bits) atomicMax(largest, bits);
}

template <class A>
__global__ void __launch_bounds__(kThreads) add_fixed_kernel(FixedPoint fixed, A* out, int64_t count) {
  const double scale = fixed_scale(fixed);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads)
    out[i] += static_cast<A>(static_cast<double>(static_cast<long long>(fixed.sums[i])) / scale);
}

}  // namespace

template <class T>
void largest_magnitude(const T* values, int64_t count, unsigned long long* largest, void* stream) {
  if (count <= 0) return;
  const dim3 grid(at_most(ceil_div(count, 8 * kThreads), 2048));
  launch(largest_kernel<T>, grid, kThreads, 0, stream, values, count, largest);
}

template <class A>
void add_fixed(const FixedPoint& fixed, A* out, int64_t count, void* stream) {
  if (count <= 0) return;
  launch(add_fixed_kernel<A>, dim3(blocks_for(count)), kThreads, 0, stream, fixed, out, count);
}

template void largest_magnitude<float>(const float*, int64_t, unsigned long long*, void*);
template void largest_magnitude<double>(const double*, int64_t, unsigned long long*, void*);
template void largest_magnitude<Half>(const Half*, int64_t, unsigned long long*, void*);
template void largest_magnitude<BFloat16>(const BFloat16*, int64_t, unsigned long long*, void*);
template void add_fixed<float>(const FixedPoint&, float*, int64_t, void*);
template void add_fixed<double>(const FixedPoint&, double*, int64_t, void*);

}  // namespace texvlm::cuda
