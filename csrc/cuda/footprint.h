// The kernels of the stem `footprint` that are more than a functor per query.
#pragma once

#include "../math/footprint.h"
#include "scatter.h"

namespace texvlm::cuda {

template <class T>
void sample_grad_adjoint(const SampleGradAdjoint<T, 0>& f, int64_t batch, const FixedPoint& fixed, void* stream);

}  // namespace texvlm::cuda
