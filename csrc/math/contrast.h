// Luma normalised by its local contrast, (I - local mean) / (local standard deviation + eps), and the adjoint in gather form.
#pragma once

#include "salience.h"

namespace texvlm {

constexpr int kRadius = 4, kWindow = 2 * kRadius + 1;  // contrast is normalised over a box of 9 x 9
constexpr double kContrastEps = 0.02;                  // added to the local standard deviation
constexpr double kContrastScale = 2 * kEdgeScale;

template <class A>
struct LocalMoments {
  A mean, deviation;
};

// Mean and standard deviation over the box, from those of its columns: sum (v - mean)^2 = sum over columns of (their own sum of
// squared differences + 9 (column mean - mean)^2). Nothing large is subtracted (T. Chan, G. Golub and R. LeVeque, 1979).
template <class A>
struct BoxRows {
  const A* row[kWindow];
};
template <class A>
TEXVLM_HD BoxRows<A> box_rows(const A* plane, int64_t b, int64_t y, int64_t height, int64_t width) {
  BoxRows<A> r;
  for (int i = 0; i < kWindow; ++i) r.row[i] = plane + (b * height + clamp<int64_t>(y + i - kRadius, 0, height - 1)) * width;
  return r;
}
template <class A>
TEXVLM_HD void column_moments(const BoxRows<A>& r, int64_t x, A& mean, A& squares) {
  A sum = 0;
  for (int i = 0; i < kWindow; ++i) sum += r.row[i][x];
  mean = sum * (A(1) / kWindow);
  squares = 0;
  for (int i = 0; i < kWindow; ++i) squares += (r.row[i][x] - mean) * (r.row[i][x] - mean);
}
template <class A>
TEXVLM_HD LocalMoments<A> box_moments(const A* means, const A* squares) {  // of kWindow columns
  A sum = 0, inner = 0, outer = 0;
  for (int i = 0; i < kWindow; ++i) sum += means[i];
  const A mean = sum * (A(1) / kWindow);
  for (int i = 0; i < kWindow; ++i) {
    inner += squares[i];
    outer += (means[i] - mean) * (means[i] - mean);
  }
  return {mean, std::sqrt((inner + A(kWindow) * outer) * (A(1) / (kWindow * kWindow)))};
}
// Of n pixels from column x on.
template <int N, class A>
TEXVLM_HD void moments_run(const A* plane, int64_t b, int64_t y, int64_t x, int n, int64_t height, int64_t width,
                           A* TEXVLM_RESTRICT mean, A* TEXVLM_RESTRICT deviation) {
  const BoxRows<A> r = box_rows(plane, b, y, height, width);
  A means[N + 2 * kRadius], squares[N + 2 * kRadius];  // [j] is column x - kRadius + j
  const int first = static_cast<int>(maximum<int64_t>(0, kRadius - x));
  const int last = static_cast<int>(minimum<int64_t>(n + 2 * kRadius, width - x + kRadius));
  for (int j = first; j < last; ++j) column_moments(r, x - kRadius + j, means[j], squares[j]);
  for (int j = 0; j < first; ++j) means[j] = means[first], squares[j] = squares[first];
  for (int j = last; j < n + 2 * kRadius; ++j) means[j] = means[last - 1], squares[j] = squares[last - 1];
  for (int j = 0; j < n; ++j) {
    const LocalMoments<A> m = box_moments(means + j, squares + j);
    mean[j] = m.mean;
    deviation[j] = m.deviation;
  }
}

// (luma - local mean) / (local standard deviation + eps)
template <class T, int C>
struct ContrastPlane {
  const T* luma;
  T* out;
  int64_t height, width;

  template <int N>
  TEXVLM_HD void pixels(int64_t b, int64_t y, int64_t x, int n) const {
    T mean[N], deviation[N];
    const int64_t below = (b * height + minimum(y + kRadius + 1, height - 1)) * width + x;
    for (int j = 0; j < n; j += 64 / static_cast<int>(sizeof(T))) TEXVLM_PREFETCH(luma + below + j);  // for the row to come
    moments_run<N>(luma, b, y, x, n, height, width, mean, deviation);
    const T* TEXVLM_RESTRICT from = luma + (b * height + y) * width + x;
    T* TEXVLM_RESTRICT to = out + (b * height + y) * width + x;
    for (int j = 0; j < n; ++j) to[j] = (from[j] - mean[j]) / (deviation[j] + T(kContrastEps));
  }
};

// Both planes that are windows of luma, in one pass; either's `out` may be null.
template <class T, int C>
struct EdgeAndContrast {
  EdgePlane<T, C> edge;
  ContrastPlane<T, C> contrast;

  template <int N>
  TEXVLM_HD void pixels(int64_t b, int64_t y, int64_t x, int n) const {
    if (edge.out) edge.template pixels<N>(b, y, x, n);
    if (contrast.out) contrast.template pixels<N>(b, y, x, n);
  }
};

// Adjoint, first half: what mean and variance of each pixel's box receive; the pixel's own share is added to `to_luma`.
template <class T, int C>
struct ContrastAdjointSeed {
  const T *luma, *grad;
  T *mean, *to_mean, *to_variance, *to_luma;
  int64_t height, width;

  template <int N>
  TEXVLM_HD void pixels(int64_t b, int64_t y, int64_t x, int n) const {
    T local_mean[N], deviation[N];
    moments_run<N>(luma, b, y, x, n, height, width, local_mean, deviation);
    const int64_t first = (b * height + y) * width + x;
    for (int j = 0; j < n; ++j) {
      const int64_t i = first + j;
      const T spread = deviation[j] + T(kContrastEps), direct = grad[i] / spread;
      const bool varies = deviation[j] > T(0);
      mean[i] = local_mean[j];
      to_mean[i] = -direct;
      to_variance[i] = varies ? -direct * (luma[i] - local_mean[j]) / (spread * T(2) * (varies ? deviation[j] : T(1))) : T(0);
      to_luma[i] += direct;
    }
  }
};

// Second half: what each pixel receives from the boxes that it is in.
template <class T, int C>
struct ContrastAdjoint {
  const T *luma, *mean, *to_mean, *to_variance;
  T* to_luma;
  int64_t height, width;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const T ones[kWindow] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    const AxisAdjoint<T, kRadius> ay = axis_adjoint<kRadius>(y, height, ones), ax = axis_adjoint<kRadius>(x, width, ones);
    const int64_t here = (b * height + y) * width + x;
    T sum = 0;
    for (int i = 0; i < ay.count; ++i)
      for (int j = 0; j < ax.count; ++j) {
        const int64_t at = (b * height + ay.first + i) * width + ax.first + j;
        sum += ay.weight[i] * ax.weight[j] * (to_mean[at] + T(2) * to_variance[at] * (luma[here] - mean[at]));
      }
    to_luma[here] += sum / T(kWindow * kWindow);
  }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    const T ones[kWindow] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    const AxisAdjoint<T, kRadius> ay = axis_adjoint<kRadius>(y, height, ones);
    const Inside in = inside(x0, x1, kRadius, width);
    for (int64_t x = x0; x < in.begin; ++x) (*this)(b, y, x, 0, 1);
    for (int64_t x = in.begin; x < in.end; x += kRun) {
      const int n = static_cast<int>(minimum<int64_t>(kRun, in.end - x));
      const T* TEXVLM_RESTRICT here = luma + (b * height + y) * width + x;
      T sum[kRun];
      for (int j = 0; j < n; ++j) sum[j] = T(0);
      for (int i = 0; i < ay.count; ++i) {
        const int64_t from = (b * height + ay.first + i) * width + x - kRadius;
        const T *TEXVLM_RESTRICT m = mean + from, *TEXVLM_RESTRICT gm = to_mean + from, *TEXVLM_RESTRICT gv = to_variance + from;
        for (int j = 0; j < n; ++j) {
          T part = 0;
          for (int k = 0; k < kWindow; ++k) part += gm[j + k] + T(2) * gv[j + k] * (here[j] - m[j + k]);
          sum[j] += ay.weight[i] * part;
        }
      }
      T* TEXVLM_RESTRICT to = to_luma + (b * height + y) * width + x;
      for (int j = 0; j < n; ++j) to[j] += sum[j] / T(kWindow * kWindow);
    }
    for (int64_t x = in.end; x < x1; ++x) (*this)(b, y, x, 0, 1);
  }
};

}  // namespace texvlm
