// The kernels of the stem `cascade` that are more than a functor per item: the best k of a row, and stable compaction.
#pragma once

#include "../math/cascade.h"
#include "launch.h"

namespace texvlm::cuda {

// Bytes of workspace that these need; the workspace may hold anything.
template <class T>
int64_t topk_workspace(int64_t batch, int64_t count, int64_t k);
int64_t compact_workspace(int64_t batch, int64_t count);

// 1 <= k <= count < 2^31; equal to SelectRow bit for bit. Nothing is read back: the launches do not depend on the scores.
template <class T>
void topk(const TopKView<T>& view, int64_t batch, void* workspace, void* stream);
void compact(const CompactView& view, int64_t batch, void* workspace, void* stream);

}  // namespace texvlm::cuda
