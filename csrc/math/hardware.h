// What texture units compute, in software: filtering with fixed-point weights.
//
// Hardware filters with weights of 8 fractional bits (CUDA C++ Programming Guide, "Linear Filtering": 9-bit fixed point, so that
// 1.0 is exact) and takes the LOD to 8 fractional bits (Direct3D 11.3, 7.18.10: at least as many). Values stay in floating point.
// The sampler here is sample.h and footprint.h with weights of that kind; it lets the hardware path be tested, and used, where
// there is no GPU. Its adjoint is that of the exact interpolant, in sample_adjoint.h and footprint.h: the true derivative of
// a staircase is zero almost everywhere.
#pragma once

#include "footprint.h"

namespace texvlm {

// The one place that says how wide the fixed-point numbers are. Rounded to nearest, halves up; `benchmarks/hardware.py` measures
// both on a card.
constexpr int kWeightBits = 8;
constexpr int kLodBits = 8;

template <class A>
TEXVLM_HD A fixed_point(A v, int bits) {
  const A steps = static_cast<A>(1 << bits);
  return floor_of(v * steps + A(0.5)) / steps;
}

// Weights in fixed point. Outside the picture (Address::border) a weight and its derivative are zero, and stay so.
template <class A>
TEXVLM_HD AxisLerp<A> quantised(AxisLerp<A> p) {
  const A f = fixed_point(p.d1 != A(0) ? p.w1 : A(1) - p.w0, kWeightBits);
  p.w0 = p.d0 != A(0) ? A(1) - f : A(0);
  p.w1 = p.d1 != A(0) ? f : A(0);
  return p;
}

struct FixedPointTaps {
  template <class A>
  TEXVLM_HD static LodTaps<A> at(A u, A v, A lod, const Levels& levels, Filter filter, Address address) {
    // The nearest level is that of the LOD itself; between levels it is rounded before it is split, so 1.999 is level 2.
    LodTaps<A> q = lod_taps(u, v, filter == Filter::trilinear ? fixed_point(lod, kLodBits) : lod, levels, filter, address);
    for (Bilinear<A>* taps : {&q.near, &q.far}) taps->x = quantised(taps->x), taps->y = quantised(taps->y);
    return settled(q, levels);
  }
};

template <class T, int C>
struct SampleLodHardware {
  using A = Acc<T>;
  TextureView<const T> texture;
  QueryView<A> queries;
  T* out;  // [B, N, C]
  int64_t count;
  Reducers reducers;
  Filter filter;
  Address address;

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t c0, int64_t c1) const {
    sample_lod_query<FixedPointTaps>(texture, queries, reducers, filter, address, b, n, c0, c1,
                                     out + (b * count + n) * (C ? C : texture.channels));
  }
};

// Hardware chooses the taps of a footprint itself; these are the taps of SampleGrad with weights in fixed point.
template <class T, int C>
using SampleGradHardware = SampleFootprint<T, C, FixedPointTaps>;

}  // namespace texvlm
