// Channels that are handed in as planes, at any resolution up to the picture's, and enlarged while the texels are written.
#pragma once

#include "enlarge.h"

namespace texvlm {

// One plane of a tensor [B, n, h, w]: enlarged bilinearly, or to the nearest where values are ids. Values that are not finite
// count as 0, as in pictures.
template <class A>
struct Given {
  const A* plane;  // null: not given
  int64_t stride_b, h, w;
  bool nearest;

  TEXVLM_HD static A kept(A v) { return finite(v) ? v : A(0); }

  TEXVLM_HD A at(int64_t b, int64_t y, int64_t x, int64_t height, int64_t width) const {
    const A* from = plane + b * stride_b;
    if (h == height && w == width) return kept(from[y * w + x]);
    if (nearest) return kept(from[nearest_centre(y, height, h) * w + nearest_centre(x, width, w)]);
    const AxisLerp<A> ty = axis_centre<A>(y, height, h), tx = axis_centre<A>(x, width, w);
    const A *p = from + ty.i0 * w, *q = from + ty.i1 * w;
    return blend(Corners<A>{kept(p[tx.i0]), kept(q[tx.i0]), kept(p[tx.i1]), kept(q[tx.i1])}, ty.w0, ty.w1, tx.w0, tx.w1);
  }

  TEXVLM_HD void run(int64_t b, int64_t y, int64_t x, int n, int64_t height, int64_t width, EnlargedRun<A>& taps,
                     A* TEXVLM_RESTRICT out) const {
    const A* TEXVLM_RESTRICT from = plane + b * stride_b;
    if (h == height && w == width) {
      from += y * w + x;
      for (int j = 0; j < n; ++j) out[j] = kept(from[j]);
    } else if (nearest) {
      from += nearest_centre(y, height, h) * w;
      for (int j = 0; j < n; ++j) out[j] = kept(from[nearest_centre(x + j, width, w)]);
    } else {
      taps.set(y, x, n, height, width, h, w);
      const A *TEXVLM_RESTRICT p = from + taps.y.i0 * w, *TEXVLM_RESTRICT q = from + taps.y.i1 * w;
      const A w0 = taps.y.w0, w1 = taps.y.w1;
      for (int j = 0; j < n; ++j) {
        const int l = taps.i0[j], r = taps.i1[j];
        const Corners<A> v{kept(p[l]), kept(q[l]), kept(p[r]), kept(q[r])};
        out[j] = blend(v, w0, w1, A(1) - taps.weight[j], taps.weight[j]);
      }
    }
  }
};

// Of each plane of a given tensor: where it is among the channels; -1: not asked for, or without a gradient.
struct Places {
  int8_t at[64];
};

// Adjoint, for one given tensor [B, n, h, w]: out from the gradients of level 0, [B channels, H, W]. Items are its planes.
template <class T, int C>
struct GivenAdjoint {
  using From = EnlargeAdjoint<T>;
  From from;
  int64_t channels, count;
  const T* given;
  T* out;
  Places place;

  TEXVLM_HD void operator()(int64_t item, int64_t y, int64_t x, int64_t, int64_t) const { gather_texel(*this, item, y, x); }
  TEXVLM_HD int64_t at(int64_t item, int64_t y, int64_t x) const { return (item * from.h + y) * from.w + x; }
  TEXVLM_HD int64_t plane(int64_t item, int64_t y, int64_t x) const {
    const int c = place.at[item % count];
    return c >= 0 && finite(given[at(item, y, x)]) ? item / count * channels + c : -1;
  }
  TEXVLM_HD void store(int64_t item, int64_t y, int64_t x, const T* sums) const { out[at(item, y, x)] = sums[0]; }
};

}  // namespace texvlm
