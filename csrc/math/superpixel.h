// Superpixels: about n connected regions of similar colour that follow the edges of a picture. All integers after the first
// rounding of a pixel, so that every device and every number of threads gives the same labels.
//
// Source: SLIC (R. Achanta et al., "SLIC superpixels compared to state-of-the-art superpixel methods", 2012): k-means in
// (L, a, b, x, y) from a grid of cells, a pixel choosing among the cells around its own. Three things differ.
// - Topology is kept, as in J. Yao et al., "Real-time coarse-to-fine topologically preserving segmentation" (2015): a pixel
//   takes a neighbour's label only where its own region stays in one piece, so there are never fragments to be joined.
// - The grid is finer than n; neighbours are then merged by J. Ward's criterion (1963), the least rise of the same k-means
//   energy, down to n exactly. Large even areas so get few regions, detailed ones many.
// - Coarse to fine: k-means and merging run on a mip of the picture; the finer levels move only borders.
#pragma once

#include "lab.h"
#include "luma.h"

namespace texvlm {

constexpr int kColourSteps = 1023;  // of a quantised sRGB value
constexpr int kLinearMax = 65535, kCurveSteps = 4095, kCurveOne = 16384;
constexpr int kLabUnits = 16, kLabBias = 2048;    // Lab in 1/16; a and b with an offset, so that nothing is negative
constexpr int kPlaceUnits = 8;                    // places of a region in 1/8 pixel of the coarse level
constexpr int kCellsEach = 8, kMostCells = 2048;  // cells per superpixel before merging, unless that makes more than kMostCells
constexpr int kPixelsEach = 160;                  // the coarse level is the last one with so many pixels per superpixel
constexpr int kCoarseSweeps = 6, kFineSweeps = 2;
constexpr int kCompactness = 10;      // SLIC's m: this much Lab distance weighs as much as one cell's side
constexpr int kMergeCompactness = 6;  // the same in Ward's criterion, per side of a superpixel
constexpr int kBorderCost = 15;       // squared Lab distance that a pixel accepts for one neighbour less across the border
constexpr int kUsualContrast = 150;   // mean squared Lab distance of neighbouring cells for which these three are as they are
constexpr int kMostScale = 16;        // how far they follow the contrast of a picture (down to 1 / 256)
constexpr int kModel = 6;             // of a region: L, a, b, y, x, pixels (sums, or rounded means)
constexpr int kNeighbours = 24;       // cells that follow a cell and whose regions can touch its region

// ---- integer Lab ----

// Item n: the sRGB curve of n / kColourSteps in 1 / kLinearMax, followed by the Lab curve of n / kCurveSteps in 1 / kCurveOne.
template <class T, int C>
struct LabTable {
  T* table;
  static constexpr int64_t kSize = kColourSteps + 1 + kCurveSteps + 1;
  TEXVLM_HD void operator()(int64_t, int64_t n, int64_t, int64_t) const {
    const int64_t m = n - (kColourSteps + 1);
    const double v = m < 0 ? kLinearMax * linear_of(static_cast<double>(n) / kColourSteps)
                           : kCurveOne * lab_curve(static_cast<double>(m) / kCurveSteps);
    table[n] = static_cast<T>(v + 0.5);
  }
};

struct Colour {
  int32_t v[3];
};

// The shares of red and blue in X, Y and Z over those of white, in 1 / 32768; green has the rest.
TEXVLM_HD int32_t white_share(int i, int c) {
  const int32_t red = static_cast<int32_t>(32768 * xyz_weight<double>(i, 0) + 0.5);
  const int32_t blue = static_cast<int32_t>(32768 * xyz_weight<double>(i, 2) + 0.5);
  return c == 0 ? red : c == 2 ? blue : 32768 - red - blue;
}

TEXVLM_HD Colour integer_lab(const int32_t* table, const int32_t (&rgb)[3]) {
  int32_t f[3];
  const int32_t r = table[rgb[0]], g = table[rgb[1]], b = table[rgb[2]];
  for (int i = 0; i < 3; ++i) {
    const int32_t t = (white_share(i, 0) * r + white_share(i, 1) * g + white_share(i, 2) * b + 16384) >> 15;
    f[i] = table[kColourSteps + 1 + (t >> 4)];
  }
  return {{(116 * kLabUnits * f[1]) / kCurveOne - 16 * kLabUnits,
           (500 * kLabUnits * (f[0] - f[1]) + kLabBias * kCurveOne) / kCurveOne,
           (200 * kLabUnits * (f[1] - f[2]) + kLabBias * kCurveOne) / kCurveOne}};
}

template <class S>
TEXVLM_HD int32_t quantised(S v) {
  using A = Acc<S>;
  return static_cast<int32_t>(clamp(pixel<A>(v), A(0), A(1)) * A(kColourSteps) + A(0.5));
}
// The same number: no byte lies halfway between two steps, the nearest are 1 / 170 of a step away.
TEXVLM_HD int32_t quantised(uint8_t v) { return (2 * kColourSteps * v + 255) / 510; }

// The Lab of a pixel of a mip level of the picture: of the rounded mean of its quantised pixels. The last row and column of a
// level hold what is left.
template <class S>
struct PictureLab {
  ImageView<const S> image;
  const int32_t* table;
  int64_t height, width;
  int level;

  TEXVLM_HD int64_t rows() const { return maximum<int64_t>(1, height >> level); }
  TEXVLM_HD int64_t columns() const { return maximum<int64_t>(1, width >> level); }
  TEXVLM_HD Colour operator()(int64_t b, int64_t y, int64_t x) const {
    const int64_t y0 = y << level, y1 = y + 1 == rows() ? height : (y + 1) << level;
    const int64_t x0 = x << level, x1 = x + 1 == columns() ? width : (x + 1) << level, n = (y1 - y0) * (x1 - x0);
    int32_t mean[3];
    for (int c = 0; c < 3; ++c) {
      int64_t sum = 0;
      for (int64_t v = y0; v < y1; ++v)
        for (int64_t u = x0; u < x1; ++u) sum += quantised(image.at(b, c, v, u));
      mean[c] = static_cast<int32_t>(n == 1 ? sum : (2 * sum + n) / (2 * n));
    }
    return integer_lab(table, mean);
  }
};

// The same from planes int32 [B, 3, h, w].
struct PlaneLab {
  const int32_t* planes;
  int64_t height, width;
  TEXVLM_HD Colour operator()(int64_t b, int64_t y, int64_t x) const {
    const int32_t* p = planes + (b * 3 * height + y) * width + x;
    return {{p[0], p[height * width], p[2 * height * width]}};
  }
};

template <class S>
struct LabPlanes {
  template <class T, int C>
  struct For {
    PictureLab<S> lab;
    T* planes;  // [B, 3, h, w]

    static constexpr int kChunk = 512;

    TEXVLM_HD void store(int64_t b, int64_t y, int64_t x, const Colour& colour) const {
      const int64_t h = lab.rows(), w = lab.columns();
      for (int c = 0; c < 3; ++c) planes[((b * 3 + c) * h + y) * w + x] = colour.v[c];
    }
    TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const { store(b, y, x, lab(b, y, x)); }

    TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
      const int level = lab.level, side = 1 << level;
      const int64_t w = lab.columns(), y0 = y << level, y1 = y + 1 == lab.rows() ? lab.height : (y + 1) << level;
      int64_t x = x0;
      const int64_t whole = lab.width % side ? minimum(x1, w - 1) : x1;  // the columns that hold `side` pixels
      for (; side <= kChunk && lab.width >= side && x < whole;) {
        const int cells = static_cast<int>(minimum<int64_t>(kChunk >> level, whole - x)), n = cells << level;
        const int64_t pixels = (y1 - y0) << level;
        int32_t mean[3][kChunk];
        for (int c = 0; c < 3; ++c) {
          int32_t column[kChunk];
          for (int j = 0; j < n; ++j) column[j] = 0;
          for (int64_t v = y0; v < y1; ++v) {
            const S* TEXVLM_RESTRICT p = &lab.image.at(b, c, v, x << level);
            const int64_t stride = lab.image.stride_x;
            if (stride == 1) {
              for (int j = 0; j < n; ++j) column[j] += quantised(p[j]);
            } else {
              for (int j = 0; j < n; ++j) column[j] += quantised(p[j * stride]);
            }
          }
          for (int j = 0; j < cells; ++j) {
            int64_t sum = 0;
            for (int k = 0; k < side; ++k) sum += column[(j << level) + k];
            mean[c][j] = static_cast<int32_t>((2 * sum + pixels) / (2 * pixels));
          }
        }
        for (int j = 0; j < cells; ++j) {
          const int32_t rgb[3] = {mean[0][j], mean[1][j], mean[2][j]};
          store(b, y, x + j, integer_lab(lab.table, rgb));
        }
        x += cells;
      }
      for (; x < x1; ++x) (*this)(b, y, x, 0, 1);
    }
  };
};

// ---- cells and regions of the coarse level ----

// rows x columns cells over height x width pixels; cell (r, c) is number r * columns + c.
struct Cells {
  int64_t height, width, rows, columns;

  TEXVLM_HD int64_t count() const { return rows * columns; }
  TEXVLM_HD static int64_t of(int64_t i, int64_t size, int64_t cells) { return (2 * i + 1) * cells / (2 * size); }
  TEXVLM_HD static int64_t first(int64_t cell, int64_t size, int64_t cells) {  // the first pixel of a cell
    return (2 * size * cell + cells - 1) / (2 * cells);
  }
  // The pixels that may have label k: those of the cells around it.
  struct Window {
    int64_t y0, y1, x0, x1;
  };
  TEXVLM_HD Window window(int64_t k) const {
    const int64_t r = k / columns, c = k % columns;
    return {first(maximum<int64_t>(r - 1, 0), height, rows), first(minimum(r + 2, rows), height, rows),
            first(maximum<int64_t>(c - 1, 0), width, columns), first(minimum(c + 2, columns), width, columns)};
  }
  TEXVLM_HD bool may_take(int64_t y, int64_t x, int64_t k) const {
    const int64_t dr = k / columns - of(y, height, rows), dc = k % columns - of(x, width, columns);
    return dr >= -1 && dr <= 1 && dc >= -1 && dc <= 1;
  }
};

// Every pixel in its own cell.
template <class T, int C>
struct StartCells {
  Cells cells;
  T* labels;
  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    labels[(b * cells.height + y) * cells.width + x] =
        static_cast<T>(Cells::of(y, cells.height, cells.rows) * cells.columns + Cells::of(x, cells.width, cells.columns));
  }
};

TEXVLM_HD int64_t rounded_mean(int64_t sum, int64_t n) { return (2 * sum + n) / (2 * n); }

TEXVLM_HD void means_of(const int64_t* sums, int64_t* model) {
  const int64_t n = sums[5];
  for (int i = 0; i < 3; ++i) model[i] = rounded_mean(sums[i], n);
  for (int i = 3; i < 5; ++i) model[i] = rounded_mean(kPlaceUnits * sums[i], n);
  model[5] = n;
}

// Item k: sums and means of region k, gathered from its window.
template <class T, int C>
struct RegionModel {
  Cells cells;
  const T* labels;
  const int32_t* planes;
  int64_t *sums, *model;  // [B, cells, kModel]

  TEXVLM_HD void operator()(int64_t b, int64_t k, int64_t, int64_t) const {
    const Cells::Window in = cells.window(k);
    const int64_t h = cells.height, w = cells.width;
    int64_t total[kModel] = {};
    for (int64_t y = in.y0; y < in.y1; ++y) {
      const T* TEXVLM_RESTRICT row = labels + (b * h + y) * w + in.x0;
      const int32_t* TEXVLM_RESTRICT p = planes + (b * 3 * h + y) * w + in.x0;
      const int32_t *TEXVLM_RESTRICT q = p + h * w, *TEXVLM_RESTRICT s = q + h * w;
      const int n = static_cast<int>(in.x1 - in.x0);
      const T label = static_cast<T>(k);
      int32_t lightness = 0, a = 0, blue = 0, place = 0, count = 0;
      for (int j = 0; j < n; ++j) {
        const int32_t is = -static_cast<int32_t>(row[j] == label);  // all bits, or none
        lightness += p[j] & is;
        a += q[j] & is;
        blue += s[j] & is;
        place += j & is;
        count -= is;
      }
      total[0] += lightness, total[1] += a, total[2] += blue;
      total[3] += y * count;
      total[4] += place + in.x0 * count;
      total[5] += count;
    }
    int64_t* to = sums + (b * cells.count() + k) * kModel;
    for (int i = 0; i < kModel; ++i) to[i] = total[i];
    means_of(total, model + (b * cells.count() + k) * kModel);
  }
};

// What colours are weighed against, by the contrast of the picture, so that dim pictures have regions too.
struct Weights {
  int64_t place;   // of squared distances in 1 / kPlaceUnits pixel, over 65536, in k-means
  int64_t merge;   // the same in Ward's criterion
  int64_t border;  // cost of a neighbour that has another label
};

// Item 0: of each picture, from the means of its cells.
template <class T, int C>
struct PictureWeights {
  Cells cells;
  const T* model;
  Weights usual;
  Weights* out;  // [B]

  TEXVLM_HD int64_t squares(const T* p, const T* q) const {
    return (p[0] - q[0]) * (p[0] - q[0]) + (p[1] - q[1]) * (p[1] - q[1]) + (p[2] - q[2]) * (p[2] - q[2]);
  }
  TEXVLM_HD void operator()(int64_t b, int64_t, int64_t, int64_t) const {
    int64_t sum = 0;
    for (int64_t r = 0; r < cells.rows; ++r)
      for (int64_t c = 0; c < cells.columns; ++c) {
        const T* p = model + (b * cells.count() + r * cells.columns + c) * kModel;
        if (c + 1 < cells.columns) sum += squares(p, p + kModel);
        if (r + 1 < cells.rows) sum += squares(p, p + cells.columns * kModel);
      }
    const int64_t pairs = maximum<int64_t>(1, 2 * cells.count() - cells.rows - cells.columns);
    const int64_t scale = clamp<int64_t>(sum / (pairs * kUsualContrast * (kLabUnits * kLabUnits / 256)), 1, 256 * kMostScale);
    out[b] = {(usual.place * scale) >> 8, (usual.merge * scale) >> 8, (usual.border * scale) >> 8};
  }
};

// ---- moving borders ----

// Whether a pixel can leave its region and the region stays in one piece (4-connected): around the pixel, bit i of `ring` says
// that neighbour i has its label, clockwise from above; the 4-neighbours among them (even bits) must be linked through the ring.
TEXVLM_HD bool can_leave(uint32_t ring) {
  const uint32_t twice = ring | (ring << 8);
  const uint32_t linked = (twice >> 7) & (twice >> 6);  // bit i: both neighbours before i, i - 1 and i - 2, are of the region
  const uint32_t starts = ring & 0x55u & ~linked;
  return starts != 0 && (starts & (starts - 1)) == 0;
}

// One of the four interleaved quarters of the pixels, those with y % 2 == odd_y and x % 2 == odd_x: no two of them are
// neighbours, so all can choose at the same time. Pixel (y, x) of the rectangle is (2 y + odd_y, 2 x + odd_x). The first of its
// own label and those above, left, right and below with the least squared distance wins.
template <class Lab>
struct MoveBorders {
  template <class T, int C>
  struct For {
    Lab lab;
    T* labels;
    const int64_t* model;  // [B, regions, kModel]
    int64_t height, width, regions;
    int odd_y, odd_x;
    Cells cells;             // coarse: places count, and labels keep to the windows of these; fine: borders count, rows = 0
    const Weights* weights;  // [B]

    TEXVLM_HD int64_t cost(const Colour& colour, int64_t y, int64_t x, const int64_t* region, int64_t place) const {
      int64_t d = 0;
      for (int i = 0; i < 3; ++i) {
        const int64_t e = colour.v[i] - region[i];
        d += e * e;
      }
      if (cells.rows == 0) return d;
      const int64_t ey = kPlaceUnits * y - region[3], ex = kPlaceUnits * x - region[4];
      return d + ((place * (ey * ey + ex * ex)) >> 16);
    }

    TEXVLM_HD void choose(int64_t b, int64_t y, int64_t x) const {
      T* at = labels + (b * height + y) * width + x;
      const bool up = y > 0, down = y + 1 < height, left = x > 0, right = x + 1 < width;
      const T own = *at, none = T(-1);
      const T ring[8] = {up ? at[-width] : none,  up && right ? at[1 - width] : none,
                         right ? at[1] : none,    down && right ? at[width + 1] : none,
                         down ? at[width] : none, down && left ? at[width - 1] : none,
                         left ? at[-1] : none,    up && left ? at[-width - 1] : none};
      uint32_t same = 0;
      for (int i = 0; i < 8; ++i) same |= static_cast<uint32_t>(ring[i] == own) << i;
      if (!can_leave(same)) return;
      const Colour colour = lab(b, y, x);
      const int64_t place = weights[b].place, border = cells.rows == 0 ? weights[b].border : 0;
      const T tried[5] = {own, ring[0], ring[6], ring[2], ring[4]};
      T best = own, last = none;
      int64_t least = 0;
      for (int i = 0; i < 5; ++i) {
        const T label = tried[i];
        if (label == none || label == last || (i > 0 && label == own)) continue;
        last = label;
        if (cells.rows > 0 && !cells.may_take(y, x, label)) continue;
        int64_t others = 0;
        for (int j = 0; j < 8; ++j) others += (ring[j] != none) & (ring[j] != label);
        const int64_t d = cost(colour, y, x, model + (b * regions + label) * kModel, place) + border * others;
        if (i == 0 || d < least) {
          least = d;
          best = label;
        }
      }
      if (best != own) *at = best;
    }

    TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
      choose(b, 2 * y + odd_y, 2 * x + odd_x);
    }

    // Most pixels are inside a region: they are passed over kRun at once. With odd_x < 0 the even pixels of the row choose, then
    // the odd ones: no other row looks at them in between.
    TEXVLM_HD void row(int64_t b, int64_t half, int64_t, int64_t) const {
      const int64_t y = 2 * half + odd_y;
      for (int odd = odd_x < 0 ? 0 : odd_x; odd < (odd_x < 0 ? 2 : odd_x + 1); ++odd) {
        const T* mid = labels + (b * height + y) * width;
        const T* up = y > 0 ? mid - width : mid;
        const T* down = y + 1 < height ? mid + width : mid;
        for (int64_t x = 0; x < width; x += kRun) {
          const int n = static_cast<int>(minimum<int64_t>(kRun, width - x));
          T differs[kRun], any = 0;
          if (x > 0 && x + kRun < width) {
            for (int j = 0; j < kRun; ++j) {
              const T own = mid[x + j];
              differs[j] = (own ^ up[x + j]) | (own ^ down[x + j]) | (own ^ mid[x + j - 1]) | (own ^ mid[x + j + 1]);
            }
            for (int j = 0; j < kRun; ++j) any |= differs[j];
          } else {
            for (int j = 0; j < n; ++j) {
              const T own = mid[x + j], left = mid[maximum<int64_t>(x + j - 1, 0)], right = mid[minimum(x + j + 1, width - 1)];
              differs[j] = (own ^ up[x + j]) | (own ^ down[x + j]) | (own ^ left) | (own ^ right);
              any |= differs[j];
            }
          }
          if (any == 0) continue;
          for (int j = odd; j < n; j += 2)
            if (differs[j] != 0) choose(b, y, x + j);
        }
      }
    }
  };
};

// Labels of a level from those of the level above it, or (level above = level) from its own, through `lut` [B, regions].
template <class T, int C>
struct FinerLabels {
  const T *coarse, *lut;  // lut: null for none
  T* out;
  int64_t coarse_h, coarse_w, height, width, regions;
  int shift;  // 1: the level above; 0: the same level

  TEXVLM_HD T label(int64_t b, int64_t y, int64_t x) const {
    const int64_t v = minimum(y >> shift, coarse_h - 1), u = minimum(x >> shift, coarse_w - 1);
    const T k = coarse[(b * coarse_h + v) * coarse_w + u];
    return lut ? lut[b * regions + k] : k;
  }
  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    out[(b * height + y) * width + x] = label(b, y, x);
  }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    const T* TEXVLM_RESTRICT from = coarse + (b * coarse_h + minimum(y >> shift, coarse_h - 1)) * coarse_w;
    T* TEXVLM_RESTRICT to = out + (b * height + y) * width;
    int64_t x = x0;
    if (shift == 1 && lut == nullptr) {  // x0 = 0
      for (int64_t u = 0; u < minimum(coarse_w, width / 2); ++u) to[2 * u] = to[2 * u + 1] = from[u];
      x = maximum(x, minimum(x1, 2 * minimum(coarse_w, width / 2)));
    }
    for (; x < x1; ++x) to[x] = label(b, y, x);
  }
};

// ---- merging regions ----

// Item k: which of the kNeighbours cells that follow cell k have regions that touch region k (4-neighbours), as bits. Regions
// keep to their windows, so touching ones are at most 3 cells apart.
TEXVLM_HD int64_t neighbour_of(int64_t k, int bit, int64_t columns) {
  if (bit < 3) return k + bit + 1;
  return k + ((bit - 3) / 7 + 1) * columns + (bit - 3) % 7 - 3;
}

template <class T, int C>
struct TouchingRegions {
  Cells cells;
  const T* labels;
  uint32_t* touching;  // [B, cells]

  TEXVLM_HD uint32_t bit_of(int64_t k, T other) const {
    const int64_t dr = other / cells.columns - k / cells.columns, dc = other % cells.columns - k % cells.columns;
    if (dr < 0 || (dr == 0 && dc <= 0)) return 0;
    return uint32_t{1} << (dr == 0 ? dc - 1 : 3 + (dr - 1) * 7 + dc + 3);
  }
  TEXVLM_HD void operator()(int64_t b, int64_t k, int64_t, int64_t) const {
    const Cells::Window in = cells.window(k);
    const int64_t h = cells.height, w = cells.width;
    const T label = static_cast<T>(k);
    uint32_t found = 0;
    for (int64_t y = in.y0; y < in.y1; ++y)
      for (int64_t x = in.x0; x < in.x1; ++x) {
        const T* at = labels + (b * h + y) * w + x;
        if (*at != label) continue;
        if (x + 1 < w && at[1] != label) found |= bit_of(k, at[1]);
        if (y + 1 < h && at[w] != label) found |= bit_of(k, at[w]);
        if (x > 0 && at[-1] != label) found |= bit_of(k, at[-1]);
        if (y > 0 && at[-w] != label) found |= bit_of(k, at[-w]);
      }
    touching[b * cells.count() + k] = found;
  }
};

// Ward's criterion: n m / (n + m) times the squared distance of the means. (Cut off where very long pictures would overflow.)
TEXVLM_HD int64_t merge_cost(const int64_t* p, const int64_t* q, int64_t place) {
  int64_t d = 0, far = 0;
  for (int i = 0; i < 3; ++i) d += (p[i] - q[i]) * (p[i] - q[i]);
  for (int i = 3; i < 5; ++i) far += (p[i] - q[i]) * (p[i] - q[i]);
  return (16 * p[5] * q[5]) / (p[5] + q[5]) * minimum(d + ((place * far) >> 16), int64_t{1} << 34);
}

constexpr int64_t kNoEdge = INT64_MAX;

// The edges of one picture: pairs u < v of regions that touch, and what merging them costs.
struct Edges {
  int32_t *u, *v, *slot;  // slot: its place in the order that breaks ties
  int64_t* cost;
};

// Item 0: merges regions of a picture, always the pair that costs least (of equal ones the first), until `wanted` are left.
// lut [B, cells]: the number of each cell's region, in the order of the first cell of each; model: of these.
template <class T, int C>
struct MergeRegions {
  const uint32_t* touching;
  int64_t *sums, *model, *merged;  // [B, cells, kModel] twice, [B, wanted, kModel]
  T* lut;
  int32_t* ends;   // workspace [B, 3, kNeighbours * cells]
  int64_t* costs;  // workspace [B, kNeighbours * cells]
  const Weights* weights;
  int64_t cells, columns, wanted;

  TEXVLM_HD Edges edges(int64_t b) const {
    const int64_t all = kNeighbours * cells;
    int32_t* const e = ends + 3 * b * all;
    return {e, e + all, e + 2 * all, costs + b * all};
  }
  TEXVLM_HD const int64_t* means(int64_t b, int64_t k) const { return model + (b * cells + k) * kModel; }
  TEXVLM_HD int64_t cost_of(int64_t b, int64_t u, int64_t v) const {
    return merge_cost(means(b, u), means(b, v), weights[b].merge);
  }
  TEXVLM_HD void unite(int64_t b, int64_t u, int64_t v) const {  // region v becomes part of u
    int64_t* to = sums + (b * cells + u) * kModel;
    const int64_t* from = sums + (b * cells + v) * kModel;
    for (int i = 0; i < kModel; ++i) to[i] += from[i];
    means_of(to, model + (b * cells + u) * kModel);
    lut[b * cells + v] = static_cast<T>(u);
  }
  // An edge after v became part of u.
  TEXVLM_HD void follow(int64_t b, const Edges& e, int64_t i, int32_t u, int32_t v) const {
    if (e.cost[i] == kNoEdge) return;
    int32_t p = e.u[i] == v ? u : e.u[i], q = e.v[i] == v ? u : e.v[i];
    if (p != u && q != u) return;
    if (p > q) {
      const int32_t t = p;
      p = q, q = t;
    }
    e.u[i] = p, e.v[i] = q;
    e.cost[i] = p == q ? kNoEdge : cost_of(b, p, q);
  }
  // lut holds for each cell a cell before it that it was merged into, or itself; in the end the number of its region.
  TEXVLM_HD void number(int64_t b) const {
    int64_t next = 0;
    T* const to = lut + b * cells;
    for (int64_t k = 0; k < cells; ++k) {
      if (to[k] != k) {
        to[k] = to[to[k]];
        continue;
      }
      for (int i = 0; i < kModel; ++i) merged[(b * wanted + next) * kModel + i] = model[(b * cells + k) * kModel + i];
      to[k] = static_cast<T>(next++);
    }
  }

  TEXVLM_HD void operator()(int64_t b, int64_t, int64_t, int64_t) const {
    const Edges e = edges(b);
    int64_t count = 0;
    for (int64_t k = 0; k < cells; ++k) {
      lut[b * cells + k] = static_cast<T>(k);
      for (uint32_t bits = touching[b * cells + k], bit = 0; bits >> bit; ++bit) {
        if (!(bits >> bit & 1)) continue;
        const int64_t other = neighbour_of(k, static_cast<int>(bit), columns);
        e.u[count] = static_cast<int32_t>(k), e.v[count] = static_cast<int32_t>(other);
        e.cost[count++] = cost_of(b, k, other);
      }
    }
    for (int64_t left = cells; left > wanted; --left) {
      int64_t least = kNoEdge, best = 0;
      for (int64_t i = 0; i < count; ++i) least = minimum(least, e.cost[i]);
      while (best + 1 < count && e.cost[best] != least) ++best;
      const int32_t u = e.u[best], v = e.v[best];
      unite(b, u, v);
      int64_t kept = 0;
      for (int64_t i = 0; i < count; ++i) {
        follow(b, e, i, u, v);
        e.u[kept] = e.u[i], e.v[kept] = e.v[i], e.cost[kept] = e.cost[i];
        kept += e.cost[i] != kNoEdge;
      }
      count = kept;
    }
    number(b);
  }
};

}  // namespace texvlm
