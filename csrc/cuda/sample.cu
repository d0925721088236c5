#include "../math/sample_adjoint.h"

#include "launch.cuh"

namespace texvlm::cuda {

TEXVLM_FOR_TEXEL_TYPES(TEXVLM_QUERIES, SampleLod);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_QUERIES, SampleLodAdjoint);

}  // namespace texvlm::cuda
