// Adjoint of sampling at an explicit level of detail (sample.h): gradients of texels, uv and LOD in one pass per query.
//
// CUDA scatters with atomics (csrc/cuda/sample.cu). The host either runs query by query (`block`), or band by band (bands.h):
// SampleKeys says which bands a query touches, `list` takes the queries of one band in their order.
#pragma once

#include "bands.h"
#include "sample.h"

namespace texvlm {

// An incoming gradient [B, N, C] with any strides, stride 0 too.
template <class T>
struct GradView {
  const T* data;
  int64_t stride_b, stride_n, stride_c;
};

// Derivatives of a blend by the texel coordinates.
template <class A>
TEXVLM_HD A blend_dx(const Corners<A>& v, const Bilinear<A>& q) {
  return blend(v, q.x.d0, q.x.d1, q.y.w0, q.y.w1);
}
template <class A>
TEXVLM_HD A blend_dy(const Corners<A>& v, const Bilinear<A>& q) {
  return blend(v, q.x.w0, q.x.w1, q.y.d0, q.y.d1);
}

// Adjoint of blend(corners(...)): adds weight * g to the gradients of the texels inside the picture and inside the band.
template <class A>
TEXVLM_HD void scatter_corners(A* texels, int64_t channels, const Bilinear<A>& q, int level, const Band& band, A g) {
  const bool x0 = q.x.d0 != A(0), x1 = q.x.d1 != A(0);
  if (q.y.d0 != A(0) && band.has(level, q.y.i0)) {
    if (x0) accumulate(texels + q.t00 * channels, q.y.w0 * q.x.w0 * g);
    if (x1) accumulate(texels + q.t01 * channels, q.y.w0 * q.x.w1 * g);
  }
  if (q.y.d1 != A(0) && band.has(level, q.y.i1)) {
    if (x0) accumulate(texels + q.t10 * channels, q.y.w1 * q.x.w0 * g);
    if (x1) accumulate(texels + q.t11 * channels, q.y.w1 * q.x.w1 * g);
  }
}

// What one level tells of a query: the sums over the channels of g times the value and its derivatives by the texel coordinates.
template <class A>
struct LevelSums {
  A value, dx, dy;
};

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
    LevelSums<A> near{}, far{};
    for (int64_t c = c0; c < c1; ++c) {
      if (reducers.any_mode && reducers.of(c) == Reducer::mode) continue;
      const A gc = static_cast<A>(g[c * grad.stride_c]);
      if (coordinates) {
        add_channel(texels + c, channels, q.near, gc, near);
        if (blended || slope) add_channel(texels + c, channels, q.far, gc, far);
      }
      if (target) {
        scatter_corners(target + c, channels, q.near, q.level.l0, band, (A(1) - q.level.t) * gc);
        if (blended) scatter_corners(target + c, channels, q.far, q.level.l1, band, q.level.t * gc);
      }
    }
    if (!coordinates) return;
    const int64_t at = b * count + n;
    if (grad_uv) {
      accumulate(grad_uv + 2 * at, d_u(q.level, near, far));
      accumulate(grad_uv + 2 * at + 1, d_v(q.level, near, far));
    }
    if (slope) accumulate(grad_lod + at, far.value - near.value);
  }

  TEXVLM_HD static void add_channel(const T* texels, int64_t channels, const Bilinear<A>& q, A g, LevelSums<A>& sums) {
    add_corners(corners(texels, channels, q), q, g, sums);
  }
  TEXVLM_HD static void add_corners(const Corners<A>& v, const Bilinear<A>& q, A g, LevelSums<A>& sums) {
    sums.value += g * blend(v, q);
    sums.dx += g * blend_dx(v, q);
    sums.dy += g * blend_dy(v, q);
  }

  // d/du and d/dv of a query, from the sums of its levels.
  TEXVLM_HD A d_u(const LevelLerp<A>& level, const LevelSums<A>& near, const LevelSums<A>& far) const {
    const A first = (A(1) - level.t) * static_cast<A>(texture.levels.width[level.l0]) * near.dx;
    return level.t == A(0) ? first : first + level.t * static_cast<A>(texture.levels.width[level.l1]) * far.dx;
  }
  TEXVLM_HD A d_v(const LevelLerp<A>& level, const LevelSums<A>& near, const LevelSums<A>& far) const {
    const A first = (A(1) - level.t) * static_cast<A>(texture.levels.height[level.l0]) * near.dy;
    return level.t == A(0) ? first : first + level.t * static_cast<A>(texture.levels.height[level.l1]) * far.dy;
  }

#if defined(TEXVLM_HOST_LOOPS)
  TEXVLM_HD void block(int64_t b, int64_t n0, int64_t n1) const { run(nullptr, n0, n1, b, everywhere()); }

  // The queries with these numbers (b * count + n), restricted to the rows of one band of the texture of picture `picture`.
  TEXVLM_HD void list(const int32_t* ids, int64_t many, int64_t picture, const Band& band) const {
    run(ids, 0, many, picture, band);
  }

  // Queries [begin, end) of the list, or without one, of the picture.
  TEXVLM_HD void run(const int32_t* ids, int64_t begin, int64_t end, int64_t picture, const Band& band) const {
    if (filter == Filter::nearest || (C > 0 && reducers.any_mode)) {
      const LevelSizes sizes = level_sizes(texture.levels);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t b = ids ? ids[i] / count : picture, n = ids ? ids[i] % count : i;
        slowly(b, n, band, is_owner(b, n, sizes, band));
      }
      return;
    }
    const Placing placing{level_sizes(texture.levels), filter, address, C ? C : texture.channels, grad_lod != nullptr, false};
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
    const int64_t channels = C ? C : texture.channels;
    const bool owner = band.has(taps.l0[i], taps.near.y0[i]);
    if (taps.slow[i]) return slowly(b, n, band, owner);
    const LevelLerp<A> level{taps.l0[i], taps.l1[i], taps.t[i], taps.slope[i]};
    const bool blended = level.t != A(0);
    const bool coordinates = owner && (grad_uv || (grad_lod && level.slope != A(0)));
    const bool look_far = coordinates && (blended || (grad_lod && level.slope != A(0)));
    const T* texels = texture.data + b * texture.batch_stride;
    const T* g = grad.data + b * grad.stride_b + n * grad.stride_n;
    A* target = grad_data ? grad_data + b * texture.batch_stride : nullptr;
    LevelSums<A> near{}, far{};
    if constexpr (C > 0) {  // no mode channels here
      A converted[C];
      for (int c = 0; c < C; ++c) converted[c] = static_cast<A>(g[c * grad.stride_c]);
      one_level(texels, target, taps.near, i, level.l0, band, A(1) - level.t, coordinates, converted, C, near);
      if (blended || look_far)
        one_level(texels, blended ? target : nullptr, taps.far, i, level.l1, band, level.t, look_far, converted, C, far);
    } else {
      constexpr int64_t kChunk = 64;
      alignas(64) A converted[kChunk];
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
        one_level(texels + c0, target ? target + c0 : nullptr, taps.near, i, level.l0, band, A(1) - level.t, coordinates, chunk,
                  c1 - c0, near);
        if (blended || look_far) {
          one_level(texels + c0, target && blended ? target + c0 : nullptr, taps.far, i, level.l1, band, level.t, look_far, chunk,
                    c1 - c0, far);
        }
      }
    }
    if (!coordinates) return;  // a query has one owner: what is stored need not be read first, and those lie far apart
    const int64_t at = b * count + n;
    if (grad_uv) {
      grad_uv[2 * at] = d_u(level, near, far);
      grad_uv[2 * at + 1] = d_v(level, near, far);
    }
    if (grad_lod && level.slope != A(0)) grad_lod[at] = far.value - near.value;
  }

  // Some channels of one level: sums for the coordinates, and the scatter of share * g. No tap is outside the picture.
  TEXVLM_HD static void one_level(const T* texels, A* target, const LevelTaps<A>& taps, int i, int level, const Band& band,
                                  A share, bool coordinates, const A* g, int64_t wide, LevelSums<A>& sums) {
    const int64_t step = taps.step[i];
    const A x1 = taps.fx[i], x0 = A(1) - x1, y1 = taps.fy[i], y0 = A(1) - y1;
    if (coordinates) {
      const T *top = texels + taps.top[i], *bottom = texels + taps.bottom[i];
      int64_t c = 0;
#if defined(TEXVLM_HAS_LANES)
      if constexpr (C == 0) {
        constexpr int N = 8;
        Lanes<A, N> value{}, dx{}, dy{};
        for (; c + N <= wide; c += N) {
          const Lanes<A, N> gc = load_lanes<A, N>(g + c);
          const Lanes<A, N> p = load_lanes<A, N>(top + c), q = load_lanes<A, N>(top + step + c) - p;
          const Lanes<A, N> r = load_lanes<A, N>(bottom + c), s = load_lanes<A, N>(bottom + step + c) - r;
          const Lanes<A, N> upper = p + x1 * q, lower = r + x1 * s;
          dx += gc * (y0 * q + y1 * s);
          dy += gc * (lower - upper);
          value += gc * (y0 * upper + y1 * lower);
        }
        for (int k = 0; k < N; ++k) {
          sums.dx += dx[k];
          sums.dy += dy[k];
          sums.value += value[k];
        }
      }
#endif
      for (; c < wide; ++c) {
        const A p = static_cast<A>(top[c]), q = static_cast<A>(top[step + c]) - p;
        const A r = static_cast<A>(bottom[c]), s = static_cast<A>(bottom[step + c]) - r;
        const A upper = p + x1 * q, lower = r + x1 * s;
        sums.dx += g[c] * (y0 * q + y1 * s);
        sums.dy += g[c] * (lower - upper);
        sums.value += g[c] * (y0 * upper + y1 * lower);
      }
    }
    if (!target) return;
    if (band.has(level, taps.y0[i])) scatter_row(target + taps.top[i], step, share * y0 * x0, share * y0 * x1, g, wide);
    if (band.has(level, taps.y1[i])) scatter_row(target + taps.bottom[i], step, share * y1 * x0, share * y1 * x1, g, wide);
  }

  // Both texels may be the same one (step 0), so the first is done before the second is read.
  TEXVLM_HD static void scatter_row(A* row, int64_t step, A w0, A w1, const A* g, int64_t wide) {
#if defined(TEXVLM_HAS_LANES)
    if constexpr (C == 3) {  // two neighbours are six values: four and two
      if (step == 3) {
        const Lanes<A, 4> first{w0 * g[0], w0 * g[1], w0 * g[2], w1 * g[0]};
        const Lanes<A, 2> rest{w1 * g[1], w1 * g[2]};
        store_lanes<A, 4>(row, load_lanes<A, 4>(row) + first);
        store_lanes<A, 2>(row + 4, load_lanes<A, 2>(row + 4) + rest);
        return;
      }
    }
#endif
    add_scaled(row, w0, g, wide);
    add_scaled(row + step, w1, g, wide);
  }

  TEXVLM_HD static void add_scaled(A* TEXVLM_RESTRICT to, A w, const A* TEXVLM_RESTRICT g, int64_t wide) {
    for (int64_t c = 0; c < (C ? C : wide); ++c) to[c] += w * g[c];
  }
#endif
};

#if defined(TEXVLM_HOST_LOOPS)
// The bands that a query touches: `slots` of them (2, or 4 where two levels are blended), -1 for none. Pictures with textures of
// their own have bands of their own.
template <class A>
struct SampleKeys {
  QueryView<A> queries;
  Levels levels;
  bool own_textures;
  int64_t count;
  Filter filter;
  Address address;

  int slots() const { return filter == Filter::trilinear && levels.count > 1 ? 4 : 2; }

  // Queries [begin, end) of all pictures.
  void operator()(const BandTable& bands, int64_t begin, int64_t end, int32_t* out) const {
    const Placing placing{level_sizes(levels), filter, address, 1, false, true};
    const int width = slots();
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
          if (y >= 0) out[0] = first + bands.of(level, y);
          continue;
        }
        out[0] = first + bands.of(taps.l0[i], taps.near.y0[i]);
        const int second = first + bands.of(taps.l0[i], taps.near.y1[i]);
        if (second != out[0]) out[1] = second;
        if (width == 2 || taps.t[i] == A(0)) continue;
        out[2] = first + bands.of(taps.l1[i], taps.far.y0[i]);
        const int fourth = first + bands.of(taps.l1[i], taps.far.y1[i]);
        if (fourth != out[2]) out[3] = fourth;
      }
      q += valid;
    }
  }
};
#endif

}  // namespace texvlm
