// Derivatives of a bilinear blend by its place, summed over channels.
//
// The gradient times each of the four texels is summed first, and weighed once. Taps are those that are there, not settled
// (filter.h): at a kink the derivative is that of the right side. Along an axis that reads one texel twice, beyond the edge, it
// is 0. Texels of coefficient 0 do not count.
#pragma once

#include "filter.h"

namespace texvlm {

// sums += g * texels: one channel, or vectors of them.
template <class V, class G>
TEXVLM_HD void add_products(Corners<V>& sums, const G& g, const Corners<V>& v) {
  sums.t00 += g * v.t00;
  sums.t01 += g * v.t01;
  sums.t10 += g * v.t10;
  sums.t11 += g * v.t11;
}

// A blend, and its derivatives by the texel coordinates.
template <class A>
struct Slopes {
  A value, dx, dy;

  TEXVLM_HD bool known() const { return value + dx + dy == value + dx + dy; }  // no NaN
};

// kExact: by the rule. Else in plain arithmetic, which is right where it gives no NaN.
template <bool kExact, class A>
TEXVLM_HD Slopes<A> slopes_by(const Corners<A>& v, const AxisLerp<A>& x, const AxisLerp<A>& y) {
  const auto times = [](A coefficient, A t) { return kExact ? counted(coefficient, t) : coefficient * t; };
  const bool flat_x = kExact && x.i0 == x.i1 && x.d0 != A(0) && x.d1 != A(0);
  const bool flat_y = kExact && y.i0 == y.i1 && y.d0 != A(0) && y.d1 != A(0);
  const A top = times(x.w0, v.t00) + times(x.w1, v.t01), bottom = times(x.w0, v.t10) + times(x.w1, v.t11);
  const A upper = times(x.d0, v.t00) + times(x.d1, v.t01), lower = times(x.d0, v.t10) + times(x.d1, v.t11);
  return {times(y.w0, top) + times(y.w1, bottom), flat_x ? A(0) : times(y.w0, upper) + times(y.w1, lower),
          flat_y ? A(0) : times(y.d0, top) + times(y.d1, bottom)};
}

#if defined(__CUDACC__)
template <class A>
TEXVLM_HD Slopes<A> exact_slopes(const Corners<A>& v, const AxisLerp<A>& x, const AxisLerp<A>& y) {
#else
template <class A>
TEXVLM_NOINLINE Slopes<A> exact_slopes(const Corners<A>& v, const AxisLerp<A>& x, const AxisLerp<A>& y) {
#endif
  return slopes_by<true>(v, x, y);
}

template <class A>
TEXVLM_HD Slopes<A> slopes(const Corners<A>& v, const AxisLerp<A>& x, const AxisLerp<A>& y) {
  const Slopes<A> plain = slopes_by<false>(v, x, y);
  return plain.known() ? plain : exact_slopes(v, x, y);
}

}  // namespace texvlm
