// The scatter of a *_backward op on CUDA: plain atomics, or fixed point under torch.use_deterministic_algorithms.
#pragma once

#include <ATen/Context.h>

#include "cuda/scatter.h"
#include "launch.h"
#include "tensor.h"

namespace texvlm {

// Of one call: what the kernels need, and how it gets into the gradient of the texels afterwards.
struct FixedSums {
  at::Tensor sums, largest;
  cuda::FixedPoint view{nullptr, nullptr, 0};

  // grad: the incoming gradient; target: the gradient of the texels, zeros, or undefined; queries: their number in all pictures.
  FixedSums(const at::Tensor& grad, const at::Tensor& target, int64_t queries) {
    if (!target.defined() || target.numel() == 0 || !at::globalContext().deterministicAlgorithms()) return;
    const at::Tensor packed = grad.contiguous();
    sums = new_zeros(target.sizes(), at::kLong, target.device());
    largest = new_zeros({1}, at::kLong, target.device());
    view = {pointer<unsigned long long>(sums), pointer<unsigned long long>(largest), queries};
    dispatch_texel(grad.scalar_type(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      cuda::largest_magnitude(pointer<const T>(packed), packed.numel(), view.largest, current_stream(target.device()));
    });
  }

  template <class A>
  void add_to(const at::Tensor& target) const {
    if (view.sums) cuda::add_fixed(view, pointer<A>(target), target.numel(), current_stream(target.device()));
  }
};

}  // namespace texvlm
