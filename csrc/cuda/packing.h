// The kernels of the stem `packing`.
#pragma once

#include "../math/packing.h"
#include "launch.h"

namespace texvlm::cuda {

template <class S>
void pack_cells(const PackCells<S>& f, int64_t batch, void* stream);
template <class T>
void pack_cells_adjoint(const PackCellsAdjoint<T>& f, int64_t batch, void* stream);

}  // namespace texvlm::cuda
