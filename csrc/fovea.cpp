// Host code of the stem `fovea`: tokens around fixations, and their gradients to fixation, offsets, m0 and
// e0.
#include "math/fovea.h"

#include <cmath>
#include <utility>

#include "autograd.h"
#include "launch.h"
#include "reduce.h"
#include "tensor.h"

namespace texvlm {
namespace {

// Everything that forward and backward check and prepare alike. Inputs are small: they may be copied.
struct Fovea {
  Levels levels;
  Tensor fixation, offsets, m0, e0;
  int64_t batch, fixations, count;

  Fovea(const char* op, const Tensor& fixation_, const Tensor& offsets_, const Tensor& m0_, const Tensor& e0_, int64_t height,
        int64_t width, int64_t level_count) {
    levels = check_levels(op, height, width, level_count);
    check_shape(op, "fixation", fixation_, "[B, F, 2]", {-1, -1, 2});
    TEXVLM_CHECK(fixation_.scalar_type() == at::kFloat || fixation_.scalar_type() == at::kDouble, op, "fixation",
                 "Float or Double", at::toString(fixation_.scalar_type()));
    check_shape(op, "offsets", offsets_, "[N, 2]", {-1, 2});
    check_shape(op, "m0", m0_, "one value, []", {});
    check_shape(op, "e0", e0_, "one value, []", {});
    const auto alike = [&](const char* name, const Tensor& t) {
      check_dtype(op, name, t, fixation_.scalar_type(), " (as fixation)");
      check_same_device(op, name, t, fixation_);
      return t.contiguous();
    };
    if (m0_.is_cpu() && e0_.is_cpu()) {  // of a GPU nothing is asked: it would have to be waited for
      for (const auto& [name, t] : {std::pair{"e0", e0_}, std::pair{"m0", m0_}})
        TEXVLM_CHECK(t.item<double>() > 0 && std::isfinite(t.item<double>()), op, name, "a finite number above 0",
                     t.item<double>());
    }
    fixation = fixation_.contiguous(), offsets = alike("offsets", offsets_), m0 = alike("m0", m0_), e0 = alike("e0", e0_);
    batch = fixation.size(0), fixations = fixation.size(1), count = offsets.size(0);
  }

  template <class A>
  FoveaView<A> view() const {
    return {pointer<A>(fixation),
            pointer<A>(offsets),
            pointer<A>(m0),
            pointer<A>(e0),
            fixations,
            count,
            {static_cast<A>(levels.width[0]), static_cast<A>(levels.height[0])},
            static_cast<A>(levels.count - 1)};
  }
};

std::tuple<Tensor, Tensor> fovea_tokens(const Tensor& fixation, const Tensor& offsets, const Tensor& m0, const Tensor& e0,
                                        Size height, Size width, int64_t levels) {
  const Fovea f("fovea_tokens", fixation, offsets, m0, e0, height, width, levels);
  const at::ScalarType dtype = fixation.scalar_type();
  Tensor uv = new_tensor({f.batch, f.fixations, f.count, 2}, dtype, fixation.device());
  Tensor lod = new_tensor({f.batch, f.fixations, f.count}, dtype, fixation.device());
  dispatch_plane(fixation, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_query<FoveaTokens, T>(fixation.device(), f.batch, f.fixations * f.count, 1, f.view<T>(), pointer<T>(uv),
                                   pointer<T>(lod));
  });
  return {uv, lod};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fovea_tokens_backward(const Tensor& grad_uv, const Tensor& grad_lod,
                                                                 const Tensor& fixation, const Tensor& offsets, const Tensor& m0,
                                                                 const Tensor& e0, Size height, Size width, int64_t levels,
                                                                 std::array<bool, 4> mask) {
  const char* op = "fovea_tokens_backward";
  const Fovea f(op, fixation, offsets, m0, e0, height, width, levels);
  check_shape(op, "grad_uv", grad_uv, "[B, F, N, 2]", {f.batch, f.fixations, f.count, 2});
  check_shape(op, "grad_lod", grad_lod, "[B, F, N]", {f.batch, f.fixations, f.count});
  for (const Tensor& grad : {grad_uv, grad_lod}) {
    check_dtype(op, "grad", grad, fixation.scalar_type(), " (as fixation)");
    check_same_device(op, "grad", grad, fixation);
  }
  const auto room = [&](bool wanted, at::IntArrayRef sizes) {
    return wanted ? new_tensor(sizes, fixation.scalar_type(), fixation.device()) : Tensor();
  };
  const Tensor to_fixation = room(mask[0], fixation.sizes()), to_offsets = room(mask[1], offsets.sizes()),
               to_m0 = room(mask[2], m0.sizes()), to_e0 = room(mask[3], e0.sizes());
  const Tensor law = room(mask[2] || mask[3], {f.batch, f.fixations, 2}), each = room(mask[1], grad_uv.sizes());
  const Tensor uv = grad_uv.contiguous(), lod = grad_lod.contiguous();
  dispatch_plane(fixation, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr host::Isa best = host::kBest<T>;
    const c10::Device device = fixation.device();
    const int64_t fixations = f.batch * f.fixations;
    const auto maybe = [](const Tensor& t) { return t.defined() ? pointer<T>(t) : nullptr; };
    const FoveaAdjoint<T> of{f.view<T>(), pointer<const T>(uv), pointer<const T>(lod)};
    for_each_row_reduced<best>(device, fixations, f.count, 32,
                               FoveaFixationAdjoint<T>{of, maybe(to_fixation), maybe(law), maybe(each)});
    if (law.defined())
      for_each_row_reduced<best>(device, 1, fixations, 1, FoveaPairs<T>{maybe(law), 1, maybe(to_m0), maybe(to_e0)});
    if (each.defined())
      for_each_row_reduced<best>(device, f.count, fixations, 1,
                                 FoveaPairs<T>{maybe(each), f.count, maybe(to_offsets), maybe(to_offsets) + 1});
  });
  return {to_fixation, to_offsets, to_m0, to_e0};
}

}  // namespace

TEXVLM_OPS(ops) {
  ops.differentiable<fovea_tokens>("fovea_tokens");
  ops.op<fovea_tokens_backward>("fovea_tokens_backward");
  ops.promotes("fovea_tokens", {"fixation", "offsets", "m0", "e0"});
}

}  // namespace texvlm
