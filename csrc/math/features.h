// Features of cells: what a cell of the picture's grid holds, as numbers to be weighed; and the way of their gradients back to
// its samples.
#pragma once

#include <cmath>

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

// Slots 0 .. statistics - 1 are channels of which moments are taken, the rest the three of luma. (Where a term has no moments,
// its slot is the first of luma.)
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

// Counts of 16 bins, packed 8 bits each in two registers and unpacked before they overflow.
struct Histogram {
  uint64_t low = 0, high = 0;
  int32_t count[kEntropyBins] = {};
  int room = 255;

  TEXVLM_HD void add(int bin) {
    if (room == 0) unpack();
    --room;
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

// What is summed up of a channel over a cell. The variance is of differences from the first sample: nothing cancels.
template <class A>
struct Moments {
  A first, sum, differences, squared_differences, squares, most, least;

  TEXVLM_HD void start(A v) { *this = {v, A(0), A(0), A(0), A(0), v, v}; }
  // A run is summed up by itself first: of many samples, less is rounded away.
  TEXVLM_HD void add(const A* values, int n) {
    A s = 0, d = 0, dd = 0, ss = 0;
    for (int j = 0; j < n; ++j) {
      const A v = values[j], difference = v - first;
      s += v;
      d += difference;
      dd += difference * difference;
      ss += v * v;
      most = v > most ? v : most;
      least = v < least ? v : least;
    }
    sum += s;
    differences += d;
    squared_differences += dd;
    squares += ss;
  }
  TEXVLM_HD A variance(A places) const {
    return maximum(A(0), (squared_differences - differences * differences / places) / places);
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
        return variance(places);
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
  static constexpr int kChunk = 16;  // samples of a row that are read at a time

  TextureView<const T> texture;
  const int64_t* cells;  // [B, n], any strides
  int64_t stride_b, stride_n;
  const A* query;  // [B or 1, dims]
  int64_t query_b;
  A* out;  // [B, n, terms]
  int64_t count, rows, columns, cell, samples;
  int terms, statistics, dims;
  bool entropy_too;
  bool any_nearest;
  bool aligned;  // every sample lies on a texel centre of level `level.l0`
  LevelLerp<A> level;
  int nearest_level;
  Term term[kMaxTerms];
  int32_t channel[kMaxSlots];
  bool nearest[kMaxSlots];
  EntropyTable<A> table;

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    const int64_t id = cells[b * stride_b + n * stride_n];
    A* const target = out + (b * count + n) * terms;
    if (id < 0 || id >= rows * columns) {
      for (int t = 0; t < terms; ++t) target[t] = static_cast<A>(NAN);
      return;
    }
    const T* const texels = texture.data + b * texture.batch_stride;
    const int64_t cy = id / columns, cx = id - cy * columns;
    Moments<A> moments[kMaxSlots];
    const A places = static_cast<A>(samples * samples);
    for (int64_t y = 0; statistics > 0 && y < samples; ++y)
      each_run(texels, cy, cx, y, samples, 0, statistics, [&](int64_t x, int n, const A(*values)[kChunk]) {
        for (int s = 0; s < statistics; ++s) {
          Moments<A> m = moments[s];
          if (y == 0 && x == 0) m.start(values[s][0]);
          m.add(values[s], n);
          moments[s] = m;
        }
      });
    const A entropy = entropy_too ? entropy_of(texels, cy, cx) : A(0);
    for (int t = 0; t < terms; ++t) {
      const Moments<A>* const m = moments + term[t].slot;
      switch (term[t].what) {
        case Statistic::entropy:
          target[t] = entropy;
          break;
        case Statistic::cosine:
          target[t] = cosine(m, query + b * query_b);
          break;
        case Statistic::residual:
          target[t] = residual(texels, cy, cx);
          break;
        default:
          target[t] = m->of(term[t].what, places);
      }
    }
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

  // Slots [s0, s1) of row y of the samples of a cell: use(x, n, values[slot - s0][n]) for runs of them. side: `samples`, or 3 for
  // the centres of the cells around one of one sample.
  template <class F>
  TEXVLM_HD void each_run(const T* texels, int64_t cy, int64_t cx, int64_t y, int64_t side, int s0, int s1, const F& use) const {
    const bool around = side != samples;
    A values[kMaxSlots][kChunk];
    for (int64_t x = 0; x < side; x += kChunk) {
      const int n = static_cast<int>(minimum<int64_t>(kChunk, side - x));
      if (aligned) {
        const int64_t height = texture.levels.height[level.l0], width = texture.levels.width[level.l0];
        const int64_t row = clamp<int64_t>(around ? cy - 1 + y : cy * samples + y, 0, height - 1);
        const int64_t left = around ? cx - 1 : cx * samples + x;
        const T* const line = texels + (texture.levels.offset[level.l0] + row * width) * texture.channels;
        for (int j = 0; j < n; ++j) {
          const T* const texel = line + clamp<int64_t>(left + j, 0, width - 1) * texture.channels;
          for (int s = s0; s < s1; ++s) values[s - s0][j] = static_cast<A>(texel[channel[s]]);
        }
      } else {
        const Taps v = taps(cy, y, around, texture.levels.height);
        for (int j = 0; j < n; ++j) {
          const Taps u = taps(cx, x + j, around, texture.levels.width);
          const LodTaps<A> q{level, joined(u.fine, v.fine, texture.levels, level.l0),
                             joined(u.coarse, v.coarse, texture.levels, level.l1)};
          const int64_t at = texture.levels.offset[nearest_level] + v.nearest * texture.levels.width[nearest_level] + u.nearest;
          for (int s = s0; s < s1; ++s)
            values[s - s0][j] = nearest[s] ? static_cast<A>(texels[at * texture.channels + channel[s]])
                                           : fetch(texels + channel[s], texture.channels, q);
        }
      }
      use(x, n, values);
    }
  }

  // Of the histogram of luma, over its largest possible value.
  TEXVLM_HD A entropy_of(const T* texels, int64_t cy, int64_t cx) const {
    const int64_t side = samples == 1 ? kSamplesAround : samples, lights = side * side;
    Histogram histogram;
    for (int64_t y = 0; y < side; ++y)
      each_run(texels, cy, cx, y, side, statistics, statistics + 3, [&](int64_t, int n, const A(*rgb)[kChunk]) {
        for (int j = 0; j < n; ++j) histogram.add(luma_bin(luma(rgb[0][j], rgb[1][j], rgb[2][j])));
      });
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
      for (int64_t y = 0; y < samples; ++y)
        each_run(texels, cy, cx, y, samples, statistics, statistics + 3, [&](int64_t x, int n, const A(*own)[kChunk]) {
          A other[3][kChunk] = {};
          if (!first) {
            each_run(texels, oy, ox, y, samples, statistics, statistics + 3, [&](int64_t at, int, const A(*values)[kChunk]) {
              if (at != x) return;
              for (int c = 0; c < 3; ++c)
                for (int j = 0; j < n; ++j) other[c][j] = values[c][j];
            });
          }
          for (int c = 0; c < 3; ++c)
            for (int j = 0; j < n; ++j) sum += (own[c][j] - other[c][j]) * (own[c][j] - other[c][j]);
        });
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
  const T* samples;  // [B, n, slots, places]
  const A* grad;     // [B, n, terms], any strides
  int64_t grad_b, grad_n, grad_t;
  const A* query;
  int64_t query_b;
  T* grad_samples;
  A* grad_query;  // or null
  int64_t count, places;
  int terms, slots, dims;
  Term term[kMaxTerms];

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    const T* const from = samples + (b * count + n) * slots * places;
    T* const to = grad_samples + (b * count + n) * slots * places;
    A* const by_query = grad_query ? grad_query + (b * count + n) * dims : nullptr;
    const A many = static_cast<A>(places);
    for (int d = 0; by_query && d < dims; ++d) by_query[d] = 0;
    A mean[kMaxSlots];
    for (int s = 0; s < slots; ++s) {
      mean[s] = 0;
      for (int64_t i = 0; i < places; ++i) mean[s] += static_cast<A>(from[s * places + i]);
      mean[s] = mean[s] / many;
    }
    // A sample's gradient is base + slope * (its value), and what maxima add: rounded once, so half types lose nothing on the
    // way.
    A base[kMaxSlots], slope[kMaxSlots];
    for (int s = 0; s < slots; ++s) base[s] = slope[s] = A(0);
    for (int t = 0; t < terms; ++t) {
      const int s = term[t].slot;
      const A g = grad[b * grad_b + n * grad_n + t * grad_t];
      switch (term[t].what) {
        case Statistic::mean:
          base[s] += g / many;
          break;
        case Statistic::variance:
          base[s] += A(-2) * g * mean[s] / many;
          slope[s] += A(2) * g / many;
          break;
        case Statistic::rms: {
          A squares = 0;
          for (int64_t i = 0; i < places; ++i)
            squares += static_cast<A>(from[s * places + i]) * static_cast<A>(from[s * places + i]);
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
      int64_t most = 0, least = 0;
      for (int64_t i = 1; i < places; ++i) {
        const A v = static_cast<A>(from[s * places + i]);
        if (v > static_cast<A>(from[s * places + most])) most = i;
        if (v < static_cast<A>(from[s * places + least])) least = i;
      }
      A at_most = 0, at_least = 0;
      for (int t = 0; t < terms; ++t) {
        if (term[t].slot != s) continue;
        const A g = grad[b * grad_b + n * grad_n + t * grad_t];
        if (term[t].what == Statistic::max) at_most += g;
        if (term[t].what == Statistic::min) at_least += g;
      }
      for (int64_t i = 0; i < places; ++i) {
        A sum = base[s] + counted(slope[s], static_cast<A>(from[s * places + i]));
        if (i == most) sum += at_most;
        if (i == least) sum += at_least;
        to[s * places + i] = static_cast<T>(sum);
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
