// Rarity of places: the a-trous transform of planes, and the length of whitened differences of its levels.
//
// a-trous: M. Holschneider, R. Kronland-Martinet, J. Morlet and P. Tchamitchian (1989), with the binomial filter of J.-L. Starck
// and F. Murtagh: step k smooths the one before it by (1, 4, 6, 4, 1) / 16 with taps 2^(k - 1) apart, borders replicated.
#pragma once

#include "salience.h"
#include "stats.h"

namespace texvlm {

TEXVLM_HD double binomial_tap(int k) { return k == 2 ? 6.0 / 16 : k == 1 || k == 3 ? 4.0 / 16 : 1.0 / 16; }

// One axis of a step, over planes [B, h, w] whose sides are below kMaxSide.
template <class T, int C>
struct Atrous {
  const T* in;
  T* out;
  int64_t h, w, gap;
  bool vertical;

  static constexpr int kMaxSide = 2 << kTopSide, kMaxGap = 1 << (kScales - 1);

  TEXVLM_HD static T taps(T a, T b, T c, T d, T e) {
    return T(1.0 / 16) * a + T(4.0 / 16) * b + T(6.0 / 16) * c + T(4.0 / 16) * d + T(1.0 / 16) * e;
  }
  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const auto at = [&](int64_t step) {
      const int64_t i = vertical ? clamp<int64_t>(y + step, 0, h - 1) : y, j = vertical ? x : clamp<int64_t>(x + step, 0, w - 1);
      return in[(b * h + i) * w + j];
    };
    out[(b * h + y) * w + x] = taps(at(-2 * gap), at(-gap), at(0), at(gap), at(2 * gap));
  }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    T* TEXVLM_RESTRICT to = out + (b * h + y) * w;
    if (vertical) {
      const auto line = [&](int64_t step) { return in + (b * h + clamp<int64_t>(y + step, 0, h - 1)) * w; };
      const T *r0 = line(-2 * gap), *r1 = line(-gap), *r2 = line(0), *r3 = line(gap), *r4 = line(2 * gap);
      for (int64_t x = x0; x < x1; ++x) to[x] = taps(r0[x], r1[x], r2[x], r3[x], r4[x]);
      return;
    }
    const T* TEXVLM_RESTRICT from = in + (b * h + y) * w;
    T v[kMaxSide + 4 * kMaxGap];  // [j] is column x0 - 2 gap + j
    const int64_t n = x1 - x0;
    for (int64_t j = 0; j < n + 4 * gap; ++j) v[j] = from[clamp<int64_t>(x0 - 2 * gap + j, 0, w - 1)];
    const T *TEXVLM_RESTRICT v1 = v + gap, *TEXVLM_RESTRICT v2 = v1 + gap, *TEXVLM_RESTRICT v3 = v2 + gap,
                             *TEXVLM_RESTRICT v4 = v3 + gap;
    for (int64_t j = 0; j < n; ++j) to[x0 + j] = taps(v[j], v1[j], v2[j], v3[j], v4[j]);
  }
};

// Adjoint of one axis, item n: line n of each plane; what a line receives stays in it. `out` is added to.
template <class T, int C>
struct AtrousAdjoint {
  const T* grad;
  T* out;
  int64_t h, w, gap;
  bool vertical;

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    const int64_t count = vertical ? h : w, step = vertical ? w : 1, from = b * h * w + (vertical ? n : n * w);
    for (int64_t i = 0; i < count; ++i)
      for (int k = 0; k < 5; ++k) {
        const int64_t j = clamp<int64_t>(i + (k - 2) * gap, 0, count - 1);
        out[from + j * step] += static_cast<T>(binomial_tap(k)) * grad[from + i * step];
      }
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
  // Of up to kLanes places from column x on; beyond the last one the mean stands in, so that it is no different.
  TEXVLM_HD void lanes(int64_t b, int64_t y, int64_t x, const double* mean, double (&out)[kFeatures][kLanes]) const {
    const int n = static_cast<int>(minimum<int64_t>(kLanes, w - x));
    for (int c = 0; c < kFeatures; ++c) {
      const int64_t i = ((b * kFeatures + c) * h + y) * w + x;
      for (int j = 0; j < n; ++j) out[c][j] = static_cast<double>(centre[i + j] - surround[i + j]) - mean[c];
      for (int j = n; j < kLanes; ++j) out[c][j] = 0;
    }
  }
};

constexpr int kMoments = kFeatures + kFeatures * kFeatures;  // a sum of vectors, and of their outer products

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

// Item n: row n's sums of differences and of their outer products, rows [B, h, kMoments]. Place x counts in sum x % kLanes, and
// these are added up as in added(), on every device.
template <class T, int C>
struct DifferenceMoments {
  PairView<T> pair;
  double* rows;

  // CUDA: one lane after another, so that a thread's sums fit registers. All at once take 6 KB of local memory a thread, and the
  // driver sets that aside for every thread a card can hold: 1.5 GB of an H200.
  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    constexpr int kSums = kFeatures + kFeatures * (kFeatures + 1) / 2;
    double all[kSums] = {}, half[kSums] = {}, two[kSums] = {};
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (int turn = 0; turn < kLanes; ++turn) {  // lanes 0, 4, 1, 5, 2, 6, 3, 7
      double own[kSums] = {}, d[kFeatures];
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
      for (int64_t x = turn % 2 * (kLanes / 2) + turn / 2; x < pair.w; x += kLanes) {
        pair.at(b, n, x, d);
        for (int i = 0, k = 0; i < kFeatures; ++i) {
          own[k++] += d[i];
          for (int j = 0; j <= i; ++j) own[k++] += d[i] * d[j];
        }
      }
      for (int k = 0; k < kSums; ++k) {
        two[k] = turn % 2 ? two[k] + own[k] : own[k];
        if (turn % 2) half[k] = turn % 4 == 3 ? half[k] + two[k] : two[k];
        if (turn % 4 == 3) all[k] = turn == kLanes - 1 ? all[k] + half[k] : half[k];
      }
    }
    double* out = rows + (b * pair.h + n) * kMoments;
    for (int i = 0, k = 0; i < kFeatures; ++i) {
      out[i] = all[k++];
      for (int j = 0; j <= i; ++j) out[kFeatures + i * kFeatures + j] = out[kFeatures + j * kFeatures + i] = all[k++];
    }
  }

  TEXVLM_HD void block(int64_t b, int64_t n0, int64_t n1) const {
    for (int64_t n = n0; n < n1; ++n) side_by_side(b, n);
  }
  TEXVLM_HD void side_by_side(int64_t b, int64_t n) const {
    double* out = rows + (b * pair.h + n) * kMoments;
    const double nothing[kFeatures] = {};
    double sum[kFeatures][kLanes] = {}, square[kFeatures][kFeatures][kLanes] = {}, d[kFeatures][kLanes];
    for (int64_t x = 0; x < pair.w; x += kLanes) {
      pair.lanes(b, n, x, nothing, d);
      for (int i = 0; i < kFeatures; ++i) {
        for (int l = 0; l < kLanes; ++l) sum[i][l] += d[i][l];
        for (int j = 0; j <= i; ++j)
          for (int l = 0; l < kLanes; ++l) square[i][j][l] += d[i][l] * d[j][l];
      }
    }
    for (int i = 0; i < kFeatures; ++i) {
      out[i] = added(sum[i]);
      for (int j = 0; j <= i; ++j) out[kFeatures + i * kFeatures + j] = out[kFeatures + j * kFeatures + i] = added(square[i][j]);
    }
  }
  TEXVLM_HD static double added(const double (&v)[kLanes]) {
    return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
  }
};

// Item n = 0: the whitening of each picture from its rows. The matrix is positive definite, so elimination needs no pivots.
template <class T, int C>
struct WhitenPicture {
  const double* rows;
  Whitening* out;
  int64_t h, w;

  TEXVLM_HD void operator()(int64_t b, int64_t, int64_t, int64_t) const {
    double sum[kMoments] = {}, a[kFeatures][kFeatures];
    for (int64_t y = 0; y < h; ++y)
      for (int k = 0; k < kMoments; ++k) sum[k] += rows[(b * h + y) * kMoments + k];
    Whitening& to = out[b];
    const double count = static_cast<double>(h * w);
    for (int i = 0; i < kFeatures; ++i) to.mean[i] = sum[i] / count;
    for (int i = 0; i < kFeatures; ++i)
      for (int j = 0; j < kFeatures; ++j) {
        a[i][j] = sum[kFeatures + i * kFeatures + j] / count - to.mean[i] * to.mean[j] + (i == j ? kWhitenFloor : 0);
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

template <class T>
struct Pairs {
  PairView<T> pair[kPairs];
  const Whitening* whitening[kPairs];  // [B] each
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
      sum += pairs.whitening[p][b].apply(d, z);
    }
    out[(b * pairs.pair[0].h + y) * pairs.pair[0].w + x] = static_cast<T>(std::sqrt(maximum(sum, 0.0)));
  }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    T* to = out + (b * pairs.pair[0].h + y) * pairs.pair[0].w;
    for (int64_t x = x0; x < x1; x += kLanes) {
      double sum[kLanes] = {}, d[kFeatures][kLanes];
      for (int p = 0; p < kPairs; ++p) {
        const Whitening& white = pairs.whitening[p][b];
        double length[kLanes] = {};
        pairs.pair[p].lanes(b, y, x, white.mean, d);
        for (int i = 0; i < kFeatures; ++i) {
          double z[kLanes] = {};
          for (int j = 0; j < kFeatures; ++j)
            for (int l = 0; l < kLanes; ++l) z[l] += white.inverse[i][j] * d[j][l];
          for (int l = 0; l < kLanes; ++l) length[l] += d[i][l] * z[l];
        }
        for (int l = 0; l < kLanes; ++l) sum[l] += length[l];
      }
      for (int l = 0; l < kLanes; ++l) sum[l] = std::sqrt(maximum(sum[l], 0.0));
      for (int64_t l = 0; l < minimum<int64_t>(kLanes, x1 - x); ++l) to[x + l] = static_cast<T>(sum[l]);
    }
  }
};

// Adjoint. With g the gradient of the squared length, z = inverse (d - mean), q = sum of g z and Q = sum of g z z' over all
// places: to d = 2 g z - 2 / N (Q (d - mean) + q). Item n: row n's share of q and Q of one pair, rows [B, h, kMoments].
template <class T, int C>
struct RarityMoments {
  PairView<T> pair;
  const Whitening* whitening;
  const T *grad, *length;  // [B, h, w]: of the length, and the length
  double* rows;

  TEXVLM_HD static double of_square(T grad, T length) {
    return length > T(0) ? static_cast<double>(grad) / (2 * static_cast<double>(length)) : 0.0;
  }
  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    double sum[kMoments] = {}, d[kFeatures], z[kFeatures];
    for (int64_t x = 0; x < pair.w; ++x) {
      const int64_t at = (b * pair.h + n) * pair.w + x;
      const double g = of_square(grad[at], length[at]);
      pair.at(b, n, x, d);
      whitening[b].apply(d, z);
      for (int i = 0; i < kFeatures; ++i) {
        sum[i] += g * z[i];
        for (int j = 0; j < kFeatures; ++j) sum[kFeatures + i * kFeatures + j] += g * z[i] * z[j];
      }
    }
    for (int k = 0; k < kMoments; ++k) rows[(b * pair.h + n) * kMoments + k] = sum[k];
  }
};

// Item k: moment k of the rows added up, into the first of them.
template <class T, int C>
struct AddRows {
  double* rows;  // [B, h, kMoments]
  int64_t h;

  TEXVLM_HD void operator()(int64_t b, int64_t k, int64_t, int64_t) const {
    double* const first = rows + b * h * kMoments + k;
    double sum = *first;
    for (int64_t y = 1; y < h; ++y) sum += first[y * kMoments];
    *first = sum;
  }
};

// What the differences of a pair receive, added to the gradients of its two steps [B, kFeatures, h, w].
template <class T, int C>
struct SalienceRarityAdjoint {
  RarityMoments<T, C> forward;  // its `rows` hold the sums now
  T *to_centre, *to_surround;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const int64_t h = forward.pair.h, w = forward.pair.w, at = (b * h + y) * w + x;
    const double* q = forward.rows + b * h * kMoments;
    const double g = forward.of_square(forward.grad[at], forward.length[at]), count = static_cast<double>(h * w);
    double d[kFeatures], z[kFeatures];
    forward.pair.at(b, y, x, d);
    forward.whitening[b].apply(d, z);
    for (int i = 0; i < kFeatures; ++i) {
      double shared = q[i];
      for (int j = 0; j < kFeatures; ++j) shared += q[kFeatures + i * kFeatures + j] * d[j];
      const T to = static_cast<T>(2 * g * z[i] - 2 / count * shared);
      const int64_t place = ((b * kFeatures + i) * h + y) * w + x;
      to_centre[place] += to;
      to_surround[place] -= to;
    }
  }
};

// Divides by the maximum, in place; 0 where flat.
template <class T, int C>
struct OverMaximum {
  T* plane;  // [B, h, w]
  const MapStats<T>* stats;
  int64_t h, w;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const { row(b, y, x, x + 1); }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    const T max = stats[b].max;
    T* p = plane + (b * h + y) * w;
    for (int64_t x = x0; x < x1; ++x) p[x] = max > T(kMapFloor) ? p[x] / max : T(0);
  }
};

// Adjoint of OverMaximum: grad of the quotient to grad of `plane`. dot[b].sum = <grad, quotient>.
template <class T, int C>
struct OverMaximumAdjoint {
  T* grad;  // in place
  const MapStats<T>*stats, *dot;
  int64_t h, w;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const MapStats<T> s = stats[b];
    T* g = grad + (b * h + y) * w + x;
    if (!(s.max > T(kMapFloor))) {
      *g = T(0);
      return;
    }
    const T at_top = y * w + x == s.at ? static_cast<T>(dot[b].sum / static_cast<double>(s.max)) : T(0);
    *g = *g / s.max - at_top;
  }
};

}  // namespace texvlm
