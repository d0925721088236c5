// The taps of an antialiased cubic resize of one axis.
//
// R. Keys' kernel (1981) with a = -1/2, widened by the scale where the picture shrinks, cut off at the border and normalised:
// what Pillow's BICUBIC and torch's interpolate(mode="bicubic", antialias=True) compute. Pictures of bytes are resized as Pillow
// does: weights rounded to 22 bits behind the point, and each pass rounded to a byte.
#pragma once

#include <type_traits>

#include "scalar.h"

namespace texvlm {

TEXVLM_HD double cubic(double x) {
  x = fabs(x);
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  if (x < 2) return (((x - 5) * x + 8) * x - 4) * -0.5;
  return 0;
}

// `in` pixels to `out`.
struct CubicAxis {
  int64_t in, out;

  TEXVLM_HD double scale() const { return static_cast<double>(in) / static_cast<double>(out); }
  TEXVLM_HD double support() const { return 2 * maximum(1.0, scale()); }
  TEXVLM_HD double centre(int64_t o) const { return (static_cast<double>(o) + 0.5) * scale(); }
  // At most so many pixels are read for one, and for n neighbours.
  int64_t taps() const { return minimum(in, 2 * static_cast<int64_t>(ceil(support())) + 1); }
  int64_t window(int64_t n) const {
    return minimum(
        in, static_cast<int64_t>(ceil(static_cast<double>(n - 1) * scale())) + 2 * static_cast<int64_t>(ceil(support())) + 2);
  }
};

// Whether the pass along columns comes first, for bytes: where many more rows go than columns. Pillow's rule since its version
// 13; before, that along rows always came first.
inline bool columns_first(const CubicAxis& down, const CubicAxis& across) {
  return down.out < down.in && down.in - down.out > 2 * (across.in - across.out);
}

// How values of type S are summed: floating point in Acc<S>, bytes in fixed point. finish() is what comes out of a pass.
template <class S>
struct CubicSums {
  using Sum = Acc<S>;
  static constexpr Sum kStart = 0;
  TEXVLM_HD static Sum weight(double w) { return static_cast<Sum>(w); }
  template <class V>
  TEXVLM_HD static V finish(const V& sum) {  // a Sum, or Lanes of them
    return sum;
  }
};
template <>
struct CubicSums<uint8_t> {
  using Sum = int32_t;
  static constexpr int kBits = 22;
  static constexpr Sum kStart = 1 << (kBits - 1);  // a half
  TEXVLM_HD static Sum weight(double w) { return static_cast<Sum>(w * (1 << kBits) + (w < 0 ? -0.5 : 0.5)); }
  template <class V>
  TEXVLM_HD static V finish(const V& sum) {
    const V none = sum ^ sum, most = none + 255, value = sum >> kBits;
    const V above = value > 0 ? value : none;
    return above < 255 ? above : most;
  }
};

// Output o is the sum of weight[o * taps + k] times pixel first[o] + k, over k below count[o].
template <class W>
struct CubicTaps {
  CubicAxis axis;
  int64_t taps;
  int32_t *first, *count;
  W* weight;
};

// Fills the tables of both axes, an output at a time. W: int32_t for bytes.
template <class W>
struct MakeCubicTaps {
  using Sums = CubicSums<std::conditional_t<std::is_same_v<W, int32_t>, uint8_t, W>>;
  CubicTaps<W> axes[2];

  TEXVLM_HD void operator()(int64_t which, int64_t o, int64_t, int64_t) const {
    const CubicTaps<W>& to = axes[which];
    if (o >= to.axis.out) return;
    const double support = to.axis.support(), centre = to.axis.centre(o), narrow = 1 / maximum(1.0, to.axis.scale());
    int64_t first = maximum<int64_t>(0, static_cast<int64_t>(centre - support + 0.5));
    int64_t end = minimum(to.axis.in, static_cast<int64_t>(centre + support + 0.5));
    const auto weight = [&](int64_t i) { return cubic((static_cast<double>(i) - centre + 0.5) * narrow); };
    double sum = 0;
    for (int64_t i = first; i < end; ++i) sum += weight(i);
    while (first < end && weight(first) == 0) ++first;  // the same size has one tap
    while (first < end && weight(end - 1) == 0) --end;
    to.first[o] = static_cast<int32_t>(first);
    to.count[o] = static_cast<int32_t>(end - first);
    for (int64_t i = first; i < end; ++i) to.weight[o * to.taps + i - first] = Sums::weight(weight(i) / sum);
  }
};

// The outputs that may read pixel i: [begin, end), a few more than do. Then what each has of it.
struct CubicReaders {
  int64_t begin, end;

  TEXVLM_HD static CubicReaders of(const CubicAxis& axis, int64_t i) {
    const double reach = axis.support() + 1, scale = axis.scale(), at = static_cast<double>(i) + 0.5;
    const auto bounded = [&](double o) { return static_cast<int64_t>(clamp(o, 0.0, static_cast<double>(axis.out))); };
    return {bounded((at - reach) / scale - 0.5), bounded((at + reach) / scale + 1.5)};
  }
};
template <class W>
TEXVLM_HD W cubic_weight(const CubicTaps<W>& t, int64_t o, int64_t i) {
  const int64_t k = i - t.first[o];
  return k >= 0 && k < t.count[o] ? t.weight[o * t.taps + k] : W(0);
}

// Adjoint of the resize of columns, [..., out] to [..., in], rows of all planes as one run of rows; and of that of rows.
template <class T, int C>
struct CubicColumnsAdjoint {
  CubicTaps<T> taps;
  const T* grad;
  T* out;

  TEXVLM_HD void operator()(int64_t, int64_t y, int64_t x, int64_t, int64_t) const {
    const CubicReaders readers = CubicReaders::of(taps.axis, x);
    const T* g = grad + y * taps.axis.out;
    T sum = 0;
    for (int64_t o = readers.begin; o < readers.end; ++o) sum += cubic_weight(taps, o, x) * g[o];
    out[y * taps.axis.in + x] = sum;
  }

#if defined(TEXVLM_HOST_LOOPS)
  // The same sums, output by output; what was not kept adds nothing.
  TEXVLM_HD void row(int64_t, int64_t y, int64_t, int64_t) const {
    const T* g = grad + y * taps.axis.out;
    T* to = out + y * taps.axis.in;
    for (int64_t x = 0; x < taps.axis.in; ++x) to[x] = 0;
    for (int64_t o = 0; o < taps.axis.out; ++o) {
      if (g[o] == 0) continue;
      const T* w = taps.weight + o * taps.taps;
      T* target = to + taps.first[o];
      for (int64_t k = 0; k < taps.count[o]; ++k) target[k] += w[k] * g[o];
    }
  }
#endif
};

// [planes, out, width] to [planes, in, width].
template <class T, int C>
struct CubicRowsAdjoint {
  CubicTaps<T> taps;
  const T* grad;
  T* out;
  int64_t width;

  TEXVLM_HD void operator()(int64_t plane, int64_t y, int64_t x, int64_t, int64_t) const {
    const CubicReaders readers = CubicReaders::of(taps.axis, y);
    const T* g = grad + plane * taps.axis.out * width + x;
    T sum = 0;
    for (int64_t o = readers.begin; o < readers.end; ++o) sum += cubic_weight(taps, o, y) * g[o * width];
    out[(plane * taps.axis.in + y) * width + x] = sum;
  }

#if defined(TEXVLM_HOST_LOOPS)
  TEXVLM_HD void row(int64_t plane, int64_t y, int64_t, int64_t) const {
    const CubicReaders readers = CubicReaders::of(taps.axis, y);
    T* TEXVLM_RESTRICT to = out + (plane * taps.axis.in + y) * width;
    for (int64_t x = 0; x < width; ++x) to[x] = 0;
    for (int64_t o = readers.begin; o < readers.end; ++o) {
      const T w = cubic_weight(taps, o, y);
      const T* TEXVLM_RESTRICT g = grad + (plane * taps.axis.out + o) * width;
      if (w == 0) continue;
      for (int64_t x = 0; x < width; ++x) to[x] += w * g[x];
    }
  }
#endif
};

}  // namespace texvlm
