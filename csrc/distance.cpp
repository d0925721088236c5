// Host code of the stem `distance`: the exact distance transform of a mask.
#include "distance.h"

#include "autograd.h"

namespace texvlm {
namespace {

// Steps of half the longer side (rounded up to a power of two), a quarter, ..., 1, and then 2 and 1 again.
void flood(const BoolMask& mask, const SquaredSink& sink, c10::Device device, int64_t batch) {
  const int64_t height = sink.height, width = sink.width;
  const Rect all{batch, 0, height, 0, width};
  Tensor from = new_tensor({batch, height, width}, at::kLong, device), to = new_tensor({batch, height, width}, at::kLong, device);
  for_each_pixel<FloodStart<BoolMask>::template For, int64_t>(device, all, Work{}, mask, pointer<int64_t>(from), height, width);
  std::vector<int64_t> steps;
  for (int64_t step = 1; step < std::max(height, width); step *= 2) steps.insert(steps.begin(), step);
  steps.insert(steps.end(), {2, 1});
  for (const int64_t step : steps) {
    for_each_pixel<FloodStep, int64_t>(device, all, Work{1, 64}, pointer<const int64_t>(from), pointer<int64_t>(to), height,
                                       width, step);
    std::swap(from, to);
  }
  for_each_pixel<FloodEnd, int64_t>(device, all, Work{1, 4}, pointer<const int64_t>(from), sink);
}

std::tuple<Tensor, Tensor> distance_transform(const Tensor& mask, std::string_view method) {
  const char* op = "distance_transform";
  TEXVLM_CHECK(method == "exact" || method == "jfa", op, "method", "exact or jfa", "'", method, "'");
  check_shape(op, "mask", mask, "[B, H, W]", {-1, -1, -1});
  check_dtype(op, "mask", mask, at::kBool, "");
  const int64_t batch = mask.size(0), height = mask.size(1), width = mask.size(2);
  check_levels(op, height, width, 1);
  Tensor squared = new_tensor(mask.sizes(), at::kLong, mask.device()), index = new_tensor(mask.sizes(), at::kLong, mask.device());
  const BoolMask view{pointer<const bool>(mask), mask.stride(0), mask.stride(1), mask.stride(2)};
  const SquaredSink sink{pointer<int64_t>(squared), pointer<int64_t>(index), height, width};
  if (method == "jfa") {
    flood(view, sink, mask.device(), batch);
  } else {
    run_distance(mask.device(), batch, height, width, view, sink);
  }
  return {squared, index};
}

}  // namespace

TEXVLM_OPS(ops) { ops.op<distance_transform>("distance_transform"); }

}  // namespace texvlm
