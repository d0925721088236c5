// The cascade: the exact best k of many scores, and compaction.
#pragma once

#include <cmath>

#include "order.h"

namespace texvlm {

// ---- the best k ----

// Scores [B, N], any strides, and the best k of each row: best first, ties to the lowest index. Without `values` they are in the
// order of their indices, and written is what `cells` holds there, if it is given.
template <class T>
struct TopKView {
  const T* scores;
  int64_t stride_b, stride_n, count, k;
  T* values;
  int64_t* indices;
  const int64_t* cells = nullptr;  // [B, N], any strides
  int64_t cells_b = 0, cells_n = 0;

  TEXVLM_HD bool ordered() const { return values != nullptr; }
  TEXVLM_HD int64_t cell(int64_t b, int64_t i) const { return cells ? cells[b * cells_b + i * cells_n] : i; }
};

// Gradient of the values: each goes to the place it came from. grad, indices [B, k] contiguous; out [B, N] is
// zero before; the indices of a row are distinct, as select_topk makes them, and those outside the row are
// left out.
template <class T, int C>
struct ScatterTopK {
  const T* grad;
  const int64_t* indices;
  int64_t k, count;
  T* out;

  TEXVLM_HD void operator()(int64_t b, int64_t j, int64_t, int64_t) const {
    const int64_t n = indices[b * k + j];
    if (n >= 0 && n < count) out[b * count + n] = grad[b * k + j];
  }
};

// The host's way (CUDA has csrc/cuda/cascade.cu), for one row: the k-th best key by bisection over its bits (each step counts
// keys, which vectorises and has no branches), then the winners in one pass, then a radix sort of the winners alone.
template <class T>
struct SelectRow {
  using A = Acc<T>;
  using Key = decltype(rank_key(A(0)));
  using Bits = std::make_unsigned_t<Key>;
  struct Entry {
    Bits order, index;  // ascending order: best first
  };
  static constexpr int kDigits = sizeof(Bits);
  static constexpr Bits kTop = Bits{1} << (8 * sizeof(Bits) - 1);

  TopKView<T> view;
  char* workspace;
  int64_t workspace_stride;

  static int64_t keys_bytes(int64_t count) { return (count * static_cast<int64_t>(sizeof(Key)) + 63) / 64 * 64; }
  static int64_t entries_bytes(int64_t k) { return ((k + 1) * static_cast<int64_t>(sizeof(Entry)) + 63) / 64 * 64; }
  static int64_t workspace_bytes(int64_t count, int64_t k) { return keys_bytes(count) + 2 * entries_bytes(k); }

  TEXVLM_HD static int64_t count_from(const Key* keys, int64_t count, Key threshold) {
    int64_t total = 0;
    for (int64_t i = 0; i < count;) {
      const int64_t stop = minimum(count, i + (int64_t{1} << 20));
      Key part = 0;
      for (; i < stop; ++i) part += keys[i] >= threshold;
      total += part;
    }
    return total;
  }

  // Stable, least digit first; digits that all entries share are passed over. Returns the buffer that holds
  // the result.
  TEXVLM_HD static Entry* sort(Entry* from, Entry* to, int64_t count) {
    uint32_t histogram[kDigits][256];
    memset(histogram, 0, sizeof(histogram));
    for (int64_t i = 0; i < count; ++i)
      for (int d = 0; d < kDigits; ++d) ++histogram[d][(from[i].order >> (8 * d)) & 255];
    for (int d = 0; d < kDigits; ++d) {
      uint32_t* start = histogram[d];
      if (count == 0 || start[(from[0].order >> (8 * d)) & 255] == count) continue;
      uint32_t sum = 0;
      for (int i = 0; i < 256; ++i) {
        const uint32_t n = start[i];
        start[i] = sum;
        sum += n;
      }
      for (int64_t i = 0; i < count; ++i) to[start[(from[i].order >> (8 * d)) & 255]++] = from[i];
      Entry* const other = from;
      from = to;
      to = other;
    }
    return from;
  }

  TEXVLM_HD void operator()(int64_t b) const {
    const int64_t count = view.count, k = view.k;
    char* const own = workspace + b * workspace_stride;
    Key* TEXVLM_RESTRICT keys = reinterpret_cast<Key*>(own);
    Entry* entries = reinterpret_cast<Entry*>(own + keys_bytes(count));
    Entry* const spare = reinterpret_cast<Entry*>(own + keys_bytes(count) + entries_bytes(k));
    const T* TEXVLM_RESTRICT scores = view.scores + b * view.stride_b;
    if (view.stride_n == 1) {
      for (int64_t i = 0; i < count; ++i) keys[i] = rank_key(static_cast<A>(scores[i]));
    } else {
      for (int64_t i = 0; i < count; ++i) keys[i] = rank_key(static_cast<A>(scores[i * view.stride_n]));
    }

    // In `threshold` the sign bit is flipped, so that it compares as the keys do. At least k keys are >=
    // threshold.
    Key low = keys[0], high = keys[0];
    for (int64_t i = 0; i < count; ++i) {
      low = minimum(low, keys[i]);
      high = maximum(high, keys[i]);
    }
    Bits threshold = static_cast<Bits>(low) ^ kTop;
    bool exact = k == count;  // exactly k keys are >= threshold
    if (!exact) {
      Bits bit = kTop;
      const Bits differ = static_cast<Bits>(low) ^ static_cast<Bits>(high);
      while (bit > differ) bit >>= 1;
      if (bit) threshold &= ~(bit | (bit - 1));
      for (; bit && !exact; bit >>= 1) {
        const Bits trial = threshold | bit;
        const int64_t reached = count_from(keys, count, static_cast<Key>(trial ^ kTop));
        if (reached >= k) threshold = trial;
        exact = reached == k;
      }
    }

    const Key limit = static_cast<Key>(threshold ^ kTop);
    int64_t* TEXVLM_RESTRICT indices = view.indices + b * k;
    int64_t won = 0;
    if (!view.ordered()) {
      int64_t equal = exact ? k : k - count_from(keys, count, limit + 1);  // so many of those at the limit stay
      for (int64_t i = 0; won < k; ++i) {
        const bool same = keys[i] == limit;
        indices[won] = view.cell(b, i);
        won += keys[i] > limit || (same && equal > 0);
        equal -= same;
      }
      return;
    }
    const Key from = exact ? limit : limit + 1;  // not exact: fewer than k keys are above the limit, so it is not the largest key
    for (int64_t i = 0; i < count; ++i) {
      entries[won] = {~(static_cast<Bits>(keys[i]) ^ kTop), static_cast<Bits>(i)};
      won += keys[i] >= from;
    }
    entries = sort(entries, spare, won);
    for (int64_t j = 0; j < won; ++j) indices[j] = static_cast<int64_t>(entries[j].index);
    for (int64_t i = 0; won < k; ++i) {
      indices[won] = i;
      won += keys[i] == limit;
    }
    T* TEXVLM_RESTRICT values = view.values + b * k;
    for (int64_t j = 0; j < k; ++j) values[j] = scores[indices[j] * view.stride_n];
  }
};

// ---- compaction ----

// mask [B, N], any strides (in elements) -> the indices of what is set, in order, then -1; and how many are set.
struct CompactView {
  const bool* mask;
  int64_t stride_b, stride_n, count;
  int64_t *indices, *set;  // [B, N], [B]
};

// The host's way, for one row. Every item is written and only some stay, so there is no branch to mispredict.
struct CompactRow {
  CompactView view;

  TEXVLM_HD void operator()(int64_t b) const {
    const bool* TEXVLM_RESTRICT mask = view.mask + b * view.stride_b;
    int64_t* TEXVLM_RESTRICT out = view.indices + b * view.count;
    int64_t set = 0;
    for (int64_t i = 0; i < view.count; ++i) {
      out[set] = i;
      set += mask[i * view.stride_n];
    }
    for (int64_t i = set; i < view.count; ++i) out[i] = -1;
    view.set[b] = set;
  }
};

}  // namespace texvlm
