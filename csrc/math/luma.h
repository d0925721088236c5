// Luma, its Sobel gradient and the change between two pictures: the planes [B, H, W] that channels and saliency are made of.
//
// Loops run along x over runs of up to N pixels with their intermediates on the stack, so that nothing but whole planes touches
// memory. Borders are replicated.
#pragma once

#include "texture.h"

namespace texvlm {

constexpr double kLumaRed = 0.299, kLumaGreen = 0.587, kLumaBlue = 0.114;  // ITU-R BT.601
constexpr double kEdgeScale = 4.472135954999579;  // 4 sqrt(1.25): the largest Sobel magnitude of values in [0, 1]

// A pixel as a number: uint8 is divided by 255, what is not finite counts as 0.
template <class A>
TEXVLM_HD A pixel(uint8_t v) {
  return static_cast<A>(v) / A(255);
}
template <class A>
TEXVLM_HD A pixel(float v) {
  return finite(v) ? static_cast<A>(v) : A(0);
}
template <class A>
TEXVLM_HD A pixel(double v) {
  return finite(v) ? static_cast<A>(v) : A(0);
}

// Cut off where the square of what is made from it would not be finite; values in [0, 1] are far from it.
constexpr float kMostLuma = 1e15f;

template <class A>
TEXVLM_HD A luma_of(A r, A g, A b) {
  const A most = A(kMostLuma);
  return A(kLumaRed) * clamp(r, -most, most) + A(kLumaGreen) * clamp(g, -most, most) + A(kLumaBlue) * clamp(b, -most, most);
}

// Luma of n pixels of a row. A picture without data has luma 0.
template <class A, class S>
TEXVLM_HD void luma_run(const ImageView<const S>& image, int64_t b, int64_t y, int64_t x, int n, A* TEXVLM_RESTRICT out) {
  const S *r = &image.at(b, 0, y, x), *g = r + image.stride_c, *p = g + image.stride_c;
  if (image.stride_x == 1) {
    for (int j = 0; j < n; ++j) out[j] = luma_of(pixel<A>(r[j]), pixel<A>(g[j]), pixel<A>(p[j]));
  } else {
    const int64_t s = image.stride_x;
    for (int j = 0; j < n; ++j) out[j] = luma_of(pixel<A>(r[j * s]), pixel<A>(g[j * s]), pixel<A>(p[j * s]));
  }
}

// The channel motion: how much the luma of a place has changed.
template <class A>
TEXVLM_HD A motion_of(A now, A before) {
  return std::abs(now - before);
}

template <class S>
struct LumaPlane {
  template <class T, int C>
  struct For {
    ImageView<const S> image;
    T* out;
    int64_t height, width;

    template <int N>
    TEXVLM_HD void pixels(int64_t b, int64_t y, int64_t x, int n) const {
      luma_run(image, b, y, x, n, out + (b * height + y) * width + x);
    }
  };
};

// The three rows around y, and the three columns around x, borders replicated.
template <class A>
struct Rows3 {
  const A *up, *mid, *down;
};
template <class A>
TEXVLM_HD Rows3<A> rows3(const A* plane, int64_t b, int64_t y, int64_t height, int64_t width) {
  const A* p = plane + b * height * width;
  return {p + (y > 0 ? y - 1 : 0) * width, p + y * width, p + (y + 1 < height ? y + 1 : y) * width};
}

// The Sobel operator (R. Duda and P. Hart, "Pattern Classification and Scene Analysis", 1973), weights 1, 2, 1, unscaled.
// Of n pixels from column x on.
template <int N, class A>
TEXVLM_HD void sobel_run(const A* plane, int64_t b, int64_t y, int64_t x, int n, int64_t height, int64_t width,
                         A* TEXVLM_RESTRICT gx, A* TEXVLM_RESTRICT gy) {
  const Rows3<A> r = rows3(plane, b, y, height, width);
  A smooth[N + 2], slope[N + 2];  // [j] is column x - 1 + j
  const int first = x > 0 ? 0 : 1, last = x + n < width ? n + 2 : n + 1;
  const A *TEXVLM_RESTRICT up = r.up + x - 1, *TEXVLM_RESTRICT mid = r.mid + x - 1, *TEXVLM_RESTRICT down = r.down + x - 1;
  for (int j = first; j < last; ++j) {
    smooth[j] = up[j] + A(2) * mid[j] + down[j];
    slope[j] = down[j] - up[j];
  }
  if (first == 1) smooth[0] = smooth[1], slope[0] = slope[1];
  if (last == n + 1) smooth[n + 1] = smooth[n], slope[n + 1] = slope[n];
  for (int j = 0; j < n; ++j) {
    gx[j] = smooth[j + 2] - smooth[j];
    gy[j] = slope[j] + A(2) * slope[j + 1] + slope[j + 2];
  }
}

// Magnitudes of n pixels from column x on.
template <int N, class A>
TEXVLM_HD void sobel_run(const A* plane, int64_t b, int64_t y, int64_t x, int n, int64_t height, int64_t width,
                         A* TEXVLM_RESTRICT out) {
  A gx[N], gy[N];
  sobel_run<N>(plane, b, y, x, n, height, width, gx, gy);
  for (int j = 0; j < n; ++j) out[j] = std::sqrt(gx[j] * gx[j] + gy[j] * gy[j]);
}

template <class T, int C>
struct EdgePlane {
  const T* luma;
  T* out;
  int64_t height, width;

  template <int N>
  TEXVLM_HD void pixels(int64_t b, int64_t y, int64_t x, int n) const {
    T* TEXVLM_RESTRICT to = out + (b * height + y) * width + x;
    sobel_run<N>(luma, b, y, x, n, height, width, to);
    for (int j = 0; j < n; ++j) to[j] /= T(kEdgeScale);
  }
};

// Adjoint of a window along an axis with replicated borders: the outputs first .. first + count - 1 read source i with these
// weights.
template <class A, int R>
struct AxisAdjoint {
  int64_t first;
  int count;
  A weight[2 * R + 1];
};
template <int R, class A>
TEXVLM_HD AxisAdjoint<A, R> axis_adjoint(int64_t i, int64_t n, const A (&kernel)[2 * R + 1]) {
  AxisAdjoint<A, R> a{};
  a.first = i - R > 0 ? i - R : 0;
  a.count = static_cast<int>((i + R < n - 1 ? i + R : n - 1) - a.first + 1);
  const int64_t p0 = i == 0 ? -R : i, p1 = i == n - 1 ? n - 1 + R : i;  // the padded places that hold source i
  for (int k = 0; k < a.count; ++k)
    for (int64_t p = p0; p <= p1; ++p) {
      const int64_t t = p - (a.first + k);
      if (t >= -R && t <= R) a.weight[k] += kernel[t + R];
    }
  return a;
}

// Adjoint of magnitude / scale, first half: what the gradient (gx, gy) of each pixel receives. 0 where the magnitude is 0 and,
// with `clip`, where it is above `scale` (the value is then cut off at 1).
template <class T, int C>
struct SobelAdjointSeed {
  const T* plane;
  ImageView<const T> grad;  // channel 0 is the incoming gradient
  T *to_x, *to_y;
  int64_t height, width;
  T scale;
  bool clip;

  TEXVLM_HD T factor(T gx, T gy, T g) const {
    const T magnitude = std::sqrt(gx * gx + gy * gy);
    const bool flows = (magnitude > T(0)) & !(clip & (magnitude / scale > T(1)));
    return flows ? g / ((flows ? magnitude : T(1)) * scale) : T(0);
  }
  template <int N>
  TEXVLM_HD void pixels(int64_t b, int64_t y, int64_t x, int n) const {
    T gx[N], gy[N];
    sobel_run<N>(plane, b, y, x, n, height, width, gx, gy);
    const T* TEXVLM_RESTRICT g = &grad.at(b, 0, y, x);
    T *TEXVLM_RESTRICT px = to_x + (b * height + y) * width + x, *TEXVLM_RESTRICT py = to_y + (b * height + y) * width + x;
    for (int j = 0; j < n; ++j) {
      const T f = factor(gx[j], gy[j], g[j * grad.stride_x]);
      px[j] = f * gx[j];
      py[j] = f * gy[j];
    }
  }
};

// Columns of a row whose windows of radius R (and those of the windows around them) stay inside: there, all weights are the
// kernel's.
struct Inside {
  int64_t begin, end;
};
TEXVLM_HD Inside inside(int64_t x0, int64_t x1, int64_t radius, int64_t width) {
  const int64_t begin = maximum(x0, radius), end = minimum(x1, width - radius);
  return {minimum(begin, x1), maximum(minimum(begin, x1), end)};
}

// Second half: what each source pixel receives, added to `out`.
template <class T, int C>
struct SobelAdjoint {
  const T *to_x, *to_y;
  T* out;
  int64_t height, width;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const T smooth[3] = {T(1), T(2), T(1)}, slope[3] = {T(-1), T(0), T(1)};
    const AxisAdjoint<T, 1> sy = axis_adjoint<1>(y, height, smooth), dy = axis_adjoint<1>(y, height, slope);
    const AxisAdjoint<T, 1> sx = axis_adjoint<1>(x, width, smooth), dx = axis_adjoint<1>(x, width, slope);
    T sum = 0;
    for (int i = 0; i < sy.count; ++i)
      for (int j = 0; j < sx.count; ++j) {
        const int64_t at = (b * height + sy.first + i) * width + sx.first + j;
        sum += sy.weight[i] * dx.weight[j] * to_x[at] + dy.weight[i] * sx.weight[j] * to_y[at];
      }
    out[(b * height + y) * width + x] += sum;
  }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    const T smooth[3] = {T(1), T(2), T(1)}, slope[3] = {T(-1), T(0), T(1)};
    const AxisAdjoint<T, 1> sy = axis_adjoint<1>(y, height, smooth), dy = axis_adjoint<1>(y, height, slope);
    const Inside in = inside(x0, x1, 1, width);
    for (int64_t x = x0; x < in.begin; ++x) (*this)(b, y, x, 0, 1);
    for (int i = 0; i < sy.count; ++i) {
      const T *TEXVLM_RESTRICT p = to_x + (b * height + sy.first + i) * width,
                               *TEXVLM_RESTRICT q = to_y + (b * height + sy.first + i) * width;
      T* TEXVLM_RESTRICT to = out + (b * height + y) * width;
      for (int64_t x = in.begin; x < in.end; ++x)
        to[x] += sy.weight[i] * (p[x - 1] - p[x + 1]) + dy.weight[i] * (q[x - 1] + T(2) * q[x] + q[x + 1]);
    }
    for (int64_t x = in.end; x < x1; ++x) (*this)(b, y, x, 0, 1);
  }
};

// Adjoint of |luma - luma of the previous picture|: adds to the gradients of both lumas; 0 where they are equal.
template <class T, int C>
struct MotionAdjoint {
  const T *luma, *previous;
  ImageView<const T> grad;  // channel 0 is the incoming gradient
  T *to_luma, *to_previous;
  int64_t height, width;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const int64_t at = (b * height + y) * width + x;
    const T difference = luma[at] - previous[at], g = grad.at(b, 0, y, x);
    const T signed_g = difference > T(0) ? g : difference < T(0) ? -g : T(0);
    to_luma[at] += signed_g;
    to_previous[at] -= signed_g;
  }
};

// Adjoint of luma and of taking the picture's own values, into the gradient of a picture [B, 3, H, W]: 0 where a pixel is not
// finite.
//   luma [B, H, W] or null; own: gradients of the three colours, at most two of them, or null data.
template <class S>
struct PictureAdjoint {
  template <class T, int C>
  struct For {
    ImageView<const S> image;
    const T* luma;
    ImageView<const T> first, second;
    int64_t first_at[3];  // where red, green, blue are in `first`, or -1
    ImageView<T> out;
    int64_t height, width;

    TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
      const double weight[3] = {kLumaRed, kLumaGreen, kLumaBlue};
      for (int c = 0; c < 3; ++c) {
        T sum = luma ? static_cast<T>(weight[c]) * luma[(b * height + y) * width + x] : T(0);
        if (first.data && first_at[c] >= 0) sum += first.at(b, first_at[c], y, x);
        if (second.data) sum += second.at(b, c, y, x);
        out.at(b, c, y, x) = finite(image.at(b, c, y, x)) ? sum : T(0);
      }
    }
  };
};

}  // namespace texvlm
