// Host code of the stem `carrying`: which cell's value each cell takes over from the frame before.
#include "math/carrying.h"

#include "autograd.h"
#include "launch.h"
#include "tensor.h"

namespace texvlm {
namespace {

using Carried = std::tuple<Tensor, Tensor, Tensor, Tensor>;

void check_cells(const char* op, const char* argument, const Tensor& t, const char* names, const Tensor& now, int64_t channels) {
  check_shape(op, argument, t, names, {now.size(0), channels, now.size(2), now.size(3)});
  check_dtype(op, argument, t, at::kFloat, "");
  check_same_device(op, argument, t, now);
}

void check_flow(const char* op, const Tensor& flow, const Tensor& occlusion, const Tensor& now) {
  TEXVLM_CHECK(flow.defined() || !occlusion.defined(), op, "occlusion", "given together with flow", "no flow");
  if (!flow.defined()) return;
  check_shape(op, "flow", flow, "[B, 2, h, w]", {now.size(0), 2, -1, -1});
  check_dtype(op, "flow", flow, at::kFloat, "");
  check_same_device(op, "flow", flow, now);
  TEXVLM_CHECK(flow.size(2) >= 1 && flow.size(3) >= 1, op, "flow", "of at least 1 x 1", shape_of(flow));
  if (!occlusion.defined()) return;
  check_shape(op, "occlusion", occlusion, "[B, h, w]", {now.size(0), flow.size(2), flow.size(3)});
  check_dtype(op, "occlusion", occlusion, at::kBool, "");
  check_same_device(op, "occlusion", occlusion, now);
}

Carried carry(const Tensor& now, const Tensor& before, const Tensor& held, const Tensor& offset, const Tensor& still, Maybe flow,
              Maybe occlusion, double floor, double quiet, double occluded) {
  const char* op = "carry";
  check_shape(op, "now", now, "[B, A, rows, columns]", {-1, -1, -1, -1});
  check_dtype(op, "now", now, at::kFloat, "");
  const int64_t batch = now.size(0), channels = now.size(1), rows = now.size(2), columns = now.size(3);
  TEXVLM_CHECK(channels >= 1 && rows >= 1 && columns >= 1, op, "now", "of at least one channel and one cell", shape_of(now));
  check_cells(op, "before", before, "[B, A, rows, columns]", now, channels);
  check_cells(op, "held", held, "[B, A, rows, columns]", now, channels);
  check_cells(op, "offset", offset, "[B, 2, rows, columns]", now, 2);
  check_shape(op, "still", still, "[B, rows, columns]", {batch, rows, columns});
  check_dtype(op, "still", still, at::kBool, "");
  check_same_device(op, "still", still, now);
  check_flow(op, given(flow), given(occlusion), now);

  const c10::Device device = now.device();
  Tensor source = new_tensor({batch, rows, columns}, at::kLong, device), beside = new_tensor(offset.sizes(), at::kFloat, device),
         moved = new_tensor(now.sizes(), at::kFloat, device),
         residual = new_tensor({2, batch, rows, columns}, at::kFloat, device);
  const bool moves = given(flow).defined();
  const CarriedCells<float> cells{image_view<const float>(now),
                                  image_view<const float>(before),
                                  image_view<const float>(held),
                                  image_view<const float>(offset),
                                  moves ? image_view<const float>(*flow) : ImageView<const float>{nullptr, 0, 0, 0, 0},
                                  plane_view<bool>(given(occlusion)),
                                  plane_view<bool>(still),
                                  channels,
                                  rows,
                                  columns,
                                  moves ? flow->size(2) : 0,
                                  moves ? flow->size(3) : 0};
  const int64_t cost = 32 * channels + (moves ? 3 * flow->size(2) * flow->size(3) / (rows * columns) : 0);
  for_each_pixel<Carry, float>(device, {batch, 0, rows, 0, columns}, Work{1, cost}, cells, static_cast<float>(floor),
                               static_cast<float>(quiet), static_cast<float>(occluded), pointer<int64_t>(source),
                               pointer<float>(beside), pointer<float>(moved), pointer<float>(residual), batch * rows * columns);
  return {source, beside, moved, residual};
}

}  // namespace

TEXVLM_OPS(ops) { ops.op<carry>("carry"); }

}  // namespace texvlm
