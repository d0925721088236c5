// Square patches around given centres. Sample (i, j), row i and column j of a patch of size S, lies ((j, i) -
// (S - 1) / 2) * 2^lod level-0 pixels off the centre, mapped by `axes` where there are some, and is a
// trilinear fetch at `lod`.
//
// Without axes a patch is separable: columns need taps once, rows need taps once. Where the samples are one
// texel apart (an integer LOD of a size that halves exactly) the taps are consecutive texels with one weight,
// so rows are read as they lie in memory.
#pragma once

#include <type_traits>

#include "sample.h"

namespace texvlm {

// Where a patch lies: its centre in uv, its levels, and the map from sample offsets to uv.
template <class A>
struct PatchFrame {
  bool usable;  // all of it finite
  LevelLerp<A> level;
  A u, v;
  A spacing;  // 2^lod, level-0 pixels
  A axes[4];  // row-major: columns are the images of the x and y unit vectors
};

// A sample: its offset from the centre in level-0 pixels before the axes, after them, and where that is.
template <class A>
struct PatchPoint {
  A x, y, mapped_x, mapped_y, u, v;
};

constexpr int kPatchColumns = 16;                  // columns handled at a time on the host
constexpr int kPatchSpan = 2 * kPatchColumns + 2;  // texels that they read in one level: at most 2 apart; the last is zero
constexpr int kPatchTile = 16;                     // channels handled at a time where their number is not a template constant

// The taps of kPatchColumns columns in one level: the texels that they read, and where in that list each
// column finds its two.
template <class A>
struct PatchColumns {
  bool unit;     // column j reads the texels j and j + 1 of the list, all columns with the same weights
  bool outside;  // some column reads none: the zero behind the list stands in for its texels
  int count;     // texels in the list
  int first;     // of consecutive texels; -1: they are scattered
  int texel[kPatchSpan];
  int t0[kPatchColumns], t1[kPatchColumns];
  A w0[kPatchColumns], w1[kPatchColumns];
};

// One axis of samples that lie one texel apart, n of them from sample k0 on: true, their first texel and
// weights where all of them lie inside the level.
template <class A>
TEXVLM_HD bool unit_taps(A center, A middle, int k0, int n, int64_t size, int& first, A& w1) {
  const A x = center * static_cast<A>(size) - (middle + A(0.5)) + static_cast<A>(k0);
  if (!(x >= A(0) && x + static_cast<A>(n - 1) <= static_cast<A>(size - 1))) return false;
  const A base = floor_of(x);
  first = static_cast<int>(base);
  w1 = x - base;
  return w1 == A(0) || first + n < size;
}

// All patches of a call.
template <class A>
struct PatchGrid {
  const A *center, *lod, *axes;  // [B, N, 2] uv, [B, N], [B, N, 2, 2] or null
  int64_t count;                 // N
  int size;                      // S
  int levels;
  Address address;
  A inverse_width, inverse_height;  // of level 0

  TEXVLM_HD PatchFrame<A> frame(int64_t b, int64_t n) const {
    const int64_t q = b * count + n;
    PatchFrame<A> f{};
    f.u = center[2 * q];
    f.v = center[2 * q + 1];
    f.usable = finite(f.u) && finite(f.v) && finite(lod[q]);
    for (int k = 0; k < 4; ++k) {
      f.axes[k] = axes ? axes[4 * q + k] : A(k % 3 == 0);
      f.usable = f.usable && finite(f.axes[k]);
    }
    if (f.usable) {  // the conversion of a LOD to int needs a finite one
      f.level = level_lerp(lod[q], levels);
      f.spacing = exp2_of(f.level.t) * static_cast<A>(int64_t{1} << f.level.l0);
    }
    return f;
  }

  TEXVLM_HD A middle() const { return static_cast<A>(size - 1) * A(0.5); }

  TEXVLM_HD A u_of(const PatchFrame<A>& f, int j) const {
    return f.u + (static_cast<A>(j) - middle()) * f.spacing * inverse_width;
  }
  TEXVLM_HD A v_of(const PatchFrame<A>& f, int i) const {
    return f.v + (static_cast<A>(i) - middle()) * f.spacing * inverse_height;
  }

  TEXVLM_HD PatchPoint<A> point(const PatchFrame<A>& f, int i, int j) const {
    const A x = (static_cast<A>(j) - middle()) * f.spacing, y = (static_cast<A>(i) - middle()) * f.spacing;
    const A mx = axes ? f.axes[0] * x + f.axes[1] * y : x, my = axes ? f.axes[2] * x + f.axes[3] * y : y;
    return {x, y, mx, my, f.u + mx * inverse_width, f.v + my * inverse_height};
  }

  // Whether samples lie exactly one texel apart in the one level that they read.
  TEXVLM_HD static bool unit(const PatchFrame<A>& f, const int64_t* size) {
    return f.level.t == A(0) && size[f.level.l0] << f.level.l0 == size[0];
  }

  // Settled taps of row i of a patch without axes, in one level.
  TEXVLM_HD AxisLerp<A> row_taps(const PatchFrame<A>& f, int i, const Levels& levels, int level) const {
    const int height = static_cast<int>(levels.height[level]);
    int y0;
    A w1;
    if (unit(f, levels.height) && unit_taps(f.v, middle(), i, 1, height, y0, w1))
      return settled(AxisLerp<A>{y0, y0 + 1, A(1) - w1, w1, A(-1), A(1)});
    return settled(axis_lerp(v_of(f, i), height, address));
  }

  // Settled taps of its columns j0 .. j0 + n - 1.
  TEXVLM_HD void column_taps(const PatchFrame<A>& f, int j0, int n, const Levels& levels, int level, PatchColumns<A>& x) const {
    const int width = static_cast<int>(levels.width[level]);
    A w1 = 0;
    x.outside = false;
    x.unit = unit(f, levels.width) && unit_taps(f.u, middle(), j0, n, width, x.first, w1);
    if (x.unit) {
      const bool whole = w1 == A(0);
      x.w0[0] = whole ? A(0.5) : A(1) - w1;
      x.w1[0] = whole ? A(0.5) : w1;
      x.count = whole ? n : n + 1;
      return;
    }
    int low = width, high = 0;
    for (int j = 0; j < n; ++j) {
      const AxisLerp<A> t = settled(axis_lerp(u_of(f, j0 + j), width, address));
      x.t0[j] = t.i0, x.t1[j] = t.i1, x.w0[j] = t.w0, x.w1[j] = t.w1;
      low = minimum(low, minimum(t.i0, t.i1));
      high = maximum(high, maximum(t.i0, t.i1));
    }
    const bool consecutive = high - low + 1 < kPatchSpan;
    x.first = consecutive ? low : -1;
    x.count = consecutive ? high - low + 1 : 2 * n;
    for (int j = 0; j < n; ++j) {
      const bool none = x.w0[j] == A(0);
      x.outside |= none;
      if (!consecutive) x.texel[2 * j] = x.t0[j], x.texel[2 * j + 1] = x.t1[j];
      x.t0[j] = none ? x.count : consecutive ? x.t0[j] - low : 2 * j;
      x.t1[j] = none ? x.count : consecutive ? x.t1[j] - low : 2 * j + 1;
    }
  }
};

// v = w0 * top + w1 * bottom, n values; N: n where known at compile time.
template <int N, class A, class T>
TEXVLM_HD void lerp_run(A* TEXVLM_RESTRICT v, const T* TEXVLM_RESTRICT top, const T* TEXVLM_RESTRICT bottom, A w0, A w1, int n) {
  for (int k = 0; k < (N ? N : n); ++k) v[k] = w0 * static_cast<A>(top[k]) + w1 * static_cast<A>(bottom[k]);
}

// Interleaved columns [n, tile] to planes: out[c * plane + j]. N, C: n and tile where known at compile time.
template <int N, int C, class A, class T>
TEXVLM_HD void to_planes(T* TEXVLM_RESTRICT out, const A* TEXVLM_RESTRICT in, int64_t plane, int n, int tile) {
  for (int c = 0; c < (C ? C : tile); ++c)
    for (int j = 0; j < (N ? N : n); ++j) out[c * plane + j] = static_cast<T>(in[j * (C ? C : tile) + c]);
}

// texture -> out [B, N, C, S, S]. The host runs block() for patches; CUDA has csrc/cuda/patches.cu.
template <class T, int C>
struct ExtractPatches {
  using A = Acc<T>;
  TextureView<const T> texture;
  PatchGrid<A> grid;
  Reducers reducers;
  T* out;

  TEXVLM_HD int64_t plane() const { return static_cast<int64_t>(grid.size) * grid.size; }
  TEXVLM_HD int64_t channels() const { return C ? C : texture.channels; }
  TEXVLM_HD T* patch(int64_t b, int64_t n) const { return out + (b * grid.count + n) * channels() * plane(); }

  // Sample k of patch n, any axes.
  TEXVLM_HD void one(int64_t b, int64_t n, const PatchFrame<A>& f, int k, int64_t c0, int64_t c1) const {
    T* o = patch(b, n) + k;
    const PatchPoint<A> p = grid.point(f, k / grid.size, k % grid.size);
    if (!f.usable || !finite(p.u) || !finite(p.v)) {
      for (int64_t c = c0; c < c1; ++c) o[c * plane()] = static_cast<T>(A(NAN));
      return;
    }
    const T* texels = texture.texel(b, 0, 0, 0);
    const LodTaps<A> q = settled_taps(p.u, p.v, f.level, texture.levels, grid.address);
    for (int64_t c = c0; c < c1; ++c) o[c * plane()] = static_cast<T>(fetch(texels + c, channels(), q));
    if (reducers.any_mode) nearest(texels, f, p.u, p.v, o, c0, c1);
  }

  // Channels with the reducer mode: the nearest texel of the nearest level.
  TEXVLM_HD void nearest(const T* texels, const PatchFrame<A>& f, A u, A v, T* o, int64_t c0, int64_t c1) const {
    const int level = nearest_level(static_cast<A>(f.level.l0) + f.level.t, grid.levels);
    const int64_t width = texture.levels.width[level];
    const int x = axis_nearest(u, static_cast<int>(width), grid.address);
    const int y = axis_nearest(v, static_cast<int>(texture.levels.height[level]), grid.address);
    const T* in = texels + (texture.levels.offset[level] + y * width + x) * channels();
    for (int64_t c = c0; c < c1; ++c)
      if (reducers.of(c) == Reducer::mode) o[c * plane()] = x < 0 || y < 0 ? static_cast<T>(A(0)) : in[c];
  }

  TEXVLM_HD void block(int64_t b, int64_t n0, int64_t n1) const {
    const int samples = static_cast<int>(plane());
    for (int64_t n = n0; n < n1; ++n) {
      const PatchFrame<A> f = grid.frame(b, n);
      if (!f.usable || grid.axes) {
        for (int k = 0; k < samples; ++k) one(b, n, f, k, 0, channels());
        continue;
      }
      const bool smooth = !(reducers.uniform && reducers.any_mode);
      for (int j0 = 0; smooth && j0 < grid.size; j0 += kPatchColumns) {
        if (grid.size - j0 >= kPatchColumns) {
          strip<kPatchColumns>(b, f, patch(b, n), j0, kPatchColumns);
        } else {
          strip<0>(b, f, patch(b, n), j0, grid.size - j0);
        }
      }
      if (!reducers.any_mode) continue;
      for (int k = 0; k < samples; ++k)
        nearest(texture.texel(b, 0, 0, 0), f, grid.u_of(f, k % grid.size), grid.v_of(f, k / grid.size), patch(b, n) + k, 0,
                channels());
    }
  }

  // n columns from j0 on, all rows, of a patch without axes.
  template <int N>
  TEXVLM_HD void strip(int64_t b, const PatchFrame<A>& f, T* patch, int j0, int n) const {
    const int used = f.level.t == A(0) ? 1 : 2;
    PatchColumns<A> columns[2];
    grid.column_taps(f, j0, n, texture.levels, f.level.l0, columns[0]);
    if (used == 2) grid.column_taps(f, j0, n, texture.levels, f.level.l1, columns[1]);
    for (int64_t c0 = 0; c0 < channels(); c0 += C ? C : kPatchTile) {
      const int tile = C ? C : static_cast<int>(minimum<int64_t>(kPatchTile, channels() - c0));
      for (int i = 0; i < grid.size; ++i) {
        A sum[kPatchColumns * (C ? C : kPatchTile)];
        T* target = patch + c0 * plane() + static_cast<int64_t>(i) * grid.size + j0;
        const A* source = sum;
        for (int k = 0; k < used; ++k) {
          const int level = k ? f.level.l1 : f.level.l0;
          const A share = used == 1 ? A(1) : k ? f.level.t : A(1) - f.level.t;
          const AxisLerp<A> y = grid.row_taps(f, i, texture.levels, level);
          const T *top = texture.texel(b, level, y.i0, 0) + c0, *bottom = texture.texel(b, level, y.i1, 0) + c0;
          source = line<N>(columns[k], top, bottom, y.w0 * share, y.w1 * share, k > 0, sum, n, tile);
        }
        to_planes<N, C>(target, source, plane(), n, tile);
      }
    }
  }

  // One row of n columns in one level, interleaved [n, tile]: vertically first, then horizontally. Returns
  // where it lies: `sum`, or the texture itself where nothing is to be computed.
  template <int N>
  TEXVLM_HD const A* line(const PatchColumns<A>& x, const T* top, const T* bottom, A w0, A w1, bool add, A* TEXVLM_RESTRICT sum,
                          int n, int tile) const {
    A v[kPatchSpan * (C ? C : kPatchTile)];
    if (w0 == A(0)) {  // both rows are outside
      for (int k = 0; k < n * tile; ++k) sum[k] = add ? sum[k] : A(0);
      return sum;
    }
    if (C > 0 && x.unit) {
      const T *t = top + x.first * C, *d = bottom + x.first * C;
      if (x.count == n) {
        if constexpr (std::is_same_v<T, A>) {
          if (t == d && w0 == A(0.5) && w1 == A(0.5)) return t;
        }
        lerp_run<N * C>(sum, t, d, w0, w1, n * C);
      } else {
        lerp_run<N ? (N + 1) * C : 0>(v, t, d, w0, w1, (n + 1) * C);
        lerp_run<N * C>(sum, v, v + C, x.w0[0], x.w1[0], n * C);
      }
      return sum;
    }
    const int64_t pitch = channels();
    for (int c = 0; c < tile && x.outside; ++c) v[x.count * tile + c] = A(0);
    if (C > 0 && x.first >= 0) {
      lerp_run<0>(v, top + x.first * C, bottom + x.first * C, w0, w1, x.count * C);
    } else {
      for (int k = 0; k < x.count; ++k) {
        const int64_t at = (x.first >= 0 ? x.first + k : x.texel[k]) * pitch;
        lerp_run<0>(v + k * tile, top + at, bottom + at, w0, w1, tile);
      }
    }
    for (int j = 0; j < n; ++j) {
      const A* TEXVLM_RESTRICT p = v + (x.unit ? j : x.t0[j]) * tile;
      const A* TEXVLM_RESTRICT q = v + (x.unit ? (x.count == n ? j : j + 1) : x.t1[j]) * tile;
      const A a = x.w0[x.unit ? 0 : j], d = x.w1[x.unit ? 0 : j];
      for (int c = 0; c < (C ? C : tile); ++c) {
        const A value = a * p[c] + d * q[c];
        sum[j * tile + c] = add ? sum[j * tile + c] + value : value;
      }
    }
    return sum;
  }
};

}  // namespace texvlm
