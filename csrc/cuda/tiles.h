// The kernel of the stem `tiles`.
#pragma once

#include "../math/tiles.h"
#include "launch.h"

namespace texvlm::cuda {

// Compares all tiles, by largest differences or by means, notes them in `dirty` [B, rows, columns] and stores what differs. One
// launch.
template <class T>
void dirty_tiles(const TiledFrames<T>& frames, bool by_means, int64_t batch, bool* dirty, void* stream);

}  // namespace texvlm::cuda
