// Texture filtering: which texels a coordinate reads, with what weights, and their blend. Every sampler of texvlm is built from
// these.
//
// One rule, for all samplers, devices and loops: A TEXEL OF WEIGHT 0 DOES NOT COUNT, whatever it holds; outside the picture
// (Address::border) texels are zeros that do not count either. Of other weights, values that are not finite propagate as IEEE
// arithmetic has it. As 0 times infinity is NaN, it is kept so: what is blended has `settled` taps, where the other texel of the
// axis stands in for one of weight 0; gradients add nothing to a texel of weight 0; and derivatives by the place, which at kinks
// look at texels of weight 0 too, leave out those of coefficient 0 (slopes.h).
//
// Texel centres lie at (i + 0.5) / n (as align_corners=False). At kinks the derivatives are one-sided from the right: floor()
// puts a coordinate on a cell edge, and a LOD on an integer, into the cell above it. Source: the Direct3D 11.3
// specification, 7.18.
#pragma once

#include <cmath>

#include "texture.h"

namespace texvlm {

enum class Address : uint8_t { clamp = 0, wrap = 1, mirror = 2, border = 3 };
enum class Filter : uint8_t { nearest = 0, bilinear = 1, trilinear = 2 };

// The two texels that a coordinate lies between, their weights, and the derivatives of the weights by the texel coordinate.
template <class A>
struct AxisLerp {
  int i0, i1;
  A w0, w1, d0, d1;
};

// x in texels (texel i has its centre at i), clamped to the picture; with `border`, texels outside are zero.
template <class A>
TEXVLM_HD AxisLerp<A> axis_lerp_at(A at, int n, bool border) {
  // Clamping the coordinate first keeps the conversion to int defined; beyond one texel outside nothing changes any more.
  const A x = clamp(at, A(-2), static_cast<A>(n) + A(1)), base = floor_of(x), f = x - base;
  const int i = static_cast<int>(base), last = n - 1;
  const int i0 = clamp(i, 0, last), i1 = clamp(i + 1, 0, last);
  if (!border) return {i0, i1, A(1) - f, f, A(-1), A(1)};
  const A in0 = i == i0 ? A(1) : A(0), in1 = i + 1 == i1 ? A(1) : A(0);
  return {i0, i1, (A(1) - f) * in0, f * in1, -in0, in1};
}

// u in units of the axis (texel i has its centre at (i + 0.5) / n); any finite value is fine, however large.
template <class A>
TEXVLM_HD AxisLerp<A> axis_lerp(A u, int n, Address address) {
  const A size = static_cast<A>(n);
  if (address == Address::wrap) {
    const A x = (u - floor_of(u)) * size - A(0.5), base = floor_of(x), f = x - base;  // base in [-1, n - 1]
    const int i = static_cast<int>(base);
    return {i < 0 ? n - 1 : i, i + 1 >= n ? 0 : i + 1, A(1) - f, f, A(-1), A(1)};
  }
  if (address == Address::mirror) {
    const A x = (u - A(2) * floor_of(u * A(0.5))) * size - A(0.5), base = floor_of(x), f = x - base;  // base in [-1, 2n - 1]
    const int i = static_cast<int>(base), j = i + 1;
    const int i0 = i < 0 ? 0 : (i >= n ? 2 * n - 1 - i : i), i1 = j >= 2 * n ? 0 : (j >= n ? 2 * n - 1 - j : j);
    return {i0, i1, A(1) - f, f, A(-1), A(1)};
  }
  return axis_lerp_at(u * size - A(0.5), n, address == Address::border);
}

// The texel that contains u, or -1 outside under Address::border.
template <class A>
TEXVLM_HD int axis_nearest(A u, int n, Address address) {
  const A size = static_cast<A>(n);
  if (address == Address::wrap) return minimum(static_cast<int>((u - floor_of(u)) * size), n - 1);
  if (address == Address::mirror) {
    const int i = minimum(static_cast<int>((u - A(2) * floor_of(u * A(0.5))) * size), 2 * n - 1);
    return i >= n ? 2 * n - 1 - i : i;
  }
  const int i = static_cast<int>(floor_of(clamp(u * size, A(-1), size)));
  return address == Address::border ? (i >= n ? -1 : i) : clamp(i, 0, n - 1);
}

// The two levels that a LOD lies between: value = (1 - t) * level l0 + t * level l1. `slope` is 1 where d/dlod flows, 0 where
// clamped.
template <class A>
struct LevelLerp {
  int l0, l1;
  A t, slope;
};

template <class A>
TEXVLM_HD LevelLerp<A> level_lerp(A lod, int levels) {
  const A last = static_cast<A>(levels - 1), l = clamp(lod, A(0), last), base = floor_of(l);
  const int l0 = static_cast<int>(base);
  return {l0, minimum(l0 + 1, levels - 1), l - base, lod >= A(0) && lod <= last ? A(1) : A(0)};
}

template <class A>
TEXVLM_HD int nearest_level(A lod, int levels) {
  return static_cast<int>(floor_of(clamp(lod, A(0), static_cast<A>(levels - 1)) + A(0.5)));
}

// The same taps without weights of 0: the other texel is read twice, half of the weight each, which is exact but for subnormal
// numbers. Weights of 0 are left where both texels are outside.
template <class A>
TEXVLM_HD AxisLerp<A> settled(AxisLerp<A> p) {
  const bool only0 = p.w1 == A(0), only1 = p.w0 == A(0);
  const A half = A(0.5) * (only0 ? p.w0 : p.w1);
  p.i1 = only0 ? p.i0 : p.i1;
  p.i0 = only1 ? p.i1 : p.i0;
  p.w0 = only0 || only1 ? half : p.w0;
  p.w1 = only0 || only1 ? half : p.w1;
  return p;
}

// Settled taps at the centre of texel i of `fine` on the same axis in `coarse` texels, clamped.
template <class A>
TEXVLM_HD AxisLerp<A> axis_centre(int64_t i, int64_t fine, int64_t coarse) {
  // One rounding, by the division, and none where a level is half of the other: weights that should be 0 are. (32-bit integers
  // vectorise.)
  const double odd = static_cast<double>(static_cast<int32_t>(2 * i + 1)), of = static_cast<double>(static_cast<int32_t>(coarse));
  const double at = fine == 2 * coarse ? odd * 0.25 : odd * of / static_cast<double>(static_cast<int32_t>(2 * fine));
  const auto p = axis_lerp_at(at - 0.5, static_cast<int>(coarse), false);
  const A w = static_cast<A>(p.w1);
  return settled(AxisLerp<A>{p.i0, p.i1, A(1) - w, w, A(-1), A(1)});
}

// The four texels of a bilinear fetch in one level: offsets from the start of the picture's buffer, in texels.
template <class A>
struct Bilinear {
  int64_t t00, t01, t10, t11;
  AxisLerp<A> x, y;

  // Settled, they lie outside the picture.
  TEXVLM_HD bool outside() const { return x.w0 == A(0) || y.w0 == A(0); }
};

template <class A>
TEXVLM_HD Bilinear<A> joined(const AxisLerp<A>& x, const AxisLerp<A>& y, const Levels& levels, int level) {
  const int64_t top = levels.offset[level] + y.i0 * levels.width[level],
                bottom = levels.offset[level] + y.i1 * levels.width[level];
  return {top + x.i0, top + x.i1, bottom + x.i0, bottom + x.i1, x, y};
}

template <class A>
TEXVLM_HD Bilinear<A> bilinear(A u, A v, const Levels& levels, int level, Address address) {
  return joined(axis_lerp(u, static_cast<int>(levels.width[level]), address),
                axis_lerp(v, static_cast<int>(levels.height[level]), address), levels, level);
}

template <class A>
TEXVLM_HD Bilinear<A> settled(const Bilinear<A>& q, const Levels& levels, int level) {
  return joined(settled(q.x), settled(q.y), levels, level);
}

// The four texels of a fetch, or vectors of their channels.
template <class V>
struct Corners {
  V t00, t01, t10, t11;
};

template <class A, class T>
TEXVLM_HD Corners<A> corners(const T* texels, int64_t channels, const Bilinear<A>& q) {
  return {static_cast<A>(texels[q.t00 * channels]), static_cast<A>(texels[q.t01 * channels]),
          static_cast<A>(texels[q.t10 * channels]), static_cast<A>(texels[q.t11 * channels])};
}

// The blend, by settled weights.
template <class V, class A>
TEXVLM_HD V blend(const Corners<V>& v, A x0, A x1, A y0, A y1) {
  return y0 * (x0 * v.t00 + x1 * v.t01) + y1 * (x0 * v.t10 + x1 * v.t11);
}
template <class V, class A>
TEXVLM_HD V blend(const Corners<V>& v, const Bilinear<A>& q) {
  return blend(v, q.x.w0, q.x.w1, q.y.w0, q.y.w1);
}

// One channel of a settled fetch; `texels` points at the channel in texel 0 of the picture.
template <class A, class T>
TEXVLM_HD A fetch(const T* texels, int64_t channels, const Bilinear<A>& q) {
  return q.outside() ? A(0) : blend(corners(texels, channels, q), q);
}

// What a query reads at one LOD: the two levels and the taps in each. The second level is read where t is not 0.
template <class A>
struct LodTaps {
  LevelLerp<A> level;
  Bilinear<A> near, far;
};

template <class A>
TEXVLM_HD LodTaps<A> lod_taps(A u, A v, const LevelLerp<A>& level, const Levels& levels, Address address) {
  return {level, bilinear(u, v, levels, level.l0, address), bilinear(u, v, levels, level.l1, address)};
}
template <class A>
TEXVLM_HD LodTaps<A> lod_taps(A u, A v, A lod, const Levels& levels, Filter filter, Address address) {
  if (filter == Filter::trilinear) return lod_taps(u, v, level_lerp(lod, levels.count), levels, address);
  const int nearest = nearest_level(lod, levels.count);
  return lod_taps(u, v, LevelLerp<A>{nearest, nearest, A(0), A(0)}, levels, address);
}

template <class A>
TEXVLM_HD LodTaps<A> settled(const LodTaps<A>& q, const Levels& levels) {
  return {q.level, settled(q.near, levels, q.level.l0), settled(q.far, levels, q.level.l1)};
}

template <class A, class T>
TEXVLM_HD A fetch(const T* texels, int64_t channels, const LodTaps<A>& q) {
  const A near = fetch(texels, channels, q.near);
  return q.level.t == A(0) ? near : (A(1) - q.level.t) * near + q.level.t * fetch(texels, channels, q.far);
}

// coefficient * v where the coefficient is not 0: for sums whose weights may be.
template <class A>
TEXVLM_HD A counted(A coefficient, A v) {
  return coefficient == A(0) ? A(0) : coefficient * v;
}

}  // namespace texvlm
