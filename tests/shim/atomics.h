// Atomic functions: relaxed, as on the GPU, and a place where another thread may come first.
#pragma once

#include "grid.h"
#include "vectors.h"

namespace texvlm::shim {

template <class T>
struct Given {  // so that T is deduced from the pointer alone
  using type = T;
};

template <class T, class F>
T atomically(T* target, const F& change) {
  yield_sometimes();
  T old, next;
  __atomic_load(target, &old, __ATOMIC_RELAXED);
  do next = change(old);
  while (!__atomic_compare_exchange(target, &old, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  yield_sometimes();
  return old;
}

}  // namespace texvlm::shim

#define TEXVLM_SHIM_ATOMIC(name, expression)                                                     \
  template <class T>                                                                             \
  T name(T* target, typename texvlm::shim::Given<T>::type value) {                               \
    return texvlm::shim::atomically(target, [&](T old) { return static_cast<T>(expression); });  \
  }                                                                                              \
  template <class T>                                                                             \
  T name##_block(T* target, typename texvlm::shim::Given<T>::type value) {                       \
    return name(target, value);                                                                  \
  }
TEXVLM_SHIM_ATOMIC(atomicAdd, old + value)
TEXVLM_SHIM_ATOMIC(atomicSub, old - value)
TEXVLM_SHIM_ATOMIC(atomicExch, ((void)old, value))
TEXVLM_SHIM_ATOMIC(atomicMin, value < old ? value : old)
TEXVLM_SHIM_ATOMIC(atomicMax, old < value ? value : old)
TEXVLM_SHIM_ATOMIC(atomicAnd, old & value)
TEXVLM_SHIM_ATOMIC(atomicOr, old | value)
TEXVLM_SHIM_ATOMIC(atomicXor, old ^ value)
TEXVLM_SHIM_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
TEXVLM_SHIM_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef TEXVLM_SHIM_ATOMIC

template <class T>
T atomicCAS(T* target, typename texvlm::shim::Given<T>::type compare, typename texvlm::shim::Given<T>::type value) {
  return texvlm::shim::atomically(target, [&](T old) { return old == compare ? value : old; });
}

// sm_90: each component by itself.
inline float2 atomicAdd(float2* target, float2 value) {
  return {atomicAdd(&target->x, value.x), atomicAdd(&target->y, value.y)};
}
inline float4 atomicAdd(float4* target, float4 value) {
  return {atomicAdd(&target->x, value.x), atomicAdd(&target->y, value.y), atomicAdd(&target->z, value.z),
          atomicAdd(&target->w, value.w)};
}

inline void __threadfence() { texvlm::shim::fence(false); }
inline void __threadfence_system() { texvlm::shim::fence(false); }
inline void __threadfence_block() { texvlm::shim::fence(true); }
inline void __nanosleep(unsigned) { texvlm::shim::yield(); }
