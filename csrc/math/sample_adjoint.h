// Adjoint of sampling at an explicit level of detail (sample.h): gradients of texels, uv and LOD in one pass per query.
//
// CUDA scatters with atomics (csrc/cuda/sample.cu). The host either runs query by query (`block`), or band by band (bands.h):
// SampleKeys says which bands a query touches, `list` takes the queries of one band in their order.
#pragma once

#include "bands.h"
#include "sample.h"
#include "slopes.h"

namespace texvlm {

// An incoming gradient [B, N, C] with any strides, stride 0 too.
template <class T>
struct GradView {
  const T* data;
  int64_t stride_b, stride_n, stride_c;
};

// Adjoint of a blend: adds weight * g to the gradients of the texels inside the band.
template <class A>
TEXVLM_HD void scatter_corners(A* texels, int64_t channels, const Bilinear<A>& q, int level, const Band& band, A g) {
  const auto row = [&](A y, int64_t t0, int64_t t1) {
    if (const A w = y * q.x.w0; w != A(0)) accumulate(texels + t0 * channels, w * g);
    if (const A w = y * q.x.w1; w != A(0)) accumulate(texels + t1 * channels, w * g);
  };
  if (band.has(level, q.y.i0)) row(q.y.w0, q.t00, q.t01);
  if (band.has(level, q.y.i1)) row(q.y.w1, q.t10, q.t11);
}

// What a query's place receives: from the slopes in its two levels, of texels times the incoming gradient.
template <class A>
struct PlaceGrad {
  A u, v, lod;
};
template <class A>
TEXVLM_HD PlaceGrad<A> place_grad(const LevelLerp<A>& level, const Slopes<A>& near, const Slopes<A>& far, const Levels& levels) {
  const A t = level.t, s = A(1) - t;
  const A u = s * static_cast<A>(levels.width[level.l0]) * near.dx, v = s * static_cast<A>(levels.height[level.l0]) * near.dy;
  const A lod = level.l1 == level.l0 ? A(0) : far.value - near.value;
  if (t == A(0)) return {u, v, lod};
  return {u + t * static_cast<A>(levels.width[level.l1]) * far.dx, v + t * static_cast<A>(levels.height[level.l1]) * far.dy, lod};
}
template <class A>
TEXVLM_HD PlaceGrad<A> place_grad(const LodTaps<A>& q, const Corners<A>& near, const Corners<A>& far, const Levels& levels) {
  return place_grad(q.level, slopes(near, q.near.x, q.near.y), slopes(far, q.far.x, q.far.y), levels);
}

// Adjoint of SampleLod: adds to grad_data, grad_uv, grad_lod, each of which may be null, from zero.
template <class T, int C>
struct SampleLodAdjoint {
  using A = Acc<T>;
  TextureView<const T> texture;
  QueryView<A> queries;
  GradView<T> grad;
  A *grad_data, *grad_uv, *grad_lod;  // [Bt, T, C], [B, N, 2], [B, N]
  int64_t count;
  Reducers reducers;
  Filter filter;
  Address address;

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t c0, int64_t c1) const { one(b, n, c0, c1, everywhere(), true); }

  // `owner`: whether this band is the one that sees to the query's coordinates.
  TEXVLM_HD void one(int64_t b, int64_t n, int64_t c0, int64_t c1, const Band& band, bool owner) const {
    const int64_t channels = C ? C : texture.channels;
    const A u = queries.u(b, n), v = queries.v(b, n), lod = queries.level(b, n);
    if (!(finite(u) && finite(v) && finite(lod))) return;
    const T* g = grad.data + b * grad.stride_b + n * grad.stride_n;
    A* target = grad_data ? grad_data + b * texture.batch_stride : nullptr;
    if (filter == Filter::nearest) {
      const int level = nearest_level(lod, texture.levels.count);
      const int64_t texel = nearest_texel(u, v, lod, texture.levels, address);
      if (!target || texel < 0 || !band.has(level, (texel - texture.levels.offset[level]) / texture.levels.width[level])) return;
      for (int64_t c = c0; c < c1; ++c)
        if (reducers.of(c) != Reducer::mode) accumulate(target + texel * channels + c, static_cast<A>(g[c * grad.stride_c]));
      return;
    }
    const LodTaps<A> q = lod_taps(u, v, lod, texture.levels, filter, address);
    const T* texels = texture.data + b * texture.batch_stride;
    const bool coordinates = owner && (grad_uv || grad_lod), slope = grad_lod && q.level.slope != A(0),
               blended = q.level.t != A(0);
    Corners<A> near{}, far{};
    spread(texels, target, g, q, band, A(1), c0, c1, coordinates, coordinates && (blended || slope), near, far);
    if (!coordinates) return;
    const int64_t at = b * count + n;
    const PlaceGrad<A> d = place_grad(q, near, far, texture.levels);
    if (grad_uv) {
      accumulate(grad_uv + 2 * at, d.u);
      accumulate(grad_uv + 2 * at + 1, d.v);
    }
    if (slope) accumulate(grad_lod + at, d.lod);
  }

  // Channels [c0, c1) of a fetch that counts `weight`, their incoming gradient at g: what the texels at `target` (unless it is
  // null) receive in this band, and, where asked for, the sums for its place.
  TEXVLM_HD void spread(const T* texels, A* target, const T* g, const LodTaps<A>& q, const Band& band, A weight, int64_t c0,
                        int64_t c1, bool look_near, bool look_far, Corners<A>& near, Corners<A>& far) const {
    const int64_t channels = C ? C : texture.channels;
    const A share = weight * (A(1) - q.level.t), far_share = weight * q.level.t;
    for (int64_t c = c0; c < c1; ++c) {
      if (reducers.any_mode && reducers.of(c) == Reducer::mode) continue;
      const A gc = static_cast<A>(g[c * grad.stride_c]);
      if (look_near) add_products(near, gc, corners(texels + c, channels, q.near));
      if (look_far) add_products(far, gc, corners(texels + c, channels, q.far));
      if (!target) continue;
      scatter_corners(target + c, channels, q.near, q.level.l0, band, share * gc);
      if (far_share != A(0)) scatter_corners(target + c, channels, q.far, q.level.l1, band, far_share * gc);
    }
  }

#if defined(TEXVLM_HOST_LOOPS)
  // Whether blocks of queries can be spread: not with mode channels among few.
  TEXVLM_HD bool in_blocks() const { return C == 0 || !reducers.any_mode; }

  // The same of query i of a block, all channels; it is not slow.
  TEXVLM_HD void spread(const T* texels, A* target, const T* g, const BlockTaps<A>& taps, int i, const Band& band, A weight,
                        bool look_near, bool look_far, Corners<A>& near, Corners<A>& far) const {
    const int l0 = taps.l0[i], l1 = taps.l1[i];
    const A share = weight * (A(1) - taps.t[i]), far_share = weight * taps.t[i];
    const bool blended = far_share != A(0);
    const auto levels = [&](const T* from, A* to, const A* gc, int64_t wide) __attribute__((always_inline)) {
      one_level(from, to, taps.near, i, l0, band, share, look_near, gc, wide, near);
      if (blended || look_far) one_level(from, blended ? to : nullptr, taps.far, i, l1, band, far_share, look_far, gc, wide, far);
    };
    if constexpr (C > 0) {
      A converted[C];
      for (int c = 0; c < C; ++c) converted[c] = static_cast<A>(g[c * grad.stride_c]);
      levels(texels, target, converted, C);
    } else {
      constexpr int64_t kChunk = 64;
      alignas(64) A converted[kChunk];
      const int64_t channels = texture.channels;
      for (int64_t c0 = 0, c1; c0 < channels; c0 = c1) {
        c1 = minimum(channels, c0 + kChunk);
        if (reducers.any_mode) {  // a run of channels that have gradients
          const bool skip = reducers.of(c0) == Reducer::mode;
          int64_t c = c0 + 1;
          while (c < c1 && (reducers.of(c) == Reducer::mode) == skip) ++c;
          c1 = c;
          if (skip) continue;
        }
        const A* chunk = converted;
        if (std::is_same_v<A, T> && grad.stride_c == 1) {
          chunk = reinterpret_cast<const A*>(g + c0);
        } else {
          for (int64_t c = c0; c < c1; ++c) converted[c - c0] = static_cast<A>(g[c * grad.stride_c]);
        }
        levels(texels + c0, target ? target + c0 : nullptr, chunk, c1 - c0);
      }
    }
  }

  TEXVLM_HD void block(int64_t b, int64_t n0, int64_t n1) const { run(nullptr, n0, n1, b, everywhere()); }

  // The queries with these numbers (b * count + n), restricted to the rows of one band of the texture of picture `picture`.
  TEXVLM_HD void list(const int32_t* ids, int64_t many, int64_t picture, const Band& band) const {
    run(ids, 0, many, picture, band);
  }

  // Queries [begin, end) of the list, or without one, of the picture.
  TEXVLM_HD void run(const int32_t* ids, int64_t begin, int64_t end, int64_t picture, const Band& band) const {
    if (filter == Filter::nearest || !in_blocks()) {
      const LevelSizes sizes = level_sizes(texture.levels);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t b = ids ? ids[i] / count : picture, n = ids ? ids[i] % count : i;
        slowly(b, n, band, is_owner(b, n, sizes, band));
      }
      return;
    }
    const Placing placing{level_sizes(texture.levels), filter, address, C ? C : texture.channels, false,
                          grad_lod != nullptr,         false};
    BlockTaps<A> ring[2];
    int turn = 0;
    for (int64_t i = begin - kBlock; i < end; i += kBlock, turn ^= 1) {
      if (i + kBlock < end)
        prepare(ids, i + kBlock, static_cast<int>(minimum<int64_t>(kBlock, end - i - kBlock)), picture, placing, ring[turn ^ 1]);
      if (i < begin) continue;
      const int valid = static_cast<int>(minimum<int64_t>(kBlock, end - i));
      for (int k = 0; k < valid; ++k) {
        const int64_t id = ids ? ids[i + k] : i + k, b = !ids ? picture : (id < count ? 0 : id / count);
        apply(b, ids ? id - b * count : id, k, ring[turn], band);
      }
    }
  }

  TEXVLM_NOINLINE bool is_owner(int64_t b, int64_t n, const LevelSizes& sizes, const Band& band) const {
    if (band.level < 0 || filter == Filter::nearest) return true;
    const A lod = queries.level(b, n), v = queries.v(b, n);
    if (!(finite(lod) && finite(v))) return false;
    const int level = filter == Filter::trilinear ? level_lerp(lod, sizes.count).l0 : nearest_level(lod, sizes.count);
    return band.has(level, axis_lerp(v, sizes.height[level], address).i0);
  }

  TEXVLM_NOINLINE void slowly(int64_t b, int64_t n, const Band& band, bool owner) const {
    one(b, n, int64_t{0}, C ? int64_t{C} : texture.channels, band, owner);
  }

  // Texels and incoming gradients are on their way once the taps are known. The gradients of a band's texels stay in the cache.
  TEXVLM_HD void prepare(const int32_t* ids, int64_t first, int valid, int64_t picture, const Placing& placing,
                         BlockTaps<A>& taps) const {
    const int64_t channels = C ? C : texture.channels, bytes = channels * static_cast<int64_t>(sizeof(T));
    if (ids) {
      place_listed(queries, ids + first, count, valid, placing, taps);
      for (int i = 0; i < valid; ++i) {
        const int64_t id = ids[first + i], b = id < count ? 0 : id / count;
        const char* g = reinterpret_cast<const char*>(grad.data + b * grad.stride_b + (id - b * count) * grad.stride_n);
        for (int64_t o = 0; o < bytes; o += kLineBytes) TEXVLM_PREFETCH(g + o);
        if (grad_uv) TEXVLM_PREFETCH_WRITE(grad_uv + 2 * id);
      }
    } else {
      place_run(queries, picture, first, valid, placing, taps);
    }
    if (!grad_uv && !grad_lod) return;
    const T* texels = texture.data + picture * texture.batch_stride;
    fetch_ahead(texels, channels, taps.near);
    if (taps.two) fetch_ahead(texels, channels, taps.far);
  }

  // Query i of the block.
  TEXVLM_HD void apply(int64_t b, int64_t n, int i, const BlockTaps<A>& taps, const Band& band) const {
    const bool owner = band.has(taps.l0[i], taps.near.y0[i]);
    if (taps.slow[i]) return slowly(b, n, band, owner);
    const LevelLerp<A> level{taps.l0[i], taps.l1[i], taps.t[i], taps.slope[i]};
    const bool coordinates = owner && (grad_uv || (grad_lod && level.slope != A(0)));
    const T* texels = texture.data + b * texture.batch_stride;
    const T* g = grad.data + b * grad.stride_b + n * grad.stride_n;
    A* target = grad_data ? grad_data + b * texture.batch_stride : nullptr;
    const bool far_too = coordinates && (level.t != A(0) || (grad_lod && level.slope != A(0)));
    Corners<A> near{}, far{};
    spread(texels, target, g, taps, i, band, A(1), coordinates, far_too, near, far);
    if (!coordinates) return;  // a query has one owner: what is stored need not be read first, and those lie far apart
    const int64_t at = b * count + n;
    const PlaceGrad<A> d =
        place_grad(level, slopes_of(near, taps.near, i), far_too ? slopes_of(far, taps.far, i) : Slopes<A>{}, texture.levels);
    if (grad_uv) {
      grad_uv[2 * at] = d.u;
      grad_uv[2 * at + 1] = d.v;
    }
    if (grad_lod && level.slope != A(0)) grad_lod[at] = d.lod;
  }

  TEXVLM_HD static Slopes<A> slopes_of(const Corners<A>& sums, const LevelTaps<A>& taps, int i) {
    return slopes(sums, AxisLerp<A>{0, taps.step[i] != 0, A(1) - taps.fx[i], taps.fx[i], A(-1), A(1)},
                  AxisLerp<A>{taps.y0[i], taps.y1[i], A(1) - taps.fy[i], taps.fy[i], A(-1), A(1)});
  }

  // Some channels of one level: sums for the coordinates, and the scatter of share * g. No tap is outside the picture.
  TEXVLM_HD static void one_level(const T* texels, A* target, const LevelTaps<A>& taps, int i, int level, const Band& band,
                                  A share, bool coordinates, const A* g, int64_t wide, Corners<A>& sums) {
    const T *const top = texels + taps.top[i], *const bottom = texels + taps.bottom[i];
    if (coordinates) add_run({top, top + taps.step[i], bottom, bottom + taps.step[i]}, g, wide, sums);
    if (!target) return;
    const int64_t step = taps.step[i];
    const A x1 = taps.fx[i], x0 = A(1) - x1, y1 = share * taps.fy[i], y0 = share * (A(1) - taps.fy[i]);
    if (band.has(level, taps.y0[i])) scatter_row(target + taps.top[i], step, y0 * x0, y0 * x1, g, wide);
    if (band.has(level, taps.y1[i])) scatter_row(target + taps.bottom[i], step, y1 * x0, y1 * x1, g, wide);
  }

  // sums += g times the four texels, over a run of channels.
  TEXVLM_HD static void add_run(const Corners<const T*>& from, const A* g, int64_t wide, Corners<A>& sums) {
    int64_t c = 0;
#if defined(TEXVLM_HAS_LANES)
    if constexpr (C == 0) {
      constexpr int N = 8;
      const auto lanes = [&](const T* p) { return load_lanes<A, N>(p + c); };
      Corners<Lanes<A, N>> all{};
      for (; c + N <= wide; c += N)
        add_products(all, load_lanes<A, N>(g + c),
                     Corners<Lanes<A, N>>{lanes(from.t00), lanes(from.t01), lanes(from.t10), lanes(from.t11)});
      for (int k = 0; k < N; ++k) {
        sums.t00 += all.t00[k];
        sums.t01 += all.t01[k];
        sums.t10 += all.t10[k];
        sums.t11 += all.t11[k];
      }
    }
#endif
    const auto at = [&](const T* p) { return static_cast<A>(p[c]); };
    for (; c < wide; ++c) add_products(sums, g[c], Corners<A>{at(from.t00), at(from.t01), at(from.t10), at(from.t11)});
  }

  // Both texels may be the same one (step 0), so the first is done before the second is read. Texels of weight 0 receive nothing.
  TEXVLM_HD static void scatter_row(A* row, int64_t step, A w0, A w1, const A* g, int64_t wide) {
#if defined(TEXVLM_HAS_LANES)
    if constexpr (C == 3) {  // two neighbours are six values: four and two
      if (step == 3 && w0 != A(0) && w1 != A(0)) {
        const Lanes<A, 4> first{w0 * g[0], w0 * g[1], w0 * g[2], w1 * g[0]};
        const Lanes<A, 2> rest{w1 * g[1], w1 * g[2]};
        store_lanes<A, 4>(row, load_lanes<A, 4>(row) + first);
        store_lanes<A, 2>(row + 4, load_lanes<A, 2>(row + 4) + rest);
        return;
      }
    }
#endif
    if (w0 != A(0)) add_scaled(row, w0, g, wide);
    if (w1 != A(0)) add_scaled(row + step, w1, g, wide);
  }

  TEXVLM_HD static void add_scaled(A* TEXVLM_RESTRICT to, A w, const A* TEXVLM_RESTRICT g, int64_t wide) {
    for (int64_t c = 0; c < (C ? C : wide); ++c) to[c] += w * g[c];
  }
#endif
};

#if defined(TEXVLM_HOST_LOOPS)
// The bands that a query touches, as scatter.h wants them: a pair, or two where two levels are blended. Pictures with textures of
// their own have bands of their own.
template <class A>
struct SampleKeys {
  QueryView<A> queries;
  Levels levels;
  bool own_textures;
  int64_t count;
  Filter filter;
  Address address;

  int pairs() const { return filter == Filter::trilinear && levels.count > 1 ? 2 : 1; }

  // Queries [begin, end) of all pictures.
  void operator()(const BandTable& bands, int64_t begin, int64_t end, int32_t* out) const {
    const Placing placing{level_sizes(levels), filter, address, 1, false, false, true};
    const int width = 2 * pairs();
    BlockTaps<A> taps;
    for (int64_t q = begin; q < end;) {
      const int64_t b = q / count, n = q - b * count;
      const int valid = static_cast<int>(minimum<int64_t>(kBlock, minimum(count - n, end - q)));
      const int first = own_textures ? static_cast<int>(b) * bands.total : 0;
      place_run(queries, b, n, valid, placing, taps);
      for (int i = 0; i < valid; ++i, out += width) {
        for (int s = 0; s < width; ++s) out[s] = -1;
        if (taps.slow[i] & kNotFinite) continue;
        if (filter == Filter::nearest) {
          const int level = taps.l0[i], h = static_cast<int>(levels.height[level]);
          const int y = axis_nearest(queries.v(b, n + i), h, address);
          if (y >= 0) out[0] = out[1] = first + bands.of(level, y);
          continue;
        }
        out[0] = first + bands.of(taps.l0[i], taps.near.y0[i]);
        out[1] = first + bands.of(taps.l0[i], taps.near.y1[i]);
        if (width == 2 || taps.t[i] == A(0)) continue;
        out[2] = first + bands.of(taps.l1[i], taps.far.y0[i]);
        out[3] = first + bands.of(taps.l1[i], taps.far.y1[i]);
      }
      q += valid;
    }
  }
};
#endif

}  // namespace texvlm
