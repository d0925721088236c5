#include "../math/perturbation.h"

#include "launch.cuh"

namespace texvlm::cuda {

TEXVLM_QUERIES(Perturb<float, 0>);
TEXVLM_QUERIES(Perturb<double, 0>);
TEXVLM_QUERIES(PerturbBackward<float, 0>);
TEXVLM_QUERIES(PerturbBackward<double, 0>);

}  // namespace texvlm::cuda
