// The best k disjoint nodes of a quadtree over a grid of cells: which places deserve a token, and at which level.
//
// Node (l, y, x) covers 2^l x 2^l cells and costs one token at any level. At a price p a token is worth
//   best(node) = max(value - p, sum of the children's best, 0),
// so for each price the best set of disjoint nodes follows from one pass from the leaves to the roots (Lagrangian relaxation of
// the tree knapsack; P. Chou, T. Lookabaugh and R. Gray, "Optimal pruning with applications to tree-structured source coding and
// modeling" (1989)). The smallest price at which at most k are taken is found bit by bit. Its set is the best of its size; where
// it is smaller than k, the best cells that are still free fill it up, and where none is free, nodes give way to their best
// children. sum of the roots' best + p k bounds the value of every set of k, and tells how far this one can be from the best.
#pragma once

#include "order.h"
#include "team.h"

namespace texvlm {

constexpr int kMaxTreeLevels = 16;

// Levels of ceil(rows / 2^l) x ceil(columns / 2^l) nodes, one after another, the cells first.
struct QuadTree {
  int levels;
  int64_t rows[kMaxTreeLevels], columns[kMaxTreeLevels], offset[kMaxTreeLevels + 1];

  static QuadTree of(int64_t rows, int64_t columns, int levels) {
    QuadTree t{};
    t.levels = levels;
    for (int l = 0; l < levels; ++l) {
      t.rows[l] = (rows + (int64_t{1} << l) - 1) >> l;
      t.columns[l] = (columns + (int64_t{1} << l) - 1) >> l;
      t.offset[l + 1] = t.offset[l] + t.rows[l] * t.columns[l];
    }
    return t;
  }
  TEXVLM_HD int64_t nodes() const { return offset[levels]; }
  TEXVLM_HD int64_t cells() const { return offset[1]; }
  TEXVLM_HD int level_of(int64_t node) const {
    int l = 0;
    while (node >= offset[l + 1]) ++l;
    return l;
  }
  // The children of node i of level l, at least 1 and at most 4, row by row.
  TEXVLM_HD int children(int l, int64_t i, int64_t* child) const {
    const int64_t y = 2 * (i / columns[l]), x = 2 * (i % columns[l]);
    int n = 0;
    for (int64_t cy = y; cy < minimum(y + 2, rows[l - 1]); ++cy)
      for (int64_t cx = x; cx < minimum(x + 2, columns[l - 1]); ++cx) child[n++] = offset[l - 1] + cy * columns[l - 1] + cx;
    return n;
  }
  TEXVLM_HD int64_t parent(int l, int64_t i) const {
    return offset[l + 1] + i / columns[l] / 2 * columns[l + 1] + i % columns[l] / 2;
  }
};

template <class Key>
TEXVLM_HD Key middle(Key low, Key high) {  // rounded down, without overflow
  return static_cast<Key>((low & high) + ((low ^ high) >> 1));
}

// values [B, nodes] of any strides -> taken [B, nodes]; the bound and the price [B].
template <class A>
struct QuadTreeCut {
  using Key = decltype(rank_key(A(0)));
  static constexpr A kLargest = A(1e30);  // sums of many stay finite

  QuadTree tree;
  const A* values;
  int64_t stride_b, stride_n, k;
  bool* taken;
  A *bound, *price;
  A* best;          // [B, nodes] work memory
  int32_t* tokens;  // [B, nodes] work memory: how many a node takes, later whether it is covered by one above

  TEXVLM_HD A value(int64_t b, int64_t i) const {
    const A v = values[b * stride_b + i * stride_n];
    return v != v ? -kLargest : clamp(v, -kLargest, kLargest);
  }

  // What node i of level l takes at this price; true if it is taken itself.
  TEXVLM_HD bool weigh(int64_t b, int l, int64_t i, A p, A* worth, int32_t* count) const {
    A sum = 0;
    int32_t below = 0;
    if (l > 0) {
      const int64_t base = tree.offset[l - 1], width = tree.columns[l - 1], y = 2 * (i / tree.columns[l]),
                    x = 2 * (i % tree.columns[l]);
      const bool right = x + 1 < width, down = y + 1 < tree.rows[l - 1];
      const int64_t first = base + y * width + x;
      sum = worth[first], below = count[first];
      if (right) sum += worth[first + 1], below += count[first + 1];
      if (down) sum += worth[first + width], below += count[first + width];
      if (right && down) sum += worth[first + width + 1], below += count[first + width + 1];
    }
    const int64_t at = tree.offset[l] + i;
    const A own = value(b, at) - p;
    const bool itself = own > A(0) && own >= sum;
    worth[at] = itself ? own : sum;
    count[at] = itself ? 1 : below;
    return itself;
  }

  // How many tokens are taken at this price. kMark: and which nodes would be, were none above them.
  template <bool kMark, class Team>
  TEXVLM_HD int64_t count(const Team& team, int64_t b, A p) const {
    A* const worth = best + b * tree.nodes();
    int32_t* const count = tokens + b * tree.nodes();
    for (int l = 0; l < tree.levels; ++l) {
      const int64_t n = tree.offset[l + 1] - tree.offset[l];
      for (int64_t i = team.rank; i < n; i += team.size) {
        const bool itself = weigh(b, l, i, p, worth, count);
        if (kMark) taken[b * tree.nodes() + tree.offset[l] + i] = itself;
      }
      team.wait();
    }
    int64_t own = 0, total;
    for (int64_t i = tree.offset[tree.levels - 1] + team.rank; i < tree.nodes(); i += team.size) own += count[i];
    team.before(own, total);
    return total;
  }

  template <class Team>
  TEXVLM_HD void operator()(const Team& team, int64_t b) const {
    const int64_t cells = tree.cells(), nodes = tree.nodes();
    bool* const chosen = taken + b * nodes;
    A p = 0;
    if (k < cells) {
      p = find_price(team, b);
    }
    int64_t left = k - count<true>(team, b, p);
    A own = 0, total;
    for (int64_t i = tree.offset[tree.levels - 1] + team.rank; i < nodes; i += team.size) own += best[b * nodes + i];
    team.before(own, total);
    if (team.rank == 0) {
      bound[b] = total + p * static_cast<A>(minimum(k, cells));
      price[b] = p;
    }
    if (k >= cells) {
      for (int64_t i = team.rank; i < nodes; i += team.size) chosen[i] = i < cells;
      return;
    }
    cover(team, b);
    left -= fill(team, b, left);
    while (left > 0) left -= split(team, b, left);
  }

  template <class Team>
  TEXVLM_HD A find_price(const Team& team, int64_t b) const {
    Key low = rank_key(A(-8) * kLargest),
        high = rank_key(kLargest);  // all cells are taken at the one, nothing at the other
    while (middle(low, high) != low) {
      const Key key = middle(low, high);
      const int64_t found = count<false>(team, b, rank_value(key));
      (found <= k ? high : low) = key;
      if (found == k) break;
    }
    return rank_value(high);
  }

  // Nodes below a taken one are covered, and not taken.
  template <class Team>
  TEXVLM_HD void cover(const Team& team, int64_t b) const {
    bool* const chosen = taken + b * tree.nodes();
    int32_t* const covered = tokens + b * tree.nodes();
    for (int l = tree.levels - 1; l >= 0; --l) {
      const int64_t n = tree.offset[l + 1] - tree.offset[l];
      for (int64_t i = team.rank; i < n; i += team.size) {
        const int64_t at = tree.offset[l] + i;
        bool above = false;
        if (l + 1 < tree.levels) {
          const int64_t parent = tree.parent(l, i);
          above = covered[parent] || chosen[parent];
        }
        covered[at] = above;
        if (above) chosen[at] = false;
      }
      team.wait();
    }
  }

  // Takes up to `left` of the cells that are free, the best first, ties to the lowest; returns how many.
  template <class Team>
  TEXVLM_HD int64_t fill(const Team& team, int64_t b, int64_t left) const {
    bool* const chosen = taken + b * tree.nodes();
    const int32_t* const covered = tokens + b * tree.nodes();
    const int64_t cells = tree.cells();
    const auto free_from = [&](Key key) {  // of at least this value
      int64_t own = 0, total;
      for (int64_t i = team.rank; i < cells; i += team.size) own += !covered[i] && !chosen[i] && rank_key(value(b, i)) >= key;
      team.before(own, total);
      return total;
    };
    Key low = rank_key(A(-2) * kLargest), high = rank_key(A(2) * kLargest);
    const int64_t wanted = minimum(left, free_from(low));
    if (wanted == 0) return 0;
    while (middle(low, high) != low) {  // at least `wanted` reach low, fewer reach high
      const Key key = middle(low, high);
      (free_from(key) >= wanted ? low : high) = key;
    }
    const int64_t above = free_from(high), each = (cells + team.size - 1) / team.size;
    const int64_t first = minimum(cells, team.rank * each), end = minimum(cells, first + each);
    int64_t equal = 0, all;
    for (int64_t i = first; i < end; ++i) equal += !covered[i] && !chosen[i] && rank_key(value(b, i)) == low;
    int64_t rank = above + team.before(equal, all);
    for (int64_t i = first; i < end; ++i) {
      if (covered[i] || chosen[i]) continue;
      const Key key = rank_key(value(b, i));
      if (key > low || (key == low && rank < wanted)) chosen[i] = true;
      rank += key == low;
    }
    team.wait();
    return wanted;
  }

  // Every cell is covered: the node that gains most per token gives way to its best children, as many as there are tokens left
  // for.
  template <class Team>
  TEXVLM_HD int64_t split(const Team& team, int64_t b, int64_t left) const {
    bool* const chosen = taken + b * tree.nodes();
    A rate = 0;
    int64_t found = -1;
    for (int64_t at = tree.cells() + team.rank; at < tree.nodes(); at += team.size) {
      if (!chosen[at]) continue;
      int64_t child[4];
      const int n = best_children(b, at, child);
      const int64_t many = minimum<int64_t>(n, left + 1);
      A gain = -value(b, at);
      for (int j = 0; j < many; ++j) gain += value(b, child[j]);
      // one child costs nothing, and is the last resort
      const A own = many > 1 ? gain / static_cast<A>(many - 1) : gain - A(16) * kLargest;
      if (found < 0 || own > rate) rate = own, found = at;
    }
    found = team.best(rate, found);
    int64_t child[4];
    const int64_t many = minimum<int64_t>(best_children(b, found, child), left + 1);
    if (team.rank == 0) {
      chosen[found] = false;
      for (int64_t j = 0; j < many; ++j) chosen[child[j]] = true;
    }
    team.wait();
    return many - 1;
  }

  // The children of a node, the best first, ties to the lowest.
  TEXVLM_HD int best_children(int64_t b, int64_t at, int64_t* child) const {
    const int l = tree.level_of(at), n = tree.children(l, at - tree.offset[l], child);
    for (int i = 1; i < n; ++i) {
      const int64_t moved = child[i];
      int j = i;
      for (; j > 0 && value(b, child[j - 1]) < value(b, moved); --j) child[j] = child[j - 1];
      child[j] = moved;
    }
    return n;
  }
};

}  // namespace texvlm
