// Where the eye has been: a decaying plane to which Gaussians at points are added.
//
// out = min(1, keep base + sum_p max(w_p, 0) exp(-|pixel - p|^2 / (2 s^2))), distances in pixels, pixel centres at (i + 0.5) / n.
// The exponential is separable: one table along x and one along y for each point, and per pixel one product for each point that
// is near enough to count. A point that is not finite counts nothing.
#pragma once

#include "luma.h"
#include "reduce.h"

namespace texvlm {

// A Gaussian is cut off where it adds less than this.
template <class A>
constexpr A kNegligible = A(1e-9);
template <>
inline constexpr double kNegligible<double> = 1e-18;

template <class A>
struct SplatPoints {
  const A *points, *weights;  // [B, P, 2] uv, [B, P]
  A *along, *down;            // tables [B, P, W], [B, P, H]
  int64_t count, height, width;
  A sigma;  // in pixels

  TEXVLM_HD A x(int64_t i) const { return points[2 * i] * static_cast<A>(width) - A(0.5); }
  TEXVLM_HD A y(int64_t i) const { return points[2 * i + 1] * static_cast<A>(height) - A(0.5); }
  TEXVLM_HD A weight(int64_t i) const {
    const A w = weights[i];
    return finite(w) && finite(points[2 * i]) && finite(points[2 * i + 1]) ? maximum(w, A(0)) : A(0);
  }
  // Pixels of row y in which point i counts, and how much it does on its column.
  TEXVLM_HD A reach(int64_t i, int64_t row, int64_t& x0, int64_t& x1) const {
    const A value = weight(i) * down[i * height + row];
    x0 = x1 = 0;
    if (!(value > kNegligible<A>)) return A(0);
    const A radius = sigma * std::sqrt(A(2) * std::log(value / kNegligible<A>)), centre = x(i), last = static_cast<A>(width);
    x0 = static_cast<int64_t>(clamp(centre - radius, A(0), last));
    x1 = static_cast<int64_t>(clamp(centre + radius + A(1), A(0), last));
    return value;
  }
};

template <class T, int C>
struct SplatTables {
  SplatPoints<T> at;

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    const int64_t length = at.width + at.height, p = n / length, k = n - p * length, i = b * at.count + p;
    const bool row = k < at.width;
    const T d = row ? static_cast<T>(k) - at.x(i) : static_cast<T>(k - at.width) - at.y(i);
    const T value = finite(d) ? std::exp(-d * d / (T(2) * at.sigma * at.sigma)) : T(0);
    (row ? at.along[i * at.width + k] : at.down[i * at.height + k - at.width]) = value;
  }
};

template <class T, int C>
struct Splat {
  SplatPoints<T> at;
  ImageView<const T> base;  // channel 0, or null data
  T keep;
  T* out;  // [B, H, W]

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    T sum = base.data ? keep * pixel<T>(base.at(b, 0, y, x)) : T(0);
    for (int64_t i = b * at.count; i < (b + 1) * at.count; ++i) {
      int64_t x0, x1;
      const T value = at.reach(i, y, x0, x1);
      if (x >= x0 && x < x1) sum += value * at.along[i * at.width + x];
    }
    out[(b * at.height + y) * at.width + x] = minimum(sum, T(1));
  }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t from, int64_t end) const {
    T* TEXVLM_RESTRICT to = out + (b * at.height + y) * at.width;
    for (int64_t x = from; x < end; ++x) to[x] = base.data ? keep * pixel<T>(base.at(b, 0, y, x)) : T(0);
    for (int64_t i = b * at.count; i < (b + 1) * at.count; ++i) {
      int64_t x0, x1;
      const T value = at.reach(i, y, x0, x1);
      const T* TEXVLM_RESTRICT along = at.along + i * at.width;
      for (int64_t x = maximum(x0, from); x < minimum(x1, end); ++x) to[x] += value * along[x];
    }
    for (int64_t x = from; x < end; ++x) to[x] = minimum(to[x], T(1));
  }
};

// Adjoint by the points: of plane i = b P + p [H, W], the sums of g e, g e (x - p_x) and g e (y - p_y), g being the gradient
// where the plane is below 1, e the Gaussian.
template <class T, int C>
struct SplatAdjoint {
  template <int N>
  using Part = Sums<T, 3, N>;
  SplatPoints<T> at;
  ImageView<const T> grad;
  const T* out;
  T *to_points, *to_weights;  // [B, P, 2], [B, P], or null

  template <int N>
  TEXVLM_HD void add(int64_t i, int64_t y, int64_t x, int n, Part<N>& to) const {
    const T down = at.down[i * at.height + y], dy = static_cast<T>(y) - at.y(i), centre = at.x(i);
    if (!(down > kNegligible<T>)) return;
    const int64_t b = i / at.count;
    const T *plane = out + (b * at.height + y) * at.width + x, *along = at.along + i * at.width + x;
    const T *from = &grad.at(b, 0, y, x), first = static_cast<T>(x) - centre;
    T g[N];
    if (grad.stride_x == 1) {
      for (int j = 0; j < n; ++j) g[j] = from[j];
    } else {
      for (int j = 0; j < n; ++j) g[j] = from[j * grad.stride_x];
    }
    for (int j = 0; j < n; ++j) {
      g[j] = plane[j] < T(1) ? g[j] * (down * along[j]) : T(0);
      to.of[0][j] += g[j];
      to.of[1][j] += g[j] * (first + static_cast<T>(j));
      to.of[2][j] += g[j] * dy;
    }
  }
  TEXVLM_HD void finish(int64_t i, const Part<1>& total) const {
    const bool counts = finite(at.points[2 * i]) && finite(at.points[2 * i + 1]) && finite(at.weights[i]);
    if (to_weights) to_weights[i] = counts && at.weights[i] >= T(0) ? total.of[0][0] : T(0);
    if (!to_points) return;
    const T by = at.weight(i) / (at.sigma * at.sigma);
    to_points[2 * i] = counts ? by * static_cast<T>(at.width) * total.of[1][0] : T(0);
    to_points[2 * i + 1] = counts ? by * static_cast<T>(at.height) * total.of[2][0] : T(0);
  }
};

// Adjoint by the base.
template <class T, int C>
struct SplatBaseAdjoint {
  ImageView<const T> grad;
  const T* out;
  T keep;
  T* to;  // [B, H, W]
  int64_t height, width;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const int64_t at = (b * height + y) * width + x;
    to[at] = out[at] < T(1) ? keep * grad.at(b, 0, y, x) : T(0);
  }
};

}  // namespace texvlm
