// Which tiles of a frame differ from what is stored of it: the largest difference of their values, or of the means of blocks of 8
// x 8.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "texture.h"

namespace texvlm {

// Noise of a sensor is gone from a block's mean, and what moves is not. Blocks are aligned to the tile, partial at the border.
constexpr int64_t kMeanBlock = 8;

// Differences of values, and sums of as many as a block has. What is not finite counts as 0, as in every picture. Signed is as
// narrow as sums of a block of bytes allow (64 * 255), so that a vector holds many.
template <class T>
struct Difference {
  using Size = Acc<T>;
  using Signed = Acc<T>;
  TEXVLM_HD static Acc<T> counted(T v) {
    const Acc<T> value = static_cast<Acc<T>>(v);
    return finite(value) ? value : Acc<T>(0);
  }
  TEXVLM_HD static Signed of(T a, T b) { return counted(a) - counted(b); }
  TEXVLM_HD static Size size(Signed d) { return std::abs(d); }
  TEXVLM_HD static Size size(T a, T b) { return size(of(a, b)); }
};
template <>
struct Difference<uint8_t> {
  using Size = uint8_t;
  using Signed = int16_t;
  TEXVLM_HD static Signed of(uint8_t a, uint8_t b) {
    return static_cast<Signed>(static_cast<Signed>(a) - static_cast<Signed>(b));
  }
  TEXVLM_HD static Signed size(Signed d) { return static_cast<Signed>(d < 0 ? -d : d); }
  TEXVLM_HD static Size size(uint8_t a, uint8_t b) { return static_cast<Size>(maximum(a, b) - minimum(a, b)); }
};

// The largest sums of 1, 2, ... differences whose mean is not above a threshold.
template <class T>
struct Limits {
  Acc<T> sums[kMeanBlock * kMeanBlock];

  static Limits within(double threshold) {
    Limits limits;
    for (int n = 1; n <= kMeanBlock * kMeanBlock; ++n) {
      const double sum = std::min(threshold * n, static_cast<double>(std::numeric_limits<Acc<T>>::max()));
      const Acc<T> near = static_cast<Acc<T>>(sum);
      limits.sums[n - 1] = static_cast<double>(near) > sum ? std::nextafter(near, Acc<T>(0)) : near;
    }
    return limits;
  }
  TEXVLM_HD Acc<T> of(int64_t count) const { return sums[count - 1]; }
};
// Bytes stand for 255ths, and their sums are exact: what a mean of n / 255 is to be within is that quotient.
template <>
struct Limits<uint8_t> {
  int16_t sums[kMeanBlock * kMeanBlock];

  static Limits within(double threshold) {
    Limits limits;
    for (int n = 1; n <= kMeanBlock * kMeanBlock; ++n) {
      int sum = static_cast<int>(std::min(1.0, threshold) * 255 * n);
      while (sum > 0 && sum / (255.0 * n) > threshold) --sum;
      while (sum < 255 * n && (sum + 1) / (255.0 * n) <= threshold) ++sum;
      limits.sums[n - 1] = static_cast<int16_t>(sum);
    }
    return limits;
  }
  TEXVLM_HD int16_t of(int64_t count) const { return sums[count - 1]; }
};

// The sum of a block's eight sums of columns, the same on any device: the first and second, third and fourth ... together. Beyond
// the border they are 0.
template <class N>
TEXVLM_HD N sum_of_eight(const N* p, int64_t step) {
  return static_cast<N>(((p[0] + p[step]) + (p[2 * step] + p[3 * step])) +
                        ((p[4 * step] + p[5 * step]) + (p[6 * step] + p[7 * step])));
}
template <class N>
TEXVLM_HD N sum_of_eight(const N* p, int64_t step, int64_t count) {
  N columns[kMeanBlock];
  for (int64_t i = 0; i < kMeanBlock; ++i) columns[i] = i < count ? p[i * step] : N(0);
  return sum_of_eight(columns, 1);
}

// Frames [B, C, H, W] of any strides, in tiles.
template <class T>
struct TiledFrames {
  ImageView<const T> frame;
  ImageView<T> stored;
  int64_t channels, height, width, tile, rows, columns;
  Limits<T> limits;

  // Pixel after pixel, as cameras have it: a row is one run of values, else one for each colour.
  TEXVLM_HD bool packed() const {
    return frame.stride_c == 1 && stored.stride_c == 1 && frame.stride_x == channels && stored.stride_x == channels;
  }
  TEXVLM_HD int64_t runs() const { return packed() ? 1 : channels; }
  TEXVLM_HD int64_t interleaved() const { return packed() ? channels : 1; }
};

// ---- on the host: rows of tiles ----

#if defined(TEXVLM_HOST_LOOPS)

// How tiles are compared: what is noted of the differences for each value of a row, over up to eight rows of pixels, and whether
// that of a tile is above a limit.
template <class T>
struct LargestDifference {
  using Noted = typename Difference<T>::Size;

  TEXVLM_HD static Noted note(Noted noted, T a, T b) { return maximum(noted, Difference<T>::size(a, b)); }
  TEXVLM_HD static bool any_above(const Limits<T>& limits, const Noted* noted, int64_t count) {
    using Flag = std::conditional_t<sizeof(Noted) == 8, uint64_t, std::conditional_t<sizeof(Noted) == 4, uint32_t, uint8_t>>;
    const Noted limit = static_cast<Noted>(limits.of(1));
    Flag any = 0;  // as wide as a value, so that the loop vectorises, which a maximum of floats does not
    for (int64_t j = 0; j < count; ++j) any |= noted[j] > limit;
    return any != 0;
  }
  // Whether tiles of these values need be looked at.
  TEXVLM_HD static bool prepare(const Limits<T>& limits, const Noted* noted, Noted*, int64_t count, int64_t) {
    return any_above(limits, noted, count);
  }
  TEXVLM_HD static bool exceeds(const Limits<T>& limits, const Noted* noted, const Noted*, int64_t width, int64_t colours,
                                int64_t) {
    return any_above(limits, noted, width * colours);
  }
};
template <class T>
struct MeanDifference {
  using Noted = typename Difference<T>::Signed;

  TEXVLM_HD static Noted note(Noted noted, T a, T b) { return static_cast<Noted>(noted + Difference<T>::of(a, b)); }
  // Sums of eight from each value on: more than are needed, by loops that vectorise.
  TEXVLM_HD static bool prepare(const Limits<T>&, const Noted* TEXVLM_RESTRICT noted, Noted* TEXVLM_RESTRICT sums, int64_t count,
                                int64_t colours) {
    for (int64_t j = 0; j < count - (kMeanBlock - 1) * colours; ++j) sums[j] = sum_of_eight(noted + j, colours);
    return true;
  }
  TEXVLM_HD static bool exceeds(const Limits<T>& limits, const Noted* noted, const Noted* sums, int64_t width, int64_t colours,
                                int64_t rows) {
    bool any = false;
    for (int64_t x = 0; x < width; x += kMeanBlock) {
      const int64_t wide = minimum(kMeanBlock, width - x);
      const auto limit = limits.of(wide * rows);
      for (int64_t j = x * colours; j < (x + 1) * colours; ++j) {
        const Noted sum = wide == kMeanBlock ? sums[j] : sum_of_eight(noted + j, colours, wide);
        any |= !(Difference<T>::size(sum) <= limit);  // what is no number is no small difference either
      }
    }
    return any;
  }
};

// Rows of tiles: memory is read in the order in which it lies, also where a tile is known to differ, until all of the row do.
// What differs is then still in a cache.
template <class T, class Measure>
struct CompareTiles {
  using Noted = typename Measure::Noted;
  TiledFrames<T> f;
  bool* dirty;  // [B, rows, columns]

  TEXVLM_HD static void note(const T* TEXVLM_RESTRICT p, int64_t step_p, const T* TEXVLM_RESTRICT q, int64_t step_q,
                             int64_t count, Noted* TEXVLM_RESTRICT noted) {
    if (step_p == 1 && step_q == 1) {
      for (int64_t j = 0; j < count; ++j) noted[j] = Measure::note(noted[j], p[j], q[j]);
    } else {
      for (int64_t j = 0; j < count; ++j) noted[j] = Measure::note(noted[j], p[j * step_p], q[j * step_q]);
    }
  }

  // Up to eight rows of pixels of run c, from y on.
  TEXVLM_HD void compare(int64_t b, int64_t c, int64_t y, int64_t rows, bool* found, Noted* noted) const {
    const int64_t colours = f.interleaved(), count = f.width * colours;
    const int64_t step_p = f.packed() ? 1 : f.frame.stride_x, step_q = f.packed() ? 1 : f.stored.stride_x;
    Noted* const sums = noted + count;
    std::fill_n(noted, count, Noted(0));
    for (int64_t r = 0; r < rows; ++r)
      note(&f.frame.at(b, c, y + r, 0), step_p, &f.stored.at(b, c, y + r, 0), step_q, count, noted);
    if (!Measure::prepare(f.limits, noted, sums, count, colours)) return;
    for (int64_t t = 0, x = 0; t < f.columns; ++t, x += f.tile)
      found[t] = found[t] ||
                 Measure::exceeds(f.limits, noted + x * colours, sums + x * colours, minimum(f.tile, f.width - x), colours, rows);
  }

  // The tiles [first, last) of run c, rows [y, end) of pixels; whole rows that lie one after another at once.
  TEXVLM_HD void store(int64_t b, int64_t c, int64_t y, int64_t end, int64_t first, int64_t last) const {
    const int64_t x = first * f.tile, width = minimum(f.width, last * f.tile) - x, values = width * f.interleaved();
    const bool dense = f.packed() || (f.frame.stride_x == 1 && f.stored.stride_x == 1);
    const int64_t rows = dense && f.frame.stride_y == values && f.stored.stride_y == values ? end - y : 1;
    for (; y < end; y += rows) {
      const T* p = &f.frame.at(b, c, y, x);
      T* q = &f.stored.at(b, c, y, x);
      if (dense) {
        std::memcpy(q, p, rows * values * sizeof(T));
      } else {
        for (int64_t i = 0; i < width; ++i) q[i * f.stored.stride_x] = p[i * f.frame.stride_x];
      }
    }
  }

  // noted: work memory, twice as many as a row has values.
  TEXVLM_HD void row(int64_t b, int64_t row, Noted* noted) const {
    bool* const found = dirty + (b * f.rows + row) * f.columns;
    bool* const found_end = found + f.columns;
    const int64_t begin = row * f.tile, end = minimum(f.height, begin + f.tile);
    std::fill(found, found_end, false);
    for (int64_t c = 0; c < f.runs(); ++c)
      for (int64_t y = begin; y < end && std::find(found, found_end, false) != found_end; y += kMeanBlock)
        compare(b, c, y, minimum(kMeanBlock, end - y), found, noted);
    for (const bool* first = std::find(found, found_end, true); first != found_end;) {
      const bool* last = std::find(first, static_cast<const bool*>(found_end), false);
      for (int64_t c = 0; c < f.runs(); ++c) store(b, c, begin, end, first - found, last - found);
      first = std::find(last, static_cast<const bool*>(found_end), true);
    }
  }
};

#endif

}  // namespace texvlm
