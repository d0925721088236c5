// Set-up of many queries at once, for the host: structure-of-arrays taps, filled by plain loops that vectorise.
//
// A block is kBlock queries. `place_run` and `place_listed` turn their coordinates into element offsets and weights; the apply
// loops of sample.h then only move texels. They are compiled once (csrc/taps.cpp), for texels of all types and channel counts.
// What the fast loops don't do is marked `slow` and left to the scalar path: coordinates that are not finite, and taps outside
// the picture under Address::border.
#pragma once

#include "filter.h"
#include "lanes.h"

#if defined(TEXVLM_HOST_LOOPS) && defined(__GNUC__)
#define TEXVLM_PREFETCH(p) __builtin_prefetch(p)
#define TEXVLM_PREFETCH_WRITE(p) __builtin_prefetch(p, 1)
#else
#define TEXVLM_PREFETCH(p) ((void)(p))
#define TEXVLM_PREFETCH_WRITE(p) ((void)(p))
#endif

namespace texvlm {

constexpr int kBlock = 32;  // two blocks are alive at a time (one is fetched while the other is applied): about 10 KB
constexpr int64_t kLineBytes = 64;
constexpr int kNotFinite = 2;  // a bit of BlockTaps::slow

// uv [B, N, 2] and lod [B, N] with any strides (in elements), stride 0 too.
template <class A>
struct QueryView {
  const A *uv, *lod;
  int64_t uv_b, uv_n, uv_c, lod_b, lod_n;

  TEXVLM_HD A u(int64_t b, int64_t n) const { return uv[b * uv_b + n * uv_n]; }
  TEXVLM_HD A v(int64_t b, int64_t n) const { return uv[b * uv_b + n * uv_n + uv_c]; }
  TEXVLM_HD A level(int64_t b, int64_t n) const { return lod[b * lod_b + n * lod_n]; }
};

template <class A>
struct Coordinates {
  alignas(64) A u[kBlock], v[kBlock], lod[kBlock];
};

// The bilinear taps of a block, one level each: offsets in elements from the picture's first texel to the taps (y0, x0), (y1,
// x0), from there to x1, and the weights of x1 and y1.
template <class A>
struct LevelTaps {
  alignas(64) int64_t top[kBlock], bottom[kBlock], step[kBlock];
  alignas(64) A fx[kBlock], fy[kBlock];
  alignas(64) int y0[kBlock], y1[kBlock];

  // Channel c of query i.
  template <class T>
  TEXVLM_HD Corners<A> corners(const T* texels, int i, int64_t c) const {
    const T *p = texels + top[i] + c, *q = texels + bottom[i] + c;
    return {static_cast<A>(p[0]), static_cast<A>(p[step[i]]), static_cast<A>(q[0]), static_cast<A>(q[step[i]])};
  }
#if defined(TEXVLM_HAS_LANES)
  template <int N, class T>
  TEXVLM_HD Corners<Lanes<A, N>> lanes(const T* texels, int i, int64_t c) const {
    const T *p = texels + top[i] + c, *q = texels + bottom[i] + c;
    return {load_lanes<A, N>(p), load_lanes<A, N>(p + step[i]), load_lanes<A, N>(q), load_lanes<A, N>(q + step[i])};
  }
#endif
};

template <class A>
struct BlockTaps {
  LevelTaps<A> near, far;
  alignas(64) int l0[kBlock], l1[kBlock], slow[kBlock];
  alignas(64) A t[kBlock], slope[kBlock];
  bool two;  // some query of the block needs its second level
};

// The level table in 32 bits, for gathers.
struct LevelSizes {
  int count, width[kMaxLevels], height[kMaxLevels];
  int64_t offset[kMaxLevels];
};

TEXVLM_HD LevelSizes level_sizes(const Levels& levels) {
  LevelSizes s{};
  s.count = levels.count;
  for (int l = 0; l < levels.count; ++l) {
    s.width[l] = static_cast<int>(levels.width[l]);
    s.height[l] = static_cast<int>(levels.height[l]);
    s.offset[l] = levels.offset[l];
  }
  return s;
}

// How the queries of an op are placed.
struct Placing {
  LevelSizes sizes;
  Filter filter;
  Address address;
  int64_t channels;
  bool settled;     // taps to blend (filter.h), not to differentiate
  bool always_far;  // the second level's taps also where its weight is zero: d/dlod looks at it
  bool rows_only;   // no more than levels and rows
};

// The rest of the block is filled with harmless queries.
template <class A>
TEXVLM_HD void load_run(const QueryView<A>& q, int64_t b, int64_t n, int count, Coordinates<A>& s) {
  const A* p = q.uv + b * q.uv_b + n * q.uv_n;
  if (q.uv_c == 1 && q.uv_n == 2 && count == kBlock) {
    for (int i = 0; i < kBlock; ++i) {
      s.u[i] = p[2 * i];
      s.v[i] = p[2 * i + 1];
    }
  } else {
    for (int i = 0; i < kBlock; ++i) {
      s.u[i] = i < count ? p[i * q.uv_n] : A(0);
      s.v[i] = i < count ? p[i * q.uv_n + q.uv_c] : A(0);
    }
  }
  const A* l = q.lod + b * q.lod_b + n * q.lod_n;
  if (q.lod_n == 0) {
    const A same = *l;
    for (int i = 0; i < kBlock; ++i) s.lod[i] = same;
  } else {
    for (int i = 0; i < kBlock; ++i) s.lod[i] = i < count ? l[i * q.lod_n] : A(0);
  }
}

template <class A>
TEXVLM_HD void load_listed(const QueryView<A>& q, const int32_t* ids, int64_t per_picture, int count, Coordinates<A>& s) {
  for (int i = 0; i < kBlock; ++i) {
    const int64_t id = ids[i < count ? i : 0], b = id < per_picture ? 0 : id / per_picture, n = id - b * per_picture;
    s.u[i] = q.u(b, n);
    s.v[i] = q.v(b, n);
    s.lod[i] = q.level(b, n);
  }
}

// Whether a tap weighs nothing: for most blocks none does, and nothing is to be settled.
template <class A>
TEXVLM_HD int one_counts_for_nothing(const AxisLerp<A>& p) {
  return static_cast<int>(p.w0 == A(0)) | static_cast<int>(p.w1 == A(0));
}

// settled() of an axis whose weights are 1 - w and w.
template <class A>
TEXVLM_HD void settle(int* TEXVLM_RESTRICT i0, int* TEXVLM_RESTRICT i1, A* TEXVLM_RESTRICT w) {
  for (int i = 0; i < kBlock; ++i) {
    const AxisLerp<A> p = texvlm::settled(AxisLerp<A>{i0[i], i1[i], A(1) - w[i], w[i], A(-1), A(1)});
    i0[i] = p.i0, i1[i] = p.i1, w[i] = p.w1;
  }
}

template <Address kAddress, bool kUniform, class A>
TEXVLM_HD void place_level(const Coordinates<A>& s, const Placing& placing, const int* level, LevelTaps<A>& out, int* slow) {
  const LevelSizes& sizes = placing.sizes;
  const int all_w = sizes.width[level[0]], all_h = sizes.height[level[0]];
  int unsettled = 0;
  for (int i = 0; i < kBlock; ++i) {
    const int h = kUniform ? all_h : sizes.height[level[i]];
    const AxisLerp<A> y = axis_lerp(s.v[i], h, kAddress);
    out.y0[i] = y.i0;
    out.y1[i] = y.i1;
    out.fy[i] = y.w1;
    unsettled |= one_counts_for_nothing(y);
    if (kAddress == Address::border) slow[i] |= static_cast<int>(y.d0 == A(0)) | static_cast<int>(y.d1 == A(0));
  }
  if (placing.settled && unsettled) settle(out.y0, out.y1, out.fy);
  if (placing.rows_only) return;
  alignas(64) int x0[kBlock], x1[kBlock];
  unsettled = 0;
  for (int i = 0; i < kBlock; ++i) {
    const int w = kUniform ? all_w : sizes.width[level[i]];
    const AxisLerp<A> x = axis_lerp(s.u[i], w, kAddress);
    x0[i] = x.i0;
    x1[i] = x.i1;
    out.fx[i] = x.w1;
    unsettled |= one_counts_for_nothing(x);
    if (kAddress == Address::border) slow[i] |= static_cast<int>(x.d0 == A(0)) | static_cast<int>(x.d1 == A(0));
  }
  if (placing.settled && unsettled) settle(x0, x1, out.fx);
  const int64_t channels = placing.channels;
  const int64_t all_offset = sizes.offset[level[0]];
  for (int i = 0; i < kBlock; ++i) {
    const int64_t w = kUniform ? all_w : sizes.width[level[i]], offset = kUniform ? all_offset : sizes.offset[level[i]];
    out.top[i] = (offset + out.y0[i] * w + x0[i]) * channels;
    out.bottom[i] = (offset + out.y1[i] * w + x0[i]) * channels;
    out.step[i] = (static_cast<int64_t>(x1[i]) - x0[i]) * channels;
  }
}

template <Address kAddress, class A>
TEXVLM_HD void place_levels(const Coordinates<A>& s, const Placing& placing, bool uniform, BlockTaps<A>& out) {
  if (uniform) {
    place_level<kAddress, true>(s, placing, out.l0, out.near, out.slow);
    if (out.two) place_level<kAddress, true>(s, placing, out.l1, out.far, out.slow);
  } else {
    place_level<kAddress, false>(s, placing, out.l0, out.near, out.slow);
    if (out.two) place_level<kAddress, false>(s, placing, out.l1, out.far, out.slow);
  }
}

#if defined(TEXVLM_HOST_LOOPS)
// Queries n .. n + count - 1 of picture b; or those with these numbers, b * per_picture + n. In csrc/taps.cpp, for float and
// double.
void place_run(const QueryView<float>& q, int64_t b, int64_t n, int count, const Placing& placing, BlockTaps<float>& out);
void place_run(const QueryView<double>& q, int64_t b, int64_t n, int count, const Placing& placing, BlockTaps<double>& out);
void place_listed(const QueryView<float>& q, const int32_t* ids, int64_t per_picture, int count, const Placing& placing,
                  BlockTaps<float>& out);
void place_listed(const QueryView<double>& q, const int32_t* ids, int64_t per_picture, int count, const Placing& placing,
                  BlockTaps<double>& out);
#endif

// Levels, taps and weights of a block.
template <class A>
TEXVLM_HD void place_taps(Coordinates<A>& s, const Placing& placing, BlockTaps<A>& out) {
  const LevelSizes& sizes = placing.sizes;
  const Filter filter = placing.filter;
  for (int i = 0; i < kBlock; ++i) {
    const bool ok = finite(s.u[i]) & finite(s.v[i]) & finite(s.lod[i]);
    out.slow[i] = ok ? 0 : kNotFinite;
    s.u[i] = ok ? s.u[i] : A(0);
    s.v[i] = ok ? s.v[i] : A(0);
    s.lod[i] = ok ? s.lod[i] : A(0);
  }
  int different = 0, between = 0;
  if (filter == Filter::trilinear && sizes.count > 1) {
    for (int i = 0; i < kBlock; ++i) {
      const LevelLerp<A> l = level_lerp(s.lod[i], sizes.count);
      out.l0[i] = l.l0;
      out.l1[i] = l.l1;
      out.t[i] = l.t;
      out.slope[i] = l.slope;
    }
    for (int i = 0; i < kBlock; ++i) {
      different |= out.l0[i] != out.l0[0];
      between |= out.t[i] > A(0);
    }
  } else {
    for (int i = 0; i < kBlock; ++i) {
      out.l0[i] = out.l1[i] = nearest_level(s.lod[i], sizes.count);
      out.t[i] = out.slope[i] = A(0);
    }
    for (int i = 0; i < kBlock; ++i) different |= out.l0[i] != out.l0[0];
  }
  out.two = between || (placing.always_far && filter == Filter::trilinear && sizes.count > 1);
  switch (placing.address) {
    case Address::clamp:
      return place_levels<Address::clamp>(s, placing, !different, out);
    case Address::wrap:
      return place_levels<Address::wrap>(s, placing, !different, out);
    case Address::mirror:
      return place_levels<Address::mirror>(s, placing, !different, out);
    default:
      return place_levels<Address::border>(s, placing, !different, out);
  }
}

}  // namespace texvlm
