#include "../math/patches.h"

#include "launch.cuh"

namespace texvlm::cuda {

TEXVLM_FOR_TEXEL_TYPES(TEXVLM_QUERIES, ExtractPatches);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_QUERIES, ExtractPatchesAdjoint);

}  // namespace texvlm::cuda
