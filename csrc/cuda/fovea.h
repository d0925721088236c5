// The adjoint of the stem `fovea`: sums in a fixed order.
#pragma once

#include "../math/fovea.h"
#include "launch.h"

namespace texvlm::cuda {

// partial: 2 values for each fixation of each picture, may hold anything. Gradients are stored, not added to.
template <class T>
void fovea_adjoint(const FoveaTokensAdjoint<T, 0>& f, int64_t batch, T* partial, void* stream);

}  // namespace texvlm::cuda
