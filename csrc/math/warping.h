// Planes moved by optical flow (backward: every pixel fetches from where it came), and the change of luma that is left then.
//
// A pixel whose flow is not finite, or that is occluded, has no source: it is filled and takes no part in any gradient, or, with
// `stay`, fetches from where it is.
#pragma once

#include "filter.h"
#include "salience.h"

namespace texvlm {

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
      const AxisEnlarge<A> ty = axis_enlarge<A>(y, height, h), tx = axis_enlarge<A>(x, width, w);
      for (int c = 0; c < 2; ++c) {
        const A left = ty.w0 * flow.at(b, c, ty.i0, tx.i0) + ty.w1 * flow.at(b, c, ty.i1, tx.i0);
        const A right = ty.w0 * flow.at(b, c, ty.i0, tx.i1) + ty.w1 * flow.at(b, c, ty.i1, tx.i1);
        f[c] = (tx.w0 * left + tx.w1 * right) * scale(c);
      }
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
      for (int j = 0; j < n; ++j) source(b, y, x + j, to_y[j], to_x[j]);
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
    return occlusion.at(b, 0, (2 * y + 1) * h / (2 * height), (2 * x + 1) * w / (2 * width));
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
    for (int64_t c = c0; c < c1; ++c) {
      A value = fill;
      if (!q.hidden) {
        const auto at = [&](int i, int j) { return static_cast<A>(planes.at(b, c, i, j)); };
        // Texels of weight 0 are not read: a NaN beside the place does not matter.
        const A top = q.x.w1 == A(0) ? at(q.y.i0, q.x.i0) : q.x.w0 * at(q.y.i0, q.x.i0) + q.x.w1 * at(q.y.i0, q.x.i1);
        value = top;
        if (q.y.w1 != A(0)) {
          const A bottom = q.x.w1 == A(0) ? at(q.y.i1, q.x.i0) : q.x.w0 * at(q.y.i1, q.x.i0) + q.x.w1 * at(q.y.i1, q.x.i1);
          value = q.y.w0 * top + q.y.w1 * bottom;
        }
      }
      out[((b * channels + c) * field.height + y) * field.width + x] = static_cast<T>(value);
    }
  }

#if defined(TEXVLM_HOST_LOOPS)
  // Along one axis, of n pixels: offsets of the two texels, and the weight of the second.
  TEXVLM_HD static void taps(const A* TEXVLM_RESTRICT at, int n, int64_t size, int64_t stride, int64_t* TEXVLM_RESTRICT first,
                             int64_t* TEXVLM_RESTRICT second, A* TEXVLM_RESTRICT weight) {
    for (int j = 0; j < n; ++j) {
      const AxisLerp<A> lerp = axis_lerp_at(at[j], static_cast<int>(size), false);
      first[j] = lerp.i0 * stride, second[j] = lerp.i1 * stride, weight[j] = lerp.w1;
    }
  }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    for (int64_t x = x0; x < x1; x += kRun) {
      const int n = static_cast<int>(minimum<int64_t>(kRun, x1 - x)), column = static_cast<int>(x);
      A to_y[kRun], to_x[kRun], wy[kRun], wx[kRun];
      int64_t top[kRun], bottom[kRun], left[kRun], right[kRun];
      int32_t found[kRun];
      field.run(b, y, x, n, to_y, to_x, found);
      for (int j = 0; j < n; ++j) {
        to_y[j] = found[j] ? to_y[j] : static_cast<A>(y);
        to_x[j] = found[j] ? to_x[j] : static_cast<A>(column + j);
      }
      taps(to_y, n, field.height, planes.stride_y, top, bottom, wy);
      taps(to_x, n, field.width, planes.stride_x, left, right, wx);
      for (int64_t c = 0; c < channels; ++c) {
        const T* TEXVLM_RESTRICT from = &planes.at(b, c, 0, 0);
        T* TEXVLM_RESTRICT to = out + ((b * channels + c) * field.height + y) * field.width + x;
        for (int j = 0; j < n; ++j) {
          const A t00 = static_cast<A>(from[top[j] + left[j]]), t01 = static_cast<A>(from[top[j] + right[j]]);
          const A t10 = static_cast<A>(from[bottom[j] + left[j]]), t11 = static_cast<A>(from[bottom[j] + right[j]]);
          const A above = wx[j] == A(0) ? t00 : (A(1) - wx[j]) * t00 + wx[j] * t01;
          const A below = wx[j] == A(0) ? t10 : (A(1) - wx[j]) * t10 + wx[j] * t11;
          const A value = wy[j] == A(0) ? above : (A(1) - wy[j]) * above + wy[j] * below;
          to[j] = static_cast<T>((found[j] | static_cast<int>(field.stay)) ? value : fill);
        }
      }
    }
  }
#endif
};

// Adjoint by the planes: what each pixel scatters, plane by plane. `to` [B, C, H, W], zero-filled.
template <class T, int C>
struct WarpAdjoint {
  using A = Acc<T>;
  FlowField<A> field;
  ImageView<const T> grad;
  A* to;
  int64_t channels;

  TEXVLM_HD void pixel_of(int64_t b, int64_t c, int64_t y, int64_t x) const {
    const WarpTaps<A> q(field, b, y, x);
    if (q.hidden) return;
    const A g = static_cast<A>(grad.at(b, c, y, x));
    A* const plane = to + (b * channels + c) * field.height * field.width;
    A *const top = plane + q.y.i0 * field.width, *const bottom = plane + q.y.i1 * field.width;
    accumulate(top + q.x.i0, q.y.w0 * q.x.w0 * g);
    accumulate(top + q.x.i1, q.y.w0 * q.x.w1 * g);
    accumulate(bottom + q.x.i0, q.y.w1 * q.x.w0 * g);
    accumulate(bottom + q.x.i1, q.y.w1 * q.x.w1 * g);
  }
  // CUDA: n numbers the pixels of all planes; the host takes plane by plane, so that results do not depend on threads.
  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    const int64_t pixels = field.height * field.width, c = n / pixels, at = n - c * pixels, y = at / field.width;
    pixel_of(b, c, y, at - y * field.width);
  }
  TEXVLM_HD void block(int64_t b, int64_t c0, int64_t c1) const {
    for (int64_t c = c0; c < c1; ++c)
      for (int64_t y = 0; y < field.height; ++y)
        for (int64_t x = 0; x < field.width; ++x) pixel_of(b, c, y, x);
  }
};

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
    A along = 0, down = 0;
    for (int64_t c = 0; c < channels && q.moved; ++c) {
      const A g = static_cast<A>(grad.at(b, c, y, x));
      const A t00 = static_cast<A>(planes.at(b, c, q.y.i0, q.x.i0)), t01 = static_cast<A>(planes.at(b, c, q.y.i0, q.x.i1)),
              t10 = static_cast<A>(planes.at(b, c, q.y.i1, q.x.i0)), t11 = static_cast<A>(planes.at(b, c, q.y.i1, q.x.i1));
      along += g * (q.y.w0 * (t01 - t00) + q.y.w1 * (t11 - t10));
      down += g * (q.x.w0 * (t10 - t00) + q.x.w1 * (t11 - t01));
    }
    A* const out = to + ((b * field.height + y) * field.width + x) * 2;
    out[0] = along, out[1] = down;
  }
};

// Second half: from the pixels to the flow's own grid, out [B, 2, h, w].
template <class T, int C>
struct FlowFieldAdjoint {
  EnlargeAdjoint<T> from;
  T scale_x, scale_y;
  T* out;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    T sum[2] = {T(0), T(0)};
    if (from.fine_h == from.h && from.fine_w == from.w) {
      const T* const at = from.grad + ((b * from.h + y) * from.w + x) * 2;
      sum[0] = at[0], sum[1] = at[1];
    } else {
      from.at(b, y, x, sum);
    }
    out[((b * 2 + 0) * from.h + y) * from.w + x] = sum[0] * scale_x;
    out[((b * 2 + 1) * from.h + y) * from.w + x] = sum[1] * scale_y;
  }
};

// |a - b| of two planes [B, H, W].
template <class T, int C>
struct AbsoluteDifference {
  const Acc<T>*a, *b;
  T* out;
  int64_t height, width;

  TEXVLM_HD void operator()(int64_t n, int64_t y, int64_t x, int64_t, int64_t) const {
    const int64_t at = (n * height + y) * width + x;
    out[at] = static_cast<T>(std::abs(a[at] - b[at]));
  }
};

}  // namespace texvlm
