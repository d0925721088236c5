// Kernels of the stem `flow` beside the generic ones.
#pragma once

#include "../math/flow.h"
#include "launch.h"

namespace texvlm::cuda {

constexpr int kMostSmoothSteps = 12;

// `steps` (1 to kMostSmoothSteps) steps of `f` at once, from its from_u, from_v to its to_u, to_v, which are others: the values
// are those of as many single steps.
void smooth_flow(const FlowSmooth<float, 0>& f, int64_t directions, int steps, void* stream);

}  // namespace texvlm::cuda
