// Numbers as integers in the same order: what is searched bit by bit, or sorted by digits, is made of these.
#pragma once

#include "scalar.h"

namespace texvlm {

// NaN lowest, -0 equal to 0.
TEXVLM_HD int32_t rank_key(float v) {
  const int32_t bits = bits_as<int32_t>(v + 0.0f);
  return v != v ? INT32_MIN : bits ^ ((bits >> 31) & INT32_MAX);
}
TEXVLM_HD int64_t rank_key(double v) {
  const int64_t bits = bits_as<int64_t>(v + 0.0);
  return v != v ? INT64_MIN : bits ^ ((bits >> 63) & INT64_MAX);
}
// The way back, but for NaN.
TEXVLM_HD float rank_value(int32_t key) { return bits_as<float>(key ^ ((key >> 31) & INT32_MAX)); }
TEXVLM_HD double rank_value(int64_t key) { return bits_as<double>(key ^ ((key >> 63) & INT64_MAX)); }

}  // namespace texvlm
