// Host code of the stem `history`: Gaussians at points, added to a plane that decays, and planes brought to the picture's size.
#include "math/history.h"

#include <array>
#include <optional>

#include "autograd.h"
#include "launch.h"
#include "math/enlarge.h"
#include "tensor.h"

namespace texvlm {
namespace {

using Maybe = const std::optional<Tensor>&;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// ---- gaussian_splat ----

struct SplatInputs {
  Tensor points, weights, along, down;
  int64_t batch, count, height, width;
  double sigma;  // in pixels

  template <class T>
  SplatPoints<T> view() const {
    return {pointer<const T>(points), pointer<const T>(weights), pointer<T>(along), pointer<T>(down), count, height, width,
            static_cast<T>(sigma)};
  }
};

SplatInputs splat_inputs(const char* op, const Tensor& points, const Tensor& weights, double sigma, int64_t height,
                         int64_t width) {
  check_shape(op, "points", points, "[B, P, 2]", {-1, -1, 2});
  TEXVLM_CHECK(points.scalar_type() == at::kFloat || points.scalar_type() == at::kDouble, op, "points", "float32 or float64",
               points.scalar_type());
  check_shape(op, "weights", weights, "[B, P]", {points.size(0), points.size(1)});
  check_dtype(op, "weights", weights, points.scalar_type(), " (as the points)");
  check_same_device(op, "weights", weights, points);
  TEXVLM_CHECK(sigma > 0 && sigma <= 1e6, op, "sigma", "above 0 (of the longer side)", sigma);
  check_levels(op, height, width, 1);
  SplatInputs in{points.contiguous(), weights.contiguous(), {}, {}, points.size(0), points.size(1), height, width, 0};
  in.sigma = sigma * static_cast<double>(std::max(height, width));
  in.along = new_tensor({in.batch, in.count, width}, points.scalar_type(), points.device());
  in.down = new_tensor({in.batch, in.count, height}, points.scalar_type(), points.device());
  dispatch_plane(points, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_item<SplatTables, T>(points.device(), in.batch, in.count * (height + width), 16, in.view<T>());
  });
  return in;
}

Tensor gaussian_splat(const Tensor& points, const Tensor& weights, double sigma, int64_t height, int64_t width, double keep,
                      Maybe base) {
  const char* op = "gaussian_splat";
  const SplatInputs in = splat_inputs(op, points, weights, sigma, height, width);
  const Tensor under = given(base);
  if (under.defined()) {
    check_shape(op, "base", under, "[B, H, W]", {in.batch, height, width});
    check_dtype(op, "base", under, points.scalar_type(), " (as the points)");
    check_same_device(op, "base", under, points);
  }
  Tensor out = new_tensor({in.batch, height, width}, points.scalar_type(), points.device());
  dispatch_plane(points, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_pixel<Splat, T>(points.device(), {in.batch, 0, height, 0, width}, Work{1, in.count + 1}, in.view<T>(),
                             plane_view<T>(under), static_cast<T>(keep), pointer<T>(out));
  });
  return out;
}

Gradients gaussian_splat_backward(const Tensor& grad, const Tensor& out, const Tensor& points, const Tensor& weights,
                                  double sigma, double keep, std::array<bool, 3> mask) {
  const char* op = "gaussian_splat_backward";
  check_shape(op, "out", out, "[B, H, W]", {points.size(0), -1, -1});
  const int64_t height = out.size(1), width = out.size(2);
  const SplatInputs in = splat_inputs(op, points, weights, sigma, height, width);
  check_shape(op, "grad", grad, "[B, H, W]", {in.batch, height, width});
  check_dtype(op, "grad", grad, points.scalar_type(), " (as the points)");
  check_dtype(op, "out", out, points.scalar_type(), " (as the points)");
  check_same_device(op, "grad", grad, points);
  check_same_device(op, "out", out, points);
  const c10::Device device = points.device();
  const Tensor plane = out.contiguous();
  Tensor to_points, to_weights, to_base;
  dispatch_plane(points, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (mask[0] || mask[1]) {
      const Tensor rows = new_tensor({in.batch, in.count, height, 2}, points.scalar_type(), device);
      for_each_item<SplatRows, T>(device, in.batch, in.count * height, width, in.view<T>(), plane_view<T>(grad),
                                  pointer<const T>(plane), pointer<T>(rows));
      if (mask[0]) to_points = new_tensor(points.sizes(), points.scalar_type(), device);
      if (mask[1]) to_weights = new_tensor(weights.sizes(), points.scalar_type(), device);
      for_each_item<SplatAdjoint, T>(device, in.batch, in.count, height, in.view<T>(), pointer<const T>(rows),
                                     mask[0] ? pointer<T>(to_points) : nullptr, mask[1] ? pointer<T>(to_weights) : nullptr);
    }
    if (mask[2]) {
      to_base = new_tensor(out.sizes(), points.scalar_type(), device);
      for_each_pixel<SplatBaseAdjoint, T>(device, {in.batch, 0, height, 0, width}, Work{}, plane_view<T>(grad),
                                          pointer<const T>(plane), static_cast<T>(keep), pointer<T>(to_base), height, width);
    }
  });
  return {to_points, to_weights, to_base};
}

Tensor call_splat(const Tensor& points, const Tensor& weights, double sigma, const SymInt& height, const SymInt& width,
                  double keep, Maybe base) {
  static const auto op =
      op_handle<Tensor(const Tensor&, const Tensor&, double, SymInt, SymInt, double, Maybe)>("texvlm::gaussian_splat");
  return op.call(points, weights, sigma, height, width, keep, base);
}

struct GaussianSplat : torch::autograd::Function<GaussianSplat> {
  static Tensor forward(AutogradContext* ctx, const Tensor& points, const Tensor& weights, double sigma, const SymInt& height,
                        const SymInt& width, double keep, Maybe base) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    Tensor out = call_splat(points, weights, sigma, height, width, keep, base);
    ctx->save_for_backward({out, points, weights});
    ctx->saved_data["sigma"] = sigma;
    ctx->saved_data["keep"] = keep;
    ctx->saved_data["base"] = given(base).defined();
    return out;
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    static const auto op =
        op_handle<Gradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&, double, double, std::array<bool, 3>)>(
            "texvlm::gaussian_splat_backward");
    const auto saved = ctx->get_saved_variables();
    const std::array<bool, 3> mask{ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                   ctx->saved_data["base"].toBool() && ctx->needs_input_grad(2)};
    const auto [points, weights, base] = op.call(grads[0], saved[0], saved[1], saved[2], ctx->saved_data["sigma"].toDouble(),
                                                 ctx->saved_data["keep"].toDouble(), mask);
    return {points, weights, Tensor(), Tensor(), Tensor(), Tensor(), base};
  }
};

Tensor gaussian_splat_autograd(const Tensor& points, const Tensor& weights, double sigma, SymInt height, SymInt width,
                               double keep, Maybe base) {
  const Tensor under = given(base);
  if (records({&points, &weights, &under})) return GaussianSplat::apply(points, weights, sigma, height, width, keep, base);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_splat(points, weights, sigma, height, width, keep, base);
}

// ---- enlarge ----

Tensor enlarge(const Tensor& planes, int64_t height, int64_t width) {
  const char* op = "enlarge";
  check_shape(op, "planes", planes, "[B, h, w]", {-1, -1, -1});
  check_texel_dtype(op, "planes", planes.scalar_type());
  check_levels(op, planes.size(1), planes.size(2), 1);
  check_levels(op, height, width, 1);
  const Tensor from = planes.to(acc_dtype(planes.scalar_type())).contiguous();
  Tensor out = new_tensor({planes.size(0), height, width}, planes.scalar_type(), planes.device());
  dispatch_texel(planes.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Acc<T>;
    for_each_pixel<EnlargePlane, T>(planes.device(), {planes.size(0), 0, height, 0, width}, Work{},
                                    Enlarged<A>{pointer<const A>(from), planes.size(1), planes.size(2), height, width},
                                    pointer<T>(out));
  });
  return out;
}

Tensor enlarge_backward(const Tensor& grad, int64_t height, int64_t width) {
  const char* op = "enlarge_backward";
  check_shape(op, "grad", grad, "[B, H, W]", {-1, -1, -1});
  check_texel_dtype(op, "grad", grad.scalar_type());
  check_levels(op, grad.size(1), grad.size(2), 1);
  check_levels(op, height, width, 1);
  const Tensor from = grad.to(acc_dtype(grad.scalar_type())).contiguous();
  Tensor out = new_tensor({grad.size(0), height, width}, from.scalar_type(), grad.device());
  dispatch_plane(from, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_pixel<EnlargePlaneAdjoint, T>(
        grad.device(), {grad.size(0), 0, height, 0, width}, Work{1, 16},
        EnlargeAdjoint<T>{pointer<const T>(from), 1, grad.size(1), grad.size(2), height, width}, pointer<T>(out));
  });
  return out.to(grad.scalar_type());
}

template <bool Adjoint>
Tensor call_enlarge(const Tensor& planes, const SymInt& height, const SymInt& width) {
  static const auto op =
      op_handle<Tensor(const Tensor&, SymInt, SymInt)>(Adjoint ? "texvlm::enlarge_backward" : "texvlm::enlarge");
  return op.call(planes, height, width);
}

// Linear: the adjoint of the adjoint is the op itself, so derivatives of all orders exist.
template <bool Adjoint>
struct Enlarging : torch::autograd::Function<Enlarging<Adjoint>> {
  static Tensor forward(AutogradContext* ctx, const Tensor& planes, const SymInt& height, const SymInt& width) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    Tensor out = call_enlarge<Adjoint>(planes, height, width);  // first, since it checks the rank
    ctx->saved_data["height"] = planes.sym_size(1);
    ctx->saved_data["width"] = planes.sym_size(2);
    return out;
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    return {call_enlarge<!Adjoint>(grads[0], ctx->saved_data["height"].toSymInt(), ctx->saved_data["width"].toSymInt()), Tensor(),
            Tensor()};
  }
};

template <bool Adjoint>
Tensor enlarge_autograd(const Tensor& planes, SymInt height, SymInt width) {
  if (records({&planes})) return Enlarging<Adjoint>::apply(planes, height, width);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_enlarge<Adjoint>(planes, height, width);
}

}  // namespace

TEXVLM_KERNELS(m) {
  m.impl("gaussian_splat", gaussian_splat);
  m.impl("gaussian_splat_backward", gaussian_splat_backward);
  m.impl("enlarge", enlarge);
  m.impl("enlarge_backward", enlarge_backward);
}
TORCH_LIBRARY_IMPL(texvlm, Autograd, m) {
  m.impl("gaussian_splat", gaussian_splat_autograd);
  m.impl("gaussian_splat_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("enlarge", enlarge_autograd<false>);
  m.impl("enlarge_backward", enlarge_autograd<true>);
}

}  // namespace texvlm
