// Cells of a picture as rows of patches, in the order of the vision towers of Qwen-VL, and the adjoint.
//
// A cell is merge x merge patches: as many rows, one after another, each of (channels, times, patch, patch) values; a still
// picture is the same at all times. A cell of level l has as many samples, each the mean of 2^l x 2^l pixels. The cells alone are
// resized.
#pragma once

#include <type_traits>

#include "cubic.h"
#include "lanes.h"
#include "texture.h"

namespace texvlm {

constexpr int kMaxPackedChannels = 64;

// Level -1: no cell.
struct PackedCell {
  int64_t row, column;
  int level;
};

// The cells of each picture: indices of level 0, row-major, or triples (level, row, column), each in the grid of its level.
struct PackedCells {
  const int64_t* data;
  int64_t stride_b, stride_k, stride_j;
  int64_t count, rows, columns;  // of the grid of level 0
  bool triples;

  TEXVLM_HD PackedCell at(int64_t b, int64_t k) const {
    const int64_t* p = data + b * stride_b + k * stride_k;
    const PackedCell none{0, 0, -1};
    if (!triples) return *p >= 0 && *p < rows * columns ? PackedCell{*p / columns, *p % columns, 0} : none;
    const int64_t level = p[0], row = p[stride_j], column = p[2 * stride_j];
    if (level < 0 || level > 31 || (level > 0 && maximum(rows, columns) <= int64_t{1} << (level - 1))) return none;
    if (row < 0 || column < 0 || row > (rows - 1) >> level || column > (columns - 1) >> level) return none;
    return {row, column, static_cast<int>(level)};
  }
  // Whether an entry asks for none.
  bool negative(int64_t b, int64_t k) const {
    const int64_t* p = data + b * stride_b + k * stride_k;
    return triples ? (p[0] < 0 || p[stride_j] < 0 || p[2 * stride_j] < 0) : *p < 0;
  }
};

// The picture that is packed, in pixels, and its rows.
struct Packing {
  int64_t height, width, channels;
  int64_t patch, merge, temporal;

  TEXVLM_HD int64_t side() const { return patch * merge; }
  TEXVLM_HD int64_t row_values() const { return channels * temporal * patch * patch; }
  // Where sample (y, x) of a channel of a cell lies: in which of its rows, and at which value there (at time 0).
  TEXVLM_HD int64_t row_of(int64_t y, int64_t x) const { return y / patch * merge + x / patch; }
  TEXVLM_HD int64_t value_of(int64_t c, int64_t y, int64_t x) const {
    return (c * temporal * patch + y % patch) * patch + x % patch;
  }
};

// The pixels [begin, end) of sample i along an axis. Beyond the picture its last sample is repeated.
struct PixelSpan {
  int64_t begin, end;

  TEXVLM_HD static PixelSpan of(int64_t i, int level, int64_t size) {
    const int64_t begin = minimum(i, (size - 1) >> level) << level;
    return {begin, minimum(begin + (int64_t{1} << level), size)};
  }
  TEXVLM_HD int64_t size() const { return end - begin; }
};

// Picture [B, C, H, W] of S to rows [B, K merge^2, C temporal patch^2] of T, which is S, or float for bytes.
template <class S>
struct PackCells {
  using A = Acc<S>;
  using T = std::conditional_t<std::is_same_v<S, uint8_t>, float, S>;
  using Sums = CubicSums<S>;
  using Sum = typename Sums::Sum;
  static constexpr int64_t kTile = 64;  // the host resizes at most so many pixels a side at a time

  ImageView<const S> image;
  PackedCells cells;
  Packing to;
  CubicTaps<Sum> down, across;  // without tables: the size stays
  bool down_first;              // the order of the two passes
  A scale, mean[kMaxPackedChannels], deviation[kMaxPackedChannels];
  T* rows;

  TEXVLM_HD bool resizes() const { return down.first != nullptr; }
  TEXVLM_HD T normalised(A value, int64_t c) const { return static_cast<T>((value * scale - mean[c]) / deviation[c]); }

  // A pixel of the picture that is packed.
  TEXVLM_HD A pixel(int64_t b, int64_t c, int64_t y, int64_t x) const {
    if (!resizes()) return static_cast<A>(image.at(b, c, y, x));
    const CubicTaps<Sum>&inner = down_first ? down : across, &outer = down_first ? across : down;
    const int64_t i = down_first ? y : x, o = down_first ? x : y;
    const int64_t inner_step = down_first ? image.stride_y : image.stride_x;
    const int64_t outer_step = down_first ? image.stride_x : image.stride_y;
    const S* in = &image.at(b, c, down.first[y], across.first[x]);
    Sum sum = Sums::kStart;
    for (int32_t k = 0; k < outer.count[o]; ++k, in += outer_step) {
      Sum line = Sums::kStart;
      for (int32_t j = 0; j < inner.count[i]; ++j)
        line += inner.weight[i * inner.taps + j] * static_cast<Sum>(static_cast<A>(in[j * inner_step]));
      sum += outer.weight[o * outer.taps + k] * Sums::finish(line);
    }
    return static_cast<A>(Sums::finish(sum));
  }

#if defined(TEXVLM_HOST_LOOPS)
  // Work memory of a thread: the sums of a cell; a window of the picture; the same after one pass; and after both.
  struct Scratch {
    A *sums, *line;
    Sum *window, *middle, *tile;
  };
  static constexpr int64_t kLanes = 64 / sizeof(Sum);  // that are weighed at a time
  TEXVLM_HD static int64_t whole(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
  TEXVLM_HD int64_t window_rows() const { return whole(down.axis.window(minimum(kTile, to.height))); }
  TEXVLM_HD int64_t window_columns() const { return whole(across.axis.window(minimum(kTile, to.width))); }
  TEXVLM_HD int64_t window_values() const { return window_rows() * window_columns(); }
  TEXVLM_HD int64_t middle_values() const { return maximum(window_rows(), window_columns()) * kTile; }
  int64_t scratch_bytes() const {
    const int64_t pixels = resizes() ? window_values() + middle_values() + kTile * kTile : 0;
    return (to.side() * to.side() + kTile) * static_cast<int64_t>(sizeof(A)) + pixels * static_cast<int64_t>(sizeof(Sum));
  }
  TEXVLM_HD Scratch split(void* memory) const {
    Scratch s{};
    s.sums = static_cast<A*>(memory);
    s.line = s.sums + to.side() * to.side();
    if (!resizes()) return s;
    s.window = reinterpret_cast<Sum*>(s.line + kTile);
    s.middle = s.window + window_values();
    s.tile = s.middle + middle_values();
    return s;
  }

  // Cell k, with all its channels.
  TEXVLM_HD void row(int64_t b, int64_t k, int64_t, int64_t, void* memory) const {
    const PackedCell cell = cells.at(b, k);
    const int64_t side = to.side(), values = to.merge * to.merge * to.row_values();
    T* out = rows + (b * cells.count + k) * values;
    if (cell.level < 0) {
      memset(static_cast<void*>(out), 0, values * sizeof(T));
      return;
    }
    const Scratch scratch = split(memory);
    for (int64_t c = 0; c < to.channels; ++c) {
      if (cell.level == 0 && !resizes()) {
        const int64_t step = image.stride_x;
        for (int64_t y = 0; y < side; ++y) {
          const S* in = &image.at(b, c, cell.row * side + y, cell.column * side);
          if (step == 1) {
            write(out, c, y, [&](int64_t x) { return static_cast<A>(in[x]); });
          } else if (step == 3) {
            write(out, c, y, [&](int64_t x) { return static_cast<A>(in[3 * x]); });
          } else {
            write(out, c, y, [&](int64_t x) { return static_cast<A>(in[x * step]); });
          }
        }
        continue;
      }
      add_pixels(b, c, cell, scratch);
      if (cell.level > 0) take_means(cell, scratch.sums);
      for (int64_t y = 0; y < side; ++y) {
        const A* in = scratch.sums + y * side;
        write(out, c, y, [&](int64_t x) { return in[x]; });
      }
    }
  }

  // Row y of the samples of a cell, to its patches and times.
  template <class Value>
  TEXVLM_HD void write(T* out, int64_t c, int64_t y, const Value& value) const {
    const int64_t plane = to.patch * to.patch;
    for (int64_t x = 0; x < to.side(); x += to.patch) {
      T* TEXVLM_RESTRICT patch = out + to.row_of(y, x) * to.row_values() + to.value_of(c, y, 0);
      for (int64_t j = 0; j < to.patch; ++j) patch[j] = normalised(value(x + j), c);
      for (int64_t t = 1; t < to.temporal; ++t) memcpy(static_cast<void*>(patch + t * plane), patch, to.patch * sizeof(T));
    }
  }

  // The sums of the pixels under the samples of a cell, a tile of pixels after another.
  TEXVLM_HD void add_pixels(int64_t b, int64_t c, const PackedCell& cell, const Scratch& s) const {
    const int64_t side = to.side(), y0 = (cell.row * side) << cell.level, x0 = (cell.column * side) << cell.level;
    const int64_t y1 = minimum(to.height, y0 + (side << cell.level)), x1 = minimum(to.width, x0 + (side << cell.level));
    if (cell.level > 0) memset(static_cast<void*>(s.sums), 0, side * side * sizeof(A));
    for (int64_t y = y0; y < y1; y += kTile) {
      for (int64_t x = x0; x < x1; x += kTile) {
        const int64_t high = minimum(kTile, y1 - y), wide = minimum(kTile, x1 - x);
        if (resizes()) resize_tile(b, c, y, x, high, wide, s);
        for (int64_t i = 0; i < high; ++i) {
          A* sums = s.sums + ((y + i - y0) >> cell.level) * side;
          if (resizes()) {
            const Sum* in = s.tile + i * kTile;
            add_line(sums, x - x0, wide, cell.level, i, y + i - y0, high, s.line,
                     [&](int64_t j) { return static_cast<A>(in[j]); });
          } else {
            const S* in = &image.at(b, c, y + i, x);
            const int64_t step = image.stride_x;
            add_line(sums, x - x0, wide, cell.level, i, y + i - y0, high, s.line,
                     [&](int64_t j) { return static_cast<A>(in[j * step]); });
          }
        }
      }
    }
  }

  // Pixels [x, x + wide) of a line to its samples: row `y` of the cell, row i of `high` of a tile. Those of a level above 0 are
  // first added up over the rows of a sample, which vectorises.
  template <class Value>
  TEXVLM_HD void add_line(A* sums, int64_t x, int64_t wide, int level, int64_t i, int64_t y, int64_t high, A* line,
                          const Value& value) const {
    if (level == 0) {
      for (int64_t j = 0; j < wide; ++j) sums[x + j] = value(j);
      return;
    }
    const int64_t mask = (int64_t{1} << level) - 1;
    if (i == 0 || (y & mask) == 0) {
      for (int64_t j = 0; j < wide; ++j) line[j] = value(j);
    } else {
      for (int64_t j = 0; j < wide; ++j) line[j] += value(j);
    }
    if (i + 1 < high && (y & mask) != mask) return;
    for (int64_t j = 0; j < wide; ++j) sums[(x + j) >> level] += line[j];
  }

  // Sums to means, and what lies beyond the picture.
  TEXVLM_HD void take_means(const PackedCell& cell, A* sums) const {
    const int64_t side = to.side(), y0 = cell.row * side, x0 = cell.column * side;
    const int64_t last_y = minimum(side - 1, ((to.height - 1) >> cell.level) - y0);
    const int64_t last_x = minimum(side - 1, ((to.width - 1) >> cell.level) - x0);
    for (int64_t y = 0; y <= last_y; ++y) {
      A* line = sums + y * side;
      const int64_t high = PixelSpan::of(y0 + y, cell.level, to.height).size();
      for (int64_t x = 0; x <= last_x; ++x) line[x] /= static_cast<A>(high * PixelSpan::of(x0 + x, cell.level, to.width).size());
      for (int64_t x = last_x + 1; x < side; ++x) line[x] = line[last_x];
    }
    for (int64_t y = last_y + 1; y < side; ++y)
      for (int64_t x = 0; x < side; ++x) sums[y * side + x] = sums[last_y * side + x];
  }

  // The pixels that n outputs read.
  TEXVLM_HD static PixelSpan reach(const CubicTaps<Sum>& taps, int64_t o, int64_t n) {
    int64_t begin = taps.first[o], end = begin;
    for (int64_t i = o; i < o + n; ++i) {
      begin = minimum<int64_t>(begin, taps.first[i]);
      end = maximum<int64_t>(end, taps.first[i] + taps.count[i]);
    }
    return {begin, end};
  }

#if defined(TEXVLM_HAS_LANES)
  // The weighed sum of `count` runs of kLanes values, `step` apart.
  TEXVLM_HD static void weigh(const Sum* weight, int64_t count, const Sum* in, int64_t step, Sum* out) {
    constexpr int64_t kHalf = kLanes / 2;  // two registers of AVX2
    using V = Lanes<Sum, kHalf>;
    V left = V{} + Sums::kStart, right = left;
    for (int64_t k = 0; k < count; ++k, in += step) {
      left += weight[k] * load_lanes<Sum, kHalf>(in);
      right += weight[k] * load_lanes<Sum, kHalf>(in + kHalf);
    }
    store_lanes<Sum, kHalf>(out, Sums::finish(left));
    store_lanes<Sum, kHalf>(out + kHalf, Sums::finish(right));
  }
  // The window, runs of `pitch` from place `begin` of an axis on, to n outputs of that axis from o on, side by side.
  TEXVLM_HD static void first_pass(const CubicTaps<Sum>& taps, int64_t o, int64_t n, int64_t begin, int64_t pitch,
                                   const Scratch& s) {
    for (int64_t j = 0; j < n; ++j) {
      const Sum* in = s.window + (taps.first[o + j] - begin) * pitch;
      for (int64_t i = 0; i < pitch; i += kLanes) {
        Sum run[kLanes];
        weigh(taps.weight + (o + j) * taps.taps, taps.count[o + j], in + i, pitch, run);
        for (int64_t m = 0; m < kLanes; ++m) s.middle[(i + m) * kTile + j] = run[m];
      }
    }
  }
  // These, `across` of them side by side, to n outputs of the other axis; turned back if it is that of columns.
  TEXVLM_HD static void second_pass(const CubicTaps<Sum>& taps, int64_t o, int64_t n, int64_t begin, int64_t across, bool turned,
                                    const Scratch& s) {
    for (int64_t j = 0; j < n; ++j) {
      const Sum *in = s.middle + (taps.first[o + j] - begin) * kTile, *weight = taps.weight + (o + j) * taps.taps;
      for (int64_t i = 0; i < across; i += kLanes) {
        Sum run[kLanes];
        weigh(weight, taps.count[o + j], in + i, kTile, turned ? run : s.tile + j * kTile + i);
        for (int64_t m = 0; m < kLanes && turned; ++m) s.tile[(i + m) * kTile + j] = run[m];
      }
    }
  }
#endif

  // `high` x `wide` resized pixels from (y, x) on, in rows of kTile. The window lies so that the first pass weighs runs of
  // neighbours, and leaves its results so that the second does.
  TEXVLM_HD void resize_tile(int64_t b, int64_t c, int64_t y, int64_t x, int64_t high, int64_t wide, const Scratch& s) const {
#if defined(TEXVLM_HAS_LANES)
    const PixelSpan lines = reach(down, y, high), columns = reach(across, x, wide);
    const int64_t pitch = whole(down_first ? columns.size() : lines.size());
    const int64_t step_y = down_first ? pitch : 1, step_x = down_first ? 1 : pitch;
    for (int64_t i = 0; i < lines.size(); ++i) {
      const S* in = &image.at(b, c, lines.begin + i, columns.begin);
      Sum* to_line = s.window + i * step_y;
      for (int64_t j = 0; j < columns.size(); ++j) to_line[j * step_x] = static_cast<Sum>(static_cast<A>(in[j * image.stride_x]));
    }
    first_pass(down_first ? down : across, down_first ? y : x, down_first ? high : wide, down_first ? lines.begin : columns.begin,
               pitch, s);
    second_pass(down_first ? across : down, down_first ? x : y, down_first ? wide : high,
                down_first ? columns.begin : lines.begin, down_first ? high : wide, down_first, s);
#else
    for (int64_t i = 0; i < high; ++i)
      for (int64_t j = 0; j < wide; ++j) s.tile[i * kTile + j] = static_cast<Sum>(pixel(b, c, y + i, x + j));
#endif
  }
#endif
};

// Adjoint of PackCells without the resize: every pixel gathers from the cells that cover it, in their order. Rows [B, R, V] of
// any strides to out [B, C, height, width].
template <class T>
struct PackCellsAdjoint {
  using A = Acc<T>;

  const T* grad;
  int64_t stride_b, stride_r, stride_v;
  PackedCells cells;
  Packing of;
  A factor[kMaxPackedChannels];  // scale / deviation
  A* out;

  TEXVLM_HD A* pixel(int64_t b, int64_t c, int64_t y, int64_t x) const {
    return out + ((b * of.channels + c) * of.height + y) * of.width + x;
  }
  // Whether a cell covers the square of pixels (row, column) of the grid of level 0.
  TEXVLM_HD static bool covers(const PackedCell& cell, int64_t row, int64_t column) {
    return cell.level >= 0 && row >> cell.level == cell.row && column >> cell.level == cell.column;
  }

  // What a cell tells a pixel that it covers.
  TEXVLM_HD A from_cell(int64_t b, int64_t k, const PackedCell& cell, int64_t c, int64_t y, int64_t x) const {
    const int64_t side = of.side(), i = y >> cell.level, j = x >> cell.level;
    const PixelSpan high = PixelSpan::of(i, cell.level, of.height), wide = PixelSpan::of(j, cell.level, of.width);
    // The last sample stands for all beyond it too.
    const int64_t i0 = i - cell.row * side, i1 = high.end == of.height ? side : i0 + 1;
    const int64_t j0 = j - cell.column * side, j1 = wide.end == of.width ? side : j0 + 1;
    const T* from = grad + b * stride_b + k * of.merge * of.merge * stride_r;
    A sum = 0;
    for (int64_t m = i0; m < i1; ++m) {
      for (int64_t n = j0; n < j1; ++n) {
        const T* g = from + of.row_of(m, n) * stride_r + of.value_of(c, m, n) * stride_v;
        for (int64_t t = 0; t < of.temporal; ++t) sum += static_cast<A>(g[t * of.patch * of.patch * stride_v]);
      }
    }
    return sum * factor[c] / static_cast<A>(high.size() * wide.size());
  }

#if defined(TEXVLM_HOST_LOOPS)
  // The pixels of a row of cells of level 0, all channels.
  TEXVLM_HD void row(int64_t b, int64_t r, int64_t, int64_t) const {
    const int64_t side = of.side();
    for (int64_t c = 0; c < of.channels; ++c)
      memset(static_cast<void*>(pixel(b, c, r * side, 0)), 0, side * of.width * sizeof(A));
    for (int64_t k = 0; k < cells.count; ++k) {
      const PackedCell cell = cells.at(b, k);
      if (cell.level < 0 || r >> cell.level != cell.row) continue;
      const int64_t x0 = (cell.column * side) << cell.level, x1 = minimum(of.width, x0 + (side << cell.level));
      for (int64_t c = 0; c < of.channels; ++c) {
        for (int64_t y = 0; y < side; ++y) {
          A* TEXVLM_RESTRICT to = pixel(b, c, r * side + y, 0);
          if (cell.level > 0) {
            for (int64_t x = x0; x < x1; ++x) to[x] += from_cell(b, k, cell, c, r * side + y, x);
          } else {
            add_row(b, k, c, y, to + x0);
          }
        }
      }
    }
  }

  // from_cell() of a row of a cell of level 0, patch by patch.
  TEXVLM_HD void add_row(int64_t b, int64_t k, int64_t c, int64_t y, A* TEXVLM_RESTRICT to) const {
    const T* from = grad + b * stride_b + k * of.merge * of.merge * stride_r + of.value_of(c, y, 0) * stride_v;
    for (int64_t x = 0; x < of.side(); x += of.patch) {
      const T* g = from + of.row_of(y, x) * stride_r;
      for (int64_t n = 0; n < of.patch; ++n) {
        A sum = 0;
        for (int64_t t = 0; t < of.temporal; ++t) sum += static_cast<A>(g[(t * of.patch * of.patch + n) * stride_v]);
        to[x + n] += sum * factor[c];
      }
    }
  }
#endif
};

}  // namespace texvlm
