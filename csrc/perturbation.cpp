// Host code of the stem `perturbation`: the best k of many noisy copies of the scores.
#include "math/perturbation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>

#include "autograd.h"
#include "launch.h"
#include "tensor.h"

namespace texvlm {
namespace {

constexpr int64_t kNoisyBytes = int64_t{1} << 24;  // of noisy scores that exist at a time: many rows, and still in the caches

void check_perturbation(const char* op, const Tensor& scores, int64_t samples, double sigma) {
  check_shape(op, "scores", scores, "[B, N]", {-1, -1});
  TEXVLM_CHECK(scores.scalar_type() == at::kFloat || scores.scalar_type() == at::kDouble, op, "scores", "float32 or float64",
               scores.scalar_type());
  TEXVLM_CHECK(scores.size(0) <= INT32_MAX && scores.size(1) <= INT32_MAX, op, "scores", "at most 2^31 - 1 a side",
               shape_of(scores));
  TEXVLM_CHECK(samples >= 1 && samples <= INT32_MAX, op, "samples", "at least 1", samples);
  TEXVLM_CHECK(sigma > 0 && std::isfinite(sigma), op, "sigma", "positive", sigma);
}

std::tuple<Tensor, Tensor> perturbed_topk(const Tensor& scores, Size k, int64_t samples, double sigma, int64_t seed) {
  const char* op = "perturbed_topk";
  check_perturbation(op, scores, samples, sigma);
  TEXVLM_CHECK(k >= 0, op, "k", "at least 0", k.value);
  const int64_t batch = scores.size(0), count = scores.size(1), kept = std::min<int64_t>(k, count), rows = batch * samples;
  const Tensor gate = at::full({batch, samples, kept}, 1.0 / static_cast<double>(samples), scores.options());
  const Tensor indices = new_tensor({batch, samples, kept}, at::kLong, scores.device());
  if (indices.numel() == 0) return {gate, indices};
  static const auto keep = op_handle<Tensor(const Tensor&, SymInt, Maybe)>("texvlm::keep_topk");
  const int64_t at_once = std::clamp<int64_t>(kNoisyBytes / (count * scores.element_size()), 1, rows);
  const Tensor noisy = new_tensor({at_once, count}, scores.scalar_type(), scores.device());
  const Tensor flat = indices.view({rows, kept});
  for (int64_t first = 0; first < rows; first += at_once) {
    const int64_t here = std::min(at_once, rows - first);
    dispatch_plane(scores, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for_each_item<Perturb, T>(scores.device(), here, (count + 3) / 4, 64, pointer<const T>(scores), scores.stride(0),
                                scores.stride(1), count, first, samples, static_cast<T>(sigma), static_cast<uint64_t>(seed),
                                pointer<T>(noisy));
    });
    flat.narrow(0, first, here).copy_(keep.call(noisy.narrow(0, 0, here), kept, std::nullopt));
  }
  return {gate, indices};
}

Tensor perturbed_topk_backward(const Tensor& grad, const Tensor& scores, int64_t samples, double sigma, int64_t seed) {
  const char* op = "perturbed_topk_backward";
  check_perturbation(op, scores, samples, sigma);
  const int64_t batch = scores.size(0), count = scores.size(1);
  check_shape(op, "grad", grad, "[B, samples, k]", {batch, samples, -1});
  check_dtype(op, "grad", grad, scores.scalar_type(), " as scores are");
  check_same_device(op, "grad", grad, scores);
  const Tensor out = new_tensor(scores.sizes(), scores.scalar_type(), scores.device());
  if (out.numel() == 0) return out;
  // What a sample is worth beyond the others: the same in the mean, and quieter.
  Tensor worth = grad.sum(2);
  if (samples > 1) worth = (worth - worth.mean(1, true)) * (static_cast<double>(samples) / static_cast<double>(samples - 1));
  worth = worth.contiguous();
  dispatch_plane(scores, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_item<PerturbBackward, T>(scores.device(), batch, (count + 3) / 4, 64 * samples, pointer<const T>(worth), count,
                                      samples, static_cast<T>(1 / (sigma * static_cast<double>(samples))),
                                      static_cast<uint64_t>(seed), pointer<T>(out));
  });
  return out;
}

}  // namespace

TEXVLM_OPS(ops) {
  ops.differentiable<perturbed_topk>("perturbed_topk");
  ops.op<perturbed_topk_backward>("perturbed_topk_backward");
  ops.promotes("perturbed_topk", {"scores"});
}

}  // namespace texvlm
