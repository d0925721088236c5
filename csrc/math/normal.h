// Standard normal numbers that a counter tells: the same on every device, in any order, as often as one asks, and stored nowhere.
//
// Philox4x32-10 (J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011)) makes four
// words of a counter, and Box and Muller's transform (1958) two normal numbers of two words. Plain arithmetic, so that loops of
// it vectorise; polynomials of the logarithm and of sine and cosine by S. Moshier, Cephes (1992).
#pragma once

#include "scalar.h"

namespace texvlm {

struct Counter {
  uint32_t word[4];
};

TEXVLM_HD Counter philox(Counter c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p = uint64_t{0xD2511F53u} * c.word[0], q = uint64_t{0xCD9E8D57u} * c.word[2];
    c = {{static_cast<uint32_t>(q >> 32) ^ c.word[1] ^ key0, static_cast<uint32_t>(q),
          static_cast<uint32_t>(p >> 32) ^ c.word[3] ^ key1, static_cast<uint32_t>(p)}};
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  return c;
}

// ln v of normal v > 0.
TEXVLM_HD float log_of(float v) {
  const uint32_t bits = float_bits(v) - 0x3f3504f3u;  // 1 / sqrt(2): the mantissa lies in [1 / sqrt(2), sqrt(2))
  const float e = static_cast<float>(static_cast<int32_t>(bits) >> 23), x = bits_float((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
  float p = 7.0376836292e-2f;
  p = fmaf(p, x, -1.1514610310e-1f);
  p = fmaf(p, x, 1.1676998740e-1f);
  p = fmaf(p, x, -1.2420140846e-1f);
  p = fmaf(p, x, 1.4249322787e-1f);
  p = fmaf(p, x, -1.6668057665e-1f);
  p = fmaf(p, x, 2.0000714765e-1f);
  p = fmaf(p, x, -2.4999993993e-1f);
  p = fmaf(p, x, 3.3333331174e-1f);
  const float s = x * x, y = fmaf(e, -2.12194440e-4f, x * s * p);
  return fmaf(e, 0.693359375f, x + fmaf(-0.5f, s, y));
}

// Two normal numbers of two words.
TEXVLM_HD void normal_pair(uint32_t a, uint32_t b, float& first, float& second) {
  const float u = fmaf(static_cast<float>(a >> 8), 0x1p-24f, 0x1p-25f);  // in (0, 1)
  const float radius = sqrt_of(-2.0f * log_of(u));
  // A turn of b / 2^32: the nearest quarter, and the rest in [-1/8, 1/8).
  const uint32_t quarter = (b + 0x20000000u) >> 30;
  const float turn = static_cast<float>(static_cast<int32_t>(b - (quarter << 30)) >> 7) * (6.283185307f * 0x1p-25f),
              s = turn * turn;
  const float sine = fmaf(fmaf(fmaf(-1.9515295891e-4f, s, 8.3321608736e-3f), s, -1.6666654611e-1f), s * turn, turn);
  const float cosine =
      fmaf(fmaf(fmaf(2.443315711809948e-5f, s, -1.388731625493765e-3f), s, 4.166664568298827e-2f), s * s, fmaf(-0.5f, s, 1.0f));
  const bool odd = quarter & 1;
  const float c = odd ? sine : cosine, d = odd ? cosine : sine;
  first = radius * (quarter == 1 || quarter == 2 ? -c : c);
  second = radius * (quarter >= 2 ? -d : d);
}

// Four normal numbers: places 4 group .. 4 group + 3 of a row.
TEXVLM_HD void normal_four(uint64_t seed, uint32_t group, uint32_t sample, uint32_t row, float* out) {
  const Counter c = philox({{group, sample, row, 0}}, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  normal_pair(c.word[0], c.word[1], out[0], out[1]);
  normal_pair(c.word[2], c.word[3], out[2], out[3]);
}

}  // namespace texvlm
