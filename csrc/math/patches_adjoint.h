// Adjoint of patches (patches.h): gradients of the texels, and of what places the patches.
//
// CUDA takes a thread per sample (csrc/cuda/patches.cu). The host sums what the frames receive patch by patch (`block`), and
// takes the texels band by band (bands.h): PatchKeys says which bands a patch touches, `list` takes the patches of one band in
// their order.
#pragma once

#include "patches.h"
#include "sample_adjoint.h"

namespace texvlm {

constexpr int kPatchTile = 16;  // channels handled at a time where their number is not a template constant

// The incoming gradient [B, N, C, S, S], any strides (in elements), stride 0 too.
template <class T>
struct PatchGradView {
  const T* data;
  int64_t stride[5];

  TEXVLM_HD const T* at(int64_t b, int64_t n, int i, int j) const {
    return data + b * stride[0] + n * stride[1] + i * stride[3] + j * stride[4];
  }
};

// What one patch adds to the gradients of its frame.
template <class A>
struct PatchFrameGrad {
  A u, v, lod, axes[4];
};

// Adjoint of ExtractPatches. Gradients that are not wanted have null pointers; those that are start as zeros.
template <class T, int C>
struct ExtractPatchesAdjoint {
  using A = Acc<T>;
  TextureView<const T> texture;
  PatchGrid<A> grid;
  Reducers reducers;
  PatchGradView<T> grad;
  Texels<A> texels;  // [Bt, T, C]
  A *center, *lod, *axes;

  TEXVLM_HD int64_t channels() const { return C ? C : texture.channels; }

  // At an integer LOD the blend has weight 0 but a derivative, from the right.
  TEXVLM_HD bool needs_coarse(const PatchFrame<A>& f) const { return f.level.t != A(0) || lod; }

  // What a sample adds to the gradients of its frame.
  TEXVLM_HD void add_sample(const PatchFrame<A>& f, const PatchPoint<A>& p, const PlaceGrad<A>& d, PatchFrameGrad<A>& sum) const {
    sum.u += d.u;
    sum.v += d.v;
    const A dx = d.u * grid.inverse_width, dy = d.v * grid.inverse_height;  // by the mapped offset in pixels
    if (lod) sum.lod += counted(f.level.slope, d.lod + A(0.69314718055994530942) * (dx * p.mapped_x + dy * p.mapped_y));
    sum.axes[0] += dx * p.x;
    sum.axes[1] += dx * p.y;
    sum.axes[2] += dy * p.x;
    sum.axes[3] += dy * p.y;
  }

  TEXVLM_HD bool skips(int64_t c) const { return reducers.any_mode && reducers.of(c) == Reducer::mode; }

  TEXVLM_HD void add(int64_t b, int64_t n, const PatchFrameGrad<A>& sum) const {
    const int64_t q = b * grid.count + n;
    if (center) {
      accumulate(center + 2 * q, sum.u);
      accumulate(center + 2 * q + 1, sum.v);
    }
    if (lod) accumulate(lod + q, sum.lod);
    for (int k = 0; k < 4 && axes; ++k) accumulate(axes + 4 * q + k, sum.axes[k]);
  }

#if defined(TEXVLM_HOST_LOOPS)
  // Gradients of the frames, patch by patch.
  TEXVLM_HD void block(int64_t b, int64_t n0, int64_t n1) const {
    for (int64_t n = n0; n < n1; ++n) {
      const PatchFrame<A> f = grid.frame(b, n);
      if (!f.usable) continue;
      PatchFrameGrad<A> sum{};
      if (grid.axes) {
        frame_samples(b, n, f, sum);
      } else {
        for (int j0 = 0; j0 < grid.size; j0 += kPatchColumns)
          frame_strip(b, n, f, j0, minimum(kPatchColumns, grid.size - j0), sum);
      }
      add(b, n, sum);
    }
  }

  // Sample by sample.
  TEXVLM_NOINLINE void frame_samples(int64_t b, int64_t n, const PatchFrame<A>& f, PatchFrameGrad<A>& sum) const {
    for (int k = 0; k < grid.size * grid.size; ++k) {
      const PatchPoint<A> p = grid.point(f, k / grid.size, k % grid.size);
      if (!finite(p.u) || !finite(p.v)) continue;
      const LodTaps<A> q = lod_taps(p.u, p.v, f.level, texture.levels, grid.address);
      const T* const g = grad.at(b, n, k / grid.size, k % grid.size);
      const Corners<A> near = products(b, q.near, g), far = needs_coarse(f) ? products(b, q.far, g) : Corners<A>{};
      add_sample(f, p, place_grad(q, near, far, texture.levels), sum);
    }
  }

  TEXVLM_HD Corners<A> products(int64_t b, const Bilinear<A>& q, const T* g) const {
    Corners<A> sums{};
    for (int64_t c = 0; c < channels(); ++c)
      if (!skips(c))
        add_products(sums, static_cast<A>(g[c * grad.stride[2]]), corners(texture.texel(b, 0, 0, 0) + c, channels(), q));
    return sums;
  }

  // Some columns of a patch without axes, in one level: taps as they are, sums over channels, and slopes.
  struct FrameColumns {
    int level;
    int64_t left[kPatchColumns], right[kPatchColumns];
    A w0[kPatchColumns], w1[kPatchColumns], d0[kPatchColumns], d1[kPatchColumns];
    A s00[kPatchColumns], s01[kPatchColumns], s10[kPatchColumns], s11[kPatchColumns];
    A value[kPatchColumns], dx[kPatchColumns], dy[kPatchColumns];

    template <bool kExact>
    TEXVLM_HD bool slope(int count, const AxisLerp<A>& y) {
      int known = 1;
      for (int j = 0; j < count; ++j) {
        const Slopes<A> d = slopes_by<kExact>(Corners<A>{s00[j], s01[j], s10[j], s11[j]},
                                              AxisLerp<A>{0, left[j] != right[j], w0[j], w1[j], d0[j], d1[j]}, y);
        value[j] = d.value, dx[j] = d.dx, dy[j] = d.dy;
        known &= static_cast<int>(d.known());
      }
      return known;
    }
  };

  TEXVLM_HD void frame_strip(int64_t b, int64_t n, const PatchFrame<A>& f, int j0, int count, PatchFrameGrad<A>& sum) const {
    FrameColumns all[2];
    const int used = needs_coarse(f) ? 2 : 1;
    for (int k = 0; k < used; ++k) {
      FrameColumns& x = all[k];
      x.level = k ? f.level.l1 : f.level.l0;
      for (int j = 0; j < count; ++j) {
        const AxisLerp<A> t = grid.column_taps(f, j0 + j, texture.levels, x.level);
        x.left[j] = t.i0 * channels(), x.right[j] = t.i1 * channels();
        x.w0[j] = t.w0, x.w1[j] = t.w1, x.d0[j] = t.d0, x.d1[j] = t.d1;
      }
    }
    A to_u[kPatchColumns] = {}, to_v[kPatchColumns] = {}, to_lod[kPatchColumns] = {};
    for (int i = 0; i < grid.size; ++i) {
      for (int k = 0; k < used; ++k) frame_row(b, n, f, i, j0, count, all[k]);
      for (int j = 0; j < count; ++j) {
        const Slopes<A> near{all[0].value[j], all[0].dx[j], all[0].dy[j]};
        const Slopes<A> far = used == 1 ? Slopes<A>{} : Slopes<A>{all[1].value[j], all[1].dx[j], all[1].dy[j]};
        PatchFrameGrad<A> own{};
        add_sample(f, grid.point(f, i, j0 + j), place_grad(f.level, near, far, texture.levels), own);
        to_u[j] += own.u, to_v[j] += own.v, to_lod[j] += own.lod;
      }
    }
    for (int j = 0; j < count; ++j) sum.u += to_u[j], sum.v += to_v[j], sum.lod += to_lod[j];
  }

  TEXVLM_HD void frame_row(int64_t b, int64_t n, const PatchFrame<A>& f, int i, int j0, int count, FrameColumns& x) const {
    const AxisLerp<A> y = grid.row_taps(f, i, texture.levels, x.level);
    const T *const top = texture.texel(b, x.level, y.i0, 0), *const bottom = texture.texel(b, x.level, y.i1, 0);
    const T* const g = grad.at(b, n, i, j0);
    for (int j = 0; j < count; ++j) x.s00[j] = x.s01[j] = x.s10[j] = x.s11[j] = A(0);
    if (C == 0 && !reducers.any_mode) return frame_tiles(g, top, bottom, count, y, x);
    for (int64_t c = 0; c < channels(); ++c) {
      if (skips(c)) continue;
      const T* const plane = g + c * grad.stride[2];
      for (int j = 0; j < count; ++j) {
        const A gc = static_cast<A>(plane[j * grad.stride[4]]);
        x.s00[j] += gc * static_cast<A>(top[x.left[j] + c]);
        x.s01[j] += gc * static_cast<A>(top[x.right[j] + c]);
        x.s10[j] += gc * static_cast<A>(bottom[x.left[j] + c]);
        x.s11[j] += gc * static_cast<A>(bottom[x.right[j] + c]);
      }
    }
    if (!x.template slope<false>(count, y)) x.template slope<true>(count, y);
  }

  // The same of many channels, which lie side by side in the texels: the gradient is brought into that order first.
  TEXVLM_HD void frame_tiles(const T* g, const T* top, const T* bottom, int count, const AxisLerp<A>& y, FrameColumns& x) const {
    constexpr int64_t kTile = 64;
    A tile[kPatchColumns][kTile];
    for (int64_t c0 = 0; c0 < channels(); c0 += kTile) {
      const int64_t wide = minimum(kTile, channels() - c0);
      for (int64_t c = 0; c < wide; ++c)
        for (int j = 0; j < count; ++j) tile[j][c] = static_cast<A>(g[(c0 + c) * grad.stride[2] + j * grad.stride[4]]);
      for (int j = 0; j < count; ++j) {
        Corners<A> sums{x.s00[j], x.s01[j], x.s10[j], x.s11[j]};
        const Corners<const T*> from{top + x.left[j] + c0, top + x.right[j] + c0, bottom + x.left[j] + c0,
                                     bottom + x.right[j] + c0};
        SampleLodAdjoint<T, C>::add_run(from, tile[j], wide, sums);
        x.s00[j] = sums.t00, x.s01[j] = sums.t01, x.s10[j] = sums.t10, x.s11[j] = sums.t11;
      }
    }
    if (!x.template slope<false>(count, y)) x.template slope<true>(count, y);
  }

  // What the patches with these numbers (b * N + n) give to the texels of one band.
  TEXVLM_HD void list(const int32_t* ids, int64_t many, int64_t, const Band& band) const {
    for (int64_t k = 0; k < many; ++k) {
      const int64_t b = ids[k] / grid.count, n = ids[k] - b * grid.count;
      const PatchFrame<A> f = grid.frame(b, n);
      if (!f.usable) continue;
      for (int l = 0; l < (f.level.t == A(0) ? 1 : 2); ++l) {
        const int level = l ? f.level.l1 : f.level.l0;
        const A share = l ? f.level.t : A(1) - f.level.t;
        if (band.level >= 0 && band.level != level) continue;
        if (grid.axes) {
          spread(b, n, f, level, share, band);
        } else {
          for (int j0 = 0; j0 < grid.size; j0 += kPatchColumns)
            texel_strip(b, n, f, level, share, band, j0, minimum(kPatchColumns, grid.size - j0));
        }
      }
    }
  }

  // Sample by sample.
  TEXVLM_NOINLINE void spread(int64_t b, int64_t n, const PatchFrame<A>& f, int level, A share, const Band& band) const {
    for (int k = 0; k < grid.size * grid.size; ++k) {
      const PatchPoint<A> p = grid.point(f, k / grid.size, k % grid.size);
      if (!finite(p.u) || !finite(p.v)) continue;
      const Bilinear<A> q = bilinear(p.u, p.v, texture.levels, level, grid.address);
      if (!band.has(level, q.y.i0) && !band.has(level, q.y.i1)) continue;
      const T* const g = grad.at(b, n, k / grid.size, k % grid.size);
      for (int64_t c = 0; c < channels(); ++c)
        if (!skips(c))
          scatter_corners(texels.texel(texture.levels, b, 0, 0, 0) + c, channels(), q, level, band,
                          share * static_cast<A>(g[c * grad.stride[2]]));
    }
  }

  // n columns from j0 on, row by row: the adjoint of ExtractPatches::strip, horizontally into `v`, then to both rows of texels.
  TEXVLM_HD void texel_strip(int64_t b, int64_t n, const PatchFrame<A>& f, int level, A share, const Band& band, int j0,
                             int count) const {
    PatchColumns<A> x;
    grid.run_of_columns(f, j0, count, texture.levels, level, x);
    for (int64_t c0 = 0; c0 < channels(); c0 += C ? C : kPatchTile) {
      const int tile = C ? C : static_cast<int>(minimum<int64_t>(kPatchTile, channels() - c0));
      for (int i = 0; i < grid.size; ++i) {
        const AxisLerp<A> y = settled(grid.row_taps(f, i, texture.levels, level));
        const bool above = band.has(level, y.i0), below = band.has(level, y.i1);
        if (y.w0 == A(0) || !(above || below)) continue;
        A g[kPatchColumns * (C ? C : kPatchTile)], v[kPatchSpan * (C ? C : kPatchTile)];
        const T* const from = grad.at(b, n, i, j0);
        for (int c = 0; c < (C ? C : tile); ++c) {
          const bool none = skips(c0 + c);
          const T* const plane = from + (c0 + c) * grad.stride[2];
          for (int j = 0; j < count; ++j)
            g[j * (C ? C : tile) + c] = none ? A(0) : share * static_cast<A>(plane[j * grad.stride[4]]);
        }
        columns_adjoint(x, g, v, count, tile);
        if (above) add_row(texels.texel(texture.levels, b, level, y.i0, 0) + c0, x, v, y.w0, tile);
        if (below) add_row(texels.texel(texture.levels, b, level, y.i1, 0) + c0, x, v, y.w1, tile);
      }
    }
  }

  TEXVLM_HD static void columns_adjoint(const PatchColumns<A>& x, const A* TEXVLM_RESTRICT g, A* TEXVLM_RESTRICT v, int n,
                                        int tile) {
    const int wide = n * (C ? C : tile);
    if (x.unit && x.apart == 0) {
      for (int k = 0; k < wide; ++k) v[k] = g[k];
    } else if (x.unit) {
      for (int c = 0; c < (C ? C : tile); ++c) v[c] = A(0);
      for (int k = 0; k < wide; ++k) v[(C ? C : tile) + k] = x.w1[0] * g[k];
      for (int k = 0; k < wide; ++k) v[k] += x.w0[0] * g[k];
    } else {
      for (int k = 0; k < (x.count + 1) * tile; ++k) v[k] = A(0);
      for (int j = 0; j < n; ++j) {
        A *const p = v + x.t0[j] * tile, *const q = v + x.t1[j] * tile;
        for (int c = 0; c < (C ? C : tile); ++c) p[c] += x.w0[j] * g[j * tile + c];
        for (int c = 0; c < (C ? C : tile); ++c) q[c] += x.w1[j] * g[j * tile + c];
      }
    }
  }

  TEXVLM_HD void add_row(A* TEXVLM_RESTRICT row, const PatchColumns<A>& x, const A* TEXVLM_RESTRICT v, A w, int tile) const {
    if (C > 0 && x.first >= 0) {
      row += x.first * C;
      for (int k = 0; k < x.count * C; ++k) row[k] += w * v[k];
      return;
    }
    for (int k = 0; k < x.count; ++k) {
      A* const to = row + x.at(k) * channels();
      for (int c = 0; c < tile; ++c) to[c] += w * v[k * tile + c];
    }
  }
#endif
};

#if defined(TEXVLM_HOST_LOOPS)
// The bands that a patch touches, as SampleKeys has them: its rows lie between those of its corners.
template <class A>
struct PatchKeys {
  PatchGrid<A> grid;
  Levels levels;
  bool own_textures;

  static constexpr int kPairs = 2;

  void operator()(const BandTable& bands, int64_t begin, int64_t end, int32_t* out) const {
    for (int64_t q = begin; q < end; ++q, out += 2 * kPairs) {
      const int64_t b = q / grid.count;
      const PatchFrame<A> f = grid.frame(b, q - b * grid.count);
      out[0] = out[2] = -1;
      if (!f.usable) continue;
      const int last = grid.size - 1, first = own_textures ? static_cast<int>(b) * bands.total : 0;
      A low = grid.point(f, 0, 0).v, high = low;
      bool known = finite(low);
      for (int k = 1; k < 4; ++k) {
        const A v = grid.point(f, k & 1 ? last : 0, k & 2 ? last : 0).v;
        known = known && finite(v);
        low = minimum(low, v), high = maximum(high, v);
      }
      if (!known) low = static_cast<A>(NAN);
      near_rows(bands, f.level.l0, low, high, first, out);
      if (f.level.t != A(0)) near_rows(bands, f.level.l1, low, high, first, out + 2);
    }
  }
  // With a row more on either side: rows one texel apart are placed by other roundings (axis_taps).
  void near_rows(const BandTable& bands, int level, A low, A high, int first, int32_t* out) const {
    const A row = A(1) / static_cast<A>(levels.height[level]);
    bands_between(bands, levels, level, low - row, high + row, grid.address, first, out);
  }
};
#endif

}  // namespace texvlm
