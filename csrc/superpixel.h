// Superpixels as a step of other stems.
#pragma once

#include "salience.h"

namespace texvlm {

// Labels int32 [B, H, W] of a picture [B, 3, H, W] that check_picture has accepted; `wanted` >= 1 is cut to its pixels.
at::Tensor superpixel_labels(const at::Tensor& image, int64_t& wanted);

}  // namespace texvlm
