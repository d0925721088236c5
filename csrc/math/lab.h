// CIE L*a*b* of sRGB values, and its adjoint.
#pragma once

#include "scalar.h"

namespace texvlm {

constexpr double kSrgbLinearEnd = 0.04045;
constexpr double kLabDelta = 6.0 / 29.0;

// x^(1/5) and x^(1/3) of a normal positive number by Newton's and Halley's iteration from an estimate on the bits: exact to an
// ulp or two, the same on all machines, and free of calls, so that loops vectorise.
template <class A>
TEXVLM_HD A fifth_root(A x) {
  A y = static_cast<A>(bits_float(float_bits(static_cast<float>(x)) / 5u + 0x32c9af22u));
  for (int i = 0; i < (sizeof(A) == 8 ? 5 : 3); ++i) {
    const A y2 = y * y;
    y += A(0.2) * (x / (y2 * y2) - y);
  }
  return y;
}
template <class A>
TEXVLM_HD A cube_root(A x) {
  A y = static_cast<A>(bits_float(float_bits(static_cast<float>(x)) / 3u + 0x2a555555u));
  for (int i = 0; i < (sizeof(A) == 8 ? 4 : 2); ++i) {
    const A y3 = y * y * y;
    y *= (y3 + A(2) * x) / (A(2) * y3 + x);
  }
  return y;
}

// The sRGB transfer curve (IEC 61966-2-1) and its derivative.
template <class A>
TEXVLM_HD A linear_of(A v) {
  const bool low = v <= A(kSrgbLinearEnd);
  const A t = low ? A(1) : (v + A(0.055)) / A(1.055), root = fifth_root(t);
  return low ? v / A(12.92) : t * t * (root * root);
}
template <class A>
TEXVLM_HD A linear_slope(A v) {
  if (v <= A(kSrgbLinearEnd)) return A(1) / A(12.92);
  const A t = (v + A(0.055)) / A(1.055), root = fifth_root(t);
  return A(2.4 / 1.055) * t * (root * root);
}

// The curve of CIE L*a*b* (CIE 15:2004) and its derivative.
template <class A>
TEXVLM_HD A lab_curve(A t) {
  constexpr A delta = A(kLabDelta);
  const bool root = t > delta * delta * delta;
  const A c = cube_root(root ? t : A(1));
  return root ? c : t / (A(3) * delta * delta) + A(4.0 / 29.0);
}
template <class A>
TEXVLM_HD A lab_curve_slope(A t) {
  constexpr A delta = A(kLabDelta);
  if (!(t > delta * delta * delta)) return A(1) / (A(3) * delta * delta);
  const A c = cube_root(t);
  return A(1) / (A(3) * c * c);
}

// Linear sRGB to XYZ over the XYZ of white (D65): each row of the matrix over its sum, so that grey has a = b = 0 up to rounding.
template <class A>
TEXVLM_HD A xyz_weight(int i, int c) {
  constexpr double m[3][3] = {
      {0.4124564, 0.3575761, 0.1804375}, {0.2126729, 0.7151522, 0.0721750}, {0.0193339, 0.1191920, 0.9503041}};
  return static_cast<A>(m[i][c] / (m[i][0] + m[i][1] + m[i][2]));
}

template <class A>
struct Triple {
  A v[3];
};

// L, a, b over 100 of sRGB values.
template <class A>
TEXVLM_HD Triple<A> lab_of(A r, A g, A b) {
  const A lr = linear_of(r), lg = linear_of(g), lb = linear_of(b);
  const A fx = lab_curve(xyz_weight<A>(0, 0) * lr + xyz_weight<A>(0, 1) * lg + xyz_weight<A>(0, 2) * lb);
  const A fy = lab_curve(xyz_weight<A>(1, 0) * lr + xyz_weight<A>(1, 1) * lg + xyz_weight<A>(1, 2) * lb);
  const A fz = lab_curve(xyz_weight<A>(2, 0) * lr + xyz_weight<A>(2, 1) * lg + xyz_weight<A>(2, 2) * lb);
  return {{(A(116) * fy - A(16)) / A(100), A(5) * (fx - fy), A(2) * (fy - fz)}};
}
template <class A>
TEXVLM_HD Triple<A> lab_adjoint(const Triple<A>& rgb, const Triple<A>& g) {
  const A gf[3] = {A(5) * g.v[1], A(1.16) * g.v[0] - A(5) * g.v[1] + A(2) * g.v[2], -A(2) * g.v[2]};
  A lin[3];
  for (int c = 0; c < 3; ++c) lin[c] = linear_of(rgb.v[c]);
  Triple<A> out{};
  for (int i = 0; i < 3; ++i) {
    const A t = xyz_weight<A>(i, 0) * lin[0] + xyz_weight<A>(i, 1) * lin[1] + xyz_weight<A>(i, 2) * lin[2];
    const A gt = gf[i] * lab_curve_slope(t);
    for (int c = 0; c < 3; ++c) out.v[c] += gt * xyz_weight<A>(i, c);
  }
  for (int c = 0; c < 3; ++c) out.v[c] *= linear_slope(rgb.v[c]);
  return out;
}

}  // namespace texvlm
