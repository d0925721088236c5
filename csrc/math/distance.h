// Exact Euclidean distance transform in two passes: the nearest feature of each column, then the nearest of those along each row.
//
// Scheme: A. Meijster, J. Roerdink and W. Hesselink, "A general algorithm for computing distance transforms in linear time"
// (2000). The row pass searches outwards and stops as soon as the step alone is farther than what is found, 16 pixels at once;
// rows with a pixel that has to look farther than kReach take the lower envelope of parabolas instead. Ties go to the lowest
// row-major index: every comparison is of (squared distance, index), a total order in which two columns change places at most
// once along a row, so the envelope stays exact.
#pragma once

#include "scalar.h"

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
  template <class I>
  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, I d, int64_t, bool) const {
    const A diagonal = static_cast<A>(height * height + width * width);
    plane[(b * height + y) * width + x] = std::sqrt(static_cast<A>(d) / diagonal);
  }
};

// Squared distances and indices are held in T: int32_t while H^2 + 2 W^2 and H W stay below 2^31, int64_t beyond. The search
// along a row is in keys of 32 bits: squared distance, then rows, then columns from the pixel, so that the least key is the
// nearest feature and of equally near ones the lowest. All that it finds is less than kReach rows and columns away.
template <class Sink>
struct NearestInRow {
  template <class T, int C>
  struct For {
    const int32_t* near;
    int64_t height, width;
    Sink sink;

    static constexpr int kLanes = 16, kReach = 96, kCheck = 4, kFew = 4;
    static constexpr int32_t kMiddle = 128, kFar = 1 << 30;  // rows and columns are stored plus kMiddle; kFar: none so near
    static_assert(kReach % kCheck == 0 && kReach < kMiddle && kReach * kReach < (kFar >> 16));

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

    int64_t scratch_bytes() const {
      return (2 * width + 2 * kReach + kLanes) * 4 + 4 * width * static_cast<int64_t>(sizeof(T)) + 64;
    }

    // A whole row: x0 = 0, x1 = width.
    TEXVLM_HD void row(int64_t b, int64_t y, int64_t, int64_t, void* scratch) const {
      T* const stack = static_cast<T*>(scratch);
      int32_t* TEXVLM_RESTRICT key = reinterpret_cast<int32_t*>(stack + 4 * width) + kReach;
      int32_t* TEXVLM_RESTRICT best = key + width + kReach + kLanes;
      const int32_t* TEXVLM_RESTRICT column = near + (b * height + y) * width;
      for (int64_t x = -kReach; x < 0; ++x) key[x] = kFar;
      for (int64_t x = width; x < width + kReach + kLanes; ++x) key[x] = kFar;
      const int32_t here = static_cast<int32_t>(y);
      int32_t columns_with = 0;
      for (int64_t x = 0; x < width; ++x) columns_with += column[x] != kNoRow;
      // Few parabolas make an envelope at once, where a search would have far to go.
      if (columns_with < static_cast<int32_t>(width / kFew)) return envelope(b, y, column, stack);
      for (int64_t x = 0; x < width; ++x) {
        const int32_t down = clamp(column[x] - here, -kReach - 1, kReach + 1);
        key[x] = down >= -kReach && down <= kReach ? ((down * down) << 16) + ((down + kMiddle) << 8) + kMiddle : kFar;
      }
      if (!search(key, best)) return envelope(b, y, column, stack);
      const T first = static_cast<T>(y - kMiddle) * static_cast<T>(width) - kMiddle;
      for (int64_t x = 0; x < width; ++x) {
        const T rows = (best[x] >> 8) & 255, columns = best[x] & 255;
        sink(b, y, x, best[x] >> 16, first + rows * static_cast<T>(width) + static_cast<T>(x) + columns, true);
      }
    }

    // Searches up to kReach columns to both sides; false where that is not enough.
    TEXVLM_HD bool search(const int32_t* TEXVLM_RESTRICT key, int32_t* TEXVLM_RESTRICT best) const {
      for (int64_t x = 0; x < width; x += kLanes) {
        int32_t d[kLanes];
        for (int j = 0; j < kLanes; ++j) d[j] = key[x + j];
        const int64_t stop = minimum<int64_t>(kLanes, width - x);
        for (int k = 1;; k += kCheck) {
          int32_t worst = 0;
          if (stop == kLanes) {
            for (int j = 0; j < kLanes; ++j) worst = maximum(worst, d[j]);
          } else {
            for (int j = 0; j < stop; ++j) worst = maximum(worst, d[j]);
          }
          if ((k * k) << 16 > worst) break;
          if (k >= kReach || k >= width) {
            if (worst >> 16 <= kReach * kReach) break;  // all of a narrow picture has been looked at
            return false;
          }
          for (int step = k; step < k + kCheck; ++step) {
            const int32_t across = (step * step) << 16;
            const int32_t *left = key + x - step, *right = key + x + step;
            for (int j = 0; j < kLanes; ++j) {
              d[j] = minimum(d[j], left[j] + (across - step));
              d[j] = minimum(d[j], right[j] + (across + step));
            }
          }
        }
        for (int j = 0; j < stop; ++j) best[x + j] = d[j];
      }
      return true;
    }

    // The first column where the parabola of column u beats that of column i < u, in the order of (squared distance, index).
    TEXVLM_HD int64_t first_win(int64_t i, int64_t down_i, int64_t row_i, int64_t u, int64_t down_u, int64_t row_u) const {
      const int64_t n = (u - i) * (u + i) + down_u - down_i - (row_u < row_i ? 1 : 0);
      if (n < 0) return 0;
      const int64_t step = 2 * (u - i);
      // 32-bit division is much the faster one
      return 1 + (n >> 31 == 0 ? static_cast<int64_t>(static_cast<uint32_t>(n) / static_cast<uint32_t>(step)) : n / step);
    }

    // The lower envelope of the parabolas of all columns; stack: room for 4 T a column.
    TEXVLM_HD void envelope(int64_t b, int64_t y, const int32_t* at, T* stack) const {
      T *column = stack, *start = stack + width, *down = stack + 2 * width, *row = stack + 3 * width;
      int64_t top = -1;
      for (int64_t u = 0; u < width; ++u) {
        if (at[u] == kNoRow) continue;
        const int64_t below = at[u] - y, square = below * below;
        int64_t from = 0;
        while (top >= 0) {
          from = first_win(column[top], down[top], row[top], u, square, at[u]);
          if (from > start[top]) break;
          --top;
          from = 0;
        }
        if (from >= width) continue;
        ++top;
        column[top] = static_cast<T>(u), start[top] = static_cast<T>(from);
        down[top] = static_cast<T>(square), row[top] = static_cast<T>(at[u]);
      }
      if (top < 0) {
        for (int64_t x = 0; x < width; ++x) sink(b, y, x, farther(), int64_t{0}, false);
        return;
      }
      for (int64_t i = 0; i <= top; ++i) {
        const int64_t stop = i < top ? static_cast<int64_t>(start[i + 1]) : width;
        const T u = column[i], square = down[i], index = row[i] * static_cast<T>(width) + u;
        for (int64_t x = start[i]; x < stop; ++x) {
          const T across = static_cast<T>(x) - u;
          sink(b, y, x, square + across * across, index, true);
        }
      }
    }
  };
};

// Jump flooding with two more rounds (JFA+2). G. Rong and T.-S. Tan, "Jump flooding in GPU with applications to Voronoi diagram
// and distance transform" (2006). A pixel knows of one feature at most, by its index, and takes the best of those that the nine
// pixels around it, `step` apart, know of.
template <class Mask>
struct FloodStart {
  template <class T, int C>
  struct For {
    Mask mask;
    T* nearest;  // [B, H, W], -1: none
    int64_t height, width;
    TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
      nearest[(b * height + y) * width + x] = mask(b, y, x) ? static_cast<T>(y * width + x) : T(-1);
    }
  };
};

TEXVLM_HD int64_t squared_distance(int64_t y, int64_t x, int64_t index, int64_t width) {
  const int64_t dy = index / width - y, dx = index % width - x;
  return dy * dy + dx * dx;
}

template <class T, int C>
struct FloodStep {
  const T* from;
  T* to;
  int64_t height, width, step;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const T* p = from + b * height * width;
    int64_t best = -1, least = 0;
    for (int64_t v = y - step; v <= y + step; v += step)
      for (int64_t u = x - step; u <= x + step; u += step) {
        if (v < 0 || v >= height || u < 0 || u >= width) continue;
        const int64_t i = p[v * width + u];
        if (i < 0 || i == best) continue;
        const int64_t d = squared_distance(y, x, i, width);
        if (best < 0 || d < least || (d == least && i < best)) {
          least = d;
          best = i;
        }
      }
    to[(b * height + y) * width + x] = static_cast<T>(best);
  }
};

template <class T, int C>
struct FloodEnd {
  const T* nearest;
  SquaredSink sink;
  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const int64_t i = nearest[(b * sink.height + y) * sink.width + x];
    sink(b, y, x, i < 0 ? 0 : squared_distance(y, x, i, sink.width), i, i >= 0);
  }
};

}  // namespace texvlm
