// Exact Euclidean distance transform in two passes: the nearest feature of each column, then the nearest of those along each row.
//
// Scheme: A. Meijster, J. Roerdink and W. Hesselink, "A general algorithm for computing distance transforms in linear time"
// (2000). The row pass searches outwards and stops as soon as the step alone is farther than what is found, 16 pixels at once;
// rows with a pixel that has to look farther than kReach take the lower envelope of parabolas instead. Ties go to the lowest
// row-major index: every comparison is of (squared distance, index), a total order in which two columns change places at most
// once along a row, so the envelope stays exact.
#pragma once

#include "texture.h"

namespace texvlm {

constexpr int32_t kNoRow = -(1 << 30);  // no feature in this column

struct BoolMask {
  const bool* data;
  int64_t stride_b, stride_y, stride_x;
  TEXVLM_HD bool operator()(int64_t b, int64_t y, int64_t x) const { return data[b * stride_b + y * stride_y + x * stride_x]; }
};

// Pixels of a plane above a threshold of their picture.
template <class A>
struct AboveMask {
  const A* plane;           // [B, H, W]
  const double* threshold;  // [B]
  int64_t height, width;
  TEXVLM_HD bool operator()(int64_t b, int64_t y, int64_t x) const {
    return static_cast<double>(plane[(b * height + y) * width + x]) > threshold[b];
  }
};

// Item n: column n. near [B, H, W]: the row of the nearest feature in the pixel's own column, the upper of two, or kNoRow.
template <class Mask>
struct NearestInColumn {
  template <class T, int C>
  struct For {
    Mask mask;
    T* near;
    int64_t height, width;

    TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const { block(b, n, n + 1); }

    TEXVLM_HD void block(int64_t b, int64_t n0, int64_t n1) const {
      T* plane = near + b * height * width;
      for (int64_t x = n0; x < n1; ++x) plane[x] = mask(b, 0, x) ? T(0) : T(kNoRow);
      for (int64_t y = 1; y < height; ++y) {
        const T* TEXVLM_RESTRICT above = plane + (y - 1) * width;
        T* TEXVLM_RESTRICT row = plane + y * width;
        for (int64_t x = n0; x < n1; ++x) row[x] = mask(b, y, x) ? static_cast<T>(y) : above[x];
      }
      // What the row below found is its nearest one below, or else the nearest one above, which this row has already.
      for (int64_t y = height - 2; y >= 0; --y) {
        const T* TEXVLM_RESTRICT below = plane + (y + 1) * width;
        T* TEXVLM_RESTRICT row = plane + y * width;
        const T here = static_cast<T>(y);
        for (int64_t x = n0; x < n1; ++x) row[x] = here - row[x] <= below[x] - here ? row[x] : below[x];
      }
    }
  };
};

// Where the answer goes: squared distance and index (-1 and H^2 + W^2 where there is no feature), or the distance over the
// diagonal.
struct SquaredSink {
  int64_t* squared;
  int64_t* index;
  int64_t height, width;
  static constexpr bool kIndexed = true;
  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t d, int64_t i, bool found) const {
    const int64_t at = (b * height + y) * width + x;
    squared[at] = found ? d : height * height + width * width;
    index[at] = found ? i : -1;
  }
};

template <class A>
struct DiagonalSink {
  A* plane;
  int64_t height, width;
  static constexpr bool kIndexed = false;
  template <class I>
  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, I d, int64_t, bool) const {
    const A diagonal = static_cast<A>(height * height + width * width);
    plane[(b * height + y) * width + x] = std::sqrt(static_cast<A>(d) / diagonal);
  }
};

// Squared distances and indices are held in T: int32_t while H^2 + 2 W^2 and H W stay below 2^31, int64_t beyond.
template <class Sink>
struct NearestInRow {
  template <class T, int C>
  struct For {
    const int32_t* near;
    int64_t height, width;
    Sink sink;

    static constexpr int kLanes = 16, kReach = 96, kCheck = 4;

    TEXVLM_HD T farther() const { return static_cast<T>(height * height + width * width); }  // than any feature

    // One pixel, by itself.
    TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
      const int32_t* row = near + (b * height + y) * width;
      int64_t best = farther(), index = -1;
      for (int64_t k = 0; k * k <= best && (x - k >= 0 || x + k < width); ++k) {
        for (int side = 0; side < (k ? 2 : 1); ++side) {
          const int64_t column = side ? x + k : x - k;
          if (column < 0 || column >= width || row[column] == kNoRow) continue;
          const int64_t down = row[column] - y, d = k * k + down * down, i = row[column] * width + column;
          if (d < best || (d == best && (index < 0 || i < index))) {
            best = d;
            index = i;
          }
        }
      }
      sink(b, y, x, best, index, index >= 0);
    }

    int64_t scratch_bytes() const { return (2 * (width + 2 * kReach + kLanes) + 5 * width) * static_cast<int64_t>(sizeof(T)); }

    // A whole row: x0 = 0, x1 = width.
    TEXVLM_HD void row(int64_t b, int64_t y, int64_t, int64_t, void* scratch) const {
      const int64_t padded = width + 2 * kReach + kLanes;
      T* TEXVLM_RESTRICT down = static_cast<T*>(scratch) + kReach;  // squared distance along the column, farther() outside
      T* TEXVLM_RESTRICT place = down + padded;                     // index of that feature, larger than any outside
      T* TEXVLM_RESTRICT best = static_cast<T*>(scratch) + 2 * padded;
      T* TEXVLM_RESTRICT index = best + width;
      const T none = farther(), nowhere = static_cast<T>(height * width);
      const int32_t* TEXVLM_RESTRICT column = near + (b * height + y) * width;
      for (int64_t x = -kReach; x < 0; ++x) down[x] = none, place[x] = nowhere;
      for (int64_t x = width; x < width + kReach + kLanes; ++x) down[x] = none, place[x] = nowhere;
      for (int64_t x = 0; x < width; ++x) {
        const bool has = column[x] != kNoRow;
        const T distance = static_cast<T>(has ? column[x] - static_cast<int32_t>(y) : 0);
        down[x] = has ? distance * distance : none;
        if constexpr (Sink::kIndexed)
          place[x] = has ? static_cast<T>(column[x]) * static_cast<T>(width) + static_cast<T>(x) : nowhere;
      }
      if (!search(down, place, best, index)) envelope(down, place, best, index, index + width);
      for (int64_t x = 0; x < width; ++x) {
        const int64_t i = Sink::kIndexed ? static_cast<int64_t>(index[x]) : 0;
        sink(b, y, x, best[x], i, !Sink::kIndexed || index[x] != nowhere);
      }
    }

    // Searches up to kReach columns to both sides; false where that is not enough.
    TEXVLM_HD bool search(const T* TEXVLM_RESTRICT down, const T* TEXVLM_RESTRICT place, T* TEXVLM_RESTRICT best,
                          T* TEXVLM_RESTRICT index) const {
      for (int64_t x = 0; x < width; x += kLanes) {
        T d[kLanes], at[kLanes];
        for (int j = 0; j < kLanes; ++j) d[j] = down[x + j], at[j] = place[x + j];
        for (int k = 1;; k += kCheck) {
          T worst = 0;
          for (int j = 0; j < kLanes; ++j) worst = maximum(worst, x + j < width ? d[j] : T(0));
          if (Sink::kIndexed ? static_cast<T>(k) * k > worst : static_cast<T>(k) * k >= worst) break;
          if (k >= kReach || k >= width) {
            if (k >= width) break;
            return false;
          }
          for (int step = k; step < k + kCheck; ++step) {
            const T across = static_cast<T>(step) * static_cast<T>(step);
            const T *left = down + x - step, *right = down + x + step;
            if constexpr (Sink::kIndexed) {
              const T *left_at = place + x - step, *right_at = place + x + step;
              for (int j = 0; j < kLanes; ++j) {
                const T l = left[j] + across, r = right[j] + across;
                const bool take_l = (l < d[j]) | ((l == d[j]) & (left_at[j] < at[j]));
                d[j] = take_l ? l : d[j];
                at[j] = take_l ? left_at[j] : at[j];
                const bool take_r = (r < d[j]) | ((r == d[j]) & (right_at[j] < at[j]));
                d[j] = take_r ? r : d[j];
                at[j] = take_r ? right_at[j] : at[j];
              }
            } else {
              for (int j = 0; j < kLanes; ++j) d[j] = minimum(d[j], minimum(left[j], right[j]) + across);
            }
          }
        }
        const int64_t stop = minimum<int64_t>(kLanes, width - x);
        for (int j = 0; j < stop; ++j) {
          best[x + j] = d[j];
          if constexpr (Sink::kIndexed) index[x + j] = at[j];
        }
      }
      return true;
    }

    // The first column where the parabola of column u beats that of column i < u, in the order of (squared distance, index).
    TEXVLM_HD int64_t first_win(const T* down, const T* place, int64_t i, int64_t u) const {
      const bool on_tie = Sink::kIndexed && place[u] < place[i];
      const int64_t n = (u - i) * (u + i) + static_cast<int64_t>(down[u]) - static_cast<int64_t>(down[i]) - (on_tie ? 1 : 0);
      return n < 0 ? 0 : n / (2 * (u - i)) + 1;
    }

    TEXVLM_HD void envelope(const T* down, const T* place, T* best, T* index, T* stack) const {
      T *column = stack, *start = stack + width;
      const T none = farther(), nowhere = static_cast<T>(height * width);
      int64_t top = -1;
      for (int64_t u = 0; u < width; ++u) {
        if (down[u] == none) continue;
        int64_t from = 0;
        while (top >= 0) {
          from = first_win(down, place, column[top], u);
          if (from > start[top]) break;
          --top;
          from = 0;
        }
        if (from >= width) continue;
        ++top;
        column[top] = static_cast<T>(u);
        start[top] = static_cast<T>(from);
      }
      for (int64_t x = width - 1; x >= 0; --x) {
        if (top < 0) {
          best[x] = none;
          index[x] = nowhere;
          continue;
        }
        const int64_t u = column[top];
        best[x] = down[u] + static_cast<T>((x - u) * (x - u));
        index[x] = place[u];
        if (x == start[top]) --top;
      }
    }
  };
};

}  // namespace texvlm
