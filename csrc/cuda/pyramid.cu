#include "../math/pyramid.h"

#include "launch.cuh"

namespace texvlm::cuda {

#define TEXVLM_IMAGE(S, T) TEXVLM_TEXELS(ImageToTexels<S>::For<T, 0>)
TEXVLM_IMAGE(uint8_t, float);
TEXVLM_IMAGE(uint8_t, double);
TEXVLM_IMAGE(uint8_t, Half);
TEXVLM_IMAGE(uint8_t, BFloat16);
TEXVLM_IMAGE(float, float);
TEXVLM_IMAGE(double, double);
TEXVLM_IMAGE(Half, Half);
TEXVLM_IMAGE(BFloat16, BFloat16);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_TEXELS, MipDown);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_TEXELS, MipDownAdjoint);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_TEXELS, MipAdjointSeed);

}  // namespace texvlm::cuda
