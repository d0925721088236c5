// Maxima and sums of planes, in two steps, rows and then planes, so that their order is fixed.
#pragma once

#include "scalar.h"
#include "texture.h"

namespace texvlm {

constexpr double kEdgeThreshold = 2;  // an edge pixel is above this many times the picture's mean edge

template <class A>
struct MapStats {  // of one map
  double sum;
  A max;
  int64_t at;  // the first maximal place, row-major
};

// Item n: row n of planes [B, rows, w]; the product with `other` (or with nothing) is summed.
template <class T, int C>
struct RowStats {
  const T* plane;
  const T* other;  // [B, rows, w] with a batch stride of its own, rows repeating every `other_rows`; may be null
  int64_t other_rows;
  MapStats<T>* out;  // [B, rows]
  int64_t rows, w;

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    const T* p = plane + (b * rows + n) * w;
    const T* q = other ? other + (b * other_rows + n % other_rows) * w : nullptr;
    constexpr int kLanes = 8;
    double sum[kLanes] = {};
    T max = p[0];
    for (int64_t x = 0; x < w; x += kLanes)
      for (int j = 0; j < kLanes && x + j < w; ++j) {
        sum[j] += static_cast<double>(q ? p[x + j] * q[x + j] : p[x + j]);
        max = maximum(max, p[x + j]);
      }
    int64_t at = 0;
    while (at + 1 < w && p[at] != max) ++at;
    out[b * rows + n] = {((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7])), max, at};
  }
};

// Item 0: kEdgeThreshold times the mean of the edges of each picture, from the sums of its rows.
template <class T, int C>
struct EdgeThreshold {
  const MapStats<T>* rows;  // [B, H]
  double* out;
  int64_t height, width;

  TEXVLM_HD void operator()(int64_t b, int64_t, int64_t, int64_t) const {
    double sum = 0;
    for (int64_t y = 0; y < height; ++y) sum += rows[b * height + y].sum;
    out[b] = kEdgeThreshold * (sum / static_cast<double>(height * width));
  }
};

// Item n: map n of each picture, from its h rows.
template <class T, int C>
struct PlaneStats {
  const MapStats<T>* rows;  // [B, maps, h]
  MapStats<T>* out;         // [B, maps]
  int64_t maps, h, w;

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    const MapStats<T>* r = rows + (b * maps + n) * h;
    MapStats<T> s = r[0];
    for (int64_t y = 1; y < h; ++y) {
      s.sum += r[y].sum;
      if (r[y].max > s.max) {
        s.max = r[y].max;
        s.at = y * w + r[y].at;
      }
    }
    out[b * maps + n] = s;
  }
};

}  // namespace texvlm
