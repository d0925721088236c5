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
  } else {
    for (int i = 0; i < N; ++i) v[i] = static_cast<A>(p[i]);
  }
  return v;
}
template <class A, int N, class T>
TEXVLM_HD void store_lanes(T* p, const Lanes<A, N>& v) {
  if constexpr (std::is_same_v<A, T>) {
    memcpy(p, &v, sizeof(v));
  } else {
    for (int i = 0; i < N; ++i) p[i] = static_cast<T>(v[i]);
  }
}

// Width for a channel count: 4 lanes hold the texels of pictures, 8 those of feature maps.
constexpr int lanes_for(int channels) { return channels > 0 && channels <= 4 ? 4 : 8; }

TEXVLM_HD int64_t guard_texels(int64_t channels, int lanes) {
  const int64_t used = (channels + lanes - 1) / lanes * lanes;
  return (used + channels - 1) / channels;
}

}  // namespace texvlm
#endif
