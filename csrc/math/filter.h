// Texture filtering: which texels a coordinate reads and with what weights. Every sampler of texvlm is built from these.
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

// The four texels of a bilinear fetch in one level: offsets from the start of the picture's buffer, in texels.
template <class A>
struct Bilinear {
  int64_t t00, t01, t10, t11;
  AxisLerp<A> x, y;
};

template <class A>
TEXVLM_HD Bilinear<A> bilinear(A u, A v, const Levels& levels, int level, Address address) {
  const int width = static_cast<int>(levels.width[level]);
  const AxisLerp<A> x = axis_lerp(u, width, address), y = axis_lerp(v, static_cast<int>(levels.height[level]), address);
  const int64_t top = levels.offset[level] + static_cast<int64_t>(y.i0) * width,
                bottom = levels.offset[level] + static_cast<int64_t>(y.i1) * width;
  return {top + x.i0, top + x.i1, bottom + x.i0, bottom + x.i1, x, y};
}

// One channel of a bilinear fetch; `texels` points at the channel in texel 0 of the picture.
template <class A, class T>
TEXVLM_HD A fetch(const T* texels, int64_t channels, const Bilinear<A>& q) {
  const A top = q.x.w0 * static_cast<A>(texels[q.t00 * channels]) + q.x.w1 * static_cast<A>(texels[q.t01 * channels]);
  const A bottom = q.x.w0 * static_cast<A>(texels[q.t10 * channels]) + q.x.w1 * static_cast<A>(texels[q.t11 * channels]);
  return q.y.w0 * top + q.y.w1 * bottom;
}

}  // namespace texvlm
