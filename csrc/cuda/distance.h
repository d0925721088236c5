// The kernel of the distance transform that deserves its own: what host code knows of it.
#pragma once

#include "../math/distance.h"
#include "launch.h"

namespace texvlm::cuda {

// NearestInColumn of all columns.
template <class Mask>
void nearest_in_columns(const typename NearestInColumn<Mask>::template For<int32_t, 0>& f, int64_t batch, void* stream);

}  // namespace texvlm::cuda
