// Host code of the stem `flow`: optical flow between two pictures and where it has nothing to point at.
#include "math/flow.h"

#include <algorithm>
#include <optional>

#include "autograd.h"
#include "cuda/flow.h"
#include "launch.h"
#include "picture.h"
#include "pyramid.h"
#include "reduce.h"
#include "tensor.h"

namespace texvlm {
namespace {

// How a level is searched. Coarse levels have few pixels and decide where the others look: there, nodes are dense, and they are
// searched again from what their neighbours found, so that a good match spreads.
struct FlowPass {
  int64_t stride;  // pixels between nodes
  int searches, steps;
  float smoothness, softness;  // see FlowSmooth
};
constexpr FlowPass kFinestPass{4, 1, 12, 36.f, 0.12f}, kMiddlePass{5, 3, 4, 25.f, 2.f}, kCoarsePass{3, 7, 12, 15.f, 4.f};

static_assert(std::max({kFinestPass.steps, kMiddlePass.steps, kCoarsePass.steps}) <= cuda::kMostSmoothSteps);

constexpr int64_t kCoarsestSide = 24;               // the longer side of the coarsest level is at least this: three patches
constexpr int64_t kCoarsestShortSide = 2 * kPatch;  // and the shorter one this: where most patches meet a border, few are right
constexpr int64_t kCoarseSide = 120;                // levels with shorter sides than this are coarse
constexpr int64_t kKnownSide = 100;                 // those with shorter ones are left out where a flow is given
constexpr int64_t kFullSize = 1280;  // pictures up to this long are searched down to their own pixels, larger ones to level 1

// Levels that the search uses, the finest first.
struct FlowLevels {
  Levels table;
  int finest;
};

FlowLevels flow_levels(int64_t height, int64_t width, std::optional<int64_t> finest) {
  const int64_t longer = std::max(height, width), shorter = std::min(height, width);
  const int count = std::min(level_count(longer / kCoarsestSide, 1), level_count(shorter / kCoarsestShortSide, 1));
  return {make_levels(height, width, count), static_cast<int>(std::min<int64_t>(finest.value_or(longer > kFullSize), count - 1))};
}

float over(int64_t a, int64_t b) { return static_cast<float>(static_cast<double>(a) / static_cast<double>(b)); }

// Luma of both pictures with its mips, [2 B, T, 1].
Tensor luma_pyramid(const Tensor& previous, const Tensor& current, const Levels& levels) {
  const int64_t batch = current.size(0);
  Tensor data = new_tensor({2 * batch, levels.texels, 1}, at::kFloat, current.device());
  const Tensor pictures[2] = {readable(previous), readable(current)};
  for (int64_t i = 0; i < 2; ++i) {
    dispatch_picture(pictures[i], [&](auto tag) {
      using S = typename decltype(tag)::type;
      for_each_pixel<FlowLuma<S>::template For, float>(current.device(), {batch, 0, levels.height[0], 0, levels.width[0]}, Work{},
                                                       image_view<const S>(pictures[i]), texture_view<float>(data, levels),
                                                       i * batch);
    });
  }
  build_mipmaps(data, levels, check_reducers("optical_flow", {"mean"}, 1));
  return data;
}

// How much contrast each of the pictures has, [2 B]: at their coarsest level, where noise is gone.
Tensor contrasts(const Tensor& data, const Levels& levels) {
  const int level = levels.count - 1;
  Tensor out = new_tensor({data.size(0)}, at::kFloat, data.device());
  for_each_plane_reduced<FlowContrast, float>(data.device(), data.size(0), levels.height[level], levels.width[level], 2,
                                              texture_view<const float>(data, levels), level, pointer<float>(out));
  return out;
}

// A level's flow, and the tensor that holds it.
struct LevelFlow {
  FlowGrid grid{};
  int64_t stride = 0;  // pixels of the level between nodes
  Tensor planes;
  int64_t height = 0, width = 0;  // of the level
  bool given = false;
};

FlowFound found_in(const Tensor& planes) {  // [5, 2 B, rows, columns]
  const auto plane = [&](int64_t i) { return pointer<float>(planes) + i * planes.stride(0); };
  return {plane(0), plane(1), plane(2), plane(3), plane(4), static_cast<int>(planes.size(2)), static_cast<int>(planes.size(3))};
}

// The nodes' flows made smooth, in pass.steps steps.
LevelFlow smoothed(const FlowFound& found, const FlowPass& pass, int64_t directions, c10::Device device) {
  const bool at_once = on_cuda(device);  // else between two pairs of planes
  LevelFlow to{{}, pass.stride, new_tensor({at_once ? 1 : 2, 2, directions, found.rows, found.columns}, at::kFloat, device)};
  float* const u[2] = {pointer<float>(to.planes), pointer<float>(to.planes) + (at_once ? 0 : to.planes.stride(0))};
  const int64_t v = to.planes.stride(1);  // from u to v
  const auto step = [&](int k) {
    const float* const from = u[(k + 1) % 2];
    return FlowSmooth<float, 0>{found,        k ? from : found.u, k ? from + v : found.v, u[k % 2],
                                u[k % 2] + v, pass.smoothness,    pass.softness};
  };
  if (at_once) {
    const c10::DeviceGuard guard(device);
    cuda::smooth_flow(step(0), directions, pass.steps, current_stream(device));
  } else {  // all steps of a direction by one thread: they are short, and waiting for each other costs more
    const Rect nodes{directions, 0, found.rows, 0, found.columns};
    host::parallel(directions, found.nodes() * 16, [&](int64_t begin, int64_t end) {
      for (int k = 0; k < pass.steps; ++k)
        host::texel_rows_any<0>(step(k), nodes, int64_t{1}, begin * found.rows, end * found.rows);
    });
  }
  const FlowSmooth<float, 0> last = step(pass.steps);
  to.grid = {last.from_u, last.from_v, found.rows, found.columns};
  return to;
}

// Searches a level, from the flow of the coarser one if there is one.
LevelFlow search_level(const Tensor& data, const Tensor& contrast, const Levels& levels, int level, const FlowPass& pass,
                       const LevelFlow& coarse) {
  const c10::Device device = data.device();
  const int64_t directions = data.size(0), h = levels.height[level], w = levels.width[level];
  const int64_t rows = (h + pass.stride - 1) / pass.stride, columns = (w + pass.stride - 1) / pass.stride;
  const Tensor planes = new_tensor({5, directions, rows, columns}, at::kFloat, device);
  FlowSearch<float, 0> search{.luma = texture_view<const float>(data, levels),
                              .level = level,
                              .stride = static_cast<int>(pass.stride),
                              .batch = directions / 2,
                              .contrast = pointer<const float>(contrast),
                              .out = found_in(planes),
                              .coarse = coarse.grid,
                              .coarse_y = 0.f,
                              .coarse_x = 0.f,
                              .scale_y = 1.f,
                              .scale_x = 1.f,
                              .given = coarse.given};
  if (coarse.grid.u) {
    const int64_t ch = coarse.height, cw = coarse.width;
    search.scale_y = over(h, ch), search.scale_x = over(w, cw);
    search.coarse_y = over(ch, h * coarse.stride * coarse.grid.rows),
    search.coarse_x = over(cw, w * coarse.stride * coarse.grid.columns);
  }
  LevelFlow flow;
  for (int turn = 0; turn < pass.searches; ++turn) {
    for_each_item<host::kBest<float>>(device, directions, rows * columns, kPatch * kPatch * 16, search);
    flow = smoothed(search.out, pass, directions, device);
    search.coarse = flow.grid;  // the next turn begins where this one ended
    search.coarse_y = over(1, rows * pass.stride), search.coarse_x = over(1, columns * pass.stride);
    search.scale_y = search.scale_x = 1.f, search.given = false;
  }
  flow.height = h, flow.width = w;
  return flow;
}

// What the search begins with, from a flow [B, 2, h, w] in pixels of its own grid.
LevelFlow given_flow(const Tensor& initial) {
  const int64_t batch = initial.size(0), height = initial.size(2), width = initial.size(3);
  LevelFlow to{{}, 1, new_tensor({2, 2 * batch, height, width}, at::kFloat, initial.device()), height, width, true};
  float* const u = pointer<float>(to.planes);
  float* const v = u + to.planes.stride(0);
  for_each_pixel<FlowGiven, float>(initial.device(), {batch, 0, height, 0, width}, Work{1, 4}, image_view<const float>(initial),
                                   u, v, batch, height, width);
  to.grid = {u, v, static_cast<int>(height), static_cast<int>(width)};
  return to;
}

std::tuple<Tensor, Tensor> optical_flow(const Tensor& previous, const Tensor& current, std::optional<int64_t> finest,
                                        Maybe initial) {
  const char* op = "optical_flow";
  check_picture(op, "current", current);
  check_picture(op, "previous", previous);
  TEXVLM_CHECK(previous.sizes() == current.sizes(), op, "previous", "of the shape of current, " + shape_of(current),
               shape_of(previous));
  check_dtype(op, "previous", previous, current.scalar_type(), " (as current)");
  check_same_device(op, "previous", previous, current);
  TEXVLM_CHECK(finest.value_or(0) >= 0, op, "finest", "a level, 0 or more", *finest);
  if (initial) {
    check_shape(op, "initial", *initial, "[B, 2, h, w]", {current.size(0), 2, -1, -1});
    check_dtype(op, "initial", *initial, at::kFloat, "");
    check_same_device(op, "initial", *initial, current);
    TEXVLM_CHECK(initial->size(2) >= 1 && initial->size(3) >= 1, op, "initial", "of at least 1 x 1", shape_of(*initial));
  }
  const int64_t batch = current.size(0), height = current.size(2), width = current.size(3);
  const c10::Device device = current.device();
  Tensor flow = new_tensor({batch, 2, height, width}, at::kFloat, device),
         occlusion = new_tensor({batch, height, width}, at::kBool, device);
  if (batch == 0) return {flow, occlusion};

  const FlowLevels levels = flow_levels(height, width, finest);
  const Tensor data = luma_pyramid(previous, current, levels.table), contrast = contrasts(data, levels.table);
  const auto longer = [&](int level) { return std::max(levels.table.height[level], levels.table.width[level]); };
  LevelFlow found;
  int coarsest = levels.table.count - 1;
  if (initial) {  // it has what coarse levels, which cost up to a half, would find
    found = given_flow(*initial);
    while (coarsest > levels.finest && longer(coarsest) < kKnownSide) --coarsest;
  }
  for (int level = coarsest; level >= levels.finest; --level) {
    const bool coarse = !initial && longer(level) < kCoarseSide;
    const FlowPass& pass = level == levels.finest ? kFinestPass : coarse ? kCoarsePass : kMiddlePass;
    found = search_level(data, contrast, levels.table, level, pass, found);
  }
  const FlowGrid& grid = found.grid;

  const int64_t h = levels.table.height[levels.finest], w = levels.table.width[levels.finest];
  const float scale_y = over(height, h), scale_x = over(width, w);
  const float grid_y = over(h, height * found.stride * grid.rows), grid_x = over(w, width * found.stride * grid.columns);
  for_each_pixel<FlowDense, float>(device, {batch, 0, height, 0, width}, Work{1, 4}, grid, scale_y, scale_x, pointer<float>(flow),
                                   height, width, grid_y, grid_x);
  const int64_t block = std::max<int64_t>(1, (found.stride << levels.finest) / 2);
  const auto blocks = [&](int64_t n) { return (n + block - 1) / block; };
  for_each_pixel<FlowOcclusion, float>(device, {batch, 0, blocks(height), 0, blocks(width)}, Work{1, 32}, grid, batch, height,
                                       width, block, scale_y, scale_x, grid_y, grid_x, pointer<bool>(occlusion));
  return {flow, occlusion};
}

}  // namespace

TEXVLM_OPS(ops) { ops.op<optical_flow>("optical_flow"); }

}  // namespace texvlm
