#include "../math/warping.h"

#include "launch.cuh"

namespace texvlm::cuda {

TEXVLM_FOR_TEXEL_TYPES(TEXVLM_TEXELS, Warp);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_QUERIES, WarpAdjoint);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_TEXELS, WarpFlowAdjoint);
TEXVLM_TEXELS(FlowFieldAdjoint<float, 0>);
TEXVLM_TEXELS(FlowFieldAdjoint<double, 0>);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_TEXELS, AbsoluteDifference);

}  // namespace texvlm::cuda
