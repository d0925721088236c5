// The map of text of a picture, for the stems that read it.
#pragma once

#include "launch.h"
#include "math/text.h"
#include "tensor.h"

namespace texvlm {

// Numbers that the network has: `weights` of the op must be float32 of this many.
int64_t text_weight_count();

// Scores of the cells, [B, ceil(H / 16), ceil(W / 16)] in [0, 1], of a readable picture [B, 3, H, W] (see salience.h); `luma`
// [B, H, W] is used where it is defined.
at::Tensor text_map(const at::Tensor& image, const at::Tensor& luma, const at::Tensor& weights);

// The map as a functor reads it at the picture's pixels. Its height and width are those of the whole grid.
template <class A>
Enlarged<A> text_enlarged(const at::Tensor& map) {
  return {pointer<const A>(map), map.size(1), map.size(2), map.size(1) * kTextCell, map.size(2) * kTextCell};
}

}  // namespace texvlm
