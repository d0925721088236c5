// The kernels of the stem `sample` that are more than a functor per query.
#pragma once

#include "../math/sample_adjoint.h"
#include "scatter.h"

namespace texvlm::cuda {

template <class T>
void sample(const SampleLod<T, 0>& f, int64_t batch, void* stream);
// grad_uv and grad_lod are stored, not added to; queries that are not finite are left alone.
template <class T>
void sample_adjoint(const SampleLodAdjoint<T, 0>& f, int64_t batch, const FixedPoint& fixed, void* stream);

}  // namespace texvlm::cuda
