// The chain of levels above a level 0, for every stem that writes a level 0 of its own.
#pragma once

#include <algorithm>

#include "launch.h"
#include "math/pyramid.h"
#include "tensor.h"

namespace texvlm {

// Levels 1.. from level 0, or only what depends on a rectangle of level 0.
template <class T>
void build_levels(const at::Tensor& data, const TextureView<T>& texture, const Reducers& reducers, Rect r) {
  for (int level = 1; level < texture.levels.count; ++level) {
    const auto range = [](int64_t& lo, int64_t& hi, int64_t n) {  // destination texels that read [lo, hi)
      if (n == 1) return;
      const int64_t last = n / 2;
      lo = n % 2 ? std::max<int64_t>(0, (lo - 1) / 2) : lo / 2;
      hi = std::min<int64_t>(last, (hi + 1) / 2);
    };
    range(r.y0, r.y1, texture.levels.height[level - 1]);
    range(r.x0, r.x1, texture.levels.width[level - 1]);
    for_each_texel<MipDown, T>(data.device(), r, data.size(2), texture, level, reducers);
  }
}

}  // namespace texvlm
