// The kernel of the stem `soft_selection`: a block of threads for each row of scores.
#pragma once

#include "../math/soft_selection.h"
#include "launch.h"

namespace texvlm::cuda {

// F: SoftTopK or SoftTopKBackward. Nothing is read back.
template <class F>
void launch_soft_rows(const F& f, int64_t batch, void* stream);

}  // namespace texvlm::cuda
