// The kernels of the stem `patches`.
#pragma once

#include "../math/patches_adjoint.h"
#include "scatter.h"

namespace texvlm::cuda {

template <class T>
void patches(const ExtractPatches<T, 0>& f, int64_t batch, void* stream);
// The gradients of centre, LOD and axes are stored, not added to; patches that are not finite are left alone.
template <class T>
void patches_adjoint(const ExtractPatchesAdjoint<T, 0>& f, int64_t batch, const FixedPoint& fixed, void* stream);

}  // namespace texvlm::cuda
