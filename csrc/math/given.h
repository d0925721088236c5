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
  TEXVLM_HD static int64_t near(int64_t i, int64_t fine, int64_t coarse) { return ((2 * i + 1) * coarse) / (2 * fine); }

  TEXVLM_HD A at(int64_t b, int64_t y, int64_t x, int64_t height, int64_t width) const {
    const A* from = plane + b * stride_b;
    if (h == height && w == width) return kept(from[y * w + x]);
    if (nearest) return kept(from[near(y, height, h) * w + near(x, width, w)]);
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
      from += near(y, height, h) * w;
      for (int j = 0; j < n; ++j) out[j] = kept(from[near(x + j, width, w)]);
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

// Adjoint, for one given tensor: out [B, n, h, w] from the gradient of level 0, [B, channels, H, W].
template <class T, int C>
struct GivenAdjoint {
  const T* grad;
  int64_t channels, height, width;
  const T* given;
  T* out;
  int64_t count, h, w;
  Places place;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    for (int64_t c = c0; c < c1; ++c) {
      const int64_t here = ((b * count + c) * h + y) * w + x;
      T sum = 0;
      if (const int64_t from = place.at[c]; from >= 0 && finite(given[here])) {
        const T* plane = grad + (b * channels + from) * height * width;
        if (h == height && w == width) {
          sum = plane[y * w + x];
        } else {
          EnlargeAdjoint<T>{plane, 1, height, width, h, w}.at(0, y, x, &sum);
        }
      }
      out[here] = sum;
    }
  }
};

}  // namespace texvlm
