// Bands: runs of rows of one level. A scatter is parallel and yet independent of the number of threads when each band takes the
// queries that touch it in their order and writes its own rows only.
#pragma once

#include "texture.h"

namespace texvlm {

struct Band {
  int level;  // -1: everything
  int64_t y0, y1;

  TEXVLM_HD bool has(int l, int64_t y) const { return level < 0 || (l == level && y >= y0 && y < y1); }
};

TEXVLM_HD Band everywhere() { return {-1, 0, 0}; }

// Level l is cut into bands of 2^shift[l] rows; they are numbered from start[l].
struct BandTable {
  int count, total, shift[kMaxLevels], start[kMaxLevels];

  TEXVLM_HD int of(int level, int64_t y) const { return start[level] + static_cast<int>(y >> shift[level]); }

  Band band(const Levels& levels, int k) const {
    int l = 0;
    while (l + 1 < count && start[l + 1] <= k) ++l;
    const int64_t y0 = static_cast<int64_t>(k - start[l]) << shift[l];
    return {l, y0, minimum(y0 + (int64_t{1} << shift[l]), levels.height[l])};
  }
};

// A function of the sizes alone. A band's gradients shall stay in a core's cache, and no level shall be left to one core.
inline BandTable make_bands(const Levels& levels, int64_t bytes_per_texel) {
  constexpr int64_t kBandBytes = int64_t{1} << 18, kMostBands = 256, kLeastPerLevel = 4;
  const int64_t wanted = maximum(kBandBytes, levels.texels * bytes_per_texel / kMostBands);
  BandTable t{};
  t.count = levels.count;
  for (int l = 0; l < levels.count; ++l) {
    const int64_t row = levels.width[l] * bytes_per_texel, height = levels.height[l];
    const auto bands = [&](int shift) { return ((height - 1) >> shift) + 1; };
    int shift = 0;
    while ((row << (shift + 1)) <= wanted && bands(shift + 1) >= kLeastPerLevel) ++shift;
    while (bands(shift) > 4 * kMostBands) ++shift;
    t.shift[l] = shift;
    t.start[l] = t.total;
    t.total += static_cast<int>(bands(shift));
  }
  return t;
}

}  // namespace texvlm
