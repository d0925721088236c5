#include "../math/features.h"

#include "launch.cuh"

namespace texvlm::cuda {

TEXVLM_FOR_TEXEL_TYPES(TEXVLM_QUERIES, CellFeatures);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_QUERIES, CellFeaturesAdjoint);

}  // namespace texvlm::cuda
