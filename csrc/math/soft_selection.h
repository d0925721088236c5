// Soft selection: weights in [0, 1] that sum to k, in place of the best k.
//
// w_i = link((s_i - t) / T), with the one threshold t at which they sum to k. The link is the logistic function (entropic
// projection onto the capped simplex), or 1 - exp(-exp(z)), what the best k of s / T + Gumbel noise are included with. t is found
// by Newton's method on link^-1(mean weight), which is linear in t where all scores are alike, inside a bracket that is bisected
// where that fails. What is small is never a difference of large numbers: sums go over w below t, over 1 - w above it, and the
// scores above are counted; so t is right, too, where no score is within many temperatures of it.
//
// Gradients by the implicit function theorem, with g_i = link'(z_i) and p = g / sum g, normalised in the logarithm:
//   dt/ds_j = p_j,    dw_i/ds_j = g_i (delta_ij - p_j) / T.
#pragma once

#include "exponential.h"
#include "team.h"

namespace texvlm {

enum class Link { logistic, gumbel };

// Of a score beyond its threshold by z: the smaller one of w and 1 - w, accurate to the last, w, and dw/dz.
template <class A>
struct SoftWeight {
  A small, weight, slope;
};
template <Link kLink, class A>
TEXVLM_HD SoftWeight<A> soft_weight(A z) {
  if constexpr (kLink == Link::logistic) {
    const A e = exp_of(-absolute(z)), big = A(1) / (A(1) + e), small = e * big;
    return {small, z >= A(0) ? big : small, small * big};
  } else {
    const A x = exp_of(z > A(80) ? A(80) : z), rest = exp_of(-x);
    A few = A(1);  // (1 - exp(-x)) / x by its series, where the difference would be inexact
    for (int i = 6; i > 1; --i) few = A(1) - x * A(1.0 / i) * few;
    const A weight = x < A(sizeof(A) == 4 ? 0.25 : 0.03125) ? x * few : A(1) - rest;
    return {z >= A(0) ? rest : weight, weight, x * rest};
  }
}

// The link's inverse at p in (0, 1), and its derivative.
template <Link kLink>
TEXVLM_HD double link_inverse(double p) {
  return kLink == Link::logistic ? log(p / (1 - p)) : log(-log1p(-p));
}
template <Link kLink>
TEXVLM_HD double link_inverse_slope(double p) {
  return kLink == Link::logistic ? 1 / (p * (1 - p)) : -1 / ((1 - p) * log1p(-p));
}

// A threshold as the sum of two numbers of A, so that scores near it keep their differences from it at any temperature.
template <class A>
struct Threshold {
  A coarse, fine, inverse;  // 1 / T

  TEXVLM_HD static Threshold of(double t, double temperature) {
    const A coarse = static_cast<A>(t);
    return {coarse, static_cast<A>(t - static_cast<double>(coarse)), static_cast<A>(1 / temperature)};
  }
  TEXVLM_HD A above(A score) const { return (score - coarse) - fine; }
  TEXVLM_HD A z(A score) const { return above(score) * inverse; }
};

// The logarithm of link'(z), for the logistic link but for what is 2 log(1 + exp(-|z|)).
template <Link kLink, class A>
TEXVLM_HD A log_slope(A z) {
  if constexpr (kLink == Link::logistic) return -absolute(z);
  return z - exp_of(z > A(80) ? A(80) : z);
}

// NaN counts as -inf: both are removed, with weight 0.
template <class A>
TEXVLM_HD A as_score(A s) {
  return s == s ? s : -A(INFINITY);
}

// The scores of a row: extent and moments of what is finite, and how many are above all bounds.
template <class A>
struct ScoreRange {
  template <int N>
  struct Part {
    A least[N], most[N], sum[N], squares[N];
    int32_t finite[N], infinite[N];

    TEXVLM_HD void clear() {
      for (int l = 0; l < N; ++l) {
        least[l] = A(INFINITY), most[l] = -A(INFINITY), sum[l] = squares[l] = A(0);
        finite[l] = infinite[l] = 0;
      }
    }
    template <int M>
    TEXVLM_HD void join(int at, const Part<M>& from, int first, int count) {
      for (int l = 0; l < count; ++l) {
        least[at + l] = minimum(least[at + l], from.least[first + l]);
        most[at + l] = maximum(most[at + l], from.most[first + l]);
        sum[at + l] += from.sum[first + l];
        squares[at + l] += from.squares[first + l];
        finite[at + l] += from.finite[first + l];
        infinite[at + l] += from.infinite[first + l];
      }
    }
  };
  const A* scores;

  template <class P>
  TEXVLM_HD void add(int64_t, int64_t x, int n, P& part) const {
    for (int l = 0; l < n; ++l) {
      const A s = scores[x + l];
      const bool in = finite(s);
      const A own = in ? s : A(0);
      part.least[l] = minimum(part.least[l], in ? s : A(INFINITY));
      part.most[l] = maximum(part.most[l], in ? s : -A(INFINITY));
      part.sum[l] += own;
      part.squares[l] += own * own;
      part.finite[l] += in;
      part.infinite[l] += s == A(INFINITY);
    }
  }
};

// The sums of weights and slopes at a threshold.
template <Link kLink, class A, bool kWrites>
struct SoftSums {
  template <int N>
  using Part = Sums<A, 2, N>;
  const A* scores;
  Threshold<A> threshold;
  A* TEXVLM_RESTRICT out;  // the weights, where it writes them

  template <class P>
  TEXVLM_HD void add(int64_t, int64_t x, int n, P& part) const {
    for (int l = 0; l < n; ++l) {
      const SoftWeight<A> w = soft_weight<kLink>(threshold.z(scores[x + l]));
      if constexpr (kWrites) out[x + l] = w.weight;
      part.of[0][l] += w.weight;
      part.of[1][l] += w.slope;
    }
  }
};

// The same where hardly a score is near the threshold: weights below it, what is missing to 1 above it, the slopes of both, and
// how many are above. No small number is lost beside a large one.
template <Link kLink, class A>
struct PartedSums {
  template <int N>
  struct Part : Sums<A, 4, N> {
    int32_t above[N];

    TEXVLM_HD void clear() {
      Sums<A, 4, N>::clear();
      for (int l = 0; l < N; ++l) above[l] = 0;
    }
    template <int M>
    TEXVLM_HD void join(int at, const Part<M>& from, int first, int count) {
      Sums<A, 4, N>::join(at, from, first, count);
      for (int l = 0; l < count; ++l) above[at + l] += from.above[first + l];
    }
  };
  const A* scores;
  Threshold<A> threshold;

  template <class P>
  TEXVLM_HD void add(int64_t, int64_t x, int n, P& part) const {
    for (int l = 0; l < n; ++l) {
      const A z = threshold.z(scores[x + l]);
      const SoftWeight<A> w = soft_weight<kLink>(z);
      const bool above = z >= A(0);  // not so for NaN
      part.of[0][l] += above ? A(0) : w.small;
      part.of[1][l] += above ? w.small : A(0);
      part.of[2][l] += above ? A(0) : w.slope;
      part.of[3][l] += above ? w.slope : A(0);
      part.above[l] += above;
    }
  }
};

// The scores nearest to a threshold on both sides.
template <class A>
struct Nearest {
  template <int N>
  struct Part {
    A below[N], above[N];

    TEXVLM_HD void clear() {
      for (int l = 0; l < N; ++l) below[l] = -A(INFINITY), above[l] = A(INFINITY);
    }
    template <int M>
    TEXVLM_HD void join(int at, const Part<M>& from, int first, int count) {
      for (int l = 0; l < count; ++l) {
        below[at + l] = maximum(below[at + l], from.below[first + l]);
        above[at + l] = minimum(above[at + l], from.above[first + l]);
      }
    }
  };
  const A* scores;
  double threshold;

  template <class P>
  TEXVLM_HD void add(int64_t, int64_t x, int n, P& part) const {
    for (int l = 0; l < n; ++l) {
      const A s = as_score(scores[x + l]);
      const bool under = static_cast<double>(s) < threshold;
      part.below[l] = maximum(part.below[l], under ? s : -A(INFINITY));
      part.above[l] = minimum(part.above[l], under ? A(INFINITY) : s);
    }
  }
};

// Sums of w below and of 1 - w above, in units of what the nearest there, `below` and `above`, has.
template <Link kLink, class A>
struct SoftTails {
  template <int N>
  using Part = Sums<A, 2, N>;
  const A* scores;
  double below, above, inverse;

  template <class P>
  TEXVLM_HD void add(int64_t, int64_t x, int n, P& part) const {
    const double steep = kLink == Link::gumbel ? (above - below) * inverse : 0.0;  // about exp(z) of the nearest above
    for (int l = 0; l < n; ++l) {
      const double s = static_cast<double>(as_score(scores[x + l]));
      const A down = static_cast<A>((s - below) * inverse), up = static_cast<A>((s - above) * inverse);
      const A rest = kLink == Link::logistic ? exp_of(-up) : exp_of(static_cast<A>(-steep) * (exp_of(minimum(up, A(80))) - A(1)));
      part.of[0][l] += s <= below ? exp_of(down) : A(0);
      part.of[1][l] += s >= above && up < A(INFINITY) ? rest : A(0);
    }
  }
};

// The host's thread has a row of its own for the scores that are not out of reach.
template <class A>
struct OneThreadWithRow : OneThread {
  A* row;
};

// scores [B, N], rows of any stride -> weights [B, N], threshold [B]. -inf and NaN have weight 0, +inf 1 as far as k goes. The
// threshold is -inf where all that is not removed has weight 1, +inf where nothing finite has any; then there are no gradients.
template <Link kLink, class A>
struct SoftTopK {
  const A* scores;
  int64_t stride_b, count;
  double k, temperature;
  A* weights;
  double* threshold;

  static constexpr double kReach = 60;  // temperatures to where nothing is left: exp(-60) beside sums near 1
  static constexpr double kEps = sizeof(A) == 4 ? 1.2e-7 : 2.3e-16;
  // Steps of t, in temperatures, that leave an error which does not count: it is about 0.03 of the step's square.
  static constexpr double kSure = sizeof(A) == 8 ? 1e-8 : kLink == Link::logistic ? 5e-3 : 2e-4;
  // The last step need not take the exponential again: two terms of the series are exact to 1 / 6 of its cube.
  static constexpr bool kSeries = kLink == Link::logistic && sizeof(A) == 4;

  struct Found {
    double t, at;  // the threshold, and the one that the weights were written for; NaN: they were not
  };

  template <class Team>
  TEXVLM_HD void operator()(const Team& team, int64_t b) const {
    A* const row = weights + b * count;
    const A* const from = scores + b * stride_b;
    const auto range = team.total(ScoreRange<A>{from}, b, count);
    const double infinite = range.infinite[0], known = range.finite[0];
    Found found{k <= infinite ? INFINITY : -INFINITY, 0};
    if (k > infinite && k < infinite + known)
      found = solve(team, b, from, known, k - infinite, range.least[0], range.most[0], range.sum[0] / known,
                    range.squares[0] / known);
    const double t = found.t;
    if (!finite(t)) {
      const A top = t < 0 ? A(1) : infinite > 0 ? static_cast<A>(k / infinite) : A(0), rest = t < 0 ? A(1) : A(0);
      for (int64_t i = team.rank; i < count; i += team.size) {
        const A s = as_score(from[i]);
        row[i] = s == A(INFINITY) ? top : s == -A(INFINITY) ? A(0) : rest;
      }
    } else if (kSeries && found.at == found.at) {
      const A step = static_cast<A>((t - found.at) / temperature), half = A(0.5) * step;
      for (int64_t i = team.rank; i < count; i += team.size) {
        const A w = row[i], rest = A(1) - w;
        row[i] = w - w * rest * step * (A(1) - half * (rest - w));
      }
    } else {
      const auto at = Threshold<A>::of(t, temperature);
      for (int64_t i = team.rank; i < count; i += team.size) row[i] = soft_weight<kLink>(at.z(from[i])).weight;
    }
    if (team.rank == 0) threshold[b] = t;
  }

 private:
  template <class Team>
  TEXVLM_HD Found solve(const Team& team, int64_t b, const A* row, double n, double wanted, double least, double most,
                        double mean, double square) const {
    const double T = temperature, target = link_inverse<kLink>(wanted / n);
    double low = least - T * target, high = most - T * target;
    if (!(low < high)) return {low, NAN};
    // Scores and the noise that the link stands for, as if both were normal where the scores are wide.
    const double noise = T * T * (kLink == Link::logistic ? 3.29 : 1.645), spread = maximum(square - mean * mean, 0.0);
    const double share = spread / (spread + noise), middle = kLink == Link::logistic ? 0.0 : 0.5772 * T;
    const double normal = mean + middle - sqrt(spread + noise) * log(wanted / (n - wanted)) / 1.702;
    double t = clamp(share * normal + (1 - share) * (mean - T * target), low, high);
    const A* near = row;
    int64_t size = count;
    double dropped = 0;  // how many above all that is near
    double width = high - low;
    bool parted = false;
    for (int step = 0; step < 200; ++step) {
      const auto at = Threshold<A>::of(t, T);
      double excess, slope, log_step = NAN, written = NAN;
      if (!parted) {
        const bool whole = kSeries && near == row;
        const auto sums = whole ? team.total(SoftSums<kLink, A, kSeries>{near, at, weights + b * count}, b, size)
                                : team.total(SoftSums<kLink, A, false>{near, at, nullptr}, b, size);
        excess = dropped + sums.of[0][0] - k, slope = sums.of[1][0];
        if (whole) written = t;
        if (slope < 0.05) {  // the sum is a whole number but for what it can't show
          parted = true;
          continue;
        }
      } else {
        const auto sums = team.total(PartedSums<kLink, A>{near, at}, b, size);
        const double below = sums.of[0][0], above = sums.of[1][0], missing = dropped + sums.above[0] - k;
        excess = missing + (below - above), slope = static_cast<double>(sums.of[2][0]) + sums.of[3][0];
        if (missing == 0) {
          if (below == 0 || above == 0) return {between(team, b, row, t), NAN};
          if (fabs(excess) <= 4 * kEps * (below + above)) return {t, NAN};
          if (below + above < 0.01) log_step = log(below / above) / (sums.of[2][0] / below + sums.of[3][0] / above);
        }
      }
      (excess > 0 ? low : high) = t;
      if (fabs(excess) <= 4 * kEps * k && !(parted && log_step == log_step)) return {t, written};
      const double p = clamp((wanted + excess) / n, 1e-12, 1 - 1e-12);
      const double next =
          t +
          T * (log_step == log_step ? log_step : (link_inverse<kLink>(p) - target) * n / (link_inverse_slope<kLink>(p) * slope));
      const bool slow = step % 3 == 2 && high - low > 0.5 * width;
      if (step % 3 == 2) width = high - low;
      if (!slow && next > low && next < high) {
        const bool sure = fabs(next - t) < kSure * T;
        t = next;
        if (sure) return {t, written};
      } else {
        t = low + 0.5 * (high - low);
        if (!(t > low && t < high)) return {t, NAN};
      }
      if constexpr (Team::size == 1) {
        if (size > 64 && 2 * kReach * T + (high - low) < 0.1 * (most - least)) {
          most = high + kReach * T, least = low - kReach * T;
          A* const kept = team.row;
          int64_t found = 0;
          for (int64_t i = 0; i < size; ++i) {
            const A s = as_score(near[i]);
            const double value = s;
            kept[found] = s;
            dropped += value > most;
            found += value >= least && value <= most;
          }
          near = kept, size = found;
        }
      }
    }
    return {t, NAN};
  }

  // Where the scores above t are as many as wanted, and too far from those below for one sum to hold both.
  template <class Team>
  TEXVLM_HD double between(const Team& team, int64_t b, const A* row, double t) const {
    const auto nearest = team.total(Nearest<A>{row, t}, b, count);
    const double below = nearest.below[0], above = nearest.above[0], T = temperature;
    const auto tails = team.total(SoftTails<kLink, A>{row, below, above, 1 / T}, b, count);
    const double ratio = log(static_cast<double>(tails.of[0][0]) / static_cast<double>(tails.of[1][0]));
    if (kLink == Link::logistic) return below + 0.5 * (above - below) + 0.5 * T * ratio;
    // exp(-y) = exp(-v) in units of the tails, y = (t - below) / T and v = exp((above - t) / T): v + log v = gap - ratio
    const double gap = (above - below) / T - ratio;
    double v = gap;
    for (int i = 0; i < 20; ++i) v = maximum(v - (v + log(v) - gap) / (1 + 1 / v), 1e-3);
    return above - T * log(v);
  }
};

// ---- gradients ----

// The largest logarithm of a slope in a row.
template <Link kLink, class A>
struct LargestSlope {
  template <int N>
  struct Part {
    A most[N];

    TEXVLM_HD void clear() {
      for (int l = 0; l < N; ++l) most[l] = -A(INFINITY);
    }
    template <int M>
    TEXVLM_HD void join(int at, const Part<M>& from, int first, int count) {
      for (int l = 0; l < count; ++l) most[at + l] = maximum(most[at + l], from.most[first + l]);
    }
  };
  const A* scores;
  Threshold<A> threshold;

  template <class P>
  TEXVLM_HD void add(int64_t, int64_t x, int n, P& part) const {
    for (int l = 0; l < n; ++l) part.most[l] = maximum(part.most[l], log_slope<kLink>(threshold.z(scores[x + l])));
  }
};

// Slopes over the largest one, written to `out`, their sum, and that of the gradients weighted by them.
template <Link kLink, class A>
struct SlopeSums {
  template <int N>
  using Part = Sums<A, 2, N>;
  const A *scores, *grad;
  Threshold<A> threshold;
  A largest, height;  // its logarithm, and itself
  A* out;

  template <class P>
  TEXVLM_HD void add(int64_t, int64_t x, int n, P& part) const {
    for (int l = 0; l < n; ++l) {
      const A e = exp_of(log_slope<kLink>(threshold.z(scores[x + l])) - largest);
      const A whole = A(1) + e * height, own = kLink == Link::logistic ? e / (whole * whole) : e;
      part.of[0][l] += own;
      part.of[1][l] += own == A(0) ? A(0) : own * grad[x + l];
      out[x + l] = own;
    }
  }
};

// grad [B, N] of the weights and scores as above, grad_threshold [B] -> out [B, N].
template <Link kLink, class A>
struct SoftTopKBackward {
  const A *grad, *scores;
  int64_t grad_b, stride_b, count;
  const double *grad_threshold, *threshold;
  int64_t grad_threshold_b, threshold_b;
  double temperature;
  A* out;

  template <class Team>
  TEXVLM_HD void operator()(const Team& team, int64_t b) const {
    A* const row = out + b * count;
    const A *const from = scores + b * stride_b, *const incoming = grad + b * grad_b;
    const double t = threshold[b * threshold_b];
    if (!finite(t)) {
      for (int64_t i = team.rank; i < count; i += team.size) row[i] = A(0);
      return;
    }
    const auto at = Threshold<A>::of(t, temperature);
    const A largest = team.total(LargestSlope<kLink, A>{from, at}, b, count).most[0], height = exp_of(largest);
    const auto sums = team.total(SlopeSums<kLink, A>{from, incoming, at, largest, height, row}, b, count);
    team.wait();
    const A mean = sums.of[1][0] / sums.of[0][0];
    const A scale = height * at.inverse, along = static_cast<A>(grad_threshold[b * grad_threshold_b] / sums.of[0][0]);
    for (int64_t i = team.rank; i < count; i += team.size) {
      const A own = row[i];
      row[i] = own == A(0) ? A(0) : own * (scale * (incoming[i] - mean) + along);
    }
  }
};

}  // namespace texvlm
