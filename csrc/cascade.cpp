// Host code of the stem `cascade`: the exact best k of many scores, and compaction.
#include "math/cascade.h"

#include <ATen/ops/empty.h>

#include "autograd.h"
#include "check.h"
#include "compact.h"
#include "cuda/cascade.h"
#include "launch.h"
#include "tensor.h"

namespace texvlm {
namespace {

std::tuple<Tensor, Tensor> select_topk(const Tensor& scores, Size size) {
  const char* op = "select_topk";
  check_shape(op, "scores", scores, "[B, N]", {-1, -1});
  check_texel_dtype(op, "scores", scores.scalar_type());
  const int64_t k = size;
  TEXVLM_CHECK(k >= 0, op, "k", "at least 0", k);
  const int64_t batch = scores.size(0), count = scores.size(1), kept = std::min(k, count);
  TEXVLM_CHECK(count <= INT32_MAX, op, "scores", "at most 2^31 - 1 a row", count);
  const Tensor values = new_tensor({batch, kept}, scores.scalar_type(), scores.device());
  const Tensor indices = new_tensor({batch, kept}, at::kLong, scores.device());
  if (batch == 0 || kept == 0) return {values, indices};
  dispatch_texel(scores.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const TopKView<T> view{pointer<const T>(scores), scores.stride(0),         scores.stride(1), count, kept,
                           pointer<T>(values),       pointer<int64_t>(indices)};
    if (on_cuda(scores.device())) {
      const c10::DeviceGuard guard(scores.device());
      const Tensor workspace = new_tensor({cuda::topk_workspace<T>(batch, count, kept)}, at::kByte, scores.device());
      return cuda::topk(view, batch, workspace.data_ptr(), current_stream(scores.device()));
    }
    const int64_t bytes = SelectRow<T>::workspace_bytes(count, kept);
    const Tensor workspace = at::empty({batch, bytes}, at::TensorOptions().dtype(at::kByte));
    const SelectRow<T> row{view, pointer<char>(workspace), bytes};
    host::parallel(batch, 4 * count, [&](int64_t begin, int64_t end) { host::each_row_any<0, host::kBest<T>>(row, begin, end); });
  });
  return {values, indices};
}

Tensor select_topk_backward(const Tensor& grad, const Tensor& indices, Size size) {
  const char* op = "select_topk_backward";
  check_shape(op, "grad", grad, "[B, k]", {-1, -1});
  check_texel_dtype(op, "grad", grad.scalar_type());
  check_shape(op, "indices", indices, "[B, k]", {grad.size(0), grad.size(1)});
  check_dtype(op, "indices", indices, at::kLong, "");
  check_same_device(op, "indices", indices, grad);
  const int64_t count = size;
  TEXVLM_CHECK(count >= grad.size(1), op, "count", "at least k = " + std::to_string(grad.size(1)), count);
  const Tensor packed = grad.contiguous(), places = indices.contiguous();
  const Tensor out = new_zeros({grad.size(0), count}, grad.scalar_type(), grad.device());
  dispatch_texel(grad.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const ScatterTopK<T, 0> scatter{pointer<const T>(packed), pointer<const int64_t>(places), grad.size(1), count,
                                    pointer<T>(out)};
    for_each_item<host::kBest<T>>(grad.device(), grad.size(0), grad.size(1), 4, scatter);
  });
  return out;
}

std::tuple<Tensor, Tensor> compact(const Tensor& mask) {
  const char* op = "compact";
  check_shape(op, "mask", mask, "[B, N]", {-1, -1});
  check_dtype(op, "mask", mask, at::kBool, "");
  return compacted(mask);
}

}  // namespace

TEXVLM_OPS(ops) {
  ops.differentiable<select_topk>("select_topk", GradientRule().given("count", size_of("scores", 1)));
  // The scatter is linear in `grad`, and its adjoint is the gather that it came from.
  ops.differentiable<select_topk_backward>(
      "select_topk_backward", GradientRule().by("aten::gather").given("dim", always(1)).given("index", same_as("indices")));
  ops.promotes("select_topk", {"scores"});
  ops.op<compact>("compact");
}

}  // namespace texvlm
