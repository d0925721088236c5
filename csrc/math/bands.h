// Bands: runs of rows of one level. A scatter is parallel and yet independent of the number of threads when each band takes the
// queries that touch it in their order and writes its own rows only.
#pragma once

#include "filter.h"

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

// The bands of all taps in one level whose places on the vertical axis lie from v0 to v1, as a pair for scatter.h; bands of
// earlier pictures come before `first`. Where the rows in between are not in one run, the whole level.
template <class A>
inline void bands_between(const BandTable& bands, const Levels& levels, int level, A v0, A v1, Address address, int first,
                          int32_t* out) {
  const int h = static_cast<int>(levels.height[level]);
  int low = 0, high = h - 1;
  const A begin = minimum(v0, v1), end = maximum(v0, v1);
  if (finite(v0) && finite(v1)) {
    const AxisLerp<A> p = axis_lerp(begin, h, address), q = axis_lerp(end, h, address);
    const bool run = address == Address::clamp || address == Address::border ||
                     (floor_of(begin) == floor_of(end) && (address == Address::mirror || (p.i0 <= p.i1 && q.i0 <= q.i1)));
    if (run) low = minimum(minimum(p.i0, p.i1), minimum(q.i0, q.i1)), high = maximum(maximum(p.i0, p.i1), maximum(q.i0, q.i1));
  }
  out[0] = first + bands.of(level, low);
  out[1] = first + bands.of(level, high);
}

}  // namespace texvlm
