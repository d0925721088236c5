// The cascade: a score for each cell of the picture's grid, and the exact best k of many scores.
#pragma once

#include <cmath>

#include "filter.h"

namespace texvlm {

// ---- scores of cells ----

constexpr int kEntropyBins = 16;    // bins of the histogram of luma over [0, 1]
constexpr int kEntropyTable = 257;  // counts 0..256: the cells of 16 x 16 samples
constexpr int kSamplesAround = 3;   // a cell of one sample takes its entropy over the centres of the 3 x 3 cells around it

enum ScoreChannel { kScoreRed, kScoreGreen, kScoreBlue, kScoreEdge, kScoreSaliency, kScoreChannels };

// -p log2 p of a share p = count / total; 0 for a count of 0.
template <class A>
TEXVLM_HD A entropy_term(int64_t count, A total) {
  if (count == 0) return A(0);
  const A share = static_cast<A>(count) / total;
  return -(share * log2_of(share));
}

// The terms of all counts that a small cell can have, made once on the host, so that every device adds the
// same numbers.
template <class A>
struct EntropyTable {
  A term[kEntropyTable];
  A largest;  // log2 of the number of bins that can be filled

  static EntropyTable of(int64_t samples) {
    EntropyTable t{};
    const int64_t last = minimum<int64_t>(samples, kEntropyTable - 1);
    for (int64_t i = 0; i <= last; ++i) t.term[i] = entropy_term(i, static_cast<A>(samples));
    t.largest = static_cast<A>(std::log2(static_cast<double>(minimum<int64_t>(kEntropyBins, samples))));
    return t;
  }
};

// Counts of 16 bins, packed 8 bits each in two registers and unpacked before they overflow.
struct Histogram {
  uint64_t low = 0, high = 0;
  int32_t count[kEntropyBins] = {};
  int room = 255;

  TEXVLM_HD void add(int bin) {
    // by a mask: a branch on the bin would be mispredicted half of the time
    const uint64_t one = uint64_t{1} << (8 * (bin & 7)), in_high = uint64_t{0} - static_cast<uint64_t>(bin >> 3);
    low += one & ~in_high;
    high += one & in_high;
  }
  TEXVLM_HD void unpack() {
    for (int i = 0; i < 8; ++i) {
      count[i] += static_cast<int32_t>((low >> (8 * i)) & 255u);
      count[i + 8] += static_cast<int32_t>((high >> (8 * i)) & 255u);
    }
    low = high = 0;
    room = 255;
  }
  // Call before each sample where there may be more than 255.
  TEXVLM_HD void make_room() {
    if (room == 0) unpack();
    --room;
  }
};

template <class A>
TEXVLM_HD A luma(A red, A green, A blue) {
  return A(0.299) * red + A(0.587) * green + A(0.114) * blue;
}

// The bin of a luma; NaN and everything below 0 is in the first, everything from 1 in the last.
template <class A>
TEXVLM_HD int luma_bin(A light) {
  const A scaled = light * A(kEntropyBins);
  return static_cast<int>(scaled > A(0) ? minimum(scaled, A(kEntropyBins - 1)) : A(0));
}

// One query per cell: weight[0] * sqrt(mean edge^2) + weight[1] * entropy of luma + weight[2] * mean saliency
// over samples x samples places of the cell, trilinear with clamp at LOD log2(cell / samples). Channels of
// the reducer mode are read nearest.
template <class T, int C>
struct ScoreCells {
  using A = Acc<T>;
  TextureView<const T> texture;
  const int64_t* cells;  // [B, n], any strides
  int64_t stride_b, stride_n;
  A* out;  // [B, n]
  int64_t count, rows, columns, cell, samples;
  int64_t channel[kScoreChannels];
  bool nearest[kScoreChannels];  // of the reducer mode
  bool any_nearest;
  bool aligned;  // every sample lies on a texel centre of level `level.l0`
  A weight[3];
  LevelLerp<A> level;
  int nearest_level;
  EntropyTable<A> table;

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    const int64_t id = cells[b * stride_b + n * stride_n];
    A* target = out + b * count + n;
    if (id < 0 || id >= rows * columns) {
      *target = static_cast<A>(NAN);
      return;
    }
    const T* texels = texture.data + b * texture.batch_stride;
    const int64_t cy = id / columns, cx = id - cy * columns;
    if (aligned) {
      *target = samples == 1 ? score<true, true>(texels, cy, cx) : score<true, false>(texels, cy, cx);
    } else {
      *target = samples == 1 ? score<false, true>(texels, cy, cx) : score<false, false>(texels, cy, cx);
    }
  }

  // An axis of the grid of samples in the two levels around the LOD, settled, and nearest for channels of the reducer
  // mode.
  struct Taps {
    AxisLerp<A> fine, coarse;
    int64_t nearest;
  };

  // Sample i of the cell at `at` on an axis of `size` pixels; the arithmetic is that of uv = pixel / size.
  TEXVLM_HD Taps taps(int64_t at, int64_t i, const int64_t* sizes) const {
    const A step = samples == 1 ? static_cast<A>(i) - A(0.5) : (static_cast<A>(i) + A(0.5)) / static_cast<A>(samples);
    const A u = (static_cast<A>(at) + step) * static_cast<A>(cell) / static_cast<A>(sizes[0]);
    return {settled(axis_lerp(u, static_cast<int>(sizes[level.l0]), Address::clamp)),
            settled(axis_lerp(u, static_cast<int>(sizes[level.l1]), Address::clamp)),
            any_nearest ? axis_nearest(u, static_cast<int>(sizes[nearest_level]), Address::clamp) : 0};
  }

  // Channels [first, last) of one sample, interpolated.
  TEXVLM_HD void interpolate(const T* texels, const Taps& y, const Taps& x, int first, int last, A* value) const {
    const Bilinear<A> fine = joined(x.fine, y.fine, texture.levels, level.l0);
    for (int k = first; k < last; ++k) value[k] = blend(corners(texels + channel[k], texture.channels, fine), fine);
    if (level.t > A(0)) {
      const Bilinear<A> coarse = joined(x.coarse, y.coarse, texture.levels, level.l1);
      for (int k = first; k < last; ++k)
        value[k] = (A(1) - level.t) * value[k] + level.t * blend(corners(texels + channel[k], texture.channels, coarse), coarse);
    }
    if (any_nearest) {
      const int64_t at = texture.levels.offset[nearest_level] + y.nearest * texture.levels.width[nearest_level] + x.nearest;
      for (int k = first; k < last; ++k)
        if (nearest[k]) value[k] = static_cast<A>(texels[at * texture.channels + channel[k]]);
    }
  }

  // `around`: one sample, whose entropy is that of the 3 x 3 cells around it.
  template <bool kAligned, bool kAround>
  TEXVLM_HD A score(const T* texels, int64_t cy, int64_t cx) const {
    constexpr int kCached = 4;
    const int64_t side = kAround ? kSamplesAround : samples;
    const int64_t height = texture.levels.height[level.l0], width = texture.levels.width[level.l0];
    const int64_t top = kAround ? cy - 1 : cy * samples, left = kAround ? cx - 1 : cx * samples;
    Taps cached[kCached];
    if constexpr (!kAligned) {
      for (int64_t j = 0; j < minimum<int64_t>(kCached, side); ++j) cached[j] = taps(cx, j, texture.levels.width);
    }
    const bool small = side * side <= 255;
    Histogram histogram;
    A energy = 0, conspicuous = 0;
    for (int64_t i = 0; i < side; ++i) {
      A row_energy = 0, row_conspicuous = 0;
      const int64_t row = clamp<int64_t>(top + i, 0, height - 1);
      const T* line = texels + (texture.levels.offset[level.l0] + row * width) * texture.channels;
      Taps y;
      if constexpr (!kAligned) y = taps(cy, i, texture.levels.height);
      for (int64_t j = 0; j < side; ++j) {
        const bool centre = !kAround || (i == 1 && j == 1);
        A value[kScoreChannels];
        if constexpr (kAligned) {
          const T* texel = line + clamp<int64_t>(left + j, 0, width - 1) * texture.channels;
          for (int k = 0; k < kScoreEdge; ++k) value[k] = static_cast<A>(texel[channel[k]]);
          if (centre) {
            for (int k = kScoreEdge; k < kScoreChannels; ++k) value[k] = static_cast<A>(texel[channel[k]]);
          }
        } else {
          const Taps x = j < kCached ? cached[j] : taps(cx, j, texture.levels.width);
          interpolate(texels, y, x, 0, centre ? kScoreChannels : kScoreEdge, value);
        }
        if (!small) histogram.make_room();
        histogram.add(luma_bin(luma(value[kScoreRed], value[kScoreGreen], value[kScoreBlue])));
        if (centre) {
          row_energy += value[kScoreEdge] * value[kScoreEdge];
          row_conspicuous += value[kScoreSaliency];
        }
      }
      energy += row_energy;
      conspicuous += row_conspicuous;
    }
    histogram.unpack();
    const A places = static_cast<A>(samples * samples), lights = static_cast<A>(side * side);
    A entropy = 0;
    for (int i = 0; i < kEntropyBins; ++i) {
      const int32_t filled = histogram.count[i];
      entropy += side * side < kEntropyTable ? table.term[filled] : entropy_term<A>(filled, lights);
    }
    return weight[0] * sqrt_of(energy / places) + weight[1] * (entropy / table.largest) + weight[2] * (conspicuous / places);
  }
};

// ---- the best k ----

// Integers that compare as scores rank: NaN lowest, -0 equal to 0.
TEXVLM_HD int32_t rank_key(float v) {
  const int32_t bits = static_cast<int32_t>(float_bits(v + 0.0f));
  return v != v ? INT32_MIN : bits ^ ((bits >> 31) & INT32_MAX);
}
TEXVLM_HD int64_t rank_key(double v) {
  const double positive_zero = v + 0.0;
  int64_t bits;
  memcpy(&bits, &positive_zero, 8);
  return v != v ? INT64_MIN : bits ^ ((bits >> 63) & INT64_MAX);
}

// Scores [B, N], any strides, and the best k of each row: best first, ties to the lowest index.
template <class T>
struct TopKView {
  const T* scores;
  int64_t stride_b, stride_n, count, k;
  T* values;
  int64_t* indices;
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
    int64_t won = 0;
    const Key from = exact ? limit : limit + 1;  // not exact: fewer than k keys are above the limit, so it is not the largest key
    for (int64_t i = 0; i < count; ++i) {
      entries[won] = {~(static_cast<Bits>(keys[i]) ^ kTop), static_cast<Bits>(i)};
      won += keys[i] >= from;
    }
    entries = sort(entries, spare, won);
    int64_t* TEXVLM_RESTRICT indices = view.indices + b * k;
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
