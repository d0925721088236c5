#include "../math/footprint.h"

#include "launch.cuh"

namespace texvlm::cuda {

TEXVLM_FOR_TEXEL_TYPES(TEXVLM_QUERIES, SampleGrad);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_QUERIES, SampleGradAdjoint);

}  // namespace texvlm::cuda
