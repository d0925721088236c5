// Which texels depend on dirty tiles: the pixels of level 0 that a texel is made of, axis by axis, and whether a dirty tile is
// among them.
#pragma once

#include "scalar.h"

namespace texvlm {

// Texel i of an axis is made of the pixels (i << shift) - before to (i << shift) + after, cut off at the ends. (Every pixel is
// under a texel of each level, so cutting off once, at level 0, is enough.)
struct Support {
  int shift;
  int64_t before, after;
};

// Of the next level; n: texels of this one. The windows are those of axis_taps (pyramid.h).
TEXVLM_HD Support support_above(Support s, int64_t n) {
  if (n == 1) return s;
  return {s.shift + 1, s.before, s.after + (int64_t{n % 2 ? 2 : 1} << s.shift)};
}
// Of what reads texels up to `reach` away.
TEXVLM_HD Support support_around(Support s, int64_t reach) {
  return {s.shift, s.before + (reach << s.shift), s.after + (reach << s.shift)};
}

// One mask of dirty tiles and how far it reaches.
struct DirtyMask {
  const bool* tiles;  // [B, rows, columns], or null
  Support y, x;
};

constexpr int kMostMasks = 2;

// The texels of a level that depend on a dirty tile of any of the masks.
struct RegionView {
  DirtyMask mask[kMostMasks];
  int64_t height, width, tile, rows, columns;  // of the pictures, and of their tiles
  int64_t planes;                              // pictures of a launch for one of the masks

  struct Range {
    int64_t first, last;
  };
  TEXVLM_HD Range tiles_of(const Support& s, int64_t i, int64_t pixels) const {
    const int64_t first = maximum<int64_t>(0, (i << s.shift) - s.before), last = minimum(pixels - 1, (i << s.shift) + s.after);
    const auto side = static_cast<uint32_t>(tile);  // pictures have at most 2^30 pixels a side
    return {static_cast<uint32_t>(first) / side, static_cast<uint32_t>(last) / side};
  }
  TEXVLM_HD bool holds(int64_t b, int64_t y, int64_t x) const {
    for (int m = 0; m < kMostMasks; ++m) {
      if (!mask[m].tiles) continue;
      const Range v = tiles_of(mask[m].y, y, height), u = tiles_of(mask[m].x, x, width);
      for (int64_t row = v.first; row <= v.last; ++row) {
        const bool* const tiles = mask[m].tiles + (b / planes * rows + row) * columns;
        bool any = false;
        for (int64_t column = u.first; column <= u.last; ++column) any |= tiles[column];
        if (any) return true;
      }
    }
    return false;
  }
};

// A functor where the region holds a texel, and nothing elsewhere: what CUDA launches over a whole level, so that nobody has to
// read the mask back.
template <class F>
struct Within {
  F f;
  RegionView region;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    if (!region.holds(b, y, x)) return;
    if constexpr (HasPixels<F>::value) {
      f.template pixels<1>(b, y, x, 1);
    } else {
      f(b, y, x, c0, c1);
    }
  }
};
template <class F>
constexpr bool kHasOwnWays<Within<F>> = kHasOwnWays<F>;

}  // namespace texvlm
