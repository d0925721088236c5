// Cells of a picture that their neighbours predict: the rule of PixelPrune (2026), whose neighbours are those of LOCO-I (M.
// Weinberger, G. Seroussi and G. Sapiro, 2000) without the corner above right.
#pragma once

#include <cfloat>
#include <type_traits>

#include "texture.h"

namespace texvlm {

// Whether values differ by at most a bound. What is not finite is near to nothing: `most` is finite, and a comparison with NaN
// fails.
template <class T>
struct Near {
  using A = Acc<T>;
  using Flag = std::conditional_t<sizeof(A) == 8, uint64_t, uint32_t>;  // as wide as a value, so that runs of them vectorise
  A most;                                                               // the largest that is not above the bound

  static Near within(double bound) {
    if constexpr (std::is_same_v<A, double>) return {bound};
    if (bound >= static_cast<double>(FLT_MAX)) return {static_cast<A>(FLT_MAX)};
    const float most = static_cast<float>(bound);
    return {static_cast<A>(static_cast<double>(most) > bound ? std::nextafter(most, 0.0f) : most)};
  }
  TEXVLM_HD bool operator()(T a, T b) const {
    const A difference = static_cast<A>(a) - static_cast<A>(b);
    return (difference <= most) & (difference >= -most);
  }
};

// Bytes stand for 255ths; their differences are exact.
template <>
struct Near<uint8_t> {
  using Flag = uint8_t;
  uint8_t most;

  static Near within(double bound) {
    int most = 0;
    while (most < 255 && (most + 1) / 255.0 <= bound) ++most;
    return {static_cast<uint8_t>(most)};
  }
  TEXVLM_HD bool operator()(uint8_t a, uint8_t b) const { return static_cast<uint8_t>(a > b ? a - b : b - a) <= most; }
};

// The cells of a picture [B, C, H, W], row-major. Partial cells at the edge are filled up by their border. A cell is predicted by
// one of those that come before it, which is never smaller: neither its row nor its column is a later one.
template <class T>
struct PredictedCells {
  ImageView<const T> image;
  int64_t channels, height, width, cell, rows, columns;
  Near<T> near;

  // Of a cell: its first pixel, and how many it has of its own.
  struct Area {
    int64_t y, x, height, width;
  };
  TEXVLM_HD Area area(int64_t i) const {
    const uint32_t row = static_cast<uint32_t>(i) / static_cast<uint32_t>(columns);  // there are fewer than 2^31 cells
    const int64_t y = row * cell, x = (i - row * columns) * cell;
    return {y, x, minimum(cell, height - y), minimum(cell, width - x)};
  }

  TEXVLM_HD bool alike(const T* p, int64_t step_p, const T* q, int64_t step_q, int64_t count) const {
    typename Near<T>::Flag apart = 0;
    if (step_p == 1 && step_q == 1) {
      for (int64_t j = 0; j < count; ++j) apart |= !near(p[j], q[j]);
    } else {
      for (int64_t j = 0; j < count; ++j) apart |= !near(p[j * step_p], q[j * step_q]);
    }
    return apart == 0;
  }

  // Whether a cell is near to an earlier one in every value; stops at the first row of pixels that is not.
  TEXVLM_HD bool alike(int64_t b, int64_t own_cell, int64_t earlier_cell) const {
    const Area own = area(own_cell), earlier = area(earlier_cell);
    const int64_t step = image.stride_x;
    const bool packed = image.stride_c == 1 && step == channels;  // pixel after pixel: a row is one run
    for (int64_t y = 0; y < earlier.height; ++y) {
      const T* p = &image.at(b, 0, own.y + minimum(y, own.height - 1), own.x);
      const T* q = &image.at(b, 0, earlier.y + y, earlier.x);
      if (packed && !alike(p, 1, q, 1, own.width * channels)) return false;
      for (int64_t c = 0; c < channels; ++c, p += image.stride_c, q += image.stride_c) {
        if (!packed && !alike(p, step, q, step, own.width)) return false;
        if (own.width < earlier.width &&
            !alike(p + (own.width - 1) * step, 0, q + own.width * step, step, earlier.width - own.width))
          return false;
      }
    }
    return true;
  }

  // A row of cells, from the left on. Team: bool alike(f, b, own, earlier), compares cells; int64_t source(b, cell), waits until
  // that cell of the row above is decided; decide(b, cell, source).
  template <class Team>
  TEXVLM_HD void row(const Team& team, int64_t b, int64_t y) const {
    int64_t left = -1, above = -1;
    for (int64_t x = 0; x < columns; ++x) {
      const int64_t own = y * columns + x;
      int64_t source = own, corner = above;  // above: -1 where nobody asked
      above = -1;
      if (x > 0 && team.alike(*this, b, own, left)) {
        source = left;
      } else if (y > 0) {
        above = team.source(b, own - columns);
        if (above != left && team.alike(*this, b, own, above)) {
          source = above;
        } else if (x > 0) {
          if (corner < 0) corner = team.source(b, own - columns - 1);
          if (corner != left && corner != above && team.alike(*this, b, own, corner)) source = corner;
        }
      }
      team.decide(b, own, source);
      left = source;
    }
  }
};

}  // namespace texvlm
