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

#include "enlarge.h"
#include "integer_lab.h"
#include "reduce.h"

namespace texvlm {

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

// ---- cells and regions of the coarse level ----

// rows x columns cells over height x width pixels; cell (r, c) is number r * columns + c.
struct Cells {
  int64_t height, width, rows, columns;

  TEXVLM_HD int64_t count() const { return rows * columns; }
  TEXVLM_HD static int64_t of(int64_t i, int64_t size, int64_t cells) { return nearest_centre(i, size, cells); }
  TEXVLM_HD static int64_t first(int64_t cell, int64_t size, int64_t cells) {  // the first pixel of a cell
    return (2 * size * cell + cells - 1) / (2 * cells);
  }
  TEXVLM_HD int64_t own(int64_t y, int64_t x) const { return of(y, height, rows) * columns + of(x, width, columns); }
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

// The pixels of the coarse level in integer Lab, each in its own cell.
template <class S>
struct LabPlanes {
  template <class T, int C>
  struct For {
    PictureLab<S> lab;
    T* planes;  // [B, 3, h, w]
    Cells cells;
    T* labels;  // [B, h, w]: every pixel in its own cell

    static constexpr int kChunk = 512;

    TEXVLM_HD void store(int64_t b, int64_t y, int64_t x, const Colour& colour) const {
      const int64_t h = lab.rows(), w = lab.columns();
      for (int c = 0; c < 3; ++c) planes[((b * 3 + c) * h + y) * w + x] = colour.v[c];
      labels[(b * h + y) * w + x] = static_cast<T>(cells.own(y, x));
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

TEXVLM_HD int64_t rounded_mean(int64_t sum, int64_t n) { return (2 * sum + n) / (2 * n); }

TEXVLM_HD void means_of(const int64_t* sums, int64_t* model) {
  const int64_t n = sums[5];
  for (int i = 0; i < 3; ++i) model[i] = rounded_mean(sums[i], n);
  for (int i = 3; i < 5; ++i) model[i] = rounded_mean(kPlaceUnits * sums[i], n);
  model[5] = n;
}

// Item n: the table of colours, and how many regions each picture has: what does not depend on the picture.
template <class T, int C>
struct StartSuperpixels {
  LabTable<T, C> table;
  int64_t* count;  // [B]
  int64_t batch, regions;

  static constexpr int64_t items(int64_t batch) { return maximum(batch, LabTable<T, C>::kSize); }
  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    if (n < LabTable<T, C>::kSize) table(b, n, 0, 1);
    if (n < batch) count[n] = regions;
  }
};

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

// Of each picture, from the means of its cells.
template <class T, int C>
struct PictureWeights {
  template <int N>
  using Part = Sums<int64_t, 1, N>;
  Cells cells;
  const T* model;
  Weights usual;
  Weights* out;  // [B]

  TEXVLM_HD int64_t squares(const T* p, const T* q) const {
    return (p[0] - q[0]) * (p[0] - q[0]) + (p[1] - q[1]) * (p[1] - q[1]) + (p[2] - q[2]) * (p[2] - q[2]);
  }
  template <class P>
  TEXVLM_HD void add(int64_t b, int64_t k, int n, P& to) const {
    for (int j = 0; j < n; ++j) {
      const T* p = model + (b * cells.count() + k + j) * kModel;
      if ((k + j) % cells.columns + 1 < cells.columns) to.of[0][j] += squares(p, p + kModel);
      if (k + j + cells.columns < cells.count()) to.of[0][j] += squares(p, p + cells.columns * kModel);
    }
  }
  TEXVLM_HD void finish(int64_t b, const Part<1>& total) const {
    const int64_t pairs = maximum<int64_t>(1, 2 * cells.count() - cells.rows - cells.columns);
    const int64_t scale =
        clamp<int64_t>(total.of[0][0] / (pairs * kUsualContrast * (kLabUnits * kLabUnits / 256)), 1, 256 * kMostScale);
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

// The pixels choose in four interleaved quarters, those with even y and even x, even and odd, odd and even, odd and odd: no two
// of a quarter are neighbours, so all of it can choose at the same time. The first of its own label and those above, left, right
// and below with the least squared distance wins.
template <class Lab>
struct MoveBorders {
  template <class T, int C>
  struct For {
    Lab lab;
    T* labels;
    const int64_t* model;  // [B, regions, kModel]
    int64_t height, width, regions;
    int odd;                 // row() of y is of pixels 2 y + odd
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

    // What pixel (y, x) chooses; `at` is its label in rows that are `pitch` apart, model_of(label) what is known of a region.
    template <class ModelOf>
    TEXVLM_HD T chosen(int64_t b, int64_t y, int64_t x, const T* at, int64_t pitch, const ModelOf& model_of) const {
      const bool up = y > 0, down = y + 1 < height, left = x > 0, right = x + 1 < width;
      const T own = *at, none = T(-1);
      const T ring[8] = {up ? at[-pitch] : none,  up && right ? at[1 - pitch] : none,
                         right ? at[1] : none,    down && right ? at[pitch + 1] : none,
                         down ? at[pitch] : none, down && left ? at[pitch - 1] : none,
                         left ? at[-1] : none,    up && left ? at[-pitch - 1] : none};
      uint32_t same = 0;
      for (int i = 0; i < 8; ++i) same |= static_cast<uint32_t>(ring[i] == own) << i;
      if (!can_leave(same)) return own;
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
        const int64_t d = cost(colour, y, x, model_of(label), place) + border * others;
        if (i == 0 || d < least) {
          least = d;
          best = label;
        }
      }
      return best;
    }

    TEXVLM_HD void choose(int64_t b, int64_t y, int64_t x) const {
      T* at = labels + (b * height + y) * width + x;
      const T best = chosen(b, y, x, at, width, [&](T label) { return model + (b * regions + label) * kModel; });
      if (best != *at) *at = best;
    }

    // Two quarters, one after the other: no other row looks at the pixels in between. Most are inside a region: they are passed
    // over kRun at once.
    TEXVLM_HD void row(int64_t b, int64_t half, int64_t, int64_t) const {
      const int64_t y = 2 * half + odd;
      for (int odd_x = 0; odd_x < 2; ++odd_x) {
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
          for (int j = odd_x; j < n; j += 2)
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

}  // namespace texvlm
