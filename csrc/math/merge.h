// Merging of the regions of cells (superpixel.h) by Ward's criterion, down to a wanted number.
#pragma once

#include "superpixel.h"

namespace texvlm {

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

// Item k: what region k is made of, and what it touches.
template <class T, int C>
struct MeasureAndTouch {
  RegionModel<T, C> measure;
  TouchingRegions<T, C> touching;

  TEXVLM_HD void operator()(int64_t b, int64_t k, int64_t, int64_t) const {
    measure(b, k, 0, 1);
    touching(b, k, 0, 1);
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
      keep(b, k, next);
      to[k] = static_cast<T>(next++);
    }
  }
  TEXVLM_HD void keep(int64_t b, int64_t k, int64_t number) const {  // the means of region k as those of a number
    for (int i = 0; i < kModel; ++i) merged[(b * wanted + number) * kModel + i] = model[(b * cells + k) * kModel + i];
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
