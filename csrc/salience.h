// The map of saliency as a step of other stems.
#pragma once

#include <tuple>

#include "math/enlarge.h"
#include "picture.h"

namespace texvlm {

// The map at its own level, [B, h, w] in [0, 1], and its enlarged form as a functor reads it.
at::Tensor salience_map(const Picture& picture);
template <class A>
Enlarged<A> enlarged(const at::Tensor& map, int64_t height, int64_t width) {
  return {pointer<const A>(map), map.size(1), map.size(2), height, width};
}

// Adjoint: grad of the enlarged map [B, H, W] -> grads of the picture and of the previous one [B, 3, H, W], which is undefined if
// there is none.
std::tuple<at::Tensor, at::Tensor> salience_map_backward(const at::Tensor& grad, const Picture& picture);

}  // namespace texvlm
