// The kernels of superpixels that deserve their own: what host code knows of them.
#pragma once

#include "../math/merge.h"
#include "../math/regions.h"
#include "launch.h"

namespace texvlm::cuda {

// MergeRegions of each picture by one block.
void merge_regions(const MergeRegions<int32_t, 0>& merge, int64_t batch, void* stream);

}  // namespace texvlm::cuda
