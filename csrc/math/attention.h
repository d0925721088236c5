// Hierarchical attention: keys and values as a texture, one softmax over near and far.
//
// The places of a grid are pooled into cells of several levels (attention_pack). Queries read all cells of the coarsest level;
// the cells that matter most are split, into cells of the next level and in the end into places, and the others are read whole: a
// cell of n places with the mean key k and the mean value v counts as n places that hold these,
//   s = scale q k + ln n,  o = sum softmax(s) v,
// one softmax over cells, places and a dense prefix. Which cells are split is decided for a tile of neighbouring queries by the
// attention a cell has times how much its keys and values differ, and by a bound of its best key ("spread" below).
// Counts in logits: D. Bolya et al., "Token merging: your ViT but faster", 2022 (proportional attention); near places in full,
// far ones pooled: Z. Zeng et al., "Multi resolution analysis (MRA) for approximate self-attention", 2022; the bound by a cell's
// least and largest key: J. Tang et al., "Quest: query-aware sparsity for efficient long-context LLM inference", 2024.
#pragma once

#include "exponential.h"
#include "scalar.h"

namespace texvlm {

constexpr int kMaxAttentionStages = 8;
constexpr int kTileQueries = 64;  // at most, in a tile

// What a stage's cells are chosen by.
enum class Importance : int { spread, mass, bound };
// Of the bound, beside the mass times the spread. In a trained vision transformer shares of .25 to 4 err alike within a layer
// (11.5 to 11.2 % on six photographs that nothing was chosen by); twelve layers on, what was missed once weighs more, and 2 is
// best.
constexpr double kBoundShare = 2;

// Cells or places [y0, y1) x [x0, x1) of a grid of `columns`, whose entries begin at `base`.
struct CellBox {
  int64_t y0, y1, x0, x1, columns, base;
  TEXVLM_HD int64_t count() const { return (y1 - y0) * (x1 - x0); }
  TEXVLM_HD int64_t cell(int64_t i) const { return (y0 + i / (x1 - x0)) * columns + x0 + i % (x1 - x0); }
};

// The cells of all coarse levels, the coarsest first, each level row by row; those at the border may be partial. As entries they
// are numbered 0 .. total() - 1, the places come after them, and then the prefix.
struct CellPyramid {
  int64_t rows, columns;
  int stages;
  int level[kMaxAttentionStages];
  int64_t offset[kMaxAttentionStages + 1];

  TEXVLM_HD int64_t places() const { return rows * columns; }
  TEXVLM_HD int64_t total() const { return offset[stages]; }
  TEXVLM_HD int64_t cells(int s) const { return offset[s + 1] - offset[s]; }
  TEXVLM_HD int64_t rows_of(int s) const { return s < stages ? (rows + (int64_t{1} << level[s]) - 1) >> level[s] : rows; }
  TEXVLM_HD int64_t columns_of(int s) const {
    return s < stages ? (columns + (int64_t{1} << level[s]) - 1) >> level[s] : columns;
  }
  // What cell i of stage s is made of at stage s + 1; after the last, places.
  TEXVLM_HD CellBox children(int s, int64_t i) const {
    const int64_t of = columns_of(s), y = i / of, x = i % of;
    return at(s + 1, y, x, level[s] - (s + 1 < stages ? level[s + 1] : 0));
  }
  // The places of cell i of stage s.
  TEXVLM_HD CellBox places_of(int s, int64_t i) const {
    const int64_t of = columns_of(s);
    return at(stages, i / of, i % of, level[s]);
  }
  // All cells of the first stage; all places, where there are no stages.
  TEXVLM_HD CellBox first() const { return {0, rows_of(0), 0, columns_of(0), columns_of(0), 0}; }
  // The entry of the cell of stage s that place (y, x) is in.
  TEXVLM_HD int64_t above(int s, int64_t y, int64_t x) const {
    return offset[s] + (y >> level[s]) * columns_of(s) + (x >> level[s]);
  }

 private:
  TEXVLM_HD CellBox at(int s, int64_t y, int64_t x, int finer) const {
    const int64_t step = int64_t{1} << finer, h = rows_of(s), w = columns_of(s);
    return {y * step, minimum((y + 1) * step, h), x * step, minimum((x + 1) * step, w), w, offset[s]};
  }
};

// Of the structs below, `storage` says what void* points to.

// k, v [B, heads, N, D] and log_weight [B, N], or null -> keys, values, low, high [B, heads, M, D], log_count [B, M],
// spread [B, heads, M, 2], of all cells.
template <class A>
struct AttentionPack {
  CellPyramid cells;
  int64_t batch, heads, dim;
  Storage storage;
  const void *k, *v;
  const A* log_weight;
  A *keys, *values, *log_count, *spread, *low, *high;
};

//   dk_j += w_j / n dkeys;  dv_j alike;  dlog_weight_j += w_j / n [dlog_count + (k_j - keys) dkeys + (v_j - values) dvalues]
// Gradients of k, v [B, heads, N, D] and log_weight [B, N]; those not wanted are null. Incoming ones may be null: zero.
template <class A>
struct AttentionPackAdjoint {
  CellPyramid cells;
  int64_t batch, heads, dim;
  Storage storage;
  const A *grad_keys, *grad_values, *grad_log_count;
  const void *k, *v;
  const A *log_weight, *keys, *values, *log_count;
  A *grad_k, *grad_v, *grad_log_weight;
};

// Who asks whom: query heads over heads of keys, queries in tiles that choose together, and how many cells each stage splits.
struct AttentionShape {
  CellPyramid cells;
  int64_t batch, heads, kv_heads, queries, dim, prefix;
  int64_t tile_rows, tile_columns;  // 1 x 1: each query for itself, wherever it comes from; otherwise places of the grid
  int64_t counts[kMaxAttentionStages];
  int64_t splits;  // the sum of counts
  double scale;

  TEXVLM_HD bool alone() const { return tile_rows * tile_columns == 1; }
  TEXVLM_HD int64_t tiles_across() const { return (cells.columns + tile_columns - 1) / tile_columns; }
  TEXVLM_HD int64_t tiles() const { return alone() ? queries : (cells.rows + tile_rows - 1) / tile_rows * tiles_across(); }
  // The queries of a tile, as places.
  TEXVLM_HD CellBox tile(int64_t t) const {
    if (alone()) return {0, 1, t, t + 1, queries, 0};
    const int64_t y = t / tiles_across() * tile_rows, x = t % tiles_across() * tile_columns;
    return {y, minimum(y + tile_rows, cells.rows), x, minimum(x + tile_columns, cells.columns), cells.columns, 0};
  }
  TEXVLM_HD int64_t kv_head(int64_t head) const { return head / (heads / kv_heads); }
  TEXVLM_HD int64_t entries() const { return cells.total() + cells.places() + prefix; }
};

// q [B, heads, queries, D]; k, v [B, kv_heads, N, D]; the results of AttentionPack; prefix_k, prefix_v [B, kv_heads, P, D];
// choice [B, heads, tiles, splits] or null -> out [B, heads, queries, D], lse [B, heads, queries], chosen as choice, and unless
// null mass [B, heads, N], zeroed.
template <class A>
struct Attend {
  AttentionShape shape;
  Importance importance;
  Storage storage;
  const void *q, *k, *v, *prefix_k, *prefix_v;
  const A *keys, *values, *log_count, *spread, *low, *high, *log_weight;
  const int32_t* choice;
  void* out;
  A* lse;
  int32_t* chosen;
  A* mass;
};

// With p = exp(s - lse) and delta = grad out - grad_lse:
//   ds_e = p_e (grad v_e - delta);  dq = scale sum ds_e k_e;  dk_e += scale ds_e q;  dv_e += p_e grad;  dlog_count_e += ds_e
// The choice is constant. Gradients that are not wanted are null; the others are zeroed. Those of log_count [B, kv_heads, M] and
// log_weight [B, kv_heads, N] are by head, to be summed.
template <class A>
struct AttendAdjoint {
  AttentionShape shape;
  Storage storage;
  const void* grad;
  const A* grad_lse;  // or null
  const void *q, *k, *v, *prefix_k, *prefix_v;
  const A *keys, *values, *log_count, *log_weight;
  const void* out;
  const A* lse;
  const int32_t* chosen;
  A *grad_q, *grad_k, *grad_v, *grad_keys, *grad_values, *grad_log_count, *grad_log_weight, *grad_prefix_k, *grad_prefix_v;
};

}  // namespace texvlm
