// Storage and arithmetic types of every functor, for host and device; no torch, no CUDA headers.
//
// Texels are stored as float, double, Half or BFloat16 (`T`) and computed as `Acc<T>`: double for double, float otherwise.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define TEXVLM_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__)
// Functors must inline into the loops of launch.h, which are compiled once per instruction set.
#define TEXVLM_HD inline __attribute__((always_inline))
#else
#define TEXVLM_HD inline
#endif

// row() and block() are for the host loops alone: nvcc does not see them.
#if !defined(__CUDACC__)
#define TEXVLM_HOST_LOOPS 1
#endif

// Rare paths of the host loops: compiled once instead of once per instruction set.
#if defined(__GNUC__) && !defined(__CUDACC__)
#define TEXVLM_NOINLINE __attribute__((noinline))
#else
#define TEXVLM_NOINLINE
#endif

#if defined(__GNUC__) || defined(__CUDACC__)
#define TEXVLM_RESTRICT __restrict__
#else
#define TEXVLM_RESTRICT
#endif

namespace texvlm {

TEXVLM_HD uint32_t float_bits(float v) {
  uint32_t u;
  memcpy(&u, &v, 4);
  return u;
}
TEXVLM_HD float bits_float(uint32_t u) {
  float v;
  memcpy(&v, &u, 4);
  return v;
}

// C's functions by overload: std:: has them on the host alone.
TEXVLM_HD float floor_of(float v) { return floorf(v); }
TEXVLM_HD double floor_of(double v) { return floor(v); }
TEXVLM_HD float sqrt_of(float v) { return sqrtf(v); }
TEXVLM_HD double sqrt_of(double v) { return sqrt(v); }
TEXVLM_HD float exp2_of(float v) { return exp2f(v); }
TEXVLM_HD double exp2_of(double v) { return exp2(v); }
TEXVLM_HD float log2_of(float v) { return log2f(v); }
TEXVLM_HD double log2_of(double v) { return log2(v); }
TEXVLM_HD float hypot_of(float x, float y) { return hypotf(x, y); }
TEXVLM_HD double hypot_of(double x, double y) { return hypot(x, y); }

template <class To, class From>
TEXVLM_HD To bits_as(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  memcpy(&out, &v, sizeof(out));
  return out;
}

// IEEE binary16. The conversions are branch-free (selects only), of one number or of vectors of them (lanes.h): F is float and U
// uint32_t, the half in its low bits, or vectors of these. They round to nearest even, keep infinities, and keep NaN as a quiet
// NaN. Method: F. Giesen, "Half to float done quick" (2012).
struct Half {
  uint16_t bits;
  Half() = default;
  TEXVLM_HD explicit Half(float value) : bits(static_cast<uint16_t>(narrowed<uint32_t>(value))) {}
  TEXVLM_HD operator float() const { return widened<float>(uint32_t{bits}); }

  template <class U, class F>
  TEXVLM_HD static U narrowed(F value) {
    const U all = bits_as<U>(value), sign = (all >> 16) & 0x8000u, magnitude = all & 0x7fffffffu;
    const U odd = (magnitude >> 13) & 1u;
    const U normal = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;
    const U subnormal = bits_as<U>(bits_as<F>(magnitude) + 0.5f) - 0x3f000000u;  // adding 1/2 does the rounding
    U h = magnitude < (113u << 23) ? subnormal : normal;
    h = magnitude >= (143u << 23) ? h * 0u + 0x7c00u : h;
    h = magnitude > 0x7f800000u ? h * 0u + 0x7e00u : h;
    return h | sign;
  }
  template <class F, class U>
  TEXVLM_HD static F widened(U half) {
    const U shifted = (half & 0x7fffu) << 13, exponent = shifted & (0x7c00u << 13);
    const F normal = bits_as<F>(shifted + (112u << 23));
    const F special = bits_as<F>(shifted + (224u << 23));
    const F subnormal = bits_as<F>(shifted + (113u << 23)) - 6.103515625e-05f;  // 2^-14, the smallest normal half
    const F small = exponent == 0u ? subnormal : normal, value = exponent == (0x7c00u << 13) ? special : small;
    return bits_as<F>(bits_as<U>(value) | ((half & 0x8000u) << 16));
  }
};

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  TEXVLM_HD explicit BFloat16(float value) : bits(static_cast<uint16_t>(narrowed<uint32_t>(value))) {}
  TEXVLM_HD operator float() const { return widened<float>(uint32_t{bits}); }

  template <class U, class F>
  TEXVLM_HD static U narrowed(F value) {
    const U all = bits_as<U>(value), rounded = (all + 0x7fffu + ((all >> 16) & 1u)) >> 16;
    return (all & 0x7fffffffu) > 0x7f800000u ? all * 0u + 0x7fc0u : rounded;
  }
  template <class F, class U>
  TEXVLM_HD static F widened(U half) {
    return bits_as<F>(half << 16);
  }
};

template <class T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <class T>
using Acc = typename AccOf<T>::type;

// What rows of numbers are stored in: the type of the arithmetic, or a half type, which is widened. Known at run time, where
// loops are compiled for two types, not four.
enum class Storage { own, half, bfloat16 };
template <class T>
constexpr Storage kStorage = std::is_same_v<T, Half>       ? Storage::half
                             : std::is_same_v<T, BFloat16> ? Storage::bfloat16
                                                           : Storage::own;

template <class T>
TEXVLM_HD T minimum(T a, T b) {
  return b < a ? b : a;
}
template <class T>
TEXVLM_HD T maximum(T a, T b) {
  return a < b ? b : a;
}
template <class T>
TEXVLM_HD T clamp(T v, T lo, T hi) {
  return minimum(maximum(v, lo), hi);
}

// Pixels of a row that a functor with pixels<N>(b, y, x, n) is given at a time on the host: x .. x + n - 1, n <= N, with N =
// kRun. CUDA gives a thread one, with N = 1. So a formula stands once, in loops that vectorise, with its intermediates on the
// stack.
constexpr int kRun = 64;

// Whether F has a member of this name, whatever its type: one that does not fit is an error where it is called, instead of a slow
// way without it. (A name that two bases have is ambiguous.)
#define TEXVLM_HAS_MEMBER(Has, name)                                    \
  template <class F>                                                    \
  struct Has {                                                          \
    struct Other {                                                      \
      int name;                                                         \
    };                                                                  \
    struct Both : F, Other {};                                          \
    template <class B>                                                  \
    static std::false_type test(decltype(&B::name)*);                   \
    template <class B>                                                  \
    static std::true_type test(...);                                    \
    static constexpr bool value = decltype(test<Both>(nullptr))::value; \
  }
TEXVLM_HAS_MEMBER(HasPixels, pixels);
// Functors that take a way of its own for each channel have kOwnWays: on CUDA a warp gets one slice of channels then.
TEXVLM_HAS_MEMBER(HasOwnWays, kOwnWays);
template <class F>
constexpr bool kHasOwnWays = HasOwnWays<F>::value;

// False for NaN and infinities; |v| <= max is one comparison, which vectorises where isfinite() does not.
TEXVLM_HD bool finite(float v) { return fabsf(v) <= 3.402823466e38f; }
TEXVLM_HD bool finite(double v) { return fabs(v) <= 1.7976931348623157e308; }

// Adds to a gradient that several threads may touch. On the host the loops in launch.h never share a target, so it is a plain
// add.
template <class T>
TEXVLM_HD void accumulate(T* target, T value) {
#if defined(__CUDA_ARCH__)
  atomicAdd(target, value);
#else
  *target += value;
#endif
}

}  // namespace texvlm
