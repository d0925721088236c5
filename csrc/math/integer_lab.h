// Integer CIELAB from tables, of pixels and of mips of a picture: every device and every number of threads agrees on each bit.
#pragma once

#include "lab.h"
#include "luma.h"

namespace texvlm {

constexpr int kColourSteps = 1023;  // of a quantised sRGB value
constexpr int kLinearMax = 65535, kCurveSteps = 4095, kCurveOne = 16384;
constexpr int kLabUnits = 16, kLabBias = 2048;  // Lab in 1/16; a and b with an offset, so that nothing is negative

// Item n: the sRGB curve of n / kColourSteps in 1 / kLinearMax, followed by the Lab curve of n / kCurveSteps in 1 / kCurveOne.
template <class T, int C>
struct LabTable {
  T* table;
  static constexpr int64_t kSize = kColourSteps + 1 + kCurveSteps + 1;
  TEXVLM_HD void operator()(int64_t, int64_t n, int64_t, int64_t) const {
    const int64_t m = n - (kColourSteps + 1);
    const double v = m < 0 ? kLinearMax * linear_of(static_cast<double>(n) / kColourSteps)
                           : kCurveOne * lab_curve(static_cast<double>(m) / kCurveSteps);
    table[n] = static_cast<T>(v + 0.5);
  }
};

struct Colour {
  int32_t v[3];
};

// The shares of red and blue in X, Y and Z over those of white, in 1 / 32768; green has the rest.
TEXVLM_HD int32_t white_share(int i, int c) {
  const int32_t red = static_cast<int32_t>(32768 * xyz_weight<double>(i, 0) + 0.5);
  const int32_t blue = static_cast<int32_t>(32768 * xyz_weight<double>(i, 2) + 0.5);
  return c == 0 ? red : c == 2 ? blue : 32768 - red - blue;
}

TEXVLM_HD Colour integer_lab(const int32_t* table, const int32_t (&rgb)[3]) {
  int32_t f[3];
  const int32_t r = table[rgb[0]], g = table[rgb[1]], b = table[rgb[2]];
  for (int i = 0; i < 3; ++i) {
    const int32_t t = (white_share(i, 0) * r + white_share(i, 1) * g + white_share(i, 2) * b + 16384) >> 15;
    f[i] = table[kColourSteps + 1 + (t >> 4)];
  }
  return {{(116 * kLabUnits * f[1]) / kCurveOne - 16 * kLabUnits,
           (500 * kLabUnits * (f[0] - f[1]) + kLabBias * kCurveOne) / kCurveOne,
           (200 * kLabUnits * (f[1] - f[2]) + kLabBias * kCurveOne) / kCurveOne}};
}

template <class S>
TEXVLM_HD int32_t quantised(S v) {
  using A = Acc<S>;
  return static_cast<int32_t>(clamp(pixel<A>(v), A(0), A(1)) * A(kColourSteps) + A(0.5));
}
// The same number: no byte lies halfway between two steps, the nearest are 1 / 170 of a step away.
TEXVLM_HD int32_t quantised(uint8_t v) { return (2 * kColourSteps * v + 255) / 510; }

// The Lab of a pixel of a mip level of the picture: of the rounded mean of its quantised pixels. The last row and column of a
// level hold what is left.
template <class S>
struct PictureLab {
  ImageView<const S> image;
  const int32_t* table;
  int64_t height, width;
  int level;

  TEXVLM_HD int64_t rows() const { return maximum<int64_t>(1, height >> level); }
  TEXVLM_HD int64_t columns() const { return maximum<int64_t>(1, width >> level); }
  TEXVLM_HD Colour operator()(int64_t b, int64_t y, int64_t x) const {
    const int64_t y0 = y << level, y1 = y + 1 == rows() ? height : (y + 1) << level;
    const int64_t x0 = x << level, x1 = x + 1 == columns() ? width : (x + 1) << level, n = (y1 - y0) * (x1 - x0);
    int32_t mean[3];
    for (int c = 0; c < 3; ++c) {
      int64_t sum = 0;
      for (int64_t v = y0; v < y1; ++v)
        for (int64_t u = x0; u < x1; ++u) sum += quantised(image.at(b, c, v, u));
      mean[c] = static_cast<int32_t>(n == 1 ? sum : (2 * sum + n) / (2 * n));
    }
    return integer_lab(table, mean);
  }
};

// The same from planes int32 [B, 3, h, w].
struct PlaneLab {
  const int32_t* planes;
  int64_t height, width;
  TEXVLM_HD Colour operator()(int64_t b, int64_t y, int64_t x) const {
    const int32_t* p = planes + (b * 3 * height + y) * width + x;
    return {{p[0], p[height * width], p[2 * height * width]}};
  }
};

}  // namespace texvlm
