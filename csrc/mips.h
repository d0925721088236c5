// The chain of levels above a level 0, for every stem that fills a texture.
#pragma once

#include <algorithm>
#include <type_traits>

#include "launch.h"
#include "math/pyramid.h"
#include "tensor.h"

namespace texvlm {

// Levels `first`.. from the level before, or only what depends on the rectangle r of that level.
template <class T>
void build_levels(c10::Device device, const TextureView<T>& texture, const Reducers& reducers, Rect r, int first = 1) {
  const auto parents = [](int64_t& lo, int64_t& hi, int64_t n) {  // the range of destination texels that read [lo, hi) of n
    if (n == 1) return;
    lo = n % 2 ? std::max<int64_t>(0, (lo - 1) / 2) : lo / 2;
    hi = std::min<int64_t>(n / 2, (hi + 1) / 2);
  };
  for (int level = first; level < texture.levels.count; ++level) {
    parents(r.y0, r.y1, texture.levels.height[level - 1]);
    parents(r.x0, r.x1, texture.levels.width[level - 1]);
    for_each_texel<MipDown, T>(device, r, texture.channels, texture, level, reducers);
  }
}

// How many levels one band of rows builds while it stays in the second-level cache; 0 where the first height is odd already.
template <class T>
int band_levels(const TextureView<T>& texture) {
  constexpr int64_t kCacheBytes = 768 << 10;
  const int64_t row = texture.levels.width[0] * texture.channels * static_cast<int64_t>(sizeof(T));
  int k = 0;
  while (k + 1 < texture.levels.count && texture.levels.height[k] % 2 == 0 && row << (k + 1) <= kCacheBytes) ++k;
  return k;
}

// The whole pyramid: of `image`, or where it is undefined, above the level 0 that is in the buffer.
template <class S, class T>
void build_pyramid(const at::Tensor& image, const at::Tensor& data, const Levels& table, const Reducers& reducers) {
  const auto texture = texture_view<T>(data, table);
  const int64_t batch = data.size(0), height = table.height[0], width = table.width[0];
  const Rect all{batch, 0, height, 0, width};
  const ImageView<const S> picture = image.defined() ? image_view<const S>(image) : ImageView<const S>{};
  const int k = data.is_cpu() ? band_levels(texture) : 0;
  if (k > 0) {
    const Rect bands{batch, 0, height >> k, 0, width << k};
    for_each_row_on_host<MipBand<S>::template For, T>(bands, data.size(2), picture, texture, k, reducers);
  } else if (image.defined()) {
    for_each_texel<ImageToTexels<S>::template For, T>(data.device(), all, data.size(2), picture, texture);
  }
  build_levels(data.device(), texture, reducers, {batch, 0, table.height[k], 0, table.width[k]}, k + 1);
}

// The levels above a level 0 that the caller has written into `data`.
template <class T>
void build_levels_above(const at::Tensor& data, const Levels& table, const Reducers& reducers) {
  build_pyramid<T, T>(at::Tensor(), data, table, reducers);
}

}  // namespace texvlm
