// Host code of the stem `soft_selection`: weights in [0, 1] that sum to k.
#include "math/soft_selection.h"

#include "autograd.h"
#include "cuda/soft_selection.h"
#include "launch.h"
#include "tensor.h"

namespace texvlm {
namespace host {

template <int C, class A, class F>
TEXVLM_HD void soft_rows(const F& f, A* row, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) f(OneThreadWithRow<A>{{}, row}, b);
}
TEXVLM_ISA_DISPATCH(soft_rows)

}  // namespace host

namespace {

// f(Link as a constant)
template <class F>
auto with_link(const char* op, c10::string_view link, const F& f) {
  TEXVLM_CHECK(link == "logistic" || link == "gumbel", op, "link", "logistic or gumbel", link);
  return link == "gumbel" ? f(std::integral_constant<Link, Link::gumbel>()) : f(std::integral_constant<Link, Link::logistic>());
}

void check_scores(const char* op, const Tensor& scores, double temperature) {
  check_shape(op, "scores", scores, "[B, N]", {-1, -1});
  TEXVLM_CHECK(scores.scalar_type() == at::kFloat || scores.scalar_type() == at::kDouble, op, "scores", "float32 or float64",
               scores.scalar_type());
  TEXVLM_CHECK(scores.size(1) <= INT32_MAX, op, "scores", "at most 2^31 - 1 a row", scores.size(1));
  TEXVLM_CHECK(temperature > 0 && std::isfinite(temperature), op, "temperature", "positive", temperature);
}

// With neighbouring scores side by side; rows may lie anywhere.
Tensor packed_rows(const Tensor& t) { return t.size(1) <= 1 || t.stride(1) == 1 ? t : t.contiguous(); }

// Each row by one thread, or by one block.
template <class A, class F>
void for_each_soft_row(const Tensor& scores, int64_t cost, const F& f) {
  const int64_t batch = scores.size(0);
  if (on_cuda(scores.device())) {
    const c10::DeviceGuard guard(scores.device());
    return cuda::launch_soft_rows(f, batch, current_stream(scores.device()));
  }
  host::parallel(batch, cost * scores.size(1), [&](int64_t begin, int64_t end) {
    std::vector<A> row(scores.size(1));
    host::soft_rows_any<0, host::kBest<A>>(f, row.data(), begin, end);
  });
}

std::tuple<Tensor, Tensor> soft_topk(const Tensor& given, Size k, double temperature, c10::string_view link) {
  const char* op = "soft_topk";
  check_scores(op, given, temperature);
  const Tensor scores = packed_rows(given);
  TEXVLM_CHECK(k >= 0, op, "k", "at least 0", k.value);
  const Tensor weights = new_tensor(scores.sizes(), scores.scalar_type(), scores.device());
  const Tensor threshold = new_tensor({scores.size(0)}, at::kDouble, scores.device());
  if (scores.size(0) == 0) return {weights, threshold};
  dispatch_plane(scores, [&](auto tag) {
    using A = typename decltype(tag)::type;
    with_link(op, link, [&](auto kind) {
      for_each_soft_row<A>(scores, 32,
                           SoftTopK<decltype(kind)::value, A>{pointer<const A>(scores), scores.stride(0), scores.size(1),
                                                              static_cast<double>(k.value), temperature, pointer<A>(weights),
                                                              pointer<double>(threshold)});
    });
  });
  return {weights, threshold};
}

Tensor soft_topk_backward(const Tensor& grad, const Tensor& grad_threshold, const Tensor& given, const Tensor& threshold,
                          double temperature, c10::string_view link) {
  const char* op = "soft_topk_backward";
  check_scores(op, given, temperature);
  const Tensor scores = packed_rows(given);
  const int64_t batch = scores.size(0), count = scores.size(1);
  check_shape(op, "grad_weights", grad, "[B, N]", {batch, count});
  check_dtype(op, "grad_weights", grad, scores.scalar_type(), " as scores are");
  for (const auto& [name, t] :
       {std::pair<const char*, const Tensor&>{"grad_threshold", grad_threshold}, {"threshold", threshold}}) {
    check_shape(op, name, t, "[B]", {batch});
    check_dtype(op, name, t, at::kDouble, "");
    check_same_device(op, name, t, scores);
  }
  check_same_device(op, "grad_weights", grad, scores);
  const Tensor grad_weights = packed_rows(grad);
  const Tensor out = new_tensor(scores.sizes(), scores.scalar_type(), scores.device());
  if (batch == 0) return out;
  dispatch_plane(scores, [&](auto tag) {
    using A = typename decltype(tag)::type;
    with_link(op, link, [&](auto kind) {
      for_each_soft_row<A>(scores, 16,
                           SoftTopKBackward<decltype(kind)::value, A>{.grad = pointer<const A>(grad_weights),
                                                                      .scores = pointer<const A>(scores),
                                                                      .grad_b = grad_weights.stride(0),
                                                                      .stride_b = scores.stride(0),
                                                                      .count = count,
                                                                      .grad_threshold = pointer<const double>(grad_threshold),
                                                                      .threshold = pointer<const double>(threshold),
                                                                      .grad_threshold_b = grad_threshold.stride(0),
                                                                      .threshold_b = threshold.stride(0),
                                                                      .temperature = temperature,
                                                                      .out = pointer<A>(out)});
    });
  });
  return out;
}

}  // namespace

TEXVLM_OPS(ops) {
  ops.differentiable<soft_topk>("soft_topk");
  ops.op<soft_topk_backward>("soft_topk_backward");
  ops.promotes("soft_topk", {"scores"});
}

}  // namespace texvlm
