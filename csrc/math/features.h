// Features of cells: what a cell of the picture's grid holds, as numbers to be weighed; and the way of their gradients back to
// its samples.
#pragma once

#include <cmath>
#include <utility>

#include "filter.h"

namespace texvlm {

constexpr int kEntropyBins = 16;    // bins of the histogram of luma over [0, 1]
constexpr int kEntropyTable = 257;  // counts 0..256: the cells of 16 x 16 samples
constexpr int kSamplesAround = 3;   // a cell of one sample takes its entropy over the centres of the 3 x 3 cells around it
constexpr int kMaxTerms = 32;       // of one call
constexpr int kMaxSlots = 64;       // channels that they read

// What a term is made of, over the samples of a cell: statistics of one channel; of three, the entropy of luma and how little the
// cells left, above and above left predict the cell; of as many as the query has numbers, the cosine of their mean with it.
enum class Statistic : uint8_t { mean, max, min, variance, rms, entropy, cosine, residual };
constexpr const char* kStatistics[] = {"mean", "max", "min", "variance", "rms", "entropy", "cosine", "residual"};

// Slots 0 .. statistics - 1 are channels of which moments are taken, the rest the three of luma, which entropy and residual read.
struct Term {
  Statistic what;
  int slot;  // of its channel, or its first
};

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

constexpr int kChunk = 16;  // samples of a row of a cell that are read at a time

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

// Counts of 16 bins, packed 8 bits each in two registers and unpacked before they overflow.
struct Histogram {
  uint64_t low = 0, high = 0;
  int32_t count[kEntropyBins] = {};
  int room = 255;

  // The luma of n <= kChunk samples of red, green and blue.
  template <class A>
  TEXVLM_HD void add(const A (*rgb)[kChunk], int n) {
    int bin[kChunk];
    for (int j = 0; j < kChunk; ++j) bin[j] = luma_bin(luma(rgb[0][j], rgb[1][j], rgb[2][j]));
    if (room < n) unpack();
    room -= n;
    for (int j = 0; j < n; ++j) {
      // by a mask: a branch on the bin would be mispredicted half of the time
      const uint64_t one = uint64_t{1} << (8 * (bin[j] & 7)), in_high = uint64_t{0} - static_cast<uint64_t>(bin[j] >> 3);
      low += one & ~in_high;
      high += one & in_high;
    }
  }
  TEXVLM_HD void unpack() {
    for (int i = 0; i < 8; ++i) {
      count[i] += static_cast<int32_t>((low >> (8 * i)) & 255u);
      count[i + 8] += static_cast<int32_t>((high >> (8 * i)) & 255u);
    }
    low = high = 0;
    room = 255;
  }
};

// The sum of a run in an order that vectorises: four sums, then these.
template <class A>
TEXVLM_HD A run_sum(const A* v) {
  A part[4] = {v[0], v[1], v[2], v[3]};
  for (int j = 4; j < kChunk; j += 4)
    for (int l = 0; l < 4; ++l) part[l] += v[j + l];
  return (part[0] + part[1]) + (part[2] + part[3]);
}

// What is summed up of a channel over a cell. The variance is of differences from the first sample: nothing cancels.
template <class A>
struct Moments {
  A first, sum, squares, differences, squared_differences, most, least;

  // values [kChunk], 0 from n on but for cells of one sample. all: the variance and the extrema too.
  TEXVLM_HD void add(const A* values, int n, bool begin, bool all) {
    if (begin && n == 1) {
      *this = {values[0], values[0], values[0] * values[0], A(0), A(0), values[0], values[0]};
      return;
    }
    A other[kChunk];
    for (int j = 0; j < kChunk; ++j) other[j] = values[j] * values[j];
    if (begin) *this = {values[0], A(0), A(0), A(0), A(0), values[0], values[0]};
    sum += run_sum(values);
    squares += run_sum(other);
    if (!all) return;
    for (int j = 0; j < kChunk; ++j) other[j] = j < n ? values[j] - first : A(0);
    differences += run_sum(other);
    for (int j = 0; j < kChunk; ++j) other[j] = other[j] * other[j];
    squared_differences += run_sum(other);
    for (int j = 0; j < n; ++j) {
      most = values[j] > most ? values[j] : most;
      least = values[j] < least ? values[j] : least;
    }
  }
  TEXVLM_HD A of(Statistic what, A places) const {
    switch (what) {
      case Statistic::mean:
        return sum / places;
      case Statistic::max:
        return most;
      case Statistic::min:
        return least;
      case Statistic::variance:
        return maximum(A(0), (squared_differences - differences * differences / places) / places);
      default:
        return sqrt_of(squares / places);
    }
  }
};

// One query per cell: its terms over samples x samples places, trilinear with clamp at LOD log2(cell / samples). Channels of the
// reducer mode are read nearest. A cell that is not in the grid is NaN.
template <class T, int C>
struct CellFeatures {
  using A = Acc<T>;
  TextureView<const T> texture;
  const int64_t* cells;  // [B, n], any strides
  int64_t stride_b, stride_n;
  const A* query;  // [B or 1, dims]
  int64_t query_b;
  A* out;                                                     // [B, n, terms], or [B, n], their weighted sum
  int64_t count, rows, columns, cell, samples, rows_at_once;  // rows_at_once: of samples, in a run
  int terms, statistics, dims;
  bool entropy_too, all_moments, weighed;
  bool any_nearest;
  bool aligned;  // every sample lies on a texel centre of level `level.l0`
  LevelLerp<A> level;
  int nearest_level;
  Term term[kMaxTerms];
  A weight[kMaxTerms];
  int32_t channel[kMaxSlots];
  bool nearest[kMaxSlots];
  EntropyTable<A> table;

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    const int64_t id = cells[b * stride_b + n * stride_n];
    A* const target = out + (b * count + n) * (weighed ? 1 : terms);
    if (id < 0 || id >= rows * columns) {
      for (int t = 0; t < (weighed ? 1 : terms); ++t) target[t] = static_cast<A>(NAN);
      return;
    }
    const T* const texels = texture.data + b * texture.batch_stride;
    // divided as 32 bits where that will do: it is several times as fast
    const bool small = ((id | columns) >> 31) == 0;
    const int64_t cy = small ? static_cast<uint32_t>(id) / static_cast<uint32_t>(columns) : id / columns, cx = id - cy * columns;
    Moments<A> moments[kMaxSlots];
    Histogram histogram;
    const A places = static_cast<A>(samples * samples);
    // the entropy of one sample is that of the cells around it, which are read below
    const bool around = samples == 1, lights = entropy_too && !around;
    A values[kMaxSlots][kChunk];
    const int slots = lights ? statistics + 3 : statistics;
    for (Run at{samples, rows_at_once}; slots > 0 && at.y < samples; at.next()) {
      const int n = read(texels, cy, cx, at, 0, slots, values);
      for (int s = 0; s < statistics; ++s) moments[s].add(values[s], n, at.y == 0 && at.x == 0, all_moments);
      if (lights) histogram.add(values + statistics, n);
    }
    if (entropy_too && around) {
      const int n = read(texels, cy, cx, Run{kSamplesAround, kSamplesAround}, statistics, statistics + 3, values);
      histogram.add(values, n);
    }
    A sum = 0;
    for (int t = 0; t < terms; ++t) {
      const Moments<A>* const m = moments + term[t].slot;
      const Statistic what = term[t].what;
      const A value = what == Statistic::entropy    ? entropy_of(histogram)
                      : what == Statistic::cosine   ? cosine(m, query + b * query_b)
                      : what == Statistic::residual ? residual(texels, cy, cx)
                                                    : m->of(what, places);
      if (!weighed) {
        target[t] = value;
      } else {
        sum = t ? sum + weight[t] * value : weight[t] * value;
      }
    }
    if (weighed) *target = sum;
  }

  // An axis of the grid of samples in the two levels around the LOD, settled, and nearest for channels of the reducer
  // mode.
  struct Taps {
    AxisLerp<A> fine, coarse;
    int64_t nearest;
  };

  // Sample i, of `side` along the cell at `at` (or of the centres of the cells around), on an axis of `size` pixels; the
  // arithmetic is that of uv = pixel / size.
  TEXVLM_HD Taps taps(int64_t at, int64_t i, bool around, const int64_t* sizes) const {
    const A step = around ? static_cast<A>(i) - A(0.5) : (static_cast<A>(i) + A(0.5)) / static_cast<A>(samples);
    const A u = (static_cast<A>(at) + step) * static_cast<A>(cell) / static_cast<A>(sizes[0]);
    return {settled(axis_lerp(u, static_cast<int>(sizes[level.l0]), Address::clamp)),
            settled(axis_lerp(u, static_cast<int>(sizes[level.l1]), Address::clamp)),
            any_nearest ? axis_nearest(u, static_cast<int>(sizes[nearest_level]), Address::clamp) : 0};
  }

  // A run of the side x side samples of a cell: as many whole rows as it holds, or a part of one.
  struct Run {
    int64_t side, whole, y = 0, x = 0;  // whole: rows of a run

    TEXVLM_HD int rows() const { return static_cast<int>(minimum(whole, side - y)); }
    TEXVLM_HD int columns() const { return static_cast<int>(minimum<int64_t>(kChunk, side - x)); }
    TEXVLM_HD void next() {
      x += kChunk;
      if (x < side) return;
      x = 0;
      y += whole;
    }
  };

  // Neighbouring texels of one channel, the usual numbers of them one by one: a loop would become a gather, which is slower.
  template <int... J>
  TEXVLM_HD void copy_texels(const T* from, A* to, std::integer_sequence<int, J...>) const {
    ((to[J] = static_cast<A>(from[J * texture.channels])), ...);
  }
  TEXVLM_HD void copy_row(const T* from, int n, A* to) const {
    if (n == 16) return copy_texels(from, to, std::make_integer_sequence<int, 16>());
    if (n == 8) return copy_texels(from, to, std::make_integer_sequence<int, 8>());
    if (n == 4) return copy_texels(from, to, std::make_integer_sequence<int, 4>());
    if (n == 3) return copy_texels(from, to, std::make_integer_sequence<int, 3>());
    if (n == 1) return copy_texels(from, to, std::make_integer_sequence<int, 1>());
    for (int j = 0; j < n; ++j) to[j] = static_cast<A>(from[j * texture.channels]);
  }

  // Slots [s0, s1) of a run of the samples of a cell: values[slot - s0], 0 beyond those n that there are. Returns n. A run of
  // another side is one of the centres of the 3 x 3 cells around.
  TEXVLM_HD int read(const T* texels, int64_t cy, int64_t cx, const Run& run, int s0, int s1, A (*values)[kChunk]) const {
    const bool around = run.side != samples;
    const int rows = run.rows(), columns = run.columns(), n = rows * columns;
    if (n < kChunk && run.side > 1) {
      for (int s = s0; s < s1; ++s)
        for (int j = n; j < kChunk; ++j) values[s - s0][j] = A(0);
    }
    for (int r = 0; r < rows; ++r) {
      const int64_t y = run.y + r;
      A(*const to)[kChunk] = values;
      const int first = r * columns;
      if (aligned) {
        const int64_t height = texture.levels.height[level.l0], width = texture.levels.width[level.l0];
        const int64_t row = clamp<int64_t>(around ? cy - 1 + y : cy * samples + y, 0, height - 1);
        const int64_t left = around ? cx - 1 : cx * samples + run.x;
        const T* const line = texels + (texture.levels.offset[level.l0] + row * width) * texture.channels;
        const bool inside = left >= 0 && left + columns <= width;
        for (int s = s0; s < s1; ++s) {
          const T* const from = line + channel[s];
          if (inside) {
            copy_row(from + left * texture.channels, columns, to[s - s0] + first);
          } else {
            for (int j = 0; j < columns; ++j)
              to[s - s0][first + j] = static_cast<A>(from[clamp<int64_t>(left + j, 0, width - 1) * texture.channels]);
          }
        }
        continue;
      }
      const Taps v = taps(cy, y, around, texture.levels.height);
      for (int j = 0; j < columns; ++j) {
        const Taps u = taps(cx, run.x + j, around, texture.levels.width);
        const LodTaps<A> q{level, joined(u.fine, v.fine, texture.levels, level.l0),
                           joined(u.coarse, v.coarse, texture.levels, level.l1)};
        const int64_t at = texture.levels.offset[nearest_level] + v.nearest * texture.levels.width[nearest_level] + u.nearest;
        for (int s = s0; s < s1; ++s)
          to[s - s0][first + j] = nearest[s] ? static_cast<A>(texels[at * texture.channels + channel[s]])
                                             : fetch(texels + channel[s], texture.channels, q);
      }
    }
    return n;
  }

  // Over its largest possible value.
  TEXVLM_HD A entropy_of(Histogram& histogram) const {
    const int64_t side = samples == 1 ? kSamplesAround : samples, lights = side * side;
    histogram.unpack();
    A entropy = 0;
    for (int i = 0; i < kEntropyBins; ++i) {
      const int32_t filled = histogram.count[i];
      entropy += lights < kEntropyTable ? table.term[filled] : entropy_term<A>(filled, static_cast<A>(lights));
    }
    return entropy / table.largest;
  }

  // Of the mean of the channels with the query; 0 where one of them has no direction.
  TEXVLM_HD A cosine(const Moments<A>* m, const A* q) const {
    A dot = 0, own = 0, other = 0;
    for (int d = 0; d < dims; ++d) {
      dot += m[d].sum * q[d];
      own += m[d].sum * m[d].sum;
      other += q[d] * q[d];
    }
    const A length = sqrt_of(own) * sqrt_of(other);
    return length > A(0) ? dot / length : A(0);
  }

  // The root mean square by which the samples differ from those of the cell left, above or above left, whichever is nearest; for
  // the first cell, which nothing predicts, from 0.
  TEXVLM_HD A residual(const T* texels, int64_t cy, int64_t cx) const {
    A nearest_one = static_cast<A>(INFINITY);
    for (int way = 0; way < 3; ++way) {
      const int64_t oy = cy - (way >= 1), ox = cx - (way != 1);
      const bool first = cy == 0 && cx == 0;
      if (!first && (oy < 0 || ox < 0)) continue;
      A sum = 0;
      for (Run at{samples, rows_at_once}; at.y < samples; at.next()) {
        A own[3][kChunk] = {}, other[3][kChunk] = {};
        read(texels, cy, cx, at, statistics, statistics + 3, own);
        if (!first) read(texels, oy, ox, at, statistics, statistics + 3, other);
        for (int c = 0; c < 3; ++c) {
          for (int j = 0; j < kChunk; ++j) own[c][j] = (own[c][j] - other[c][j]) * (own[c][j] - other[c][j]);
          sum += run_sum(own[c]);
        }
      }
      nearest_one = minimum(nearest_one, sum);
    }
    return sqrt_of(nearest_one / static_cast<A>(3 * samples * samples));
  }
};

// The gradient of the samples [B, n, slots, samples, samples] of a cell, and its share of the query's [B, n, dims], of the
// gradient of its terms. Maxima and minima give it to the first sample that is one; entropy and residual have none.
template <class T, int C>
struct CellFeaturesAdjoint {
  using A = Acc<T>;
  const T* samples;  // [B, n, channels, places]
  const A* grad;     // [B, n, terms], any strides; grad_t is 0 where it is of their sum
  int64_t grad_b, grad_n, grad_t;
  const A* query;
  int64_t query_b;
  T* grad_samples;
  A* grad_query;  // or null
  int64_t count, places, channels;
  int terms, slots, dims;
  Term term[kMaxTerms];
  A weight[kMaxTerms];  // of each term in the sum, 1 where there is none
  int32_t channel[kMaxSlots];

  TEXVLM_HD A grad_of(int64_t b, int64_t n, int t) const { return weight[t] * grad[b * grad_b + n * grad_n + t * grad_t]; }

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    const T* const cell = samples + (b * count + n) * channels * places;
    T* const grad_cell = grad_samples + (b * count + n) * channels * places;
    A* const by_query = grad_query ? grad_query + (b * count + n) * dims : nullptr;
    const A many = static_cast<A>(places);
    for (int d = 0; by_query && d < dims; ++d) by_query[d] = 0;
    A mean[kMaxSlots];
    for (int s = 0; s < slots; ++s) {
      const T* const from = cell + channel[s] * places;
      mean[s] = 0;
      for (int64_t i = 0; i < places; ++i) mean[s] += static_cast<A>(from[i]);
      mean[s] = mean[s] / many;
    }
    // A sample's gradient is base + slope * (its value), and what maxima add: rounded once, so half types lose nothing on the
    // way.
    A base[kMaxSlots], slope[kMaxSlots];
    for (int s = 0; s < slots; ++s) base[s] = slope[s] = A(0);
    for (int t = 0; t < terms; ++t) {
      const int s = term[t].slot;
      const A g = grad_of(b, n, t);
      switch (term[t].what) {
        case Statistic::mean:
          base[s] += g / many;
          break;
        case Statistic::variance:
          base[s] += A(-2) * g * mean[s] / many;
          slope[s] += A(2) * g / many;
          break;
        case Statistic::rms: {
          const T* const from = cell + channel[s] * places;
          A squares = 0;
          for (int64_t i = 0; i < places; ++i) squares += static_cast<A>(from[i]) * static_cast<A>(from[i]);
          const A root = sqrt_of(squares / many);
          if (root > A(0)) slope[s] += g / (root * many);
          break;
        }
        case Statistic::cosine:
          cosine(g, mean + s, query + b * query_b, base + s, by_query);
          break;
        default:
          break;
      }
    }
    for (int s = 0; s < slots; ++s) {
      const T* const from = cell + channel[s] * places;
      T* const to = grad_cell + channel[s] * places;
      A at_most = 0, at_least = 0;
      for (int t = 0; t < terms; ++t) {
        if (term[t].slot != s) continue;
        const A g = grad_of(b, n, t);
        if (term[t].what == Statistic::max) at_most += g;
        if (term[t].what == Statistic::min) at_least += g;
      }
      int64_t most = -1, least = -1;
      for (int64_t i = 0; at_most != A(0) && i < places; ++i)
        if (most < 0 || static_cast<A>(from[i]) > static_cast<A>(from[most])) most = i;
      for (int64_t i = 0; at_least != A(0) && i < places; ++i)
        if (least < 0 || static_cast<A>(from[i]) < static_cast<A>(from[least])) least = i;
      for (int64_t i = 0; i < places; ++i) {
        A sum = base[s] + counted(slope[s], static_cast<A>(from[i]));
        if (i == most) sum += at_most;
        if (i == least) sum += at_least;
        to[i] = static_cast<T>(static_cast<A>(to[i]) + sum);
      }
    }
  }

  TEXVLM_HD void cosine(A g, const A* mean, const A* q, A* base, A* by_query) const {
    A dot = 0, own = 0, other = 0;
    for (int d = 0; d < dims; ++d) {
      dot += mean[d] * q[d];
      own += mean[d] * mean[d];
      other += q[d] * q[d];
    }
    const A length = sqrt_of(own) * sqrt_of(other);
    if (!(length > A(0))) return;
    const A value = dot / length, many = static_cast<A>(places);
    for (int d = 0; d < dims; ++d) {
      base[d] += g * (q[d] / length - value * mean[d] / own) / many;
      if (by_query) by_query[d] += g * (mean[d] / length - value * q[d] / other);
    }
  }
};

}  // namespace texvlm
