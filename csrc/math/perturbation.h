// The perturbed top-k: a choice averaged over noise, which is differentiable where the choice is not (Q. Berthet et al.,
// "Learning with differentiable perturbed optimizers" (2020); J.-B. Cordonnier et al., "Differentiable patch selection for image
// recognition" (2021)).
//
// Of E f(top-k(s + sigma Z)) with normal Z the gradient is E f Z / sigma. The choices are kept as indices, and the noise is made
// again of a counter (normal.h): nothing is as large as samples x scores, or k x scores.
#pragma once

#include "normal.h"

namespace texvlm {

// Items: groups of four places of one sample. scores [B, N] -> out [rows, N], row r being sample (first + r) % samples of picture
// (first + r) / samples.
template <class T, int C>
struct Perturb {
  const T* scores;
  int64_t stride_b, stride_n, count, first, samples;
  T sigma;
  uint64_t seed;
  T* out;

  TEXVLM_HD void operator()(int64_t r, int64_t group, int64_t, int64_t) const {
    const int64_t at = first + r, b = at / samples, m = at % samples, stop = minimum(count, 4 * group + 4);
    float noise[4];
    normal_four(seed, static_cast<uint32_t>(group), static_cast<uint32_t>(m), static_cast<uint32_t>(b), noise);
    for (int64_t n = 4 * group; n < stop; ++n)
      out[r * count + n] = scores[b * stride_b + n * stride_n] + sigma * static_cast<T>(noise[n - 4 * group]);
  }
};

// Gradient of the scores: sum over samples of weight [B, samples] times the noise, times scale. out [B, N].
template <class T, int C>
struct PerturbBackward {
  const T* weight;
  int64_t count, samples;
  T scale;
  uint64_t seed;
  T* out;

  TEXVLM_HD void operator()(int64_t b, int64_t group, int64_t, int64_t) const {
    T sum[4] = {};
    for (int64_t m = 0; m < samples; ++m) {
      float noise[4];
      normal_four(seed, static_cast<uint32_t>(group), static_cast<uint32_t>(m), static_cast<uint32_t>(b), noise);
      for (int i = 0; i < 4; ++i) sum[i] += weight[b * samples + m] * static_cast<T>(noise[i]);
    }
    for (int64_t n = 4 * group; n < minimum(count, 4 * group + 4); ++n) out[b * count + n] = scale * sum[n - 4 * group];
  }
};

}  // namespace texvlm
