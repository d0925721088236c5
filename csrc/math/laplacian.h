// Laplacian pyramids: each level less the bilinearly enlarged next coarser one, and back (P. Burt and E.
// Adelson, "The Laplacian pyramid as a compact image code", IEEE Transactions on Communications 31, 1983,
// with bilinear expansion). Enlarging samples the coarse level at the texel centres of the fine one, with
// clamp. Adjoints are in gather form: no atomics.
#pragma once

#include "enlarge.h"
#include "separable.h"

namespace texvlm {

// The fine texels that read coarse texel j.
template <class A>
using UpReaders = AxisTaps<A, 5>;

template <class A>
TEXVLM_HD UpReaders<A> up_readers(int64_t j, int64_t fine, int64_t coarse) {
  UpReaders<A> r{};
  r.first = maximum<int64_t>(0, 2 * j - 1);
  r.count = static_cast<int>(minimum<int64_t>(2 * j + 4, fine) - r.first);
  for (int k = 0; k < r.count; ++k) {
    const AxisLerp<A> t = axis_centre<A>(r.first + k, fine, coarse);
    r.weight[k] = (t.i0 == j ? t.w0 : A(0)) + (t.i1 == j ? t.w1 : A(0));
  }
  while (r.count > 1 && r.weight[r.count - 1] == A(0)) --r.count;
  while (r.count > 1 && r.weight[0] == A(0)) {  // weights of 0 are at the ends only: between, i0 moves on by texels
    ++r.first, --r.count;
    for (int k = 0; k < r.count; ++k) r.weight[k] = r.weight[k + 1];
  }
  return r;
}

constexpr int64_t kUpRun = 64;  // fine texels handled at a time on the host

// One level of out = in + sign * enlarged(above), `above` being the next coarser level: of the pyramid to
// decompose (sign -1), of the levels built already to reconstruct (sign 1).
template <class T, int C>
struct AddEnlarged {
  using A = Acc<T>;
  TextureView<const T> in;
  Texels<const T> above;
  Texels<T> out;
  int level;
  A sign;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    const Levels& l = in.levels;
    const AxisLerp<A> ty = axis_centre<A>(y, l.height[level], l.height[level + 1]);
    texel(b, y, x, ty, axis_centre<A>(x, l.width[level], l.width[level + 1]), c0, c1);
  }

  TEXVLM_HD void texel(int64_t b, int64_t y, int64_t x, const AxisLerp<A>& ty, const AxisLerp<A>& tx, int64_t c0,
                       int64_t c1) const {
    const Levels& l = in.levels;
    const T *t0 = above.texel(l, b, level + 1, ty.i0, tx.i0), *t1 = above.texel(l, b, level + 1, ty.i0, tx.i1);
    const T *d0 = above.texel(l, b, level + 1, ty.i1, tx.i0), *d1 = above.texel(l, b, level + 1, ty.i1, tx.i1);
    const T* own = in.texel(b, level, y, x);
    T* TEXVLM_RESTRICT o = out.texel(l, b, level, y, x);
    for (int64_t c = c0; c < c1; ++c) {  // vertically first, as row() does
      const Corners<A> v{static_cast<A>(t0[c]), static_cast<A>(d0[c]), static_cast<A>(t1[c]), static_cast<A>(d1[c])};
      o[c] = static_cast<T>(static_cast<A>(own[c]) + sign * blend(v, ty.w0, ty.w1, tx.w0, tx.w1));
    }
  }

  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    const Levels& l = in.levels;
    const int64_t width = l.width[level], coarse = l.width[level + 1];
    const AxisLerp<A> ty = axis_centre<A>(y, l.height[level], l.height[level + 1]);
    if (C == 0 || width != 2 * coarse) {
      for (int64_t begin = x0; begin < x1; begin += kRun) {
        const int n = static_cast<int>(minimum<int64_t>(kRun, x1 - begin));
        EnlargedRun<A> taps;
        taps.set(y, begin, n, l.height[level], width, l.height[level + 1], coarse);
        for (int j = 0; j < n; ++j) {
          const AxisLerp<A> tx{taps.i0[j], taps.i1[j], A(1) - taps.weight[j], taps.weight[j], A(-1), A(1)};
          texel(b, y, begin + j, ty, tx, 0, C ? C : in.channels);
        }
      }
      return;
    }
    constexpr int kC = C ? C : 1;
    const A y1 = ty.w1, y0 = ty.w0;
    const T *top = above.texel(l, b, level + 1, ty.i0, 0), *bottom = above.texel(l, b, level + 1, ty.i1, 0);
    const T* own = in.texel(b, level, y, 0);
    T* TEXVLM_RESTRICT o = out.texel(l, b, level, y, 0);
    A v[(kUpRun / 2 + 3) * kC];
    for (int64_t begin = x0; begin < x1; begin += kUpRun) {
      const int64_t end = minimum(begin + kUpRun, x1);
      // v[k] is column `low` + k, clamped, so that fine texel x reads v[(x + 1) / 2 - begin / 2 + 0 and + 1].
      const int64_t low = (begin + 1) / 2 - 1, high = (end + 1) / 2, from = maximum<int64_t>(low, 0),
                    to = minimum(high, coarse - 1);
      for (int64_t k = (from - low) * kC; k < (to - low + 1) * kC; ++k) {
        const int64_t at = low * kC + k;
        v[k] = y0 * static_cast<A>(top[at]) + y1 * static_cast<A>(bottom[at]);
      }
      for (int c = 0; c < kC; ++c) {
        if (from > low) v[c] = v[kC + c];
        if (to < high) v[(high - low) * kC + c] = v[(high - low - 1) * kC + c];
      }
      for (int64_t x = begin; x < end; ++x) {
        const A* p = v + ((x + 1) / 2 - 1 - low) * kC;
        const A w1 = x % 2 ? A(0.25) : A(0.75), w0 = A(1) - w1;
        for (int c = 0; c < kC; ++c)
          o[x * kC + c] = static_cast<T>(static_cast<A>(own[x * kC + c]) + sign * (w0 * p[c] + w1 * p[kC + c]));
      }
    }
  }
};

// Adjoint of AddEnlarged, by coarse texels: out[level] = grad[level] + sign * enlarged'(below[level - 1]),
// where `below` is `grad` itself (to decompose) or the finer level of `out`, already finished (to
// reconstruct, going from fine to coarse).
template <class T, int C>
struct AddEnlargedAdjoint {
  using A = Acc<T>;
  TextureView<const T> grad;
  Texels<A> out;
  int level;
  A sign;
  bool chained;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    const Levels& l = grad.levels;
    const UpReaders<A> ry = up_readers<A>(y, l.height[level - 1], l.height[level]);
    const UpReaders<A> rx = up_readers<A>(x, l.width[level - 1], l.width[level]);
    const int64_t channels = C ? C : grad.channels, pitch = l.width[level - 1] * channels;
    const T* own = grad.texel(b, level, y, x);
    A* o = out.texel(l, b, level, y, x);
    for (int64_t c = c0; c < c1; ++c) {
      const A from = chained ? gathered(out.texel(l, b, level - 1, ry.first, rx.first) + c, pitch, channels, ry, rx)
                             : gathered(grad.texel(b, level - 1, ry.first, rx.first) + c, pitch, channels, ry, rx);
      o[c] = static_cast<A>(own[c]) + sign * from;
    }
  }

  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    const Levels& l = grad.levels;
    const UpReaders<A> ry = up_readers<A>(y, l.height[level - 1], l.height[level]);
    const int64_t channels = C ? C : grad.channels, pitch = l.width[level - 1] * channels;
    for (int64_t x = x0; x < x1; x += kRun) {
      const int n = static_cast<int>(minimum<int64_t>(kRun, x1 - x));
      UpReaders<A> rx[kRun];
      for (int i = 0; i < n; ++i) rx[i] = up_readers<A>(x + i, l.width[level - 1], l.width[level]);
      const T* TEXVLM_RESTRICT own = grad.texel(b, level, y, x);
      A* TEXVLM_RESTRICT o = out.texel(l, b, level, y, x);
      const auto store = [&](int i, int64_t c0, auto count, const A* sums) {
        for (int c = 0; c < count; ++c) o[i * channels + c0 + c] = static_cast<A>(own[i * channels + c0 + c]) + sign * sums[c];
      };
      if (chained) {
        gather_run<C, 2>(out.texel(l, b, level - 1, ry.first, 0), pitch, channels, 0, channels, ry, rx, n, store);
      } else {
        gather_run<C, 2>(grad.texel(b, level - 1, ry.first, 0), pitch, channels, 0, channels, ry, rx, n, store);
      }
    }
  }
};

// One level of out = in, as accumulators: where nothing is added.
template <class T, int C>
struct CopyLevel {
  TextureView<const T> in;
  Texels<Acc<T>> out;
  int level;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    const T* p = in.texel(b, level, y, x);
    Acc<T>* o = out.texel(in.levels, b, level, y, x);
    for (int64_t c = c0; c < c1; ++c) o[c] = static_cast<Acc<T>>(p[c]);
  }
};

}  // namespace texvlm
