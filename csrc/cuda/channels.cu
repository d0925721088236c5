#include "../math/channels.h"

#include "reduce.cuh"
#include "regions.cuh"

namespace texvlm::cuda {

#define TEXVLM_CHANNEL_TEXELS(S)                    \
  TEXVLM_REGIONS(ChannelTexels<S>::For<float, 0>);  \
  TEXVLM_REGIONS(ChannelTexels<S>::For<double, 0>); \
  TEXVLM_REGIONS(ChannelTexels<S>::For<Half, 0>);   \
  TEXVLM_REGIONS(ChannelTexels<S>::For<BFloat16, 0>)
TEXVLM_CHANNEL_TEXELS(uint8_t);
TEXVLM_CHANNEL_TEXELS(float);
TEXVLM_REGIONS(ChannelTexels<double>::For<double, 0>);
#define TEXVLM_PLANES(KIND, F) \
  KIND(F<float, 0>);           \
  KIND(F<double, 0>)
TEXVLM_PLANES(TEXVLM_REGIONS, ContrastPlane);
TEXVLM_PLANES(TEXVLM_TEXELS, EdgeAndContrast);
TEXVLM_PLANES(TEXVLM_REGIONS, NoMotion);
TEXVLM_PLANES(TEXVLM_WITHIN, EdgePlane);
TEXVLM_REGIONS(LumaChange<uint8_t>::For<float, 0>);
TEXVLM_REGIONS(LumaChange<float>::For<float, 0>);
TEXVLM_REGIONS(LumaChange<double>::For<double, 0>);
TEXVLM_PLANES(TEXVLM_TEXELS, ContrastAdjointSeed);
TEXVLM_PLANES(TEXVLM_TEXELS, ContrastAdjoint);
TEXVLM_PLANES(TEXVLM_TEXELS, PassAdjoint);
TEXVLM_PLANES(TEXVLM_GATHERED, GivenAdjoint);
TEXVLM_PLANES(TEXVLM_PLANES_REDUCED, FixationAdjoint);

}  // namespace texvlm::cuda
