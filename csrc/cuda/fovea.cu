#include "../math/fovea.h"

#include "launch.cuh"

namespace texvlm::cuda {

TEXVLM_QUERIES(FoveaTokens<float, 0>);
TEXVLM_QUERIES(FoveaTokens<double, 0>);
TEXVLM_QUERIES(FoveaTokensAdjoint<float, 0>);
TEXVLM_QUERIES(FoveaTokensAdjoint<double, 0>);

}  // namespace texvlm::cuda
