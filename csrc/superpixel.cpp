// Host code of the stem `superpixel`: labels of a picture, their statistics as channels, and object boundaries.
#include "math/merge.h"

#include "autograd.h"
#include "cuda/superpixel.h"
#include "launch.h"
#include "picture.h"
#include "reduce.h"
#include "tensor.h"

namespace texvlm {
namespace {

// The plan is a function of the picture's size and n alone.
struct Plan {
  int level;  // the coarse level
  Cells cells;
};

Plan plan_of(int64_t height, int64_t width, int64_t n) {
  const auto side = [](int64_t size, int level) { return std::max<int64_t>(1, size >> level); };
  Plan p{};
  const int top = level_count(height, width) - 1;
  while (p.level < top && side(height, p.level + 1) * side(width, p.level + 1) / kPixelsEach >= n) ++p.level;
  const int64_t h = side(height, p.level), w = side(width, p.level);
  const int64_t wanted = std::max(n, std::min<int64_t>(kCellsEach * n, kMostCells));
  const double square = static_cast<double>(wanted) * static_cast<double>(h) / static_cast<double>(w);
  int64_t rows = std::clamp<int64_t>(static_cast<int64_t>(std::sqrt(square) + 0.5), 1, h);
  const int64_t columns = std::min((wanted + rows - 1) / rows, w);
  rows = std::max(rows, std::min((n + columns - 1) / columns, h));  // a narrow picture
  p.cells = {h, w, rows, columns};
  return p;
}

// 65536 * 256 (squared units of Lab) / 64 (squared units of place) * compactness^2 / (pixels of one of `regions`)
int64_t place_weight(const Cells& cells, int64_t compactness, int64_t regions) {
  const int64_t pixels = cells.height * cells.width;
  const int64_t unit = 65536 * (kLabUnits * kLabUnits) / (kPlaceUnits * kPlaceUnits) * compactness * compactness;
  return (unit * regions + pixels / 2) / pixels;
}

struct Regions {
  Tensor labels, model;  // int32 [B, h, w] (int64 in the end), int64 [B, regions, kModel]
  int64_t height, width, count;
};

// One sweep between the cells on CUDA, by regions that each tile measures itself.
void sweep_cells(const PlaneLab& lab, Regions& r, const Cells& cells, const Tensor& planes, const Tensor& weights) {
  const c10::Device device = r.labels.device();
  const Tensor from = r.labels;
  r.labels = new_tensor(from.sizes(), at::kInt, device);
  const c10::DeviceGuard guard(device);
  cuda::sweep_cells(
      {lab, pointer<int32_t>(r.labels), nullptr, r.height, r.width, r.count, 0, cells, pointer<const Weights>(weights)},
      {cells, pointer<const int32_t>(from), pointer<const int32_t>(planes), nullptr, nullptr},
      {.coarse = pointer<const int32_t>(from),
       .lut = nullptr,
       .out = nullptr,
       .coarse_h = r.height,
       .coarse_w = r.width,
       .height = r.height,
       .width = r.width,
       .regions = 0,
       .shift = 0},
      from.size(0), current_stream(device));
}

// So many sweeps over the pixels of a level, each of which stands for about `cost` values, from the labels of the level above it
// (shift 1) or of its own, through lut [B, regions] if there is one.
template <class Lab>
void sweep_borders(const Lab& lab, Regions& r, const Tensor& lut, int64_t height, int64_t width, int shift, int sweeps,
                   int64_t cost, const Cells& cells, const Tensor& weights, bool last = false) {
  const c10::Device device = r.labels.device();
  const int64_t batch = r.labels.size(0);
  const bool tiles = on_cuda(device), other = tiles || lut.defined() || shift > 0;
  const Tensor from = r.labels;
  const bool wide = tiles && last;
  if (other) r.labels = new_tensor({batch, height, width}, wide ? at::kLong : at::kInt, device);
  const FinerLabels<int32_t, 0> begin{pointer<const int32_t>(from),
                                      lut.defined() ? pointer<const int32_t>(lut) : nullptr,
                                      wide ? nullptr : pointer<int32_t>(r.labels),
                                      r.height,
                                      r.width,
                                      height,
                                      width,
                                      lut.defined() ? lut.size(1) : int64_t{0},
                                      shift};
  const auto move = [&](int odd) {
    return typename MoveBorders<Lab>::template For<int32_t, 0>{lab,
                                                               wide ? nullptr : pointer<int32_t>(r.labels),
                                                               pointer<const int64_t>(r.model),
                                                               height,
                                                               width,
                                                               r.count,
                                                               odd,
                                                               cells,
                                                               pointer<const Weights>(weights)};
  };
  r.height = height, r.width = width;
  if (tiles) {
    const c10::DeviceGuard guard(device);
    return cuda::sweep_borders<Lab>(move(0), begin, wide ? pointer<int64_t>(r.labels) : nullptr, sweeps, batch,
                                    current_stream(device));
  }
  const auto rows = [&](int64_t count, int64_t each, const auto& f) {
    const Rect all{batch, 0, count, 0, width};
    host::parallel(batch * count, width * each, [&](int64_t first, int64_t end) {
      host::texel_rows_any<0, host::kBest<int32_t>>(f, all, int64_t{1}, first, end);
    });
  };
  if (other) rows(height, 1, begin);
  for (int half = 0; half < 2 * sweeps; ++half) rows((height - half % 2 + 1) / 2, cost, move(half % 2));
  if (last) r.labels = r.labels.to(at::kLong);
}

// Measures the regions of the cells, and merges them to `wanted`: the table from cells to regions, and the regions' means.
std::tuple<Tensor, Tensor> merge(const RegionModel<int32_t, 0>& measure, c10::Device device, int64_t batch, const Tensor& weights,
                                 int64_t wanted) {
  const Cells& cells = measure.cells;
  const int64_t count = cells.count();
  const Tensor touching = new_tensor({batch, count}, at::kInt, device);
  for_each_item<MeasureAndTouch, int32_t>(device, batch, count, 45 * cells.height * cells.width / count, measure,
                                          TouchingRegions<int32_t, 0>{cells, measure.labels, pointer<uint32_t>(touching)});
  Tensor lut = new_tensor({batch, count}, at::kInt, device), merged = new_tensor({batch, wanted, kModel}, at::kLong, device);
  const Tensor ends = new_tensor({batch, 3, kNeighbours * count}, at::kInt, device);
  const Tensor costs = new_tensor({batch, kNeighbours * count}, at::kLong, device);
  const MergeRegions<int32_t, 0> f{.touching = pointer<const uint32_t>(touching),
                                   .sums = measure.sums,
                                   .model = measure.model,
                                   .merged = pointer<int64_t>(merged),
                                   .lut = pointer<int32_t>(lut),
                                   .ends = pointer<int32_t>(ends),
                                   .costs = pointer<int64_t>(costs),
                                   .weights = pointer<const Weights>(weights),
                                   .cells = count,
                                   .columns = cells.columns,
                                   .wanted = wanted};
  if (on_cuda(device)) {
    const c10::DeviceGuard guard(device);
    cuda::merge_regions(f, batch, current_stream(device));
  } else {
    host::parallel(batch, host::kGrainElements,
                   [&](int64_t begin, int64_t end) { host::query_range_any<0>(f, 1, 1, begin, end); });
  }
  return {lut, merged};
}

// int64 [B, H, W], and how many there are, int64 [B].
template <class S>
std::tuple<Tensor, Tensor> labels_of(const Tensor& image, int64_t wanted) {
  const c10::Device device = image.device();
  const int64_t batch = image.size(0), height = image.size(2), width = image.size(3);
  Tensor regions = new_tensor({batch}, at::kLong, device);
  if (batch == 0) return {new_tensor({batch, height, width}, at::kLong, device), regions};
  const Plan plan = plan_of(height, width, wanted);
  const Cells& cells = plan.cells;
  const int64_t count = cells.count(), pixels = cells.height * cells.width;
  const Tensor table = new_tensor({LabTable<int32_t, 0>::kSize}, at::kInt, device);
  const StartSuperpixels<int32_t, 0> start{{pointer<int32_t>(table)}, pointer<int64_t>(regions), batch, wanted};
  for_each_item<host::kBest<int32_t>>(device, 1, start.items(batch), 4, start);
  PictureLab<S> picture{image_view<const S>(image), pointer<const int32_t>(table), height, width, plan.level};

  Regions r{new_tensor({batch, cells.height, cells.width}, at::kInt, device),
            new_tensor({batch, count, kModel}, at::kLong, device), cells.height, cells.width, count};
  const Rect all{batch, 0, cells.height, 0, cells.width};
  const Tensor planes = new_tensor({batch, 3, cells.height, cells.width}, at::kInt, device);
  for_each_pixel<LabPlanes<S>::template For, int32_t>(device, all, Work{1, int64_t{4} << (2 * plan.level)}, picture,
                                                      pointer<int32_t>(planes), cells, pointer<int32_t>(r.labels));
  const Tensor sums = new_tensor({batch, count, kModel}, at::kLong, device);
  const auto regions_now = [&] {
    return RegionModel<int32_t, 0>{cells, pointer<const int32_t>(r.labels), pointer<const int32_t>(planes),
                                   pointer<int64_t>(sums), pointer<int64_t>(r.model)};
  };
  const auto measure = [&] { for_each_item<host::kBest<int32_t>>(device, batch, count, 27 * pixels / count, regions_now()); };
  measure();
  const Tensor weights = new_tensor({batch, 3}, at::kLong, device);
  const Weights usual{place_weight(cells, kCompactness, count), place_weight(cells, kMergeCompactness, wanted),
                      kBorderCost * kLabUnits * kLabUnits};
  for_each_row_reduced<host::kBest<float>>(
      device, batch, count, 8,
      PictureWeights<int64_t, 0>{cells, pointer<const int64_t>(r.model), usual, pointer<Weights>(weights)});
  const PlaneLab coarse{pointer<const int32_t>(planes), cells.height, cells.width};
  const bool by_tiles = on_cuda(device) && cuda::measures_cells(cells);
  for (int sweep = 0; sweep < kCoarseSweeps; ++sweep) {
    if (by_tiles) {
      sweep_cells(coarse, r, cells, planes, weights);
    } else {
      if (sweep > 0) measure();
      sweep_borders(coarse, r, Tensor(), cells.height, cells.width, 0, 1, 32, cells, weights);
    }
  }
  Tensor lut;
  if (count > wanted) {
    std::tie(lut, r.model) = merge(regions_now(), device, batch, weights, wanted);
    r.count = wanted;
  } else {
    measure();
  }
  for (int level = std::max(plan.level - 1, 0); level >= 0; --level) {
    const int64_t h = std::max<int64_t>(1, height >> level), w = std::max<int64_t>(1, width >> level);
    picture.level = level;
    sweep_borders(picture, r, lut, h, w, plan.level > 0 ? 1 : 0, kFineSweeps, 4, Cells{}, weights, level == 0);
    lut = Tensor();
  }
  return {r.labels, regions};
}

std::tuple<Tensor, Tensor> superpixels(const Tensor& image, int64_t n) {
  const char* op = "superpixels";
  check_picture(op, "image", image);
  TEXVLM_CHECK(n >= 1, op, "n", "at least 1", n);
  const int64_t wanted = std::min(n, image.size(2) * image.size(3));
  const Tensor picture = readable(image);
  return dispatch_picture(picture, [&](auto tag) { return labels_of<typename decltype(tag)::type>(picture, wanted); });
}

void check_labels(const char* op, const Tensor& labels, std::initializer_list<int64_t> sizes) {
  check_shape(op, "labels", labels, "[B, H, W]", sizes);
  check_dtype(op, "labels", labels, at::kLong, "");
  check_levels(op, labels.size(1), labels.size(2), 1);
}

Tensor superpixel_channels(const Tensor& labels, Size size) {
  const char* op = "superpixel_channels";
  const int64_t n = size;
  check_labels(op, labels, {-1, -1, -1});
  TEXVLM_CHECK(n >= 1 && n < int64_t{1} << 31, op, "n", "at least 1 and below 2^31", n);
  const int64_t batch = labels.size(0), height = labels.size(1), width = labels.size(2);
  const c10::Device device = labels.device();
  const Tensor dense = labels.contiguous();
  // CUDA: one table, many small blocks. Host: a table per band of rows, few enough that the tables stay small.
  const bool shared = on_cuda(device);
  const int64_t bands = std::clamp<int64_t>(std::min<int64_t>(height, height * width / (8 * n)), 1, 16);
  const int64_t block_h = shared ? 1 : (height + bands - 1) / bands, block_w = shared ? 128 : width;
  const int64_t rows = (height + block_h - 1) / block_h, columns = (width + block_w - 1) / block_w;
  const int64_t tables = shared ? 1 : rows;
  const Tensor sums = new_zeros({tables, batch, n, 3}, at::kLong, device);
  for_each_item<RegionSums, int64_t>(device, batch, rows * columns, block_h * block_w, pointer<const int64_t>(dense),
                                     pointer<int64_t>(sums), batch, height, width, n, block_h, block_w, columns, shared);
  const Tensor shapes = new_tensor({batch, n, 4}, at::kFloat, device);
  for_each_item<RegionShape, float>(device, batch, n, 4 * tables, pointer<const int64_t>(sums), pointer<float>(shapes), tables,
                                    batch, n, height * width);
  Tensor out = new_tensor({batch, 3, height, width}, at::kFloat, device);
  for_each_pixel<RegionPlanes, float>(device, {batch, 0, height, 0, width}, Work{1, 3}, pointer<const int64_t>(dense),
                                      pointer<const float>(shapes), pointer<float>(out), height, width, n);
  return out;
}

Tensor boundaries(const Tensor& image, const Tensor& labels) {
  const char* op = "boundaries";
  check_picture(op, "image", image);
  check_labels(op, labels, {image.size(0), image.size(2), image.size(3)});
  check_same_device(op, "labels", labels, image);
  const int64_t batch = image.size(0), height = image.size(2), width = image.size(3);
  const c10::Device device = image.device();
  const Tensor picture = readable(image), edge = edge_plane(luma_plane(picture)), threshold = edge_threshold(edge);
  const Tensor dense = labels.contiguous();
  Tensor out = new_tensor({batch, height, width}, at::kFloat, device);
  dispatch_picture(picture, [&](auto tag) {
    using A = Acc<typename decltype(tag)::type>;
    for_each_pixel<ObjectBoundary<A>::template For, float>(device, {batch, 0, height, 0, width}, Work{1, 2},
                                                           pointer<const int64_t>(dense), pointer<const A>(edge),
                                                           pointer<const double>(threshold), pointer<float>(out), height, width);
  });
  return out;
}

}  // namespace

TEXVLM_OPS(ops) {
  ops.op<superpixels>("superpixels");
  ops.op<superpixel_channels>("superpixel_channels");
  ops.op<boundaries>("boundaries");
}

}  // namespace texvlm
