// The levels above a level 0, for every stem that writes a level 0 of its own.
#pragma once

#include "tensor.h"

namespace texvlm {

// data [B, T, C] with level 0 in place; writes the levels above it.
void build_mipmaps(const at::Tensor& data, const Levels& levels, const Reducers& reducers);

}  // namespace texvlm
