// Host code of the stem `history`: Gaussians at points, added to a plane that decays, and planes brought to the picture's size.
#include "math/history.h"

#include <array>
#include <optional>

#include "autograd.h"
#include "enlarge.h"
#include "tensor.h"

namespace texvlm {
namespace {

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

Tensor gaussian_splat(const Tensor& points, const Tensor& weights, double sigma, Size height, Size width, double keep,
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
  check_shape(op, "points", points, "[B, P, 2]", {-1, -1, 2});
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
      if (mask[0]) to_points = new_tensor(points.sizes(), points.scalar_type(), device);
      if (mask[1]) to_weights = new_tensor(weights.sizes(), points.scalar_type(), device);
      for_each_plane_reduced<SplatAdjoint, T>(device, in.batch * in.count, height, width, 1, in.view<T>(), plane_view<T>(grad),
                                              pointer<const T>(plane), mask[0] ? pointer<T>(to_points) : nullptr,
                                              mask[1] ? pointer<T>(to_weights) : nullptr);
    }
    if (mask[2]) {
      to_base = new_tensor(out.sizes(), points.scalar_type(), device);
      for_each_pixel<SplatBaseAdjoint, T>(device, {in.batch, 0, height, 0, width}, Work{}, plane_view<T>(grad),
                                          pointer<const T>(plane), static_cast<T>(keep), pointer<T>(to_base), height, width);
    }
  });
  return {to_points, to_weights, to_base};
}

// ---- enlarge ----

Tensor enlarge(const Tensor& planes, Size height, Size width) {
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

Tensor enlarge_backward(const Tensor& grad, Size height, Size width) {
  const char* op = "enlarge_backward";
  check_shape(op, "grad", grad, "[B, H, W]", {-1, -1, -1});
  check_texel_dtype(op, "grad", grad.scalar_type());
  check_levels(op, grad.size(1), grad.size(2), 1);
  check_levels(op, height, width, 1);
  const Tensor from = grad.to(acc_dtype(grad.scalar_type())).contiguous();
  Tensor out = new_tensor({grad.size(0), height, width}, from.scalar_type(), grad.device());
  dispatch_plane(from, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_gathered<EnlargePlaneAdjoint>(grad.device(), grad.size(0),
                                           EnlargeAdjoint<T>{pointer<const T>(from), grad.size(1), grad.size(2), height, width},
                                           pointer<T>(out));
  });
  return out.to(grad.scalar_type());
}

}  // namespace

TEXVLM_OPS(ops) {
  ops.differentiable<gaussian_splat>("gaussian_splat", GradientRule().given("out", result(0)));
  ops.op<gaussian_splat_backward>("gaussian_splat_backward");
  // Linear: the adjoint of the adjoint is the op itself, so derivatives of all orders exist.
  ops.differentiable<enlarge>("enlarge",
                              GradientRule().given("height", size_of("planes", 1)).given("width", size_of("planes", 2)));
  ops.differentiable<enlarge_backward>(
      "enlarge_backward",
      GradientRule().by("texvlm::enlarge").given("height", size_of("grad", 1)).given("width", size_of("grad", 2)));
}

}  // namespace texvlm
