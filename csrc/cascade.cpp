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

// min(k, N), of checked arguments.
int64_t check_topk(const char* op, const Tensor& scores, int64_t k) {
  check_shape(op, "scores", scores, "[B, N]", {-1, -1});
  check_texel_dtype(op, "scores", scores.scalar_type());
  TEXVLM_CHECK(k >= 0, op, "k", "at least 0", k);
  TEXVLM_CHECK(scores.size(1) <= INT32_MAX, op, "scores", "at most 2^31 - 1 a row", scores.size(1));
  return std::min(k, scores.size(1));
}

// Into values [B, k], if they are defined, and indices [B, k].
void run_topk(const Tensor& scores, const Tensor& cells, const Tensor& values, const Tensor& indices) {
  const int64_t batch = scores.size(0), count = scores.size(1), kept = indices.size(1);
  if (batch == 0 || kept == 0) return;
  dispatch_texel(scores.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    TopKView<T> view{pointer<const T>(scores),
                     scores.stride(0),
                     scores.stride(1),
                     count,
                     kept,
                     values.defined() ? pointer<T>(values) : nullptr,
                     pointer<int64_t>(indices)};
    if (cells.defined()) {
      view.cells = cells.const_data_ptr<int64_t>();
      view.cells_b = cells.stride(0), view.cells_n = cells.stride(1);
    }
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
}

std::tuple<Tensor, Tensor> select_topk(const Tensor& scores, Size k) {
  const int64_t kept = check_topk("select_topk", scores, k);
  const Tensor values = new_tensor({scores.size(0), kept}, scores.scalar_type(), scores.device());
  const Tensor indices = new_tensor({scores.size(0), kept}, at::kLong, scores.device());
  run_topk(scores, Tensor(), values, indices);
  return {values, indices};
}

Tensor keep_topk(const Tensor& scores, Size k, Maybe cells) {
  const char* op = "keep_topk";
  const int64_t kept = check_topk(op, scores, k);
  if (cells && cells->defined()) {
    check_shape(op, "cells", *cells, "[B, N]", {scores.size(0), scores.size(1)});
    check_dtype(op, "cells", *cells, at::kLong, "");
    check_same_device(op, "cells", *cells, scores);
  }
  Tensor out = new_tensor({scores.size(0), kept}, at::kLong, scores.device());
  run_topk(scores, given(cells), Tensor(), out);
  return out;
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
  ops.op<keep_topk>("keep_topk");
  ops.op<compact>("compact");
}

}  // namespace texvlm
