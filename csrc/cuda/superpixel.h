// The kernels of superpixels that deserve their own: what host code knows of them.
#pragma once

#include "../math/merge.h"
#include "../math/regions.h"
#include "launch.h"

namespace texvlm::cuda {

// `sweeps` sweeps of MoveBorders over each picture, at most kFineSweeps of them, from the labels that `begin` gives; move.labels,
// the result, lies elsewhere.
template <class Lab>
void sweep_borders(const typename MoveBorders<Lab>::template For<int32_t, 0>& move, const FinerLabels<int32_t, 0>& begin,
                   int sweeps, int64_t batch, void* stream);

// MergeRegions of each picture by one block.
void merge_regions(const MergeRegions<int32_t, 0>& merge, int64_t batch, void* stream);

}  // namespace texvlm::cuda
