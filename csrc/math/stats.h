// Maxima and sums of planes.
#pragma once

#include "reduce.h"

namespace texvlm {

constexpr double kEdgeThreshold = 2;  // an edge pixel is above this many times the picture's mean edge

// kEdgeThreshold times the mean of the edges of each picture.
template <class T, int C>
struct EdgeThreshold {
  template <int N>
  using Part = Sums<double, 1, N>;
  const T* edge;  // [B, height, width]
  double* out;    // [B]
  int64_t height, width;

  template <class P>
  TEXVLM_HD void add(int64_t b, int64_t y, int64_t x, int n, P& to) const {
    const T* TEXVLM_RESTRICT from = edge + (b * height + y) * width + x;
    for (int j = 0; j < n; ++j) to.of[0][j] += static_cast<double>(from[j]);
  }
  TEXVLM_HD void finish(int64_t b, const Part<1>& total) const {
    out[b] = kEdgeThreshold * (total.of[0][0] / static_cast<double>(height * width));
  }
};

// Of N lanes, and of a map: the sum, the maximum, and the first place that has it, row-major.
template <class T, int N>
struct MapPart {
  double sum[N];
  T max[N];
  int64_t at[N];

  TEXVLM_HD void clear() {
    for (int l = 0; l < N; ++l) sum[l] = 0, max[l] = -static_cast<T>(HUGE_VALF), at[l] = INT64_MAX;
  }
  TEXVLM_HD void meet(int l, double v, T value, int64_t place) {
    sum[l] += v;
    const bool first = (value > max[l]) | ((value == max[l]) & (place < at[l]));
    max[l] = first ? value : max[l];
    at[l] = first ? place : at[l];
  }
  template <int M>
  TEXVLM_HD void join(int to, const MapPart<T, M>& from, int first, int count) {
    for (int l = 0; l < count; ++l) meet(to + l, from.sum[first + l], from.max[first + l], from.at[first + l]);
  }
};
template <class T>
using MapStats = MapPart<T, 1>;

// The statistics of each plane [B, h, w]; the sum is that of its products with `other`, unless that is null.
template <class T, int C>
struct PlaneStats {
  template <int N>
  using Part = MapPart<T, N>;
  const T *plane, *other;
  MapStats<T>* out;  // [B]
  int64_t h, w;

  template <class P>
  TEXVLM_HD void add(int64_t b, int64_t y, int64_t x, int n, P& to) const {
    const int64_t place = y * w + x;
    const T *TEXVLM_RESTRICT p = plane + b * h * w + place, *TEXVLM_RESTRICT q = (other ? other : plane) + b * h * w + place;
    for (int j = 0; j < n; ++j) to.meet(j, static_cast<double>(other ? p[j] * q[j] : p[j]), p[j], place + j);
  }
  TEXVLM_HD void finish(int64_t b, const Part<1>& total) const { out[b] = total; }
};

}  // namespace texvlm
