// The whole mip chain in one launch (cuda/pyramid.cu says when it takes more).
#pragma once

#include "../math/pyramid.h"
#include "launch.h"

namespace texvlm::cuda {

#if defined(TEXVLM_WITH_CUDA)
// How many counters the chain needs; they are zero before, and afterwards of no use.
template <class T>
int64_t mip_counters(const Levels& levels, const Reducers& reducers, int64_t batch, int64_t channels);

// image: of level 0, or with data == nullptr level 0 is in the texture already.
template <class S, class T>
void mip_chain(const ImageView<const S>& image, const TextureView<T>& texture, const Reducers& reducers, int64_t batch,
               unsigned* counters, void* stream);
#else
template <class T>
int64_t mip_counters(const Levels&, const Reducers&, int64_t, int64_t) {
  not_built();
}
template <class S, class T>
void mip_chain(const ImageView<const S>&, const TextureView<T>&, const Reducers&, int64_t, unsigned*, void*) {
  not_built();
}
#endif

}  // namespace texvlm::cuda
