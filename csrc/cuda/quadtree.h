// The kernel of the stem `quadtree`: a block of threads for each picture.
#pragma once

#include "../math/quadtree.h"
#include "launch.h"

namespace texvlm::cuda {

// Equal to the host's bit for bit. Nothing is read back.
template <class A>
void quadtree_cut(const QuadTreeCut<A>& cut, int64_t batch, void* stream);

}  // namespace texvlm::cuda
