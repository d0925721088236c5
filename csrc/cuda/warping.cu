#include "../math/warping.h"

#include "launch.cuh"
#include "reduce.cuh"

namespace texvlm::cuda {

TEXVLM_FOR_TEXEL_TYPES(TEXVLM_TEXELS, Warp);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_QUERIES, WarpAdjoint);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_TEXELS, WarpFlowAdjoint);
TEXVLM_GATHERED(FlowFieldAdjoint<float, 0>);
TEXVLM_GATHERED(FlowFieldAdjoint<double, 0>);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_TEXELS, MotionBetween);

}  // namespace texvlm::cuda
