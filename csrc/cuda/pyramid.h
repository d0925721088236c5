// The whole mip chain in one launch (cuda/pyramid.cu says when it takes more).
#pragma once

#include "../math/pyramid.h"
#include "launch.h"

namespace texvlm::cuda {

// How many counters the chain needs; they are zero before, and afterwards of no use.
template <class T>
int64_t mip_counters(const Levels& levels, const Reducers& reducers, int64_t batch, int64_t channels);

// image: of level 0, or with data == nullptr level 0 is in the texture already.
template <class S, class T>
void mip_chain(const ImageView<const S>& image, const TextureView<T>& texture, const Reducers& reducers, int64_t batch,
               unsigned* counters, void* stream);

}  // namespace texvlm::cuda
