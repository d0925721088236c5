// Planes moved by optical flow (backward: every pixel fetches from where it came), and the change of luma that is left then.
//
// A pixel whose flow is not finite, or that is occluded, has no source: it is filled and takes no part in any gradient, or, with
// `stay`, fetches from where it is.
#pragma once

#include "bands.h"
#include "salience.h"
#include "slopes.h"

namespace texvlm {

template <class T>
TEXVLM_HD Corners<Acc<T>> corners_at(const ImageView<const T>& planes, int64_t b, int64_t c, const AxisLerp<Acc<T>>& x,
                                     const AxisLerp<Acc<T>>& y) {
  const auto at = [&](int i, int j) { return static_cast<Acc<T>>(planes.at(b, c, i, j)); };
  return {at(y.i0, x.i0), at(y.i0, x.i1), at(y.i1, x.i0), at(y.i1, x.i1)};
}

// Flow [B, 2, h, w] in pixels of its own grid, read bilinearly at the pixels of height x width planes, and what is occluded
// [B, h, w] (null: nothing), read at the nearest.
template <class A>
struct FlowField {
  ImageView<const A> flow;
  ImageView<const bool> occlusion;
  int64_t h, w, height, width;
  bool stay;

  // Where pixel (y, x) of the planes comes from, in their pixels.
  TEXVLM_HD void source(int64_t b, int64_t y, int64_t x, A& to_y, A& to_x) const {
    A f[2];
    if (h == height && w == width) {
      for (int c = 0; c < 2; ++c) f[c] = flow.at(b, c, y, x);
    } else {
      const AxisLerp<A> ty = axis_centre<A>(y, height, h), tx = axis_centre<A>(x, width, w);
      for (int c = 0; c < 2; ++c) f[c] = blend(corners_at(flow, b, c, tx, ty), tx.w0, tx.w1, ty.w0, ty.w1) * scale(c);
    }
    to_x = static_cast<A>(x) + f[0], to_y = static_cast<A>(y) + f[1];
  }
  // The same of n pixels of a row, and which of them have a source.
  TEXVLM_HD void run(int64_t b, int64_t y, int64_t x, int n, A* TEXVLM_RESTRICT to_y, A* TEXVLM_RESTRICT to_x,
                     int32_t* TEXVLM_RESTRICT found) const {
    if (h == height && w == width) {
      const A *TEXVLM_RESTRICT along = &flow.at(b, 0, y, x), *TEXVLM_RESTRICT down = &flow.at(b, 1, y, x);
      const int64_t step = flow.stride_x;
      const int first = static_cast<int>(x);
      for (int j = 0; j < n; ++j) {
        to_x[j] = static_cast<A>(first + j) + along[j * step];
        to_y[j] = static_cast<A>(y) + down[j * step];
      }
    } else {
      EnlargedRun<A> taps;
      taps.set(y, x, n, height, width, h, w);
      for (int c = 0; c < 2; ++c) {
        const A *TEXVLM_RESTRICT p = &flow.at(b, c, taps.y.i0, 0), *TEXVLM_RESTRICT q = &flow.at(b, c, taps.y.i1, 0);
        A* TEXVLM_RESTRICT const to = c == 0 ? to_x : to_y;
        const A by = scale(c);
        for (int j = 0; j < n; ++j) {
          const int64_t l = taps.i0[j] * flow.stride_x, r = taps.i1[j] * flow.stride_x;
          const A to_there =
              blend(Corners<A>{p[l], p[r], q[l], q[r]}, A(1) - taps.weight[j], taps.weight[j], taps.y.w0, taps.y.w1);
          to[j] = static_cast<A>(static_cast<int>(c == 0 ? x + j : y)) + to_there * by;
        }
      }
    }
    for (int j = 0; j < n; ++j) found[j] = finite(to_y[j]) & finite(to_x[j]);
    if (occlusion.data)
      for (int j = 0; j < n; ++j) found[j] &= !occluded(b, y, x + j);
  }
  // Pixels of the planes per pixel of the flow, along x (0) and y (1).
  TEXVLM_HD A scale(int c) const {
    return static_cast<A>(static_cast<double>(c == 0 ? width : height) / static_cast<double>(c == 0 ? w : h));
  }
  TEXVLM_HD bool occluded(int64_t b, int64_t y, int64_t x) const {
    if (!occlusion.data) return false;
    if (h == height && w == width) return occlusion.at(b, 0, y, x);
    return occlusion.at(b, 0, nearest_centre(y, height, h), nearest_centre(x, width, w));
  }
};

// The four texels that a pixel fetches from.
template <class A>
struct WarpTaps {
  AxisLerp<A> x, y;
  bool moved, hidden;

  TEXVLM_HD WarpTaps(const FlowField<A>& field, int64_t b, int64_t row, int64_t column) {
    A to_y, to_x;
    field.source(b, row, column, to_y, to_x);
    moved = finite(to_y) && finite(to_x) && !field.occluded(b, row, column);
    hidden = !moved && !field.stay;
    x = axis_lerp_at(moved ? to_x : static_cast<A>(column), static_cast<int>(field.width), false);
    y = axis_lerp_at(moved ? to_y : static_cast<A>(row), static_cast<int>(field.height), false);
  }
};

#if defined(TEXVLM_HOST_LOOPS)
// The same of n pixels of a row, settled: all but the hidden ones are shown; wx, wy: the weights of x1, y1.
template <class A>
struct WarpRun {
  int y0[kRun], y1[kRun], x0[kRun], x1[kRun];
  A wy[kRun], wx[kRun];
  int32_t shown[kRun];

  TEXVLM_HD void place(const FlowField<A>& field, int64_t b, int64_t y, int64_t x, int n) {
    A to_y[kRun], to_x[kRun];
    field.run(b, y, x, n, to_y, to_x, shown);
    const int column = static_cast<int>(x);
    for (int j = 0; j < n; ++j) {
      to_y[j] = shown[j] ? to_y[j] : static_cast<A>(y);
      to_x[j] = shown[j] ? to_x[j] : static_cast<A>(column + j);
      shown[j] |= static_cast<int>(field.stay);
    }
    axis(to_y, n, field.height, y0, y1, wy);
    axis(to_x, n, field.width, x0, x1, wx);
  }
  TEXVLM_HD static void axis(const A* TEXVLM_RESTRICT at, int n, int64_t size, int* TEXVLM_RESTRICT first,
                             int* TEXVLM_RESTRICT second, A* TEXVLM_RESTRICT weight) {
    for (int j = 0; j < n; ++j) {
      const AxisLerp<A> p = settled(axis_lerp_at(at[j], static_cast<int>(size), false));
      first[j] = p.i0, second[j] = p.i1, weight[j] = p.w1;
    }
  }
};
#endif

template <class T, int C>
struct Warp {
  using A = Acc<T>;
  ImageView<const T> planes;
  FlowField<A> field;
  T* out;  // [B, C, H, W]
  int64_t channels;
  A fill;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    const WarpTaps<A> q(field, b, y, x);
    const AxisLerp<A> tx = settled(q.x), ty = settled(q.y);
    for (int64_t c = c0; c < c1; ++c) {
      const A value = q.hidden ? fill : blend(corners_at(planes, b, c, tx, ty), tx.w0, tx.w1, ty.w0, ty.w1);
      out[((b * channels + c) * field.height + y) * field.width + x] = static_cast<T>(value);
    }
  }

#if defined(TEXVLM_HOST_LOOPS)
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    for (int64_t x = x0; x < x1; x += kRun) {
      const int n = static_cast<int>(minimum<int64_t>(kRun, x1 - x));
      WarpRun<A> q;
      q.place(field, b, y, x, n);
      int64_t top[kRun], bottom[kRun], left[kRun], right[kRun];
      for (int j = 0; j < n; ++j) {
        top[j] = q.y0[j] * planes.stride_y, bottom[j] = q.y1[j] * planes.stride_y;
        left[j] = q.x0[j] * planes.stride_x, right[j] = q.x1[j] * planes.stride_x;
      }
      for (int64_t c = 0; c < channels; ++c) {
        const T* TEXVLM_RESTRICT from = &planes.at(b, c, 0, 0);
        T* TEXVLM_RESTRICT to = out + ((b * channels + c) * field.height + y) * field.width + x;
        for (int j = 0; j < n; ++j) {
          const Corners<A> v{static_cast<A>(from[top[j] + left[j]]), static_cast<A>(from[top[j] + right[j]]),
                             static_cast<A>(from[bottom[j] + left[j]]), static_cast<A>(from[bottom[j] + right[j]])};
          const A value = blend(v, A(1) - q.wx[j], q.wx[j], A(1) - q.wy[j], q.wy[j]);
          to[j] = static_cast<T>(q.shown[j] ? value : fill);
        }
      }
    }
  }
#endif
};

// Adjoint by the planes: what each pixel scatters. `to` [B, C, H, W]. On CUDA n numbers the pixels of all planes. The host goes
// by bands (bands.h) of each plane: WarpRows says which rows the runs of pixels touch, `list` takes those of a band in their
// order.
template <class T, int C>
struct WarpAdjoint {
  using A = Acc<T>;
  FlowField<A> field;
  ImageView<const T> grad;
  A* to;
  int64_t channels;

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    const int64_t pixels = field.height * field.width, c = n / pixels, at = n - c * pixels, y = at / field.width;
    const int64_t x = at - y * field.width;
    const WarpTaps<A> q(field, b, y, x);
    if (q.hidden) return;
    const AxisLerp<A> tx = settled(q.x), ty = settled(q.y);
    add(to + (b * channels + c) * pixels, static_cast<A>(grad.at(b, c, y, x)), ty.i0, tx.i0, tx.i1, ty.w0 * tx.w0, ty.w0 * tx.w1);
    add(to + (b * channels + c) * pixels, static_cast<A>(grad.at(b, c, y, x)), ty.i1, tx.i0, tx.i1, ty.w1 * tx.w0, ty.w1 * tx.w1);
  }
  TEXVLM_HD void add(A* plane, A g, int64_t y, int64_t x0, int64_t x1, A w0, A w1) const {
    accumulate(plane + y * field.width + x0, w0 * g);
    accumulate(plane + y * field.width + x1, w1 * g);
  }

#if defined(TEXVLM_HOST_LOOPS)
  // ids: of runs of kRun pixels, row by row, of all planes.
  TEXVLM_HD void list(const int32_t* ids, int64_t many, int64_t, const Band& band) const {
    const int64_t a_row = (field.width + kRun - 1) / kRun, a_plane = a_row * field.height;
    for (int64_t k = 0; k < many; ++k) {
      const int64_t p = ids[k] / a_plane, b = p / channels, c = p - b * channels;
      const int64_t y = (ids[k] - p * a_plane) / a_row, x = (ids[k] - p * a_plane - y * a_row) * kRun;
      const int n = static_cast<int>(minimum<int64_t>(kRun, field.width - x));
      WarpRun<A> q;
      q.place(field, b, y, x, n);
      A* const plane = to + p * field.height * field.width;
      for (int j = 0; j < n; ++j) {
        if (!q.shown[j]) continue;
        const A g = static_cast<A>(grad.at(b, c, y, x + j)), x1 = q.wx[j], x0 = A(1) - x1, y1 = q.wy[j], y0 = A(1) - y1;
        if (band.has(0, q.y0[j])) add(plane, g, q.y0[j], q.x0[j], q.x1[j], y0 * x0, y0 * x1);
        if (band.has(0, q.y1[j])) add(plane, g, q.y1[j], q.x0[j], q.x1[j], y1 * x0, y1 * x1);
      }
    }
  }
#endif
};

#if defined(TEXVLM_HOST_LOOPS)
// The first and the last row of the planes that the pixels of a run read, -1 where they read none: out [B, runs, 2].
template <class A>
struct WarpRows {
  FlowField<A> field;
  int32_t* out;

  TEXVLM_HD static int64_t runs(int64_t height, int64_t width) { return (width + kRun - 1) / kRun * height; }
  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    const int64_t a_row = (field.width + kRun - 1) / kRun, y = n / a_row, x = (n - y * a_row) * kRun;
    const int count = static_cast<int>(minimum<int64_t>(kRun, field.width - x)), all = static_cast<int>(field.height);
    WarpRun<A> q;
    q.place(field, b, y, x, count);
    int first = all, last = -1;
    for (int j = 0; j < count; ++j) {
      first = minimum(first, q.shown[j] ? q.y0[j] : all);
      last = maximum(last, q.shown[j] ? q.y1[j] : -1);
    }
    int32_t* const to = out + (b * runs(field.height, field.width) + n) * 2;
    to[0] = last < 0 ? -1 : first, to[1] = last;
  }
};
#endif

// Adjoint by the flow, first half: what the displacement of each pixel receives, in pixels of the planes. `to` [B, H, W, 2].
template <class T, int C>
struct WarpFlowAdjoint {
  using A = Acc<T>;
  ImageView<const T> planes;
  FlowField<A> field;
  ImageView<const T> grad;
  A* to;
  int64_t channels;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const WarpTaps<A> q(field, b, y, x);
    Corners<A> sums{};
    for (int64_t c = 0; c < channels && q.moved; ++c)
      add_products(sums, static_cast<A>(grad.at(b, c, y, x)), corners_at(planes, b, c, q.x, q.y));
    const Slopes<A> d = slopes(sums, q.x, q.y);
    A* const out = to + ((b * field.height + y) * field.width + x) * 2;
    out[0] = d.dx, out[1] = d.dy;
  }
};

// Second half: from the pixels to the flow's own grid, out [B, 2, h, w].
template <class T, int C>
struct FlowFieldAdjoint {
  using From = EnlargeAdjoint<T, 2>;
  From from;
  T scale_x, scale_y;
  T* out;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const { gather_texel(*this, b, y, x); }
  TEXVLM_HD int64_t plane(int64_t b, int64_t, int64_t) const { return b; }
  TEXVLM_HD void store(int64_t b, int64_t y, int64_t x, const T* sums) const {
    out[((b * 2 + 0) * from.h + y) * from.w + x] = sums[0] * scale_x;
    out[((b * 2 + 1) * from.h + y) * from.w + x] = sums[1] * scale_y;
  }
};

// Motion from one plane of luma [B, H, W] to another.
template <class T, int C>
struct MotionBetween {
  const Acc<T>*a, *b;
  T* out;
  int64_t height, width;

  TEXVLM_HD void operator()(int64_t n, int64_t y, int64_t x, int64_t, int64_t) const {
    const int64_t at = (n * height + y) * width + x;
    out[at] = static_cast<T>(motion_of(a[at], b[at]));
  }
};

}  // namespace texvlm
