// Functors over regions of a level: the generic kernel, in which a texel that depends on no dirty tile is left alone. Included by
// the .cu files only; torch-free.
#pragma once

#include "../math/support.h"
#include "launch.cuh"

namespace texvlm::cuda {

// Instantiates a functor over regions, or over both these and whole levels.
#define TEXVLM_WITHIN(...) TEXVLM_TEXELS(Within<__VA_ARGS__>)
#define TEXVLM_REGIONS(...)   \
  TEXVLM_TEXELS(__VA_ARGS__); \
  TEXVLM_WITHIN(__VA_ARGS__)

}  // namespace texvlm::cuda
