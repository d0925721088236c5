#include "../math/text.h"

#include "launch.cuh"

namespace texvlm::cuda {

TEXVLM_TEXELS(TextLuma<uint8_t>::For<float, 0>);
TEXVLM_TEXELS(TextLuma<float>::For<float, 0>);
TEXVLM_TEXELS(TextLuma<double>::For<double, 0>);
#define TEXVLM_TEXT(F)        \
  TEXVLM_TEXELS(F<float, 0>); \
  TEXVLM_TEXELS(F<double, 0>)
TEXVLM_TEXT(TextStatistics);
TEXVLM_TEXT(TextLayer);
TEXVLM_TEXT(TextScore);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_TEXELS, TextPixels);

}  // namespace texvlm::cuda
