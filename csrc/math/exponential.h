// e^x in plain arithmetic: loops of it vectorise, and every device finds the same. Multiply-adds are asked for by name: each is
// rounded once wherever it runs, unlike those that a compiler may or may not contract. Error at most 1 in the last place or two;
// 0 where the result is below the smallest normal number. Method and coefficients: S. Moshier, Cephes (1992), exp and expf.
#pragma once

#include "scalar.h"

namespace texvlm {

TEXVLM_HD float absolute(float v) { return fabsf(v); }
TEXVLM_HD double absolute(double v) { return fabs(v); }

TEXVLM_HD float exp_of(float x) {
  const float shifted = fmaf(x, 1.44269504088896341f, 12582912.0f);  // 1.5 * 2^23: the whole number n is in the low bits
  const float n = shifted - 12582912.0f, r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x)), s = r * r;
  const float p = fmaf(fmaf(fmaf(1.9875691500e-4f, r, 1.3981999507e-3f), s, fmaf(8.3334519073e-3f, r, 4.1665795894e-2f)), s,
                       fmaf(1.6666665459e-1f, r, 5.0000001201e-1f));
  const float value = (fmaf(p, s, r) + 1.0f) * bits_float((float_bits(shifted) + 127u) << 23);
  return x >= -87.0f ? value : 0.0f;
}

TEXVLM_HD double exp_of(double x) {
  const double shifted = x * 1.4426950408889634073599 + 6755399441055744.0, n = shifted - 6755399441055744.0;
  const double r = (x - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6, s = r * r;
  const double p = r * ((1.26177193074810590878e-4 * s + 3.02994407707441961300e-2) * s + 9.99999999999999999910e-1);
  const double q = ((3.00198505138664455042e-6 * s + 2.52448340349684104192e-3) * s + 2.27265548208155028766e-1) * s + 2.0;
  const double value = (1.0 + 2.0 * (p / (q - p))) * bits_as<double>((bits_as<uint64_t>(shifted) + 1023u) << 52);
  return x >= -708.0 ? value : 0.0;
}

}  // namespace texvlm
