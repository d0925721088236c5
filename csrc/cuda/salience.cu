#include "../math/rarity.h"

#include "reduce.cuh"
#include "regions.cuh"

namespace texvlm::cuda {

#define TEXVLM_PICTURES(KIND, F)   \
  KIND(F<uint8_t>::For<float, 0>); \
  KIND(F<float>::For<float, 0>);   \
  KIND(F<double>::For<double, 0>)
#define TEXVLM_PLANES(KIND, F) \
  KIND(F<float, 0>);           \
  KIND(F<double, 0>)
TEXVLM_PICTURES(TEXVLM_TEXELS, LumaPlane);
TEXVLM_PICTURES(TEXVLM_REGIONS, SalienceColours);
TEXVLM_TEXELS(PictureAdjoint<float>::For<float, 0>);
TEXVLM_TEXELS(PictureAdjoint<double>::For<double, 0>);
TEXVLM_PLANES(TEXVLM_TEXELS, EdgePlane);
TEXVLM_PLANES(TEXVLM_TEXELS, SobelAdjointSeed);
TEXVLM_PLANES(TEXVLM_TEXELS, SobelAdjoint);
TEXVLM_PLANES(TEXVLM_TEXELS, MotionAdjoint);
TEXVLM_PLANES(TEXVLM_REGIONS, SalienceFeatures);
TEXVLM_PLANES(TEXVLM_TEXELS, SalienceFeaturesAdjoint);
TEXVLM_PLANES(TEXVLM_TEXELS, SaliencePlanes);
TEXVLM_PLANES(TEXVLM_TEXELS, SaliencePlanesAdjoint);
TEXVLM_PLANES(TEXVLM_TEXELS, Atrous);
TEXVLM_PLANES(TEXVLM_TEXELS, AtrousAdjoint);
TEXVLM_PLANES(TEXVLM_TEXELS, SalienceRarity);
TEXVLM_PLANES(TEXVLM_TEXELS, SalienceRarityAdjoint);
TEXVLM_PLANES(TEXVLM_TEXELS, OverMaximum);
TEXVLM_PLANES(TEXVLM_TEXELS, OverMaximumAdjoint);
TEXVLM_PLANES(TEXVLM_GATHERED, EnlargePlaneAdjoint);
TEXVLM_PLANES(TEXVLM_PLANES_REDUCED, WhitenPicture);
TEXVLM_PLANES(TEXVLM_PLANES_REDUCED, RarityMoments);
TEXVLM_PLANES(TEXVLM_PLANES_REDUCED, PlaneStats);
TEXVLM_PLANES(TEXVLM_PLANES_REDUCED, EdgeThreshold);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_TEXELS, EnlargePlane);

}  // namespace texvlm::cuda
