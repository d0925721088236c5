// Functions of one thread: bits, casts, rounding, cache hints.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "grid.h"

namespace texvlm::shim {
template <class To, class From>
To cast_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
}  // namespace texvlm::shim

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
inline unsigned __brev(unsigned v) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (v >> i & 1u) << (31 - i);
  return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> 4 * i, byte = static_cast<unsigned>(bytes >> 8 * (s & 7)) & 0xff;
    r |= (s & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
  }
  return r;
}

inline unsigned __float_as_uint(float v) { return texvlm::shim::cast_bits<unsigned>(v); }
inline int __float_as_int(float v) { return texvlm::shim::cast_bits<int>(v); }
inline float __uint_as_float(unsigned v) { return texvlm::shim::cast_bits<float>(v); }
inline float __int_as_float(int v) { return texvlm::shim::cast_bits<float>(v); }
inline long long __double_as_longlong(double v) { return texvlm::shim::cast_bits<long long>(v); }
inline double __longlong_as_double(long long v) { return texvlm::shim::cast_bits<double>(v); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float v) { return std::sqrt(v); }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline float __saturatef(float v) { return v > 0.0f ? (v < 1.0f ? v : 1.0f) : 0.0f; }
inline int __float2int_rn(float v) { return static_cast<int>(std::nearbyint(v)); }
inline int __float2int_rd(float v) { return static_cast<int>(std::floor(v)); }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline double rsqrt(double v) { return 1.0 / std::sqrt(v); }

#define TEXVLM_SHIM_MIN_MAX(T)                        \
  inline T min(T a, T b) { return b < a ? b : a; }    \
  inline T max(T a, T b) { return a < b ? b : a; }
TEXVLM_SHIM_MIN_MAX(int)
TEXVLM_SHIM_MIN_MAX(unsigned)
TEXVLM_SHIM_MIN_MAX(long)
TEXVLM_SHIM_MIN_MAX(unsigned long)
TEXVLM_SHIM_MIN_MAX(long long)
TEXVLM_SHIM_MIN_MAX(unsigned long long)
#undef TEXVLM_SHIM_MIN_MAX
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }

#define TEXVLM_SHIM_CACHED(hint)                   \
  template <class T>                               \
  T __ld##hint(const T* p) {                       \
    return *p;                                     \
  }                                                \
  template <class T>                               \
  void __st##hint(T* p, T value) {                 \
    *p = value;                                    \
  }
TEXVLM_SHIM_CACHED(g)
TEXVLM_SHIM_CACHED(ca)
TEXVLM_SHIM_CACHED(cg)
TEXVLM_SHIM_CACHED(cs)
TEXVLM_SHIM_CACHED(lu)
TEXVLM_SHIM_CACHED(cv)
TEXVLM_SHIM_CACHED(wb)
TEXVLM_SHIM_CACHED(wt)
#undef TEXVLM_SHIM_CACHED

[[noreturn]] inline void __trap(texvlm::shim::Where where = {}) { texvlm::shim::fail(where, "__trap"); }
