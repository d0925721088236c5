#include "../math/distance.h"

#include "launch.cuh"

namespace texvlm::cuda {

TEXVLM_QUERIES(NearestInColumn<BoolMask>::For<int32_t, 0>);
TEXVLM_QUERIES(NearestInColumn<AboveMask<float>>::For<int32_t, 0>);
TEXVLM_QUERIES(NearestInColumn<AboveMask<double>>::For<int32_t, 0>);
#define TEXVLM_NEAREST_IN_ROW(SINK)                   \
  TEXVLM_TEXELS(NearestInRow<SINK>::For<int32_t, 0>); \
  TEXVLM_TEXELS(NearestInRow<SINK>::For<int64_t, 0>)
TEXVLM_NEAREST_IN_ROW(SquaredSink);
TEXVLM_NEAREST_IN_ROW(DiagonalSink<float>);
TEXVLM_NEAREST_IN_ROW(DiagonalSink<double>);
TEXVLM_TEXELS(FloodStart<BoolMask>::For<int64_t, 0>);
TEXVLM_TEXELS(FloodStep<int64_t, 0>);
TEXVLM_TEXELS(FloodEnd<int64_t, 0>);

}  // namespace texvlm::cuda
