// The kernels of superpixels that deserve their own: what host code knows of them.
#pragma once

#include "../math/merge.h"
#include "../math/regions.h"
#include "launch.h"

namespace texvlm::cuda {

// `sweeps` sweeps of MoveBorders over each picture, at most kFineSweeps of them, from the labels that `begin` gives; the result,
// move.labels or, if it is not null, `wide`, lies elsewhere.
template <class Lab>
void sweep_borders(const typename MoveBorders<Lab>::template For<int32_t, 0>& move, const FinerLabels<int32_t, 0>& begin,
                   int64_t* wide, int sweeps, int64_t batch, void* stream);

// Whether each tile of such pictures sees so few cells that it can measure their regions itself.
bool measures_cells(const Cells& cells);
// One sweep between cells, by regions that are measured first: RegionModel, without its results. move.model is not read.
void sweep_cells(const MoveBorders<PlaneLab>::For<int32_t, 0>& move, const RegionModel<int32_t, 0>& measure,
                 const FinerLabels<int32_t, 0>& begin, int64_t batch, void* stream);

// MergeRegions of each picture by one block.
void merge_regions(const MergeRegions<int32_t, 0>& merge, int64_t batch, void* stream);

}  // namespace texvlm::cuda
