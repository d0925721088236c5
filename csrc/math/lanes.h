// Fixed-width vectors for the host loops: GCC and clang vector extensions, lowered to whatever the instruction set has.
//
// Channels-last texels of C channels are processed ceil(C / N) x N values at a time. The last group reaches into the next texel:
// loads read it, stores overwrite it with junk that the next texel's own store replaces. Callers stop `guard_texels` before the
// end of a row and finish it one value at a time, so nothing outside the row is touched.
#pragma once

#include <type_traits>

#include "scalar.h"

#if defined(TEXVLM_HOST_LOOPS) && defined(__GNUC__)
#define TEXVLM_HAS_LANES 1

namespace texvlm {

template <class A, int N>
struct LanesOf {
  typedef A type __attribute__((vector_size(N * sizeof(A))));
};
template <class A, int N>
using Lanes = typename LanesOf<A, N>::type;

template <class A>
struct IntLike {
  using type = int32_t;
};
template <>
struct IntLike<double> {
  using type = int64_t;
};

// Half types widen to float on the way in and are rounded on the way out.
template <class A, int N, class T>
TEXVLM_HD Lanes<A, N> load_lanes(const T* p) {
  Lanes<A, N> v;
  if constexpr (std::is_same_v<A, T>) {
    memcpy(&v, p, sizeof(v));
  } else if constexpr (std::is_same_v<A, float> && (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>)) {
    Lanes<uint16_t, N> bits;
    memcpy(&bits, p, sizeof(bits));
    v = T::template widened<Lanes<A, N>>(__builtin_convertvector(bits, Lanes<uint32_t, N>));
  } else {
    for (int i = 0; i < N; ++i) v[i] = static_cast<A>(p[i]);
  }
  return v;
}
template <class A, int N, class T>
TEXVLM_HD void store_lanes(T* p, const Lanes<A, N>& v) {
  if constexpr (std::is_same_v<A, T>) {
    memcpy(p, &v, sizeof(v));
  } else if constexpr (std::is_same_v<A, float> && (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>)) {
    const auto bits = __builtin_convertvector(T::template narrowed<Lanes<uint32_t, N>>(v), Lanes<uint16_t, N>);
    memcpy(p, &bits, sizeof(bits));
  } else {
    for (int i = 0; i < N; ++i) p[i] = static_cast<T>(v[i]);
  }
}

// Rows to columns: four planes of four values to four texels of four channels.
template <class A>
TEXVLM_HD void transpose(Lanes<A, 4>& p, Lanes<A, 4>& q, Lanes<A, 4>& r, Lanes<A, 4>& s) {
  using V = Lanes<A, 4>;
#if defined(__clang__)
  const V low = __builtin_shufflevector(p, q, 0, 4, 1, 5), low2 = __builtin_shufflevector(r, s, 0, 4, 1, 5);
  const V high = __builtin_shufflevector(p, q, 2, 6, 3, 7), high2 = __builtin_shufflevector(r, s, 2, 6, 3, 7);
  p = __builtin_shufflevector(low, low2, 0, 1, 4, 5);
  q = __builtin_shufflevector(low, low2, 2, 3, 6, 7);
  r = __builtin_shufflevector(high, high2, 0, 1, 4, 5);
  s = __builtin_shufflevector(high, high2, 2, 3, 6, 7);
#else
  using M = Lanes<typename IntLike<A>::type, 4>;
  const V low = __builtin_shuffle(p, q, M{0, 4, 1, 5}), low2 = __builtin_shuffle(r, s, M{0, 4, 1, 5});
  const V high = __builtin_shuffle(p, q, M{2, 6, 3, 7}), high2 = __builtin_shuffle(r, s, M{2, 6, 3, 7});
  p = __builtin_shuffle(low, low2, M{0, 1, 4, 5});
  q = __builtin_shuffle(low, low2, M{2, 3, 6, 7});
  r = __builtin_shuffle(high, high2, M{0, 1, 4, 5});
  s = __builtin_shuffle(high, high2, M{2, 3, 6, 7});
#endif
}

// Width for a channel count: 4 lanes hold the texels of pictures, 8 those of feature maps.
constexpr int lanes_for(int channels) { return channels > 0 && channels <= 4 ? 4 : 8; }

TEXVLM_HD int64_t guard_texels(int64_t channels, int lanes) {
  const int64_t used = (channels + lanes - 1) / lanes * lanes;
  return (used + channels - 1) / channels;
}

}  // namespace texvlm
#endif
