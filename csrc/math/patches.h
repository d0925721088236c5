// Square patches around given centres. Sample (i, j), row i and column j of a patch of size S, lies ((j, i) -
// (S - 1) / 2) * 2^lod level-0 pixels off the centre, mapped by `axes` where there are some, and is a
// trilinear fetch at `lod`.
//
// Without axes a patch is separable: columns need taps once, rows need taps once. Where the samples are one
// texel apart (an integer LOD of a size that halves exactly) the taps are consecutive texels with one weight,
// so rows are read as they lie in memory.
#pragma once

#include <type_traits>

#include "lanes.h"
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

// The taps of kPatchColumns columns in one level: the texels that they read, and where in that list each
// column finds its two.
template <class A>
struct PatchColumns {
  bool unit;     // column j reads the texels j and j + 1 of the list, all columns with the same weights
  bool outside;  // some column reads none: the zero behind the list stands in for its texels
  int apart;     // of unit columns: from the first texel of one to its second; 0: they lie on the texels themselves
  int count;     // texels in the list
  int first;     // of consecutive texels; -1: they are scattered
  int texel[kPatchSpan];
  int t0[kPatchColumns], t1[kPatchColumns];
  A w0[kPatchColumns], w1[kPatchColumns];

  TEXVLM_HD int at(int t) const { return first >= 0 ? first + t : texel[t]; }  // where the list's texel t lies in its row
};

// One axis of samples that lie one texel apart, n of them from sample k0 on: true, the first texel of the first and the weight of
// everyone's second, where all of them lie inside the level. Sample k is k texels from sample 0, whose place alone is rounded.
template <class A>
TEXVLM_HD bool unit_taps(A center, A middle, int k0, int n, int64_t size, int& first, A& w1) {
  const A x = center * static_cast<A>(size) - (middle + A(0.5)), base = floor_of(x);
  if (!(x > A(-(1 << 30)) && x < static_cast<A>(size))) return false;
  w1 = x - base;
  first = static_cast<int>(base) + k0;
  return first >= 0 && first + n <= size - (w1 == A(0) ? 0 : 1);
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

  // n samples from k0 on of one axis of a patch without axes, in a level of which `sizes` has the sizes on that axis: true, the
  // taps of the first, where they lie one texel apart and all inside.
  TEXVLM_HD bool unit_axis(const PatchFrame<A>& f, A center, const int64_t* sizes, int level, int k0, int n,
                           AxisLerp<A>& first) const {
    int at;
    A w1;
    if (!(level == f.level.l0 && unit(f, sizes) && unit_taps(center, middle(), k0, n, sizes[level], at, w1))) return false;
    const int next = at + 1 < sizes[level]      ? at + 1
                     : address == Address::wrap ? 0
                                                : at;  // for slopes: its weight is 0 at the end
    first = {at, next, A(1) - w1, w1, A(-1), address == Address::border && next == at ? A(0) : A(1)};
    return true;
  }

  // Taps of sample k of an axis, which lies at `where`, in one level: of whatever reads or writes it, on any device.
  TEXVLM_HD AxisLerp<A> axis_taps(const PatchFrame<A>& f, A center, A where, const int64_t* sizes, int level, int k) const {
    AxisLerp<A> taps;
    if (!axes && unit_axis(f, center, sizes, level, k, 1, taps)) return taps;
    return axis_lerp(where, static_cast<int>(sizes[level]), address);
  }
  TEXVLM_HD AxisLerp<A> row_taps(const PatchFrame<A>& f, int i, const Levels& levels, int level) const {
    return axis_taps(f, f.v, v_of(f, i), levels.height, level, i);
  }
  TEXVLM_HD AxisLerp<A> column_taps(const PatchFrame<A>& f, int j, const Levels& levels, int level) const {
    return axis_taps(f, f.u, u_of(f, j), levels.width, level, j);
  }

  // Of a sample of any patch.
  TEXVLM_HD Bilinear<A> taps(const PatchFrame<A>& f, const PatchPoint<A>& p, int i, int j, const Levels& levels,
                             int level) const {
    return joined(axis_taps(f, f.u, p.u, levels.width, level, j), axis_taps(f, f.v, p.v, levels.height, level, i), levels, level);
  }
  TEXVLM_HD LodTaps<A> settled_taps(const PatchFrame<A>& f, const PatchPoint<A>& p, int i, int j, const Levels& levels) const {
    return taps_of_levels(f.level, [&](int l) { return settled(taps(f, p, i, j, levels, l), levels, l); });
  }

  // Settled taps of columns j0 .. j0 + n - 1 of a patch without axes.
  TEXVLM_HD void run_of_columns(const PatchFrame<A>& f, int j0, int n, const Levels& levels, int level,
                                PatchColumns<A>& x) const {
    const int width = static_cast<int>(levels.width[level]);
    AxisLerp<A> taps;
    x.outside = false;
    x.unit = unit_axis(f, f.u, levels.width, level, j0, n, taps);
    if (x.unit) {
      taps = settled(taps);
      x.first = taps.i0;
      x.w0[0] = taps.w0, x.w1[0] = taps.w1;
      x.apart = taps.i1 - taps.i0;
      x.count = n + x.apart;
      return;
    }
    int low = width, high = 0;
    for (int j = 0; j < n; ++j) {
      const AxisLerp<A> t = settled(column_taps(f, j0 + j, levels, level));
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

// Interleaved columns [n, C] to planes: out[c * plane + j]. N: n where known at compile time.
template <int N, int C, class A, class T>
TEXVLM_HD void to_planes(T* TEXVLM_RESTRICT out, const A* TEXVLM_RESTRICT in, int64_t plane, int n) {
  for (int c = 0; c < C; ++c)
    for (int j = 0; j < (N ? N : n); ++j) out[c * plane + j] = static_cast<T>(in[j * C + c]);
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
    const int i = k / grid.size, j = k % grid.size;
    const PatchPoint<A> p = grid.point(f, i, j);
    if (!f.usable || !finite(p.u) || !finite(p.v)) {
      for (int64_t c = c0; c < c1; ++c) o[c * plane()] = static_cast<T>(A(NAN));
      return;
    }
    const T* texels = texture.texel(b, 0, 0, 0);
    const LodTaps<A> q = grid.settled_taps(f, p, i, j, texture.levels);
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
    PatchFrame<A> following = grid.frame(b, n0);
    for (int64_t n = n0; n < n1; ++n) {
      const PatchFrame<A> f = following;
      following = n + 1 < n1 ? grid.frame(b, n + 1) : PatchFrame<A>{};
      if (!f.usable || grid.axes) {
        for (int k = 0; k < samples; ++k) one(b, n, f, k, 0, channels());
        continue;
      }
      if (!(reducers.uniform && reducers.any_mode)) {
        for (int j0 = 0; j0 < grid.size; j0 += kPatchColumns) {
          const RowsAhead next = j0 == 0 ? rows_ahead(b, following) : RowsAhead{};
          if (C > 0 && grid.size - j0 >= kPatchColumns) {
            strip<C ? kPatchColumns : 0>(b, f, patch(b, n), j0, kPatchColumns, next);
          } else {
            strip<0>(b, f, patch(b, n), j0, minimum(kPatchColumns, grid.size - j0), next);
          }
        }
      }
      if (!reducers.any_mode) continue;
      for (int k = 0; k < samples; ++k)
        nearest(texture.texel(b, 0, 0, 0), f, grid.u_of(f, k % grid.size), grid.v_of(f, k / grid.size), patch(b, n) + k, 0,
                channels());
    }
  }

  // The rows of the patch that comes next, in its finer level: they are some lines each and far apart, which no processor
  // foresees.
  struct RowsAhead {
    const char* first;
    A step;                // from row to row, in texels
    int64_t pitch, bytes;  // bytes of a row; 0: nothing is worth fetching

    TEXVLM_HD void fetch(int i) const {
      const int64_t row = static_cast<int64_t>(static_cast<A>(i) * step) * pitch;
      for (int64_t at = 0; at < bytes; at += kLineBytes) TEXVLM_PREFETCH(first + row + at);
    }
  };

  TEXVLM_HD RowsAhead rows_ahead(int64_t b, const PatchFrame<A>& f) const {
    constexpr int64_t kMost = 1 << 16;  // about what the caches next to a core hold of it
    const int64_t texel = channels() * static_cast<int64_t>(sizeof(T));
    if (!f.usable || grid.size * texel < 2 * kLineBytes || plane() * texel > kMost) return {};
    const int level = f.level.l0;
    const A width = static_cast<A>(texture.levels.width[level]), height = static_cast<A>(texture.levels.height[level]);
    const A left = grid.u_of(f, 0) * width - A(0.5), right = grid.u_of(f, grid.size - 1) * width + A(0.5);
    const A top = grid.v_of(f, 0) * height - A(0.5), bottom = grid.v_of(f, grid.size - 1) * height + A(0.5);
    if (!(left >= A(0) && right < width && top >= A(0) && bottom < height)) return {};  // its rows are clamped
    const T* first = texture.texel(b, level, static_cast<int64_t>(top), static_cast<int64_t>(left));
    return {reinterpret_cast<const char*>(first), (bottom - top) / static_cast<A>(grid.size), texture.levels.width[level] * texel,
            static_cast<int64_t>(right - left + A(1)) * texel};
  }

  // n columns from j0 on, all rows, of a patch without axes. N: n where known at compile time.
  template <int N>
  TEXVLM_HD void strip(int64_t b, const PatchFrame<A>& f, T* patch, int j0, int n, const RowsAhead& next) const {
    const int used = f.level.t == A(0) ? 1 : 2;
    Crossing all[2];
    for (int k = 0; k < used; ++k) {
      const int level = k ? f.level.l1 : f.level.l0;
      grid.run_of_columns(f, j0, n, texture.levels, level, all[k].columns);
      all[k].unit_rows = grid.unit_axis(f, f.v, texture.levels.height, level, 0, grid.size, all[k].first_row);
      if (all[k].unit_rows) all[k].first_row = settled(all[k].first_row);
    }
    if constexpr (C > 0) {
      if (all[0].unit_rows && all[0].columns.unit)
        return unit_strip<N>(all[0].columns, all[0].first_row, b, f.level.l0, n, patch + j0, next);
    }
    for (int i = 0; i < grid.size; ++i) {
      next.fetch(i);
      bool inside = true;  // another texel follows on all that are read
      for (int k = 0; k < used; ++k) {
        const int level = k ? f.level.l1 : f.level.l0;
        Crossing& at = all[k];
        if (at.unit_rows && i > 0) {
          const int64_t pitch = texture.levels.width[level] * channels();
          at.top += pitch, at.bottom += pitch, ++at.lowest;
        } else {
          const A share = used == 1 ? A(1) : k ? f.level.t : A(1) - f.level.t;
          const AxisLerp<A> y = at.unit_rows ? at.first_row : settled(grid.row_taps(f, i, texture.levels, level));
          at.top = texture.texel(b, level, y.i0, 0), at.bottom = texture.texel(b, level, y.i1, 0);
          at.w0 = y.w0 * share, at.w1 = y.w1 * share;
          at.one_row = used == 1 && y.i0 == y.i1 && y.w0 == A(0.5) && y.w1 == A(0.5);
          at.lowest = maximum(y.i0, y.i1);
        }
        if (C == 0) inside &= level + 1 < texture.levels.count || at.lowest + 1 < texture.levels.height[level];
      }
      T* const to = patch + static_cast<int64_t>(i) * grid.size + j0;
      if constexpr (C > 0) {
        runs<N>(all, used, n, to);
      } else {
        channels_of(all, used, inside, n, to);
      }
    }
  }

  // Of samples that lie one texel apart both ways, in the only level that they read.
  template <int N>
  TEXVLM_HD void unit_strip(const PatchColumns<A>& x, const AxisLerp<A>& y, int64_t b, int level, int n, T* to,
                            const RowsAhead& next) const {
    const T *top = texture.texel(b, level, y.i0, x.first), *bottom = texture.texel(b, level, y.i1, x.first);
    const int64_t pitch = texture.levels.width[level] * C;
    const bool on_texels = x.apart == 0 && y.i0 == y.i1;
    for (int i = 0; i < grid.size; ++i, top += pitch, bottom += pitch, to += grid.size) {
      next.fetch(i);
      if (on_texels) {
        to_planes<N, C>(to, top, plane(), n);
      } else {
        A sum[kPatchColumns * C];
        unit_run<N>(x, top, bottom, y.w0, y.w1, n, sum);
        to_planes<N, C>(to, sum, plane(), n);
      }
    }
  }

  // Where a row of a patch and its columns meet, in one level: settled taps. Vertically first, then horizontally.
  struct Crossing {
    PatchColumns<A> columns;
    bool unit_rows;         // row i lies i texels below the first,
    AxisLerp<A> first_row;  // and these are its taps
    const T *top, *bottom;
    int lowest;    // row that is read
    A w0, w1;      // 0: both rows are outside
    bool one_row;  // it lies on the row `top`, the only one that counts

    // V: one channel, or as many in lanes as it has.
    template <class V>
    TEXVLM_HD static V read(const T* p) {
      if constexpr (std::is_same_v<V, A>) {
        return static_cast<A>(*p);
      } else {
#if defined(TEXVLM_HAS_LANES)
        return load_lanes<A, 4>(p);
#endif
      }
    }

    template <class V>
    TEXVLM_HD V vertical(int64_t at) const {
      const V t = read<V>(top + at);
      return one_row ? t : w0 * t + w1 * read<V>(bottom + at);
    }

    // Sample j, channel c and those beside it.
    template <class V>
    TEXVLM_HD V sample(int j, int64_t c, int64_t channels) const {
      const A a = columns.w0[columns.unit ? 0 : j], d = columns.w1[columns.unit ? 0 : j];
      if (a == A(0) || w0 == A(0)) return V{};
      const int left = columns.unit ? columns.first + j : columns.at(columns.t0[j]);
      const int right = columns.unit ? left + columns.apart : columns.at(columns.t1[j]);
      return a * vertical<V>(left * channels + c) + d * vertical<V>(right * channels + c);
    }
  };

  // n samples of a row, C channels: runs of texels, and of their values. N: n where known at compile time.
  template <int N>
  TEXVLM_HD void runs(const Crossing* all, int used, int n, T* to) const {
    A sum[kPatchColumns * C];
    const Crossing& at = all[0];
    if (at.columns.unit && at.w0 != A(0)) {  // never beside a second level
      const int64_t first = at.columns.first * C;
      unit_run<N>(at.columns, at.top + first, at.bottom + first, at.w0, at.w1, n, sum);
    } else {
      for (int k = 0; k < used; ++k) run<N>(all[k], k > 0, n, sum);
    }
    to_planes<N, C>(to, sum, plane(), n);
  }

  template <int N>
  TEXVLM_HD static void unit_run(const PatchColumns<A>& x, const T* TEXVLM_RESTRICT top, const T* TEXVLM_RESTRICT bottom, A w0,
                                 A w1, int n, A* TEXVLM_RESTRICT sum) {
    constexpr int kRun = 8;
    if (N == 0 && n >= kRun) {  // the last run overlaps the one before
      for (int j = 0; j < n; j += kRun) {
        const int at = minimum(j, n - kRun) * C;
        unit_run<kRun>(x, top + at, bottom + at, w0, w1, kRun, sum + at);
      }
      return;
    }
    if (x.apart == 0) return lerp_run<N * C>(sum, top, bottom, w0, w1, n * C);
    const A left = x.w0[0], right = x.w1[0];
    for (int k = 0; k < (N ? N : n) * C; ++k) {  // what lies to the right is read twice: kept, it would have to be stored
      const A a = w0 * static_cast<A>(top[k]) + w1 * static_cast<A>(bottom[k]);
      const A b = w0 * static_cast<A>(top[k + C]) + w1 * static_cast<A>(bottom[k + C]);
      sum[k] = left * a + right * b;
    }
  }

  template <int N>
  TEXVLM_HD static void run(const Crossing& at, bool add, int n, A* TEXVLM_RESTRICT sum) {
    const PatchColumns<A>& x = at.columns;
    if (at.w0 == A(0)) {  // both rows are outside
      for (int k = 0; k < n * C && !add; ++k) sum[k] = A(0);
      return;
    }
    A v[kPatchSpan * C];
    for (int c = 0; c < C && x.outside; ++c) v[x.count * C + c] = A(0);
    if (x.first >= 0) {
      lerp_run<0>(v, at.top + x.first * C, at.bottom + x.first * C, at.w0, at.w1, x.count * C);
    } else {
      for (int k = 0; k < x.count; ++k)
        lerp_run<C>(v + k * C, at.top + x.texel[k] * C, at.bottom + x.texel[k] * C, at.w0, at.w1, C);
    }
    for (int j = 0; j < n; ++j) {
      const A *TEXVLM_RESTRICT p = v + x.t0[j] * C, *TEXVLM_RESTRICT q = v + x.t1[j] * C;
      for (int c = 0; c < C; ++c) {
        const A value = x.w0[j] * p[c] + x.w1[j] * q[c];
        sum[j * C + c] = add ? sum[j * C + c] + value : value;
      }
    }
  }

  // n samples of a row, any number of channels.
  TEXVLM_HD void channels_of(const Crossing* all, int used, bool inside, int n, T* to) const {
    const int64_t count = channels();
#if defined(TEXVLM_HAS_LANES)
    if constexpr (std::is_same_v<A, float>) {  // double runs by the baseline of the processor, which has no lanes for it
      if (n >= 4 && count > 1 && (count >= 4 || inside)) return lanes_of(all, used, n, to);
    }
#endif
    for (int64_t c = 0; c < count; ++c) {
      for (int j = 0; j < n; ++j) {
        A sum = all[0].template sample<A>(j, c, count);
        if (used == 2) sum += all[1].template sample<A>(j, c, count);
        to[c * plane() + j] = static_cast<T>(sum);
      }
    }
  }

#if defined(TEXVLM_HAS_LANES)
  // Lanes are 4 channels, of 4 columns at a time, which then change places: with another number of either, the last 4 of them,
  // some once more; with 2 or 3 channels, also some of the next texel, which are not stored.
  TEXVLM_HD void lanes_of(const Crossing* all, int used, int n, T* to) const {
    for (int64_t c = 0; c < channels(); c += 4) {
      const int64_t c0 = maximum<int64_t>(0, minimum(c, channels() - 4));
      for (int j = 0; j < n; j += 4) {
        const int j0 = minimum(j, n - 4);
        Lanes<A, 4> v[4];
        four(all, used, j0, c0, v);
        transpose<A>(v[0], v[1], v[2], v[3]);
        for (int k = 0; k < 4 && c0 + k < channels(); ++k) store_lanes<A, 4>(to + (c0 + k) * plane() + j0, v[k]);
      }
    }
  }

  TEXVLM_HD void four(const Crossing* all, int used, int j, int64_t c, Lanes<A, 4>* v) const {
    using V = Lanes<A, 4>;
    const PatchColumns<A>& x = all[0].columns;
    if (x.unit && all[0].w0 != A(0)) {  // neighbours share a texel; never beside a second level
      const int64_t at = (x.first + j) * channels() + c;
      for (int k = 0; k < 4; ++k) v[k] = all[0].template vertical<V>(at + k * channels());
      if (x.apart == 0) return;
      const V last = all[0].template vertical<V>(at + 4 * channels());
      for (int k = 0; k < 4; ++k) v[k] = x.w0[0] * v[k] + x.w1[0] * (k < 3 ? v[k + 1] : last);
      return;
    }
    for (int k = 0; k < 4; ++k) v[k] = all[0].template sample<V>(j + k, c, channels());
    for (int k = 0; k < 4 && used == 2; ++k) v[k] += all[1].template sample<V>(j + k, c, channels());
  }
#endif
};

}  // namespace texvlm
