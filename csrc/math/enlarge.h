// A coarse plane read bilinearly at the pixels of a finer one, and the adjoint of that, in gather form.
//
// Texel centres lie at (i + 0.5) / n on both; beyond the outermost centres the outermost texels continue. Vertically first.
#pragma once

#include <type_traits>

#include "filter.h"
#include "luma.h"
#include "reduce.h"

namespace texvlm {

// The one of `coarse` texels that has the centre of pixel i of `fine`.
TEXVLM_HD int64_t nearest_centre(int64_t i, int64_t fine, int64_t coarse) { return (2 * i + 1) * coarse / (2 * fine); }

// Where the n pixels of a run read a plane of h x w: kept from channel to channel, since many planes share a size.
template <class A>
struct EnlargedRun {
  int64_t h = -1, w = -1;
  AxisLerp<A> y;
  int i0[kRun], i1[kRun];
  A weight[kRun];

  TEXVLM_HD void set(int64_t row, int64_t x, int n, int64_t height, int64_t width, int64_t new_h, int64_t new_w) {
    if (h == new_h && w == new_w) return;
    h = new_h, w = new_w;
    y = axis_centre<A>(row, height, h);
    for (int j = 0; j < n; ++j) {
      const AxisLerp<A> t = axis_centre<A>(x + j, width, w);
      i0[j] = t.i0, i1[j] = t.i1, weight[j] = t.w1;
    }
  }
};

// A plane [B, h, w] read bilinearly at the pixels of a height x width picture.
template <class A>
struct Enlarged {
  const A* plane;
  int64_t h, w, height, width;

  TEXVLM_HD A at(int64_t b, int64_t y, int64_t x) const {
    const AxisLerp<A> ty = axis_centre<A>(y, height, h), tx = axis_centre<A>(x, width, w);
    const A *p = plane + (b * h + ty.i0) * w, *q = plane + (b * h + ty.i1) * w;
    return blend(Corners<A>{p[tx.i0], q[tx.i0], p[tx.i1], q[tx.i1]}, ty.w0, ty.w1, tx.w0, tx.w1);
  }

  TEXVLM_HD void run(int64_t b, int64_t y, int64_t x, int n, A* TEXVLM_RESTRICT out) const {
    EnlargedRun<A> taps;
    taps.set(y, x, n, height, width, h, w);
    const A *TEXVLM_RESTRICT p = plane + (b * h + taps.y.i0) * w, *TEXVLM_RESTRICT q = plane + (b * h + taps.y.i1) * w;
    const A w0 = taps.y.w0, w1 = taps.y.w1;
    for (int j = 0; j < n; ++j) {
      const int l = taps.i0[j], r = taps.i1[j];
      out[j] = blend(Corners<A>{p[l], q[l], p[r], q[r]}, w0, w1, A(1) - taps.weight[j], taps.weight[j]);
    }
  }

  // Whether each column stands for a power of two of pixels, 2 at least: between two centres the weights are then odd multiples
  // of 1 / (twice that), and no texel has to be looked up.
  TEXVLM_HD bool even() const {
    const int64_t each = width / w;
    return each > 1 && w * each == width && (each & (each - 1)) == 0;
  }
  // The same numbers as those of run(), as all positions are exact; any n.
  static constexpr int kPiece = 8;
  TEXVLM_HD void run_even(int64_t b, int64_t y, int64_t x, int64_t n, A* TEXVLM_RESTRICT out) const {
    const int64_t each = width / w;
    const AxisLerp<A> ty = axis_centre<A>(y, height, h);
    const A *TEXVLM_RESTRICT p = plane + (b * h + ty.i0) * w, *TEXVLM_RESTRICT q = plane + (b * h + ty.i1) * w;
    const A over = A(1) / static_cast<A>(2 * each);
    int shift = 1;
    while ((int64_t{1} << shift) < 2 * each) ++shift;
    for (int64_t j = 0; j < n;) {
      const int64_t half = 2 * (x + j) + 1 + each;  // position from the centre before the first one, in half pixels
      const int64_t column = (half >> shift) - 1, first = half & (2 * each - 1);
      const int64_t l = maximum<int64_t>(column, 0), r = minimum<int64_t>(column + 1, w - 1);
      const A left = ty.w0 * p[l] + ty.w1 * q[l], right = ty.w0 * p[r] + ty.w1 * q[r];
      const int count = static_cast<int>(minimum(n - j, (2 * each - first + 1) / 2));
      A weight = static_cast<A>(static_cast<int>(first)) * over;
      int i = 0;
      for (; i + kPiece <= count; i += kPiece, weight += A(2 * kPiece) * over)
        for (int k = 0; k < kPiece; ++k) {
          const A t = weight + static_cast<A>(2 * k) * over;
          out[j + i + k] = (A(1) - t) * left + t * right;
        }
      for (; i < count; ++i, weight += A(2) * over) out[j + i] = (A(1) - weight) * left + weight * right;
      j += count;
    }
  }
};

template <class T, int C>
struct EnlargePlane {
  Enlarged<Acc<T>> from;
  T* out;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    out[(b * from.height + y) * from.width + x] = static_cast<T>(from.at(b, y, x));
  }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    if constexpr (std::is_same_v<T, Acc<T>>) {
      if (from.even()) return from.run_even(b, y, x0, x1 - x0, out + (b * from.height + y) * from.width + x0);
    }
    for (int64_t x = x0; x < x1; x += kRun) {
      const int n = static_cast<int>(minimum<int64_t>(kRun, x1 - x));
      Acc<T> v[kRun];
      from.run(b, y, x, n, v);
      T* TEXVLM_RESTRICT to = out + (b * from.height + y) * from.width + x;
      for (int j = 0; j < n; ++j) to[j] = static_cast<T>(v[j]);
    }
  }
};

// Adjoint of enlarging, in gather form: the gradients [B, fine_h, fine_w, K] of the pixels that read texel (y, x), summed.
//
// A functor of texels [items, h, w] has one as `from`; plane(item, y, x), the picture of it that they sum, or -1; and store(item,
// y, x, sums), which is given a sum for each channel.
template <class A, int K = 1>
struct EnlargeAdjoint {
  using Sum = A;
  static constexpr int kChannels = K;
  const A* grad;
  int64_t fine_h, fine_w, h, w;

  TEXVLM_HD static int64_t first(int64_t i, int64_t fine, int64_t coarse) {  // no pixel before it reads texel i
    return i == 0 ? 0 : maximum<int64_t>(0, (2 * i - 1) * fine / (2 * coarse) - 1);
  }
  TEXVLM_HD static int64_t last(int64_t i, int64_t fine, int64_t coarse) {
    return i == coarse - 1 ? fine - 1 : minimum(fine - 1, (2 * i + 3) * fine / (2 * coarse) + 1);
  }
  TEXVLM_HD static int64_t most(int64_t fine, int64_t coarse) { return minimum(fine, 2 * fine / coarse + 4); }
  TEXVLM_HD static A weight(int64_t pixel, int64_t i, int64_t fine, int64_t coarse) {
    const AxisLerp<A> t = axis_centre<A>(pixel, fine, coarse);
    return (t.i0 == i ? t.w0 : A(0)) + (t.i1 == i ? t.w1 : A(0));
  }
  // Vertically first. Weights of 0, which count for nothing, are at the ends only.
  TEXVLM_HD void at(int64_t b, int64_t y, int64_t x, A* out) const {
    if (fine_h == h && fine_w == w) {
      for (int c = 0; c < K; ++c) out[c] += grad[((b * h + y) * w + x) * K + c];
      return;
    }
    constexpr int kColumns = 32;
    const int64_t end = last(x, fine_w, w) + 1;
    for (int64_t x0 = first(x, fine_w, w); x0 < end; x0 += kColumns) {
      int low = 0, high = static_cast<int>(minimum<int64_t>(kColumns, end - x0));
      A wx[kColumns], sums[kColumns * K] = {};
      for (int j = 0; j < high; ++j) wx[j] = weight(x0 + j, x, fine_w, w);
      while (high > low && wx[high - 1] == A(0)) --high;
      while (low < high && wx[low] == A(0)) ++low;
      const int values = (high - low) * K;
      for (int64_t i = first(y, fine_h, h); i <= last(y, fine_h, h); ++i) {
        const A wy = weight(i, y, fine_h, h);
        if (wy == A(0)) continue;
        const A* TEXVLM_RESTRICT g = grad + ((b * fine_h + i) * fine_w + x0 + low) * K;
        for (int k = 0; k < values; ++k) sums[k] += wy * g[k];
      }
      for (int k = 0; k < values; ++k) out[k % K] += wx[low + k / K] * sums[k];
    }
  }
};

// What the functor wants for one texel.
template <class F>
TEXVLM_HD void gather_texel(const F& f, int64_t item, int64_t y, int64_t x) {
  typename F::From::Sum sums[F::From::kChannels] = {};
  if (const int64_t b = f.plane(item, y, x); b >= 0) f.from.at(b, y, x, sums);
  f.store(item, y, x, sums);
}

// The same as a reduction (reduce.h): row n is texel n of all items, and its places are the most() x most() pixels from the first
// on that reads it.
template <class F>
struct GatheredTexels {
  using A = typename F::From::Sum;
  static constexpr int K = F::From::kChannels;
  template <int N>
  using Part = Sums<A, K, N>;
  F f;

  TEXVLM_HD int64_t places() const { return f.from.most(f.from.fine_h, f.from.h) * f.from.most(f.from.fine_w, f.from.w); }
  template <int N>
  TEXVLM_HD void add(int64_t n, int64_t place, int count, Part<N>& to) const {
    const auto& e = f.from;
    const int64_t y = n / e.w % e.h, x = n % e.w, wide = e.most(e.fine_w, e.w), b = f.plane(n / e.w / e.h, y, x);
    for (int j = 0; j < count && b >= 0; ++j) {
      const int64_t i = e.first(y, e.fine_h, e.h) + (place + j) / wide, k = e.first(x, e.fine_w, e.w) + (place + j) % wide;
      if (i >= e.fine_h || k >= e.fine_w) continue;
      const A weight = e.weight(i, y, e.fine_h, e.h) * e.weight(k, x, e.fine_w, e.w);
      for (int c = 0; c < K && weight != A(0); ++c) to.of[c][j] += weight * e.grad[((b * e.fine_h + i) * e.fine_w + k) * K + c];
    }
  }
  TEXVLM_HD void finish(int64_t n, const Part<1>& total) const {
    A sums[K];
    for (int c = 0; c < K; ++c) sums[c] = total.of[c][0];
    f.store(n / f.from.w / f.from.h, n / f.from.w % f.from.h, n % f.from.w, sums);
  }
};

// Adjoint of enlarging a plane.
template <class T, int C>
struct EnlargePlaneAdjoint {
  using From = EnlargeAdjoint<T>;
  From from;
  T* out;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const { gather_texel(*this, b, y, x); }
  TEXVLM_HD int64_t plane(int64_t b, int64_t, int64_t) const { return b; }
  TEXVLM_HD void store(int64_t b, int64_t y, int64_t x, const T* sums) const { out[(b * from.h + y) * from.w + x] = sums[0]; }
};

}  // namespace texvlm
