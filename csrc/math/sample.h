// Sampling at an explicit level of detail, query by query. The adjoint is in sample_adjoint.h.
//
// value = (1 - t) * level l0 + t * level l1, each level bilinear (filter.h, with its rule for texels of weight 0). Mode channels
// are the nearest texel of the nearest level and have no gradient. A query that is not finite gives NaN and takes no part in any
// gradient.
#pragma once

#include "taps.h"

namespace texvlm {

// The nearest texel of the nearest level: its number from the picture's first texel, -1 outside.
template <class A>
TEXVLM_HD int64_t nearest_texel(A u, A v, A lod, const Levels& levels, Address address) {
  const int level = nearest_level(lod, levels.count), width = static_cast<int>(levels.width[level]);
  const int x = axis_nearest(u, width, address), y = axis_nearest(v, static_cast<int>(levels.height[level]), address);
  return x < 0 || y < 0 ? -1 : levels.offset[level] + static_cast<int64_t>(y) * width + x;
}

template <class T>
TEXVLM_HD T not_a_number() {
  return static_cast<T>(static_cast<Acc<T>>(NAN));
}

// The mode channels of a query, or all of them under Filter::nearest: the nearest texel of the nearest level.
template <class T>
TEXVLM_HD void copy_nearest(const TextureView<const T>& texture, const Reducers& reducers, bool all, int64_t b, int64_t texel,
                            int64_t c0, int64_t c1, T* to) {
  const int64_t at = b * texture.batch_stride + texel * texture.channels;
  for (int64_t c = c0; c < c1; ++c)
    if (all || reducers.of(c) == Reducer::mode) to[c] = texel < 0 ? static_cast<T>(0.0f) : texture.data[at + c];
}

// The taps of both levels, of which the second may not count.
template <class A, class F>
TEXVLM_HD LodTaps<A> taps_of_levels(const LevelLerp<A>& level, const F& of) {
  const Bilinear<A> near = of(level.l0);
  return {level, near, level.t == A(0) ? near : of(level.l1)};
}

// The four texels around a place in each of its two levels, weighted exactly; settled.
template <class A>
TEXVLM_HD LodTaps<A> settled_taps(A u, A v, const LevelLerp<A>& level, const Levels& levels, Address address) {
  return taps_of_levels(level, [&](int l) {
    return joined(settled(axis_lerp(u, static_cast<int>(levels.width[l]), address)),
                  settled(axis_lerp(v, static_cast<int>(levels.height[l]), address)), levels, l);
  });
}

struct ExactTaps {
  template <class A>
  TEXVLM_HD static LodTaps<A> at(A u, A v, A lod, const Levels& levels, Filter filter, Address address) {
    if (filter == Filter::trilinear) return settled_taps(u, v, level_lerp(lod, levels.count), levels, address);
    const int nearest = nearest_level(lod, levels.count);
    return settled_taps(u, v, LevelLerp<A>{nearest, nearest, A(0), A(0)}, levels, address);
  }
};

// Channels [c0, c1) of query n; `to`: its channels.
template <class Taps, class T>
TEXVLM_HD void sample_lod_query(const TextureView<const T>& texture, const QueryView<Acc<T>>& queries, const Reducers& reducers,
                                Filter filter, Address address, int64_t b, int64_t n, int64_t c0, int64_t c1, T* to) {
  using A = Acc<T>;
  const A u = queries.u(b, n), v = queries.v(b, n), lod = queries.level(b, n);
  if (!(finite(u) && finite(v) && finite(lod))) {
    for (int64_t c = c0; c < c1; ++c) to[c] = not_a_number<T>();
    return;
  }
  const bool nearest = filter == Filter::nearest;
  if (!nearest && !(reducers.uniform && reducers.any_mode)) {
    const LodTaps<A> q = Taps::at(u, v, lod, texture.levels, filter, address);
    const T* texels = texture.data + b * texture.batch_stride;
    for (int64_t c = c0; c < c1; ++c) to[c] = static_cast<T>(fetch(texels + c, texture.channels, q));
  }
  if (nearest || reducers.any_mode)
    copy_nearest(texture, reducers, nearest, b, nearest_texel(u, v, lod, texture.levels, address), c0, c1, to);
}

#if defined(TEXVLM_HOST_LOOPS)
// Both rows of two texels, to the line in which they end.
template <class T, class A>
TEXVLM_HD void fetch_ahead(const T* texels, int64_t channels, const LevelTaps<A>& taps) {
  const int64_t bytes = 2 * channels * static_cast<int64_t>(sizeof(T));
  for (int i = 0; i < kBlock; ++i) {
    const char* top = reinterpret_cast<const char*>(texels + minimum(taps.top[i], taps.top[i] + taps.step[i]));
    const char* bottom = reinterpret_cast<const char*>(texels + minimum(taps.bottom[i], taps.bottom[i] + taps.step[i]));
    for (int64_t at = 0; at < bytes; at += kLineBytes) {
      TEXVLM_PREFETCH(top + at);
      TEXVLM_PREFETCH(bottom + at);
    }
    if (bytes > static_cast<int64_t>(sizeof(T))) {
      TEXVLM_PREFETCH(top + bytes - 1);
      TEXVLM_PREFETCH(bottom + bytes - 1);
    }
  }
}
#endif

template <class T, int C>
struct SampleLod {
  using A = Acc<T>;
  TextureView<const T> texture;
  QueryView<A> queries;
  T* out;  // [B, N, C]
  int64_t count;
  Reducers reducers;
  Filter filter;
  Address address;
  int64_t elements;  // of the whole buffer

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t c0, int64_t c1) const {
    sample_lod_query<ExactTaps>(texture, queries, reducers, filter, address, b, n, c0, c1,
                                out + (b * count + n) * (C ? C : texture.channels));
  }

#if defined(TEXVLM_HOST_LOOPS)
  // Blocks of queries: while one is applied, the texels of the next are on their way.
  TEXVLM_HD void block(int64_t b, int64_t n0, int64_t n1) const {
    if (filter == Filter::nearest || (reducers.uniform && reducers.any_mode)) {
      for (int64_t n = n0; n < n1; ++n) slowly(b, n);
      return;
    }
    const Placing placing{level_sizes(texture.levels), filter, address, C ? C : texture.channels, true, false, false};
    BlockTaps<A> ring[2];
    int turn = 0;
    for (int64_t n = n0 - kBlock; n < n1; n += kBlock, turn ^= 1) {
      if (n + kBlock < n1)
        prepare(b, n + kBlock, static_cast<int>(minimum<int64_t>(kBlock, n1 - n - kBlock)), placing, ring[turn ^ 1]);
      if (n >= n0) apply(b, n, static_cast<int>(minimum<int64_t>(kBlock, n1 - n)), ring[turn]);
    }
  }

  TEXVLM_NOINLINE void slowly(int64_t b, int64_t n) const { (*this)(b, n, int64_t{0}, C ? int64_t{C} : texture.channels); }

  TEXVLM_HD void prepare(int64_t b, int64_t n, int valid, const Placing& placing, BlockTaps<A>& taps) const {
    const int64_t channels = C ? C : texture.channels;
    place_run(queries, b, n, valid, placing, taps);
    const T* texels = texture.data + b * texture.batch_stride;
    fetch_ahead(texels, channels, taps.near);
    if (taps.two) fetch_ahead(texels, channels, taps.far);
    if constexpr (C == 3 && sizeof(T) == 4) {  // loads of four floats must end inside the buffer
      const int64_t last = elements - b * texture.batch_stride - 4;
      guard(taps.near, last, taps.slow);
      if (taps.two) guard(taps.far, last, taps.slow);
    }
  }

  TEXVLM_HD static void guard(const LevelTaps<A>& taps, int64_t last, int* slow) {
    for (int i = 0; i < kBlock; ++i) slow[i] |= maximum(taps.top[i], taps.bottom[i]) + maximum<int64_t>(taps.step[i], 0) > last;
  }

  TEXVLM_HD void apply(int64_t b, int64_t n, int valid, const BlockTaps<A>& taps) const {
    const int64_t channels = C ? C : texture.channels;
    const T* texels = texture.data + b * texture.batch_stride;
    T* to = out + (b * count + n) * channels;
    int any_slow = 0;
    for (int i = 0; i < kBlock; ++i) any_slow |= taps.slow[i];
    if (!any_slow && !taps.two) {
      for (int i = 0; i < valid; ++i, to += channels) one_level(texels, channels, taps.near, i, to, i + 1 == valid);
    } else {
      for (int i = 0; i < valid; ++i, to += channels) {
        if (taps.slow[i]) {
          slowly(b, n + i);
        } else if (taps.t[i] == A(0)) {
          one_level(texels, channels, taps.near, i, to, i + 1 == valid);
        } else {
          two_levels(texels, channels, taps, i, to, i + 1 == valid);
        }
      }
    }
    if (!reducers.any_mode) return;
    for (int i = 0; i < valid; ++i) modes(b, n + i);
  }

  // The mode channels of a query, after all channels have been blended.
  TEXVLM_NOINLINE void modes(int64_t b, int64_t n) const {
    const A u = queries.u(b, n), v = queries.v(b, n), lod = queries.level(b, n);
    if (!(finite(u) && finite(v) && finite(lod))) return;
    const int64_t channels = C ? C : texture.channels;
    copy_nearest(texture, reducers, false, b, nearest_texel(u, v, lod, texture.levels, address), int64_t{0}, channels,
                 out + (b * count + n) * channels);
  }

#if defined(TEXVLM_HAS_LANES)
  static constexpr bool kWide = sizeof(T) >= 4 && (C == 4 || (C == 3 && sizeof(T) == 4));  // a query is one vector of four

  // `last`: nothing may be written beyond this query's channels.
  TEXVLM_HD static void store_wide(const Lanes<A, 4>& value, T* TEXVLM_RESTRICT to, bool last) {
    if (C == 4 || !last) {
      memcpy(to, &value, sizeof(value));
    } else {
      memcpy(to, &value, 3 * sizeof(T));
    }
  }
#endif

  TEXVLM_HD static void one_level(const T* texels, int64_t channels, const LevelTaps<A>& taps, int i, T* TEXVLM_RESTRICT to,
                                  bool last) {
    const A x1 = taps.fx[i], x0 = A(1) - x1, y1 = taps.fy[i], y0 = A(1) - y1;
#if defined(TEXVLM_HAS_LANES)
    if constexpr (kWide) return store_wide(blend(taps.template lanes<4>(texels, i, 0), x0, x1, y0, y1), to, last);
#endif
    for (int64_t c = 0; c < channels; ++c) to[c] = static_cast<T>(blend(taps.corners(texels, i, c), x0, x1, y0, y1));
  }

  TEXVLM_HD static void two_levels(const T* texels, int64_t channels, const BlockTaps<A>& taps, int i, T* TEXVLM_RESTRICT to,
                                   bool last) {
    const A t = taps.t[i], s = A(1) - t;
    const A fx0 = taps.near.fx[i], gx0 = A(1) - fx0, fy0 = taps.near.fy[i], gy0 = A(1) - fy0;
    const A fx1 = taps.far.fx[i], gx1 = A(1) - fx1, fy1 = taps.far.fy[i], gy1 = A(1) - fy1;
#if defined(TEXVLM_HAS_LANES)
    if constexpr (kWide)
      return store_wide(s * blend(taps.near.template lanes<4>(texels, i, 0), gx0, fx0, gy0, fy0) +
                            t * blend(taps.far.template lanes<4>(texels, i, 0), gx1, fx1, gy1, fy1),
                        to, last);
#endif
    for (int64_t c = 0; c < channels; ++c)
      to[c] = static_cast<T>(s * blend(taps.near.corners(texels, i, c), gx0, fx0, gy0, fy0) +
                             t * blend(taps.far.corners(texels, i, c), gx1, fx1, gy1, fy1));
  }
#endif
};

}  // namespace texvlm
