#include "../math/flow.h"

#include "launch.cuh"
#include "reduce.cuh"

namespace texvlm::cuda {

TEXVLM_TEXELS(FlowLuma<uint8_t>::For<float, 0>);
TEXVLM_TEXELS(FlowLuma<float>::For<float, 0>);
TEXVLM_TEXELS(FlowLuma<double>::For<float, 0>);
TEXVLM_TEXELS(FlowGiven<float, 0>);
TEXVLM_PLANES_REDUCED(FlowContrast<float, 0>);
TEXVLM_QUERIES(FlowSearch<float, 0>);
TEXVLM_TEXELS(FlowSmooth<float, 0>);
TEXVLM_TEXELS(FlowDense<float, 0>);
TEXVLM_TEXELS(FlowOcclusion<float, 0>);

}  // namespace texvlm::cuda
