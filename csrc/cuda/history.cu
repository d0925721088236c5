#include "../math/history.h"

#include "launch.cuh"
#include "reduce.cuh"

namespace texvlm::cuda {

#define TEXVLM_SPLAT(T)                      \
  TEXVLM_QUERIES(SplatTables<T, 0>);         \
  TEXVLM_TEXELS(Splat<T, 0>);                \
  TEXVLM_PLANES_REDUCED(SplatAdjoint<T, 0>); \
  TEXVLM_TEXELS(SplatBaseAdjoint<T, 0>)
TEXVLM_SPLAT(float);
TEXVLM_SPLAT(double);

}  // namespace texvlm::cuda
