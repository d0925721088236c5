#include "../math/history.h"

#include "launch.cuh"

namespace texvlm::cuda {

#define TEXVLM_SPLAT(T)               \
  TEXVLM_QUERIES(SplatTables<T, 0>);  \
  TEXVLM_TEXELS(Splat<T, 0>);         \
  TEXVLM_QUERIES(SplatRows<T, 0>);    \
  TEXVLM_QUERIES(SplatAdjoint<T, 0>); \
  TEXVLM_TEXELS(SplatBaseAdjoint<T, 0>)
TEXVLM_SPLAT(float);
TEXVLM_SPLAT(double);

}  // namespace texvlm::cuda
