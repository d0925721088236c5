// What is known of labelled regions: their shapes as planes (channels 12 to 14), and their borders that edges support (38).
#pragma once

#include "scalar.h"

namespace texvlm {

// Item n: a block of pixels (rows x columns blocks); adds y, x and 1 of its pixels to its table [tables, B, regions, 3], run by
// run of equal labels. On CUDA all blocks share a table, on the host each has its own.
template <class T, int C>
struct RegionSums {
  const int64_t* labels;
  T* out;
  int64_t batch, height, width, regions, block_h, block_w, columns;
  bool shared;

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t, int64_t) const {
    const int64_t y0 = n / columns * block_h, x0 = n % columns * block_w;
    const int64_t y1 = minimum(height, y0 + block_h), x1 = minimum(width, x0 + block_w);
    T* const table = out + ((shared ? 0 : n * batch) + b) * regions * 3;
    for (int64_t y = y0; y < y1; ++y) {
      const int64_t* row = labels + (b * height + y) * width;
      for (int64_t x = x0; x < x1;) {
        const int64_t k = row[x], from = x;
        while (x < x1 && row[x] == k) ++x;
        if (k < 0 || k >= regions) continue;
        add(table + 3 * k, y * (x - from));
        add(table + 3 * k + 1, (from + x - 1) * (x - from) / 2);
        add(table + 3 * k + 2, x - from);
      }
    }
  }
  TEXVLM_HD static void add(T* to, int64_t v) {
#if defined(__CUDA_ARCH__)
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(v));
#else
    *to += v;
#endif
  }
};

// Item k: centre, 1 / radius and share of the picture of region k from `tables` tables; radius = sqrt(area / pi), that of the
// disc of its area.
template <class T, int C>
struct RegionShape {
  const int64_t* sums;
  T* out;  // [B, regions, 4]
  int64_t tables, batch, regions, pixels;

  TEXVLM_HD void operator()(int64_t b, int64_t k, int64_t, int64_t) const {
    int64_t s[3] = {};
    for (int64_t t = 0; t < tables; ++t)
      for (int i = 0; i < 3; ++i) s[i] += sums[((t * batch + b) * regions + k) * 3 + i];
    const double n = s[2] > 0 ? static_cast<double>(s[2]) : 1;
    T* to = out + (b * regions + k) * 4;
    to[0] = static_cast<T>(static_cast<double>(s[0]) / n);
    to[1] = static_cast<T>(static_cast<double>(s[1]) / n);
    to[2] = static_cast<T>(std::sqrt(3.14159265358979323846 / n));
    to[3] = static_cast<T>(static_cast<double>(s[2]) / static_cast<double>(pixels));
  }
};

// Channels 12 to 14 of each pixel, [B, 3, H, W]: its region, distance from the region's centre over its radius, share.
template <class T, int C>
struct RegionPlanes {
  const int64_t* labels;
  const T* shapes;
  T* out;
  int64_t height, width, regions;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const int64_t area = height * width, at = y * width + x, k = labels[b * area + at];
    T* to = out + 3 * b * area + at;
    const bool known = k >= 0 && k < regions;
    const T* s = shapes + (b * regions + (known ? k : 0)) * 4;
    const T dy = static_cast<T>(y) - s[0], dx = static_cast<T>(x) - s[1];
    to[0] = static_cast<T>(k);
    to[area] = known ? std::sqrt(dy * dy + dx * dx) * s[2] : T(0);
    to[2 * area] = known ? s[3] : T(0);
  }
};

// ---- boundaries ----

// Whether a 4-neighbour of a pixel has another label; label(y, x) of the pixels of a picture.
template <class Label>
TEXVLM_HD bool at_border(int64_t y, int64_t x, int64_t height, int64_t width, const Label& label) {
  const auto own = label(y, x);
  return (y > 0 && label(y - 1, x) != own) || (x > 0 && label(y, x - 1) != own) || (x + 1 < width && label(y, x + 1) != own) ||
         (y + 1 < height && label(y + 1, x) != own);
}

// 1 at the borders whose edge is above the picture's threshold.
template <class A>
struct ObjectBoundary {
  template <class T, int C>
  struct For {
    const int64_t* labels;
    const A* edge;
    const double* threshold;
    T* out;
    int64_t height, width;

    TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
      const int64_t* const plane = labels + b * height * width;
      const int64_t at = (b * height + y) * width + x;
      const bool border = at_border(y, x, height, width, [&](int64_t v, int64_t u) { return plane[v * width + u]; });
      out[at] = static_cast<T>(border && static_cast<double>(edge[at]) > threshold[b]);
    }
  };
};

}  // namespace texvlm
