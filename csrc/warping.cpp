// Host code of the stem `warping`: planes moved by optical flow, and motion that flow does not explain.
#include "math/warping.h"

#include <ATen/Context.h>
#include <ATen/ops/zeros_like.h>

#include <array>
#include <optional>

#include "autograd.h"
#include "enlarge.h"
#include "picture.h"
#include "scatter.h"
#include "tensor.h"

namespace texvlm {
namespace {

void check_flow(const char* op, const Tensor& flow, const Tensor& occlusion, int64_t batch, at::ScalarType dtype,
                const Tensor& other) {
  check_shape(op, "flow", flow, "[B, 2, h, w]", {batch, 2, -1, -1});
  check_dtype(op, "flow", flow, dtype, dtype == at::kDouble ? " (beside Double planes)" : " (beside planes other than Double)");
  check_same_device(op, "flow", flow, other);
  TEXVLM_CHECK(flow.size(2) >= 1 && flow.size(3) >= 1, op, "flow", "of at least 1 x 1", shape_of(flow));
  if (!occlusion.defined()) return;
  check_shape(op, "occlusion", occlusion, "[B, h, w]", {batch, flow.size(2), flow.size(3)});
  check_dtype(op, "occlusion", occlusion, at::kBool, "");
  check_same_device(op, "occlusion", occlusion, other);
}

template <class A>
FlowField<A> flow_field(const Tensor& flow, const Tensor& occlusion, int64_t height, int64_t width, bool stay) {
  return {image_view<const A>(flow), plane_view<bool>(occlusion), flow.size(2), flow.size(3), height, width, stay};
}

// planes [B, C, H, W] moved by the flow; what has no source is filled, or without a fill stays.
Tensor moved(const Tensor& planes, const Tensor& flow, const Tensor& occlusion, std::optional<double> fill) {
  const int64_t batch = planes.size(0), channels = planes.size(1), height = planes.size(2), width = planes.size(3);
  Tensor out = new_tensor(planes.sizes(), planes.scalar_type(), planes.device());
  dispatch_texel(planes.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Acc<T>;
    for_each_pixel<Warp, T>(planes.device(), {batch, 0, height, 0, width}, Work{channels, 8 * channels},
                            image_view<const T>(planes), flow_field<A>(flow, occlusion, height, width, !fill), pointer<T>(out),
                            channels, static_cast<A>(fill.value_or(0)));
  });
  return out;
}

// Gradient of the planes, on the CPU.
template <class T, class A>
Tensor scatter_planes(const FlowField<A>& field, const ImageView<const T>& grad, const Tensor& planes) {
  const int64_t batch = planes.size(0), channels = planes.size(1), height = planes.size(2), width = planes.size(3);
  const int64_t runs = WarpRows<A>::runs(height, width), queries = batch * channels * runs;
  const bool banded = host::worth_banding(queries, kRun, batch * channels);
  const at::ScalarType acc = acc_dtype(planes.scalar_type());
  const Tensor out = banded ? new_tensor(planes.sizes(), acc, planes.device()) : new_zeros(planes.sizes(), acc, planes.device());
  if (planes.numel() == 0) return out;
  const Levels level = make_levels(height, width, 1);
  const std::unique_ptr<int32_t[]> rows(new int32_t[banded ? 2 * batch * runs : 0]);
  const WarpRows<A> find{field, rows.get()};
  if (banded)
    host::parallel(batch * runs, 8 * kRun, [&](int64_t begin, int64_t end) {
      host::query_range_any<0, host::kBest<T>>(find, runs, int64_t{1}, begin, end);
    });
  const auto bands_of = [&](const BandTable& bands, int64_t begin, int64_t end, int32_t* to) {
    for (int64_t q = begin; q < end; ++q, to += 2) {
      const int64_t plane = q / runs, first = plane * bands.total;
      const int32_t* const y = rows.get() + (plane / channels * runs + q % runs) * 2;
      for (int k = 0; k < 2; ++k) to[k] = y[0] < 0 ? -1 : static_cast<int32_t>(first + bands.of(0, y[k]));
    }
  };
  const auto lists =
      banded ? host::list_by_bands(level, batch * channels, queries, sizeof(A), 1, bands_of) : host::one_list(queries);
  host::run_bands<0, host::kBest<T>>(WarpAdjoint<T, 0>{field, grad, pointer<A>(out), channels}, lists, level, 1, pointer<A>(out));
  return out;
}

// Adjoint: gradients of the planes and of the flow, in the arithmetic's dtype.
std::tuple<Tensor, Tensor> moved_backward(const Tensor& grad, const Tensor& planes, const Tensor& flow, const Tensor& occlusion,
                                          bool stay, std::array<bool, 2> mask) {
  const int64_t batch = planes.size(0), channels = planes.size(1), height = planes.size(2), width = planes.size(3);
  const c10::Device device = planes.device();
  const at::ScalarType acc = acc_dtype(planes.scalar_type());
  Tensor to_planes, to_flow;
  dispatch_texel(planes.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Acc<T>;
    const auto field = flow_field<A>(flow, occlusion, height, width, stay);
    const auto incoming = image_view<const T>(grad);
    if (mask[0]) {
      if (on_cuda(device)) at::globalContext().alertNotDeterministic("texvlm::warp_backward");
      if (on_cuda(device)) {
        to_planes = new_zeros(planes.sizes(), acc, device);
        for_each_query<WarpAdjoint, T>(device, batch, channels * height * width, 1, field, incoming, pointer<A>(to_planes),
                                       channels);
      } else {
        to_planes = scatter_planes<T>(field, incoming, planes);
      }
    }
    if (mask[1]) {
      const Tensor pixels = new_tensor({batch, height, width, 2}, acc, device);
      for_each_pixel<WarpFlowAdjoint, T>(device, {batch, 0, height, 0, width}, Work{1, 8 * channels}, image_view<const T>(planes),
                                         field, incoming, pointer<A>(pixels), channels);
      const int64_t h = flow.size(2), w = flow.size(3);
      to_flow = new_tensor(flow.sizes(), acc, device);
      for_each_gathered<FlowFieldAdjoint>(device, batch, EnlargeAdjoint<A, 2>{pointer<const A>(pixels), height, width, h, w},
                                          field.scale(0), field.scale(1), pointer<A>(to_flow));
    }
  });
  return {to_planes, to_flow};
}

void check_planes(const char* op, const Tensor& planes, const Tensor& flow, const Tensor& occlusion) {
  check_shape(op, "planes", planes, "[B, C, H, W]", {-1, -1, -1, -1});
  check_texel_dtype(op, "planes", planes.scalar_type());
  check_levels(op, planes.size(2), planes.size(3), 1);
  check_flow(op, flow, occlusion, planes.size(0), acc_dtype(planes.scalar_type()), planes);
}

Tensor warp(const Tensor& planes, const Tensor& flow, std::optional<double> fill, Maybe occlusion) {
  check_planes("warp", planes, flow, given(occlusion));
  return moved(planes, flow, given(occlusion), fill);
}

std::tuple<Tensor, Tensor> warp_backward(const Tensor& grad, const Tensor& planes, const Tensor& flow, std::optional<double> fill,
                                         Maybe occlusion, std::array<bool, 2> mask) {
  const char* op = "warp_backward";
  check_planes(op, planes, flow, given(occlusion));
  TEXVLM_CHECK(grad.sizes() == planes.sizes(), op, "grad", "of the shape of planes, " + shape_of(planes), shape_of(grad));
  check_dtype(op, "grad", grad, planes.scalar_type(), " (as the planes)");
  check_same_device(op, "grad", grad, planes);
  auto [to_planes, to_flow] = moved_backward(grad, planes, flow, given(occlusion), !fill, mask);
  return {mask[0] ? to_planes.to(planes.scalar_type()) : to_planes, to_flow};
}

// ---- motion ----

// The lumas of a picture and of the one before it, moved.
struct Lumas {
  Tensor image, previous;             // readable pictures
  Tensor luma, before, before_moved;  // [B, H, W]
};

Lumas compute_lumas(const char* op, const Tensor& image, const Tensor& previous, const Tensor& flow, const Tensor& occlusion) {
  check_picture(op, "image", image);
  check_picture(op, "previous", previous);
  check_previous(op, previous, image);
  TEXVLM_CHECK(flow.defined() || !occlusion.defined(), op, "occlusion", "given together with flow", "no flow");
  Lumas l{readable(image), readable(previous), {}, {}, {}};
  l.luma = luma_plane(l.image), l.before = luma_plane(l.previous);
  l.before_moved = l.before;
  if (flow.defined()) {
    check_flow(op, flow, occlusion, image.size(0), l.luma.scalar_type(), image);
    l.before_moved = moved(l.before.unsqueeze(1), flow, occlusion, std::nullopt).squeeze(1);
  }
  return l;
}

Tensor motion(const Tensor& image, const Tensor& previous, Maybe flow, Maybe occlusion) {
  const Lumas l = compute_lumas("motion", image, previous, given(flow), given(occlusion));
  const at::ScalarType dtype = texel_dtype(image);
  const int64_t batch = image.size(0), height = image.size(2), width = image.size(3);
  Tensor out = new_tensor({batch, height, width}, dtype, image.device());
  dispatch_texel(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Acc<T>;
    for_each_pixel<MotionBetween, T>(image.device(), {batch, 0, height, 0, width}, Work{}, pointer<const A>(l.luma),
                                     pointer<const A>(l.before_moved), pointer<T>(out), height, width);
  });
  return out;
}

using ThreeGradients = std::tuple<Tensor, Tensor, Tensor>;

ThreeGradients motion_backward(const Tensor& grad, const Tensor& image, const Tensor& previous, Maybe flow, Maybe occlusion,
                               std::array<bool, 3> mask) {
  const char* op = "motion_backward";
  const Lumas l = compute_lumas(op, image, previous, given(flow), given(occlusion));
  const int64_t batch = image.size(0), height = image.size(2), width = image.size(3);
  check_shape(op, "grad", grad, "[B, H, W]", {batch, height, width});
  check_same_device(op, "grad", grad, image);
  PlaneGradients to;
  to.luma = at::zeros_like(l.luma), to.previous_luma = at::zeros_like(l.luma);
  const Tensor incoming = grad.to(l.luma.scalar_type()).unsqueeze(1);
  const auto add = [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_pixel<MotionAdjoint, T>(image.device(), {batch, 0, height, 0, width}, Work{}, pointer<const T>(l.luma),
                                     pointer<const T>(l.before_moved), image_view<const T>(incoming), pointer<T>(to.luma),
                                     pointer<T>(to.previous_luma), height, width);
  };
  dispatch_plane(l.luma, add);
  Tensor to_flow;
  if (given(flow).defined()) {
    const auto [planes, field] =
        moved_backward(to.previous_luma.unsqueeze(1), l.before.unsqueeze(1), *flow, given(occlusion), true, {mask[1], mask[2]});
    if (mask[1]) to.previous_luma = planes.squeeze(1);
    to_flow = field;
  }
  return {mask[0] ? picture_gradient(l.image, to) : Tensor(), mask[1] ? previous_gradient(l.previous, to) : Tensor(), to_flow};
}

}  // namespace

TEXVLM_OPS(ops) {
  ops.differentiable<warp>("warp");
  ops.op<warp_backward>("warp_backward");
  ops.promotes("warp", {"flow"});
  ops.differentiable<motion>("motion");
  ops.op<motion_backward>("motion_backward");
}

}  // namespace texvlm
