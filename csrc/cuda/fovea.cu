#include "../math/fovea.h"

#include "launch.cuh"
#include "reduce.cuh"

namespace texvlm::cuda {

#define TEXVLM_FOVEA(T)                         \
  TEXVLM_QUERIES(FoveaTokens<T, 0>);            \
  TEXVLM_ROWS_REDUCED(FoveaFixationAdjoint<T>); \
  TEXVLM_ROWS_REDUCED(FoveaPairs<T>)
TEXVLM_FOVEA(float);
TEXVLM_FOVEA(double);

}  // namespace texvlm::cuda
