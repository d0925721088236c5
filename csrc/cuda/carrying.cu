#include "../math/carrying.h"

#include "launch.cuh"

namespace texvlm::cuda {

TEXVLM_TEXELS(Carry<float, 0>);

}  // namespace texvlm::cuda
