// Foveation: where the tokens of a layout lie around a fixation, and how coarse each of them is.
//
// The magnification of the visual field on the cortex falls with eccentricity e as M(e) = M0 / (e + e0) (J.
// Rovamo and V. Virsu, "An estimation and application of the human cortical magnification factor",
// Experimental Brain Research 37, 1979), as does the resolution that is worth displaying (W. Geisler and J.
// Perry, "Real-time foveated multiresolution system for low-bandwidth video communication", SPIE 3299, 1998).
// A token samples with LOD = max(0, -log2 M(e)) = max(0, log2((e + e0) / M0)).
#pragma once

#include "reduce.h"

namespace texvlm {

// fixation [B, F, 2] uv, offsets [N, 2] level-0 pixels, m0 and e0 one value each: tokens n = f * N + k of
// picture b.
template <class A>
struct FoveaView {
  const A *fixation, *offsets, *m0, *e0;
  int64_t fixations, count;  // F, N
  A size[2];                 // width, height
  A last_level;
};

template <class A>
struct FoveaToken {
  bool usable;     // fixation and offset are finite
  A position[2];   // level-0 pixels, clamped to the picture
  bool inside[2];  // not clamped: the clamp lets gradients pass on its own bounds
  A step[2];       // position - fixation
  A eccentricity, lod;
  bool graded;  // the LOD is not clamped
};

template <class A>
TEXVLM_HD FoveaToken<A> fovea_token(const FoveaView<A>& v, int64_t b, int64_t n) {
  FoveaToken<A> t{};
  const A *fixation = v.fixation + 2 * (b * v.fixations + n / v.count), *offset = v.offsets + 2 * (n % v.count);
  t.usable = true;
  for (int d = 0; d < 2; ++d) {
    t.usable = t.usable && finite(fixation[d]) && finite(offset[d]);
    const A origin = fixation[d] * v.size[d], wanted = origin + offset[d];
    t.inside[d] = wanted >= A(0) && wanted <= v.size[d];
    t.position[d] = clamp(wanted, A(0), v.size[d]);
    t.step[d] = t.position[d] - origin;
  }
  t.eccentricity = hypot_of(t.step[0], t.step[1]);
  const A lod = log2_of((t.eccentricity + *v.e0) / *v.m0);
  t.graded = lod >= A(0) && lod <= v.last_level;
  t.lod = clamp(lod, A(0), v.last_level);
  return t;
}

// -> uv [B, F, N, 2], lod [B, F, N]
template <class T, int C>
struct FoveaTokens {
  FoveaView<T> view;
  T *uv, *lod;

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    const FoveaToken<T> t = fovea_token(view, b, n);
    const int64_t q = b * view.fixations * view.count + n;
    for (int d = 0; d < 2; ++d) uv[2 * q + d] = t.usable ? t.position[d] / view.size[d] : T(NAN);
    lod[q] = t.usable ? t.lod : T(NAN);
  }
};

// What one token tells of what it was made from. The distance has gradient 0 at 0.
template <class T>
struct FoveaTerms {
  T fixation[2], offset[2], m0, e0;
};

// Adjoint of FoveaTokens: sums over tokens (reduce.h). Gradients that are not wanted have null pointers.
template <class T>
struct FoveaAdjoint {
  FoveaView<T> view;
  const T *grad_uv, *grad_lod;  // [B, F, N, 2], [B, F, N]

  TEXVLM_HD FoveaTerms<T> terms(int64_t i, int64_t k) const {  // of token k around fixation i = b F + f
    FoveaTerms<T> sum{};
    const int64_t b = i / view.fixations, q = i * view.count + k;
    const FoveaToken<T> t = fovea_token(view, b, q - b * view.fixations * view.count);
    if (!t.usable) return sum;
    constexpr T kLog2e = T(1.44269504088896340736);
    const T by_log = t.graded ? grad_lod[q] * kLog2e : T(0);
    const T by_distance = t.graded ? by_log / (t.eccentricity + *view.e0) : T(0);
    if (t.graded) {
      sum.m0 = -by_log / *view.m0;
      sum.e0 = by_distance;
    }
    for (int d = 0; d < 2; ++d) {
      const T by_step = t.eccentricity > T(0) ? by_distance * t.step[d] / t.eccentricity : T(0);
      const T by_position = t.inside[d] ? grad_uv[2 * q + d] / view.size[d] + by_step : T(0);
      sum.fixation[d] = view.size[d] * (by_position - by_step);
      sum.offset[d] = by_position;
    }
    return sum;
  }
};

// A row is a fixation, a place one of its tokens.
template <class T>
struct FoveaFixationAdjoint {
  template <int N>
  using Part = Sums<T, 4, N>;
  FoveaAdjoint<T> of;
  T* to;       // [B, F, 2], or null
  T* law;      // [B, F, 2], or null: what its tokens tell of m0 and e0
  T* offsets;  // [B, F, N, 2], or null: what each token tells of its offset

  template <int N>
  TEXVLM_HD void add(int64_t i, int64_t k, int n, Part<N>& sum) const {
    for (int j = 0; j < n; ++j) {
      const FoveaTerms<T> t = of.terms(i, k + j);
      const T told[] = {t.fixation[0], t.fixation[1], t.m0, t.e0};
      for (int s = 0; s < 4; ++s) sum.of[s][j] += told[s];
      for (int d = 0; d < 2 && offsets; ++d) offsets[2 * (i * of.view.count + k + j) + d] = t.offset[d];
    }
  }
  TEXVLM_HD void finish(int64_t i, const Part<1>& total) const {
    for (int d = 0; d < 2 && to; ++d) to[2 * i + d] = total.of[d][0];
    for (int d = 0; d < 2 && law; ++d) law[2 * i + d] = total.of[2 + d][0];
  }
};

// Pairs [places, rows, 2] summed over the places: the law's of one row, and those of all offsets.
template <class T>
struct FoveaPairs {
  template <int N>
  using Part = Sums<T, 2, N>;
  const T* pairs;
  int64_t rows;
  T *first, *second;  // of row 0, or null; those of the next lie two further

  template <int N>
  TEXVLM_HD void add(int64_t row, int64_t place, int n, Part<N>& sum) const {
    for (int j = 0; j < n; ++j)
      for (int d = 0; d < 2; ++d) sum.of[d][j] += pairs[2 * ((place + j) * rows + row) + d];
  }
  TEXVLM_HD void finish(int64_t row, const Part<1>& total) const {
    if (first) first[2 * row] = total.of[0][0];
    if (second) second[2 * row] = total.of[1][0];
  }
};

}  // namespace texvlm
