// Rarity of places: the a-trous transform of planes, and the length of whitened differences of its levels.
//
// a-trous: M. Holschneider, R. Kronland-Martinet, J. Morlet and P. Tchamitchian (1989), with the binomial filter of J.-L. Starck
// and F. Murtagh: step k smooths the one before it by (1, 4, 6, 4, 1) / 16 with taps 2^(k - 1) apart, borders replicated.
#pragma once

#include "salience.h"
#include "stats.h"

namespace texvlm {

TEXVLM_HD double binomial_tap(int k) { return k == 2 ? 6.0 / 16 : k == 1 || k == 3 ? 4.0 / 16 : 1.0 / 16; }

// A step, over planes [B, h, w] whose sides are below kMaxSide: down the columns, then along the row of what that gives.
template <class T, int C>
struct Atrous {
  const T* in;
  T* out;
  int64_t h, w, gap;

  static constexpr int kMaxSide = 2 << kTopSide, kMaxGap = 1 << (kScales - 1);

  TEXVLM_HD static T taps(T a, T b, T c, T d, T e) {
    return T(1.0 / 16) * a + T(4.0 / 16) * b + T(6.0 / 16) * c + T(4.0 / 16) * d + T(1.0 / 16) * e;
  }
  TEXVLM_HD const T* line(int64_t b, int64_t y) const { return in + (b * h + clamp<int64_t>(y, 0, h - 1)) * w; }

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const T *r0 = line(b, y - 2 * gap), *r1 = line(b, y - gap), *r2 = line(b, y), *r3 = line(b, y + gap),
            *r4 = line(b, y + 2 * gap);
    const auto column = [&](int64_t j) {
      j = clamp<int64_t>(j, 0, w - 1);
      return taps(r0[j], r1[j], r2[j], r3[j], r4[j]);
    };
    out[(b * h + y) * w + x] = taps(column(x - 2 * gap), column(x - gap), column(x), column(x + gap), column(x + 2 * gap));
  }
  // A whole row: x0 = 0, x1 = w.
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t, int64_t) const {
    const T *TEXVLM_RESTRICT r0 = line(b, y - 2 * gap), *TEXVLM_RESTRICT r1 = line(b, y - gap), *TEXVLM_RESTRICT r2 = line(b, y),
                             *TEXVLM_RESTRICT r3 = line(b, y + gap), *TEXVLM_RESTRICT r4 = line(b, y + 2 * gap);
    T v[kMaxSide + 4 * kMaxGap];  // [j] is column j - 2 gap
    T* TEXVLM_RESTRICT middle = v + 2 * gap;
    for (int64_t x = 0; x < w; ++x) middle[x] = taps(r0[x], r1[x], r2[x], r3[x], r4[x]);
    for (int64_t j = 0; j < 2 * gap; ++j) v[j] = middle[0], middle[w + j] = middle[w - 1];
    T* TEXVLM_RESTRICT to = out + (b * h + y) * w;
    const T *v1 = v + gap, *v2 = v1 + gap, *v3 = v2 + gap, *v4 = v3 + gap;
    for (int64_t x = 0; x < w; ++x) to[x] = taps(v[x], v1[x], v2[x], v3[x], v4[x]);
  }
};

// Adjoint of one axis, in gather form: what is passed on by the places that read (y, x). `out` is added to.
template <class T, int C>
struct AtrousAdjoint {
  const T* grad;
  T* out;
  int64_t h, w, gap;
  bool vertical;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const int64_t last = (vertical ? h : w) - 1, step = vertical ? w : 1, at = vertical ? y : x;
    const int64_t place = (b * h + y) * w + x, line = place - at * step;
    T sum = 0;
    for (int k = 0; k < 5; ++k)
      for (int64_t i = first_reader(at, k); i <= last_reader(at, k, last); ++i)
        sum += static_cast<T>(binomial_tap(k)) * grad[line + i * step];
    out[place] += sum;
  }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    T* TEXVLM_RESTRICT to = out + (b * h + y) * w;
    if (!vertical) {  // between the ends a sum of five
      const T* TEXVLM_RESTRICT from = grad + (b * h + y) * w;
      const int64_t left = clamp(2 * gap, x0, x1), right = maximum(left, minimum(x1, w - 2 * gap));
      for (int64_t x = x0; x < left; ++x) (*this)(b, y, x, 0, 1);
      for (int64_t x = left; x < right; ++x)
        to[x] += Atrous<T, C>::taps(from[x - 2 * gap], from[x - gap], from[x], from[x + gap], from[x + 2 * gap]);
      for (int64_t x = right; x < x1; ++x) (*this)(b, y, x, 0, 1);
      return;
    }
    for (int k = 0; k < 5; ++k)
      for (int64_t i = first_reader(y, k); i <= last_reader(y, k, h - 1); ++i) {
        const T* TEXVLM_RESTRICT from = grad + (b * h + i) * w;
        for (int64_t x = x0; x < x1; ++x) to[x] += static_cast<T>(binomial_tap(k)) * from[x];
      }
  }

 private:
  // Those that read place `at` by tap k: one, and at an end also all that would read beyond it.
  TEXVLM_HD int64_t first_reader(int64_t at, int k) const { return at == 0 ? 0 : maximum<int64_t>(0, at - (k - 2) * gap); }
  TEXVLM_HD int64_t last_reader(int64_t at, int k, int64_t last) const {
    return at == last ? last : minimum(last, at - (k - 2) * gap);
  }
};

// ---- whitening ----

constexpr int kLanes = 8;  // places that are handled side by side

// The differences of a pair of steps.
template <class T>
struct PairView {
  const T *centre, *surround;  // [B, kFeatures, h, w]
  int64_t h, w;

  TEXVLM_HD void at(int64_t b, int64_t y, int64_t x, double* out) const {
    const int64_t plane = h * w, i = b * kFeatures * plane + y * w + x;
    for (int c = 0; c < kFeatures; ++c) out[c] = static_cast<double>(centre[i + c * plane] - surround[i + c * plane]);
  }
  // Of n places from column x on, less `mean`.
  template <int N>
  TEXVLM_HD void lanes(int64_t b, int64_t y, int64_t x, int n, const double* mean, double (&out)[kFeatures][N]) const {
    for (int c = 0; c < kFeatures; ++c) {
      const int64_t i = ((b * kFeatures + c) * h + y) * w + x;
      for (int j = 0; j < n; ++j) out[c][j] = static_cast<double>(centre[i + j] - surround[i + j]) - mean[c];
    }
  }
};

// A sum of vectors, and of their outer products, whose entries (i, j) and (j, i) are sum number product(i, j).
constexpr int kMoments = kFeatures + kFeatures * (kFeatures + 1) / 2;
template <int N>
using Moments = Sums<double, kMoments, N>;
TEXVLM_HD int product(int i, int j) { return kFeatures + maximum(i, j) * (maximum(i, j) + 1) / 2 + minimum(i, j); }

// The inverse of (covariance + kWhitenFloor), and the mean.
struct Whitening {
  double mean[kFeatures], inverse[kFeatures][kFeatures];

  // z = inverse (d - mean); returns (d - mean) z. d becomes d - mean.
  TEXVLM_HD double apply(double* d, double* z) const {
    double length = 0;
    for (int i = 0; i < kFeatures; ++i) d[i] -= mean[i];
    for (int i = 0; i < kFeatures; ++i) {
      z[i] = 0;
      for (int j = 0; j < kFeatures; ++j) z[i] += inverse[i][j] * d[j];
      length += d[i] * z[i];
    }
    return length;
  }
};

// The pairs of all pictures.
template <class T>
struct Pairs {
  PairView<T> pair[kPairs];
  Whitening* whitening;  // [kPairs, B]
  int64_t batch;

  TEXVLM_HD const Whitening& white(int p, int64_t b) const { return whitening[p * batch + b]; }
};

// The whitening of pair n / B of picture n % B, from the moments of its differences. The matrix is positive definite, so
// elimination needs no pivots.
template <class T, int C>
struct WhitenPicture {
  template <int N>
  using Part = Moments<N>;
  Pairs<T> pairs;

  template <int N>
  TEXVLM_HD void add(int64_t item, int64_t y, int64_t x, int n, Moments<N>& to) const {
    const double nothing[kFeatures] = {};
    double d[kFeatures][N];
    pairs.pair[item / pairs.batch].lanes(item % pairs.batch, y, x, n, nothing, d);
    for (int i = 0; i < kFeatures; ++i) {
      for (int l = 0; l < n; ++l) to.of[i][l] += d[i][l];
      for (int j = 0; j <= i; ++j)
        for (int l = 0; l < n; ++l) to.of[product(i, j)][l] += d[i][l] * d[j][l];
    }
  }
  TEXVLM_HD void finish(int64_t item, const Moments<1>& total) const {
    double a[kFeatures][kFeatures];
    Whitening& to = pairs.whitening[item];
    const double count = static_cast<double>(pairs.pair[0].h * pairs.pair[0].w);
    for (int i = 0; i < kFeatures; ++i) to.mean[i] = total.of[i][0] / count;
    for (int i = 0; i < kFeatures; ++i)
      for (int j = 0; j < kFeatures; ++j) {
        a[i][j] = total.of[product(i, j)][0] / count - to.mean[i] * to.mean[j] + (i == j ? kWhitenFloor : 0);
        to.inverse[i][j] = i == j ? 1 : 0;
      }
    for (int k = 0; k < kFeatures; ++k) {
      const double over = 1 / a[k][k];
      for (int j = 0; j < kFeatures; ++j) {
        a[k][j] *= over;
        to.inverse[k][j] *= over;
      }
      for (int i = 0; i < kFeatures; ++i) {
        if (i == k) continue;
        const double f = a[i][k];
        for (int j = 0; j < kFeatures; ++j) {
          a[i][j] -= f * a[k][j];
          to.inverse[i][j] -= f * to.inverse[k][j];
        }
      }
    }
  }
};

// The length of the whitened differences of all pairs, taken together.
template <class T, int C>
struct SalienceRarity {
  Pairs<T> pairs;
  T* out;  // [B, h, w]

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    double sum = 0, d[kFeatures], z[kFeatures];
    for (int p = 0; p < kPairs; ++p) {
      pairs.pair[p].at(b, y, x, d);
      sum += pairs.white(p, b).apply(d, z);
    }
    out[(b * pairs.pair[0].h + y) * pairs.pair[0].w + x] = static_cast<T>(std::sqrt(maximum(sum, 0.0)));
  }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    T* to = out + (b * pairs.pair[0].h + y) * pairs.pair[0].w;
    for (int64_t x = x0; x < x1; x += kLanes) {
      const int n = static_cast<int>(minimum<int64_t>(kLanes, x1 - x));
      double sum[kLanes] = {}, d[kFeatures][kLanes] = {};
      for (int p = 0; p < kPairs; ++p) {
        const Whitening& white = pairs.white(p, b);
        double length[kLanes] = {};
        pairs.pair[p].lanes(b, y, x, n, white.mean, d);
        for (int i = 0; i < kFeatures; ++i) {
          double z[kLanes] = {};
          for (int j = 0; j < kFeatures; ++j)
            for (int l = 0; l < kLanes; ++l) z[l] += white.inverse[i][j] * d[j][l];
          for (int l = 0; l < kLanes; ++l) length[l] += d[i][l] * z[l];
        }
        for (int l = 0; l < kLanes; ++l) sum[l] += length[l];
      }
      for (int l = 0; l < kLanes; ++l) sum[l] = std::sqrt(maximum(sum[l], 0.0));
      for (int l = 0; l < n; ++l) to[x + l] = static_cast<T>(sum[l]);
    }
  }
};

// Adjoint. With g the gradient of the squared length, z = inverse (d - mean), q = sum of g z and Q = sum of g z z' over all
// places: to d = 2 g z - 2 / N (Q (d - mean) + q). This is q and Q of one pair.
template <class T, int C>
struct RarityMoments {
  template <int N>
  using Part = Moments<N>;
  PairView<T> pair;
  const Whitening* whitening;
  const T *grad, *length;  // [B, h, w]: of the length, and the length
  Moments<1>* out;         // [B]

  TEXVLM_HD static double of_square(T grad, T length) {
    return length > T(0) ? static_cast<double>(grad) / (2 * static_cast<double>(length)) : 0.0;
  }
  template <int N>
  TEXVLM_HD void add(int64_t b, int64_t y, int64_t x, int n, Moments<N>& to) const {
    const Whitening& white = whitening[b];
    const int64_t at = (b * pair.h + y) * pair.w + x;
    double d[kFeatures][N], z[kFeatures][N];
    pair.lanes(b, y, x, n, white.mean, d);
    for (int i = 0; i < kFeatures; ++i) {
      for (int l = 0; l < n; ++l) z[i][l] = 0;
      for (int j = 0; j < kFeatures; ++j)
        for (int l = 0; l < n; ++l) z[i][l] += white.inverse[i][j] * d[j][l];
    }
    for (int l = 0; l < n; ++l) d[0][l] = of_square(grad[at + l], length[at + l]);
    for (int i = 0; i < kFeatures; ++i) {
      for (int l = 0; l < n; ++l) to.of[i][l] += d[0][l] * z[i][l];
      for (int j = 0; j <= i; ++j)
        for (int l = 0; l < n; ++l) to.of[product(i, j)][l] += d[0][l] * z[i][l] * z[j][l];
    }
  }
  TEXVLM_HD void finish(int64_t b, const Moments<1>& total) const { out[b] = total; }
};

// What the differences of a pair receive, added to the gradients of its two steps [B, kFeatures, h, w].
template <class T, int C>
struct SalienceRarityAdjoint {
  RarityMoments<T, C> forward;  // its `out` holds the moments now
  T *to_centre, *to_surround;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const int64_t h = forward.pair.h, w = forward.pair.w, at = (b * h + y) * w + x;
    const Moments<1>& q = forward.out[b];
    const double g = forward.of_square(forward.grad[at], forward.length[at]), count = static_cast<double>(h * w);
    double d[kFeatures], z[kFeatures];
    forward.pair.at(b, y, x, d);
    forward.whitening[b].apply(d, z);
    for (int i = 0; i < kFeatures; ++i) {
      double shared = q.of[i][0];
      for (int j = 0; j < kFeatures; ++j) shared += q.of[product(i, j)][0] * d[j];
      const T to = static_cast<T>(2 * g * z[i] - 2 / count * shared);
      const int64_t place = ((b * kFeatures + i) * h + y) * w + x;
      to_centre[place] += to;
      to_surround[place] -= to;
    }
  }
};

// Divides by the maximum; 0 where flat.
template <class T, int C>
struct OverMaximum {
  const T* plane;  // [B, h, w]
  const MapStats<T>* stats;
  T* out;
  int64_t h, w;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const { row(b, y, x, x + 1); }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    const T max = stats[b].max[0];
    const T* TEXVLM_RESTRICT p = plane + (b * h + y) * w;
    T* TEXVLM_RESTRICT to = out + (b * h + y) * w;
    for (int64_t x = x0; x < x1; ++x) to[x] = max > T(kMapFloor) ? p[x] / max : T(0);
  }
};

// Adjoint of OverMaximum: grad of the quotient to grad of `plane`. dot[b]'s sum is <grad, quotient>.
template <class T, int C>
struct OverMaximumAdjoint {
  T* grad;  // in place
  const MapStats<T>*stats, *dot;
  int64_t h, w;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const T max = stats[b].max[0];
    T* g = grad + (b * h + y) * w + x;
    if (!(max > T(kMapFloor))) {
      *g = T(0);
      return;
    }
    const T at_top = y * w + x == stats[b].at[0] ? static_cast<T>(dot[b].sum[0] / static_cast<double>(max)) : T(0);
    *g = *g / max - at_top;
  }
};

}  // namespace texvlm
