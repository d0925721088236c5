#include "../math/laplacian.h"

#include "launch.cuh"

namespace texvlm::cuda {

TEXVLM_FOR_TEXEL_TYPES(TEXVLM_TEXELS, AddEnlarged);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_TEXELS, AddEnlargedAdjoint);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_TEXELS, CopyLevel);

}  // namespace texvlm::cuda
