// The kernel of the stem `prediction`.
#pragma once

#include "../math/prediction.h"
#include "launch.h"

namespace texvlm::cuda {

// 32-bit words of workspace, which must be zero.
inline int64_t prediction_workspace(int64_t batch, int64_t cells) { return 1 + batch * cells; }

// out int64 [B, cells]: where each is put back from. One launch; fewer than 2^31 cells in all, and pixels of a cell.
template <class T>
void predict_cells(const PredictedCells<T>& cells, int64_t batch, int64_t* out, uint32_t* workspace, void* stream);

}  // namespace texvlm::cuda
