// Regions of text: statistics of strokes in cells of kTextCell pixels at several mip levels, and a small network over the cells.
//
// Writing differs from texture by its strokes: thin, with an edge of the opposite polarity on the other side, in all directions,
// on a quiet ground, and with neighbours of the same kind. The statistics measure this per cell; four convolutions, trained by
// benchmarks/_train_text.py, weigh them against those of the cells around. Sums run down each column of a cell, then along the
// row of columns, in every form.
#pragma once

#include "enlarge.h"
#include "luma.h"

namespace texvlm {

constexpr int kTextCell = 16;         // pixels a side of a cell
constexpr int kTextLevels = 4;        // mip levels whose strokes are measured
constexpr int kTextReach = 2;         // a stroke is darker (lighter) than what lies this many texels to both sides
constexpr int kLevelStatistics = 11;  // per level: 4 orientations, root of the mean square, 2 net gradients, 4 strokes
constexpr int kTextStatistics = kTextLevels * kLevelStatistics + 2;
constexpr int kTextHidden = 24;
constexpr double kTextGain = 512;         // statistics enter the network as log2(1 + gain * value) / 8
constexpr double kTextQuiet = 1.0 / 512;  // cells with mean gradients below this fade out

// Layers: inputs, outputs, taps a side, cells between the taps.
struct TextLayerShape {
  int inputs, outputs, taps, dilation;
  TEXVLM_HD int weights() const { return outputs * inputs * taps * taps; }
};
constexpr TextLayerShape kTextNetwork[] = {{kTextStatistics, kTextHidden, 1, 1},
                                           {kTextHidden, kTextHidden, 3, 1},
                                           {kTextHidden, kTextHidden, 3, 2},
                                           {kTextHidden, 1, 1, 1}};

// Base-2 logarithm of a number >= 1, the same on all machines and free of calls: the exponent, and the series of atanh.
template <class A>
TEXVLM_HD A log2_series(A x) {
  const uint32_t bits = float_bits(static_cast<float>(x)) - 0x3f3504f3u;  // the mantissa is taken in [sqrt 1/2, sqrt 2)
  const int exponent = static_cast<int>(bits) >> 23;
  const A m = x * static_cast<A>(bits_float(static_cast<uint32_t>(127 - exponent) << 23)), t = (m - A(1)) / (m + A(1)), s = t * t;
  A sum = 0;
  for (int k = sizeof(A) == 8 ? 12 : 5; k >= 0; --k) sum = sum * s + A(1) / static_cast<A>(2 * k + 1);
  return static_cast<A>(exponent) + A(2.8853900817779268) * t * sum;  // 2 / ln 2
}

// Luma, cut off to [0, 1], into level 0 of a texture of one channel.
template <class S>
struct TextLuma {
  template <class T, int C>
  struct For {
    ImageView<const S> image;
    TextureView<T> texture;

    template <int N>
    TEXVLM_HD void pixels(int64_t b, int64_t y, int64_t x, int n) const {
      T v[N];
      luma_run(image, b, y, x, n, v);
      T* TEXVLM_RESTRICT out = texture.texel(b, 0, y, x);
      for (int j = 0; j < n; ++j) out[j] = clamp(v[j], T(0), T(1));
    }
  };
};

// ---- statistics of a cell ----

// What one texel adds to its cell: |gx|, |gy|, |gx + gy|, |gx - gy|, gx^2 + gy^2, gx, gy, darker along x, along y, lighter along
// x, along y. l2, l1, r1, r2: the texels to both sides; u2, u1, d1, d2: above and below.
template <class A, class Add>
TEXVLM_HD void stroke_terms(A v, A l2, A l1, A r1, A r2, A u2, A u1, A d1, A d2, const Add& add) {
  const A gx = (r1 - l1) * A(0.5), gy = (d1 - u1) * A(0.5);
  add(0, std::abs(gx));
  add(1, std::abs(gy));
  add(2, std::abs(gx + gy));
  add(3, std::abs(gx - gy));
  add(4, gx * gx + gy * gy);
  add(5, gx);
  add(6, gy);
  add(7, maximum(minimum(l2, r2) - v, A(0)));
  add(8, maximum(minimum(u2, d2) - v, A(0)));
  add(9, maximum(v - maximum(l2, r2), A(0)));
  add(10, maximum(v - maximum(u2, d2), A(0)));
}

// Texel (y, x) is a cell, whose channels are the slots: a level of the texture is measured for statistics [slot *
// kLevelStatistics,
// ...) of `out` [B, kTextStatistics + 1, rows, columns], as the network reads them; where the levels run out, the last one again.
// Slot 0 also writes how far the mean is above the smallest and below the largest value, and, as the last plane, the plain mean
// |gx| + |gy|. A cell that reaches beyond the last texel of the level is moved back inside: all cells have as many texels, since
// the statistics of a few rows or columns mislead.
template <class T, int C>
struct TextStatistics {
  TextureView<const T> texture;
  T* out;
  int64_t rows, columns;

  TEXVLM_HD int level_of(int slot) const { return minimum(slot, texture.levels.count - 1); }
  struct Extent {
    int64_t begin, end;
  };
  TEXVLM_HD static Extent extent(int64_t cell, int64_t size, int level) {
    const int64_t side = minimum<int64_t>(kTextCell >> level, size), begin = minimum(cell * side, size - side);
    return {begin, begin + side};
  }
  TEXVLM_HD const T* line(int64_t b, int64_t y, int level) const {
    return texture.texel(b, level, clamp<int64_t>(y, 0, texture.levels.height[level] - 1), 0);
  }
  TEXVLM_HD static T input(T value) { return log2_series(T(1) + T(kTextGain) * maximum(value, T(0))) * T(0.125); }
  TEXVLM_HD T* plane(int64_t b, int64_t k, int64_t y, int64_t x) const {
    return out + ((b * (kTextStatistics + 1) + k) * rows + y) * columns + x;
  }

  // The sums of a cell of `count` texels to its statistics.
  TEXVLM_HD void store(int64_t b, int64_t y, int64_t x, int slot, T* sum, int64_t count, T total, T low, T high) const {
    for (int k = 0; k < kLevelStatistics; ++k) sum[k] /= static_cast<T>(count);
    if (slot == 0) {
      const T mean = total / static_cast<T>(count);
      *plane(b, kTextStatistics - 2, y, x) = input(mean - low);
      *plane(b, kTextStatistics - 1, y, x) = input(high - mean);
      *plane(b, kTextStatistics, y, x) = sum[0] + sum[1];
    }
    sum[4] = std::sqrt(sum[4]);
    sum[5] = std::abs(sum[5]);
    sum[6] = std::abs(sum[6]);
    for (int k = 0; k < kLevelStatistics; ++k) *plane(b, slot * kLevelStatistics + k, y, x) = input(sum[k]);
  }

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    for (int64_t slot = c0; slot < c1; ++slot) measure(b, y, x, static_cast<int>(slot));
  }
  TEXVLM_HD void measure(int64_t b, int64_t y, int64_t x, int slot) const {
    const int level = level_of(slot);
    const int64_t width = texture.levels.width[level];
    const Extent ey = extent(y, texture.levels.height[level], level), ex = extent(x, width, level);
    const auto line = [&](int64_t v) { return this->line(b, v, level); };
    T sum[kLevelStatistics] = {}, total = 0, low = line(ey.begin)[ex.begin], high = low;
    for (int64_t j = ex.begin; j < ex.end; ++j) {
      const int64_t l1 = maximum<int64_t>(j - 1, 0), l2 = maximum<int64_t>(j - 2, 0), r1 = minimum(j + 1, width - 1),
                    r2 = minimum(j + 2, width - 1);
      T column[kLevelStatistics] = {}, column_total = 0;
      for (int64_t i = ey.begin; i < ey.end; ++i) {
        const T* p = line(i);
        stroke_terms(p[j], p[l2], p[l1], p[r1], p[r2], line(i - 2)[j], line(i - 1)[j], line(i + 1)[j], line(i + 2)[j],
                     [&](int k, T v) { column[k] += v; });
        column_total += p[j];
        low = minimum(low, p[j]);
        high = maximum(high, p[j]);
      }
      for (int k = 0; k < kLevelStatistics; ++k) sum[k] += column[k];
      total += column_total;
    }
    store(b, y, x, slot, sum, (ey.end - ey.begin) * (ex.end - ex.begin), total, low, high);
  }

  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    for (int slot = 0; slot < kTextLevels; ++slot) row_of(b, y, x0, x1, slot);
  }
  TEXVLM_HD void row_of(int64_t b, int64_t y, int64_t x0, int64_t x1, int slot) const {
    const int level = level_of(slot);
    const int64_t side = kTextCell >> level, whole = minimum(x1, texture.levels.width[level] / side);
    const Extent ey = extent(y, texture.levels.height[level], level);
    int64_t x = x0;
    for (; x < whole; x += kRun / side) {
      const int64_t begin = x * side, stop = minimum(whole, x + kRun / side);
      const int n = static_cast<int>((stop - x) * side);
      T column[kLevelStatistics][kRun], total[kRun], low[kRun], high[kRun];
      for (int k = 0; k < kLevelStatistics; ++k)
        for (int j = 0; j < kRun; ++j) column[k][j] = T(0);
      for (int j = 0; j < kRun; ++j) total[j] = T(0);
      for (int64_t i = ey.begin; i < ey.end; ++i) sums(b, i, begin, n, slot, i == ey.begin, column, total, low, high);
      for (int64_t c = x; c < stop; ++c) {
        const int from = static_cast<int>((c - x) * side), to = static_cast<int>(from + side);
        T sum[kLevelStatistics] = {}, all = 0, least = low[from], most = high[from];
        for (int j = from; j < to; ++j) {
          for (int k = 0; k < kLevelStatistics; ++k) sum[k] += column[k][j];
          all += total[j];
          least = minimum(least, low[j]);
          most = maximum(most, high[j]);
        }
        store(b, y, c, slot, sum, (ey.end - ey.begin) * (to - from), all, least, most);
      }
    }
    for (x = maximum(x0, whole); x < x1; ++x) measure(b, y, x, slot);
  }

  // Adds n texels of row i, from column x on.
  TEXVLM_HD void sums(int64_t b, int64_t i, int64_t x, int n, int slot, bool first, T (&column)[kLevelStatistics][kRun],
                      T (&total)[kRun], T (&low)[kRun], T (&high)[kRun]) const {
    const int level = level_of(slot);
    const int64_t width = texture.levels.width[level];
    const auto line = [&](int64_t v) { return this->line(b, v, level); };
    const T* TEXVLM_RESTRICT from = line(i);
    T v[kRun + 2 * kTextReach];  // [j] is column x - kTextReach + j
    const int begin = static_cast<int>(maximum<int64_t>(0, kTextReach - x));
    const int end = static_cast<int>(minimum<int64_t>(n + 2 * kTextReach, width - x + kTextReach));
    for (int j = begin; j < end; ++j) v[j] = from[x - kTextReach + j];
    for (int j = 0; j < begin; ++j) v[j] = v[begin];
    for (int j = end; j < n + 2 * kTextReach; ++j) v[j] = v[end - 1];
    const T *TEXVLM_RESTRICT u2 = line(i - 2) + x, *TEXVLM_RESTRICT u1 = line(i - 1) + x;
    const T *TEXVLM_RESTRICT d1 = line(i + 1) + x, *TEXVLM_RESTRICT d2 = line(i + 2) + x;
    for (int j = 0; j < n; ++j)
      stroke_terms(v[j + 2], v[j], v[j + 1], v[j + 3], v[j + 4], u2[j], u1[j], d1[j], d2[j],
                   [&](int k, T value) { column[k][j] += value; });
    if (slot != 0) {
      for (int j = 0; first && j < n; ++j) low[j] = high[j] = T(0);
      return;
    }
    for (int j = 0; j < n; ++j) {
      total[j] += v[j + 2];
      low[j] = first ? v[j + 2] : minimum(low[j], v[j + 2]);
      high[j] = first ? v[j + 2] : maximum(high[j], v[j + 2]);
    }
  }
};

// ---- the network ----

// One convolution over the grid of cells, borders replicated: out = bias + sum of weight * in, cut off below at 0.
// Weights are [outputs, inputs, taps, taps], then the biases; the channels of the call are the outputs.
template <class T, int C>
struct TextLayer {
  const T* in;  // [B, in_planes, rows, columns], of which the first shape.inputs are read
  const T* weights;
  T* out;  // [B, outputs, rows, columns]
  TextLayerShape shape;
  int64_t in_planes, rows, columns;

  TEXVLM_HD const T* line(int64_t b, int64_t c, int64_t y) const {
    return in + ((b * in_planes + c) * rows + clamp<int64_t>(y, 0, rows - 1)) * columns;
  }
  TEXVLM_HD static T cut(T v) { return maximum(v, T(0)); }

  // Output o before it is cut off.
  TEXVLM_HD T at(int64_t b, int64_t o, int64_t y, int64_t x) const {
    const int64_t d = shape.dilation, left = maximum<int64_t>(x - d, 0), right = minimum(x + d, columns - 1);
    T sum = weights[shape.weights() + o];
    for (int64_t c = 0; c < shape.inputs; ++c) {
      const T* k = weights + (o * shape.inputs + c) * shape.taps * shape.taps;
      if (shape.taps == 1) {
        sum += k[0] * line(b, c, y)[x];
        continue;
      }
      for (int i = 0; i < 3; ++i, k += 3) {
        const T* p = line(b, c, y + (i - 1) * d);
        sum += k[0] * p[left] + k[1] * p[x] + k[2] * p[right];
      }
    }
    return sum;
  }
  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    for (int64_t o = c0; o < c1; ++o) out[((b * shape.outputs + o) * rows + y) * columns + x] = cut(at(b, o, y, x));
  }

  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    for (int64_t x = x0; x < x1; x += kRun) {
      const int n = static_cast<int>(minimum<int64_t>(kRun, x1 - x));
      const int border = shape.taps == 1 ? 0 : shape.dilation;
      T sum[kTextHidden][kRun];
      for (int o = 0; o < shape.outputs; ++o)
        for (int j = 0; j < n; ++j) sum[o][j] = weights[shape.weights() + o];
      for (int64_t c = 0; c < shape.inputs; ++c)
        for (int i = 0; i < shape.taps; ++i) {
          T p[kRun + 2 * kMaxDilation];  // [j] is column x - border + j
          const T* TEXVLM_RESTRICT from = line(b, c, y + (shape.taps == 1 ? 0 : (i - 1) * shape.dilation));
          for (int j = 0; j < n + 2 * border; ++j) p[j] = from[clamp<int64_t>(x - border + j, 0, columns - 1)];
          for (int o = 0; o < shape.outputs; ++o) {
            const T* k = weights + ((o * shape.inputs + c) * shape.taps + i) * shape.taps;
            T* TEXVLM_RESTRICT to = sum[o];
            if (shape.taps == 1) {
              for (int j = 0; j < n; ++j) to[j] += k[0] * p[j];
            } else {
              const T *middle = p + border, *right = p + 2 * border;
              for (int j = 0; j < n; ++j) to[j] += k[0] * p[j] + k[1] * middle[j] + k[2] * right[j];
            }
          }
        }
      for (int o = 0; o < shape.outputs; ++o) {
        T* TEXVLM_RESTRICT to = out + ((b * shape.outputs + o) * rows + y) * columns + x;
        for (int j = 0; j < n; ++j) to[j] = cut(sum[o][j]);
      }
    }
  }

  static constexpr int kMaxDilation = 2;
};

// The logistic function of the last layer, which has one output, faded out where the cell and its neighbours are quiet.
template <class T, int C>
struct TextScore {
  TextLayer<T, 0> last;  // its `out` is not used
  const T* statistics;   // [B, kTextStatistics + 1, rows, columns]
  T* out;                // [B, rows, columns]
  int64_t rows, columns;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const T* edge = statistics + (b * (kTextStatistics + 1) + kTextStatistics) * rows * columns;
    T most = 0;
    for (int64_t i = maximum<int64_t>(y - 1, 0); i <= minimum(y + 1, rows - 1); ++i)
      for (int64_t j = maximum<int64_t>(x - 1, 0); j <= minimum(x + 1, columns - 1); ++j)
        most = maximum(most, edge[i * columns + j]);
    const int64_t at = (b * rows + y) * columns + x;
    out[at] = T(1) / (T(1) + std::exp(-last.at(b, 0, y, x))) * (most / (most + T(kTextQuiet)));
  }
};

// The scores of the cells read bilinearly at every pixel. The grid reaches beyond the picture where its last cells are partial,
// so `from` is of the whole grid.
template <class T, int C>
struct TextPixels {
  Enlarged<Acc<T>> from;
  T* out;  // [B, height, width]
  int64_t height, width;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    out[(b * height + y) * width + x] = static_cast<T>(from.at(b, y, x));
  }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    if constexpr (std::is_same_v<T, Acc<T>>) {
      if (from.even()) return from.run_even(b, y, x0, x1 - x0, out + (b * height + y) * width + x0);
    }
    for (int64_t x = x0; x < x1; x += kRun) {
      const int n = static_cast<int>(minimum<int64_t>(kRun, x1 - x));
      Acc<T> v[kRun];
      from.run(b, y, x, n, v);
      T* TEXVLM_RESTRICT to = out + (b * height + y) * width + x;
      for (int j = 0; j < n; ++j) to[j] = static_cast<T>(v[j]);
    }
  }
};

}  // namespace texvlm
