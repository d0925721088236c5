// The levels above a level 0, for every stem that writes a level 0 of its own.
#pragma once

#include "tensor.h"
#include "tiles.h"

namespace texvlm {

// data [B, T, C] with level 0 in place; writes the levels above it.
void build_mipmaps(const at::Tensor& data, const Levels& levels, const Reducers& reducers);

// The same for what depends on a region of level 0 alone: every texel once.
void update_levels(const at::Tensor& data, const Levels& levels, const Reducers& reducers, Region region);

}  // namespace texvlm
