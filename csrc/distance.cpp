// Host code of the stem `distance`: the exact distance transform of a mask.
#include "distance.h"

#include "autograd.h"

namespace texvlm {
namespace {

std::tuple<Tensor, Tensor> distance_transform(const Tensor& mask) {
  const char* op = "distance_transform";
  check_shape(op, "mask", mask, "[B, H, W]", {-1, -1, -1});
  check_dtype(op, "mask", mask, at::kBool, "");
  const int64_t batch = mask.size(0), height = mask.size(1), width = mask.size(2);
  check_levels(op, height, width, 1);
  Tensor squared = new_tensor(mask.sizes(), at::kLong, mask.device()), index = new_tensor(mask.sizes(), at::kLong, mask.device());
  run_distance(mask.device(), batch, height, width,
               BoolMask{pointer<const bool>(mask), mask.stride(0), mask.stride(1), mask.stride(2)},
               SquaredSink{pointer<int64_t>(squared), pointer<int64_t>(index), height, width});
  return {squared, index};
}

}  // namespace

TORCH_LIBRARY_IMPL(texvlm, CPU, m) { m.impl("distance_transform", distance_transform); }
TORCH_LIBRARY_IMPL(texvlm, CUDA, m) { m.impl("distance_transform", distance_transform); }
TORCH_LIBRARY_IMPL(texvlm, Autograd, m) { m.impl("distance_transform", torch::autograd::autogradNotImplementedFallback()); }

}  // namespace texvlm
