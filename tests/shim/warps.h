// Barriers of a block and operations of a warp.
#pragma once

#include <cstring>
#include <type_traits>

#include "grid.h"

using texvlm_where = texvlm::shim::Where;
constexpr unsigned texvlm_full_warp = 0xffffffffu;

inline void __syncthreads(texvlm_where where = {}) { texvlm::shim::barrier("__syncthreads", false, where); }
inline int __syncthreads_count(int vote, texvlm_where where = {}) {
  return texvlm::shim::barrier("__syncthreads_count", vote != 0, where);
}
inline int __syncthreads_or(int vote, texvlm_where where = {}) {
  return texvlm::shim::barrier("__syncthreads_or", vote != 0, where) != 0;
}
inline int __syncthreads_and(int vote, texvlm_where where = {}) {
  return texvlm::shim::barrier("__syncthreads_and", vote == 0, where) == 0;
}

inline void __syncwarp(unsigned mask = texvlm_full_warp, texvlm_where where = {}) {
  texvlm::shim::exchange("__syncwarp", mask, 0, where);
}
inline unsigned __activemask(texvlm_where where = {}) { return texvlm::shim::converged(where); }

namespace texvlm::shim {

template <class T>
uint64_t to_word(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}
template <class T>
T from_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

// The value of lane `from`, or the own one where that is outside of the lane's segment.
template <class T>
T shuffle(const char* kind, unsigned mask, T value, int from, bool inside, Where where) {
  const uint64_t* all = exchange(kind, mask, to_word(value), where);
  if (!inside) return value;
  if (!(mask >> from & 1)) fail(where, "%s reads lane %d, which is not in the mask %08x", kind, from, mask);
  return from_word<T>(all[from]);
}

template <class T, class F>
T reduce(const char* kind, unsigned mask, T value, const F& combine, Where where) {
  const uint64_t* all = exchange(kind, mask, to_word(value), where);
  const int first = __builtin_ctz(mask);
  T sum = from_word<T>(all[first]);
  for (int l = first + 1; l < warpSize; ++l)
    if (mask >> l & 1) sum = combine(sum, from_word<T>(all[l]));
  return sum;
}

inline unsigned ballot(const char* kind, unsigned mask, bool vote, Where where) {
  const uint64_t* all = exchange(kind, mask, vote, where);
  unsigned votes = 0;
  for (int l = 0; l < warpSize; ++l)
    if (mask >> l & 1) votes |= static_cast<unsigned>(all[l]) << l;
  return votes;
}

}  // namespace texvlm::shim

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = warpSize, texvlm_where where = {}) {
  const int lane = static_cast<int>(texvlm::shim::lane()), segment = lane / width * width;
  return texvlm::shim::shuffle("__shfl_sync", mask, value, segment + (from & (width - 1)), true, where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, texvlm_where where = {}) {
  const int lane = static_cast<int>(texvlm::shim::lane()), from = lane - static_cast<int>(delta);
  return texvlm::shim::shuffle("__shfl_up_sync", mask, value, from, from >= lane / width * width, where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, texvlm_where where = {}) {
  const int lane = static_cast<int>(texvlm::shim::lane()), from = lane + static_cast<int>(delta);
  return texvlm::shim::shuffle("__shfl_down_sync", mask, value, from, from < (lane / width + 1) * width, where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize, texvlm_where where = {}) {
  const int lane = static_cast<int>(texvlm::shim::lane()), from = lane ^ bits;
  return texvlm::shim::shuffle("__shfl_xor_sync", mask, value, from, from < (lane / width + 1) * width, where);
}

inline unsigned __ballot_sync(unsigned mask, int vote, texvlm_where where = {}) {
  return texvlm::shim::ballot("__ballot_sync", mask, vote != 0, where);
}
inline int __any_sync(unsigned mask, int vote, texvlm_where where = {}) {
  return texvlm::shim::ballot("__any_sync", mask, vote != 0, where) != 0;
}
inline int __all_sync(unsigned mask, int vote, texvlm_where where = {}) {
  return texvlm::shim::ballot("__all_sync", mask, vote == 0, where) == 0;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, texvlm_where where = {}) {
  const uint64_t word = texvlm::shim::to_word(value), *all = texvlm::shim::exchange("__match_any_sync", mask, word, where);
  unsigned same = 0;
  for (int l = 0; l < warpSize; ++l)
    if ((mask >> l & 1) && all[l] == word) same |= 1u << l;
  return same;
}
template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* all_match, texvlm_where where = {}) {
  *all_match = __match_any_sync(mask, value, where) == mask;
  return *all_match ? mask : 0;
}

#define TEXVLM_SHIM_REDUCE(name, expression)                                                                         \
  template <class T>                                                                                                 \
  T name(unsigned mask, T value, texvlm_where where = {}) {                                            \
    static_assert(std::is_integral_v<T> && sizeof(T) == 4, "only 32-bit integers are reduced in hardware");          \
    return texvlm::shim::reduce(#name, mask, value, [](T a, T b) { return static_cast<T>(expression); }, where);     \
  }
TEXVLM_SHIM_REDUCE(__reduce_add_sync, static_cast<unsigned>(a) + static_cast<unsigned>(b))
TEXVLM_SHIM_REDUCE(__reduce_min_sync, b < a ? b : a)
TEXVLM_SHIM_REDUCE(__reduce_max_sync, a < b ? b : a)
TEXVLM_SHIM_REDUCE(__reduce_and_sync, a & b)
TEXVLM_SHIM_REDUCE(__reduce_or_sync, a | b)
TEXVLM_SHIM_REDUCE(__reduce_xor_sync, a ^ b)
#undef TEXVLM_SHIM_REDUCE
