// Host code of the stem `packing`: kept cells as the rows of patches that a vision tower reads.
#include "math/packing.h"

#include "autograd.h"
#include "cuda/packing.h"
#include "launch.h"
#include "tensor.h"

namespace texvlm {
namespace {

using Numbers = at::ArrayRef<double>;

constexpr int64_t kMostSide = 1024, kMostTimes = 1024;

// What forward and backward are told, checked.
struct Packed {
  Packing packing;
  PackedCells cells;
  int64_t batch;
  const char* op;

  Packed(const char* op_, int64_t channels, int64_t batch_, const Tensor& given, const Tensor& beside, int64_t height,
         int64_t width, int64_t patch, int64_t merge, int64_t temporal)
      : batch(batch_), op(op_) {
    TEXVLM_CHECK(patch >= 1 && merge >= 1 && patch <= kMostSide && merge <= kMostSide && patch * merge <= kMostSide, op,
                 "patch * merge", "from 1 to " + std::to_string(kMostSide), patch, " * ", merge);
    TEXVLM_CHECK(temporal >= 1 && temporal <= kMostTimes, op, "temporal", "from 1 to " + std::to_string(kMostTimes), temporal);
    TEXVLM_CHECK(channels >= 1 && channels <= kMaxPackedChannels, op, "image",
                 "of 1 to " + std::to_string(kMaxPackedChannels) + " channels", channels);
    const int64_t side = patch * merge;
    check_levels(op, height, width, 1);
    TEXVLM_CHECK(height % side == 0 && width % side == 0 && height <= INT32_MAX && width <= INT32_MAX, op, "size",
                 "multiples of patch * merge (" + std::to_string(side) + ")", height, " x ", width);
    packing = {height, width, channels, patch, merge, temporal};
    const bool triples = given.dim() == 3;
    if (triples) {
      check_shape(op, "cells", given, "[B, K, 3]", {batch, -1, 3});
    } else {
      check_shape(op, "cells", given, "[B, K] or [B, K, 3]", {batch, -1});
    }
    check_dtype(op, "cells", given, at::kLong, "");
    check_same_device(op, "cells", given, beside);
    cells = {given.const_data_ptr<int64_t>(),
             given.stride(0),
             given.stride(1),
             triples ? given.stride(2) : 0,
             given.size(1),
             height / side,
             width / side,
             triples};
    // What is on a GPU is not read back: such cells are as negative ones there.
    if (on_cuda(beside.device())) return;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t k = 0; k < cells.count; ++k) check_cell(given, b, k);
  }

  void check_cell(const Tensor& given, int64_t b, int64_t k) const {
    if (cells.at(b, k).level >= 0 || cells.negative(b, k)) return;
    const std::string grid = std::to_string(cells.rows) + " x " + std::to_string(cells.columns);
    const int64_t* p = cells.data + b * cells.stride_b + k * cells.stride_k;
    if (!cells.triples)
      TEXVLM_CHECK(false, op, "cells", "below " + std::to_string(cells.rows * cells.columns) + " (" + grid + ")", *p);
    TEXVLM_CHECK(false, op, "cells", "(level, row, column) inside the level's grid (" + grid + " halved as often)", "(", p[0],
                 ", ", p[cells.stride_j], ", ", p[2 * cells.stride_j], ")");
  }

  int64_t rows() const { return cells.count * packing.merge * packing.merge; }
  int64_t cell_values() const { return packing.merge * packing.merge * packing.row_values(); }
};

// One number a channel, or one for all.
double of_channel(Numbers numbers, int64_t c) { return numbers[numbers.size() == 1 ? 0 : c]; }
void check_numbers(const char* op, const char* argument, Numbers numbers, int64_t channels, bool positive) {
  TEXVLM_CHECK(numbers.size() == 1 || static_cast<int64_t>(numbers.size()) == channels, op, argument,
               "one number or one for each channel (" + std::to_string(channels) + ")", numbers.size(), " of them");
  for (const double number : numbers)
    TEXVLM_CHECK(std::isfinite(number) && (number > 0 || !positive), op, argument, positive ? "finite and positive" : "finite",
                 number);
}

// The taps of both axes, and the memory that they are in.
template <class Weight>
struct Taps {
  Tensor places, weights;
  CubicTaps<Weight> down, across;

  Taps(const CubicAxis& rows, const CubicAxis& columns, at::Device device) {
    const int64_t of_rows = rows.out * rows.taps(), of_columns = columns.out * columns.taps();
    places = new_tensor({2 * (rows.out + columns.out)}, at::kInt, device);
    weights = new_tensor({of_rows + of_columns}, c10::CppTypeToScalarType<Weight>::value, device);
    int32_t* at = pointer<int32_t>(places);
    down = {rows, rows.taps(), at, at + rows.out, pointer<Weight>(weights)};
    at += 2 * rows.out;
    across = {columns, columns.taps(), at, at + columns.out, pointer<Weight>(weights) + of_rows};
    for_each_item<host::Isa::base>(device, 2, std::max(rows.out, columns.out), 8 * std::max(rows.taps(), columns.taps()),
                                   MakeCubicTaps<Weight>{{down, across}});
  }
};

template <class S>
void pack(const Tensor& image, const Packed& packed, Numbers mean, Numbers deviation, double scale, const Tensor& rows) {
  using A = Acc<S>;
  const Packing& to = packed.packing;
  PackCells<S> f{};
  f.image = image_view<const S>(image);
  f.cells = packed.cells;
  f.to = to;
  f.scale = static_cast<A>(scale);
  for (int64_t c = 0; c < to.channels; ++c) {
    f.mean[c] = static_cast<A>(of_channel(mean, c));
    f.deviation[c] = static_cast<A>(of_channel(deviation, c));
  }
  f.rows = pointer<typename PackCells<S>::T>(rows);
  std::optional<Taps<typename PackCells<S>::Sum>> taps;
  if (to.height != image.size(2) || to.width != image.size(3)) {
    taps.emplace(CubicAxis{image.size(2), to.height}, CubicAxis{image.size(3), to.width}, image.device());
    f.down = taps->down, f.across = taps->across;
    f.down_first = std::is_same_v<S, uint8_t> && columns_first(f.down.axis, f.across.axis);
  }
  if (on_cuda(image.device())) {
    const c10::DeviceGuard guard(image.device());
    return cuda::pack_cells(f, packed.batch, current_stream(image.device()));
  }
  const Rect all{packed.batch, 0, packed.cells.count, 0, 1};
  host::parallel(packed.batch * packed.cells.count, packed.cell_values(),
                 [&](int64_t begin, int64_t end) { host::texel_rows_any<0, host::kBest<S>>(f, all, 1, begin, end); });
}

Tensor pack_cells(const Tensor& image, const Tensor& cells, Size height, Size width, int64_t patch, int64_t merge,
                  int64_t temporal, Numbers mean, Numbers deviation, double scale) {
  const char* op = "pack_cells";
  check_shape(op, "image", image, "[B, C, H, W]", {-1, -1, -1, -1});
  const bool bytes = image.scalar_type() == at::kByte;
  if (!bytes) check_texel_dtype(op, "image", image.scalar_type());
  check_levels(op, image.size(2), image.size(3), 1);
  TEXVLM_CHECK(image.size(2) <= INT32_MAX && image.size(3) <= INT32_MAX, op, "image", "of sides below 2^31", shape_of(image));
  const Packed packed(op, image.size(1), image.size(0), cells, image, height, width, patch, merge, temporal);
  check_numbers(op, "mean", mean, image.size(1), false);
  check_numbers(op, "std", deviation, image.size(1), true);
  TEXVLM_CHECK(std::isfinite(scale), op, "rescale", "finite", scale);
  const Tensor rows = new_tensor({packed.batch, packed.rows(), packed.packing.row_values()}, texel_dtype(image), image.device());
  if (rows.numel() == 0) return rows;
  if (bytes) {
    pack<uint8_t>(image, packed, mean, deviation, scale, rows);
  } else {
    dispatch_texel(image.scalar_type(),
                   [&](auto tag) { pack<typename decltype(tag)::type>(image, packed, mean, deviation, scale, rows); });
  }
  return rows;
}

// [planes, out, width] -> [planes, in, width], and [rows, out] -> [rows, in], in the arithmetic's dtype.
template <class A>
Tensor resize_adjoint(const Tensor& grad, int64_t height, int64_t width) {
  const int64_t batch = grad.size(0), channels = grad.size(1), from = grad.size(2);
  const at::Device device = grad.device();
  const Taps<A> taps({height, from}, {width, grad.size(3)}, device);
  const Tensor wide = new_tensor({batch, channels, from, width}, grad.scalar_type(), device);
  const Tensor out = new_tensor({batch, channels, height, width}, grad.scalar_type(), device);
  for_each_pixel<CubicColumnsAdjoint, A>(device, {1, 0, batch * channels * from, 0, width}, Work{1, 4}, taps.across,
                                         pointer<const A>(grad), pointer<A>(wide));
  for_each_pixel<CubicRowsAdjoint, A>(device, {batch * channels, 0, height, 0, width}, Work{1, 4}, taps.down,
                                      pointer<const A>(wide), pointer<A>(out), width);
  return out;
}

Tensor pack_cells_backward(const Tensor& grad, const Tensor& cells, Size image_height, Size image_width, Size height, Size width,
                           int64_t patch, int64_t merge, int64_t temporal, Numbers deviation, double scale) {
  const char* op = "pack_cells_backward";
  check_shape(op, "grad", grad, "[B, K merge^2, C temporal patch^2]", {-1, -1, -1});
  check_texel_dtype(op, "grad", grad.scalar_type());
  check_levels(op, image_height, image_width, 1);
  const int64_t values = std::max<int64_t>(1, patch * patch * temporal);
  const Packed packed(op, grad.size(2) / values, grad.size(0), cells, grad, height, width, patch, merge, temporal);
  const Packing& of = packed.packing;
  check_shape(op, "grad", grad, "[B, K merge^2, C temporal patch^2]", {packed.batch, packed.rows(), of.row_values()});
  check_numbers(op, "std", deviation, of.channels, true);
  const Tensor out = new_tensor({packed.batch, of.channels, height, width}, acc_dtype(grad.scalar_type()), grad.device());
  Tensor resized = out;
  dispatch_texel(grad.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Acc<T>;
    PackCellsAdjoint<T> f{};
    f.grad = pointer<const T>(grad);
    f.stride_b = grad.stride(0), f.stride_r = grad.stride(1), f.stride_v = grad.stride(2);
    f.cells = packed.cells;
    f.of = of;
    for (int64_t c = 0; c < of.channels; ++c) f.factor[c] = static_cast<A>(scale / of_channel(deviation, c));
    f.out = pointer<A>(out);
    if (on_cuda(grad.device())) {
      const c10::DeviceGuard guard(grad.device());
      cuda::pack_cells_adjoint(f, packed.batch, current_stream(grad.device()));
    } else {
      const Rect all{packed.batch, 0, packed.cells.rows, 0, 1};
      host::parallel(packed.batch * packed.cells.rows, of.channels * of.side() * of.width,
                     [&](int64_t begin, int64_t end) { host::texel_rows_any<0, host::kBest<T>>(f, all, 1, begin, end); });
    }
    if (image_height != height || image_width != width) resized = resize_adjoint<A>(out, image_height, image_width);
  });
  return resized.to(grad.scalar_type());
}

}  // namespace

// Linear in the picture: its gradient needs the picture's size alone.
TEXVLM_OPS(ops) {
  ops.differentiable<pack_cells>(
      "pack_cells", GradientRule().given("image_height", size_of("image", 2)).given("image_width", size_of("image", 3)));
  ops.op<pack_cells_backward>("pack_cells_backward");
}

}  // namespace texvlm
