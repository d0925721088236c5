// Bottom-up saliency: how rare the centre-surround differences of a place are in its picture.
//
// Mips give colours and oriented edges; levels of the a-trous transform (undecimated mips) of those give centres and surrounds.
// Their differences are whitened over the picture, and the length of what comes out is the saliency: a direction in which the
// places of the picture vary little is promoted, one in which they vary much is not, so the odd one out has the peak, whatever it
// is odd in. Sources: L. Itti, C. Koch and E. Niebur, "A model of saliency-based visual attention for rapid scene analysis"
// (1998), for the features and the differences; A. Garcia-Diaz, X. Fdez-Vidal, X. Pardo and R. Dosil, "Saliency from hierarchical
// adaptation through decorrelation and variance normalization" (2012), for whitening in the place of separate peak promotions.
#pragma once

#include "enlarge.h"
#include "lab.h"
#include "pyramid.h"
#include "taps.h"

namespace texvlm {

constexpr int kFeatures = 7;  // L, a, b, edge strength, the two components of edge orientation, motion
constexpr int kBase = 2;      // the gradient is taken up to this many levels below the places of the map
constexpr int kTopSide = 6;   // the map's larger side has 2^kTopSide places or up to twice that many, or is the picture's
constexpr int kScales = 5;    // steps of the a-trous transform
constexpr int kPairs = 2;     // centre 2 and surround 4, centre 3 and surround 5, counted in steps
constexpr double kWhitenFloor = 1e-6;  // added to variances: differences of 1e-3 and below are noise
constexpr double kTurnFloor = 1e-2;    // gradients below this have no orientation
constexpr double kMapFloor = 1e-4;     // a map whose maximum is not above this is flat: its rounding noise must not be promoted

TEXVLM_HD int centre_of(int pair) { return pair + 2; }
TEXVLM_HD int surround_of(int pair) { return pair + 4; }

// Textures here hold one plane a picture: plane c of picture b of N is picture N b + c of a texture of one channel, so that loops
// run along rows of planes.

// A level of the picture's colours, into level 0 of a texture of 3 B planes: the picture itself, or the level above it, by the
// arithmetic of MipDown.
template <class S>
struct SalienceColours {
  template <class T, int C>
  struct For {
    ImageView<const S> image;
    int64_t height, width;
    bool halve;
    TextureView<T> texture;

    TEXVLM_HD void operator()(int64_t n, int64_t y, int64_t x, int64_t, int64_t) const {
      const int64_t b = n / 3, c = n % 3;
      T* out = texture.texel(n, 0, y, x);
      if (!halve) {
        *out = pixel<T>(image.at(b, c, y, x));
        return;
      }
      const AxisTaps<T> ty = axis_taps<T>(y, height), tx = axis_taps<T>(x, width);
      T sum = 0;
      for (int j = 0; j < tx.count; ++j) {
        T column = 0;
        for (int i = 0; i < ty.count; ++i) column += ty.weight[i] * pixel<T>(image.at(b, c, ty.first + i, tx.first + j));
        sum += tx.weight[j] * column;
      }
      *out = sum;
    }
    TEXVLM_HD void row(int64_t n, int64_t y, int64_t x0, int64_t x1) const {
      if (!halve || width % 2 || image.stride_x != 1) {
        for (int64_t x = x0; x < x1; ++x) (*this)(n, y, x, 0, 1);
        return;
      }
      const AxisTaps<T> ty = axis_taps<T>(y, height);
      const int64_t b = n / 3, c = n % 3;
      for (int64_t x = x0; x < x1; x += kRun) {
        const int count = static_cast<int>(minimum<int64_t>(kRun, x1 - x));
        T column[2 * kRun];
        const S *TEXVLM_RESTRICT top = &image.at(b, c, ty.first, 2 * x),
                                 *TEXVLM_RESTRICT bottom = &image.at(b, c, ty.first + (ty.count > 1 ? 1 : 0), 2 * x);
        // The rows of a picture are often 4096 bytes apart, where the hardware's own prefetching gives up.
        for (int j = 2 * kRun; j < 4 * kRun; j += 64 / static_cast<int>(sizeof(S))) {
          TEXVLM_PREFETCH(top + j);
          TEXVLM_PREFETCH(bottom + j);
        }
        if (ty.count == 2) {
          const T upper = ty.weight[0], lower = ty.weight[1];
          for (int j = 0; j < 2 * count; ++j) column[j] = upper * pixel<T>(top[j]) + lower * pixel<T>(bottom[j]);
        } else {
          for (int j = 0; j < 2 * count; ++j) column[j] = ty.weight[0] * pixel<T>(top[j]);
          for (int i = 1; i < ty.count; ++i) {
            const S* TEXVLM_RESTRICT from = &image.at(b, c, ty.first + i, 2 * x);
            for (int j = 0; j < 2 * count; ++j) column[j] += ty.weight[i] * pixel<T>(from[j]);
          }
        }
        T* TEXVLM_RESTRICT out = texture.texel(n, 0, y, x);
        for (int j = 0; j < count; ++j) out[j] = T(0.5) * column[2 * j] + T(0.5) * column[2 * j + 1];
      }
    }
  };
};

// What a gradient of three colours, Sobel sums (x[c], y[c]), says: strength m = sqrt(xx + yy) of the sums of squares and
// products, and orientation as the double angle (xx - yy, 2 xy) / (m + kTurnFloor). Source: S. Di Zenzo, "A note on the gradient
// of a multi-image" (1986).
constexpr double kSobelSum = 8;  // the gradient is the Sobel sums over this
template <class A>
struct Turn {
  A m, cosine, sine;
};
template <class A>
TEXVLM_HD Turn<A> turn_of(A xx, A yy, A xy) {
  const A m = std::sqrt(xx + yy), over = A(1) / (m + A(kTurnFloor));
  return {m, (xx - yy) * over, A(2) * xy * over};
}

// Level 0 of the texture of features, 7 B planes: red, green, blue, strength and orientation of edges, change of luma.
template <class T, int C>
struct SalienceFeatures {
  TextureView<const T> colours;
  Texels<const T> previous;  // null data if there is none
  int level;
  TextureView<T> out;

  TEXVLM_HD const T* plane(const Texels<const T>& texels, int64_t b, int c) const {
    return texels.texel(colours.levels, 3 * b + c, level, 0, 0);
  }
  TEXVLM_HD int64_t height() const { return colours.levels.height[level]; }
  TEXVLM_HD int64_t width() const { return colours.levels.width[level]; }
  TEXVLM_HD T* feature(int64_t b, int k, int64_t y, int64_t x) const { return out.texel(kFeatures * b + k, 0, y, x); }

  TEXVLM_HD T change(int64_t b, int64_t y, int64_t x) const {
    const int64_t at = y * width() + x;
    return luma_of(plane(colours, b, 0)[at], plane(colours, b, 1)[at], plane(colours, b, 2)[at]) -
           luma_of(plane(previous, b, 0)[at], plane(previous, b, 1)[at], plane(previous, b, 2)[at]);
  }
  template <int N>
  TEXVLM_HD void pixels(int64_t b, int64_t y, int64_t x, int n) const {
    T xx[N], yy[N], xy[N], gx[N], gy[N];
    for (int j = 0; j < n; ++j) xx[j] = yy[j] = xy[j] = T(0);
    for (int c = 0; c < 3; ++c) {
      const T* p = plane(colours, b, c);
      sobel_run<N>(p, 0, y, x, n, height(), width(), gx, gy);
      for (int j = 0; j < n; ++j) {
        const T u = gx[j] * T(1 / kSobelSum), v = gy[j] * T(1 / kSobelSum);
        xx[j] += u * u;
        yy[j] += v * v;
        xy[j] += u * v;
      }
      const T* TEXVLM_RESTRICT from = p + y * width() + x;
      T* TEXVLM_RESTRICT to = feature(b, c, y, x);
      for (int j = 0; j < n; ++j) to[j] = from[j];
    }
    T *TEXVLM_RESTRICT m = feature(b, 3, y, x), *TEXVLM_RESTRICT cosine = feature(b, 4, y, x),
                       *TEXVLM_RESTRICT sine = feature(b, 5, y, x), *TEXVLM_RESTRICT moved = feature(b, 6, y, x);
    for (int j = 0; j < n; ++j) {
      const Turn<T> t = turn_of(xx[j], yy[j], xy[j]);
      m[j] = t.m;
      cosine[j] = t.cosine;
      sine[j] = t.sine;
    }
    for (int j = 0; j < n; ++j) moved[j] = previous.data ? std::abs(change(b, y, x + j)) : T(0);
  }
};

// Adjoint, first half: what the Sobel sums of each colour receive, to_x and to_y [B, 3, h, w], and what the colours of both
// pictures receive directly, [B, 3, h, w]. m has gradient 0 at 0, and so has |change|.
template <class T, int C>
struct SalienceFeaturesAdjoint {
  SalienceFeatures<T, C> forward;  // its `out` is not used
  const T* grad;                   // [B, kFeatures, h, w]
  T *to_x, *to_y, *to_colours, *to_previous;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const int64_t h = forward.height(), w = forward.width(), plane = h * w, at = b * 3 * plane + y * w + x;
    const T* g = grad + b * kFeatures * plane + y * w + x;
    T dx[3], dy[3], xx = 0, yy = 0, xy = 0;
    for (int c = 0; c < 3; ++c) {
      sobel_run<1>(forward.plane(forward.colours, b, c), 0, y, x, 1, h, w, dx + c, dy + c);
      dx[c] *= T(1 / kSobelSum);
      dy[c] *= T(1 / kSobelSum);
      xx += dx[c] * dx[c];
      yy += dy[c] * dy[c];
      xy += dx[c] * dy[c];
    }
    const Turn<T> t = turn_of(xx, yy, xy);
    const T over = T(1) / (t.m + T(kTurnFloor)), g1 = g[4 * plane] * over, g2 = g[5 * plane] * over;
    const T to_m = g[3 * plane] - (g1 * t.cosine + g2 * t.sine), radial = t.m > T(0) ? to_m / t.m : T(0);
    for (int c = 0; c < 3; ++c) {
      to_x[at + c * plane] = T(1 / kSobelSum) * ((radial + T(2) * g1) * dx[c] + T(2) * g2 * dy[c]);
      to_y[at + c * plane] = T(1 / kSobelSum) * ((radial - T(2) * g1) * dy[c] + T(2) * g2 * dx[c]);
    }
    T move = 0;
    if (forward.previous.data) {
      const T v = forward.change(b, y, x);
      move = v > T(0) ? g[6 * plane] : v < T(0) ? -g[6 * plane] : T(0);
    }
    const double weight[3] = {kLumaRed, kLumaGreen, kLumaBlue};
    for (int c = 0; c < 3; ++c) {
      to_colours[at + c * plane] = g[c * plane] + static_cast<T>(weight[c]) * move;
      if (to_previous) to_previous[at + c * plane] = -static_cast<T>(weight[c]) * move;
    }
  }
};

// A level of the features as planes [B, kFeatures, h, w], colours as Lab.
template <class T, int C>
struct SaliencePlanes {
  TextureView<const T> features;
  int level;
  T* out;

  TEXVLM_HD const T* line(int64_t b, int k, int64_t y) const { return features.texel(kFeatures * b + k, level, y, 0); }
  template <int N>
  TEXVLM_HD void pixels(int64_t b, int64_t y, int64_t x, int n) const {
    const int64_t h = features.levels.height[level], w = features.levels.width[level];
    T* const to = out + (b * kFeatures * h + y) * w + x;
    T v[3][N];
    for (int c = 0; c < 3; ++c)
      for (int j = 0; j < n; ++j) v[c][j] = line(b, c, y)[x + j];
    for (int j = 0; j < n; ++j) {
      const Triple<T> lab = lab_of(v[0][j], v[1][j], v[2][j]);
      for (int c = 0; c < 3; ++c) v[c][j] = lab.v[c];
    }
    for (int k = 0; k < kFeatures; ++k) {
      const T* TEXVLM_RESTRICT from = k < 3 ? v[k] : line(b, k, y) + x;
      for (int j = 0; j < n; ++j) to[k * h * w + j] = from[j];
    }
  }
};

// Adjoint: into that level of the gradient of the features.
template <class T, int C>
struct SaliencePlanesAdjoint {
  SaliencePlanes<T, C> forward;  // its `out` is not used
  const T* grad;                 // [B, kFeatures, h, w]
  Texels<T> out;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const int64_t h = forward.features.levels.height[forward.level], w = forward.features.levels.width[forward.level];
    const T* g = grad + b * kFeatures * h * w + y * w + x;
    const Triple<T> rgb{{forward.line(b, 0, y)[x], forward.line(b, 1, y)[x], forward.line(b, 2, y)[x]}};
    const Triple<T> to = lab_adjoint(rgb, Triple<T>{{g[0], g[h * w], g[2 * h * w]}});
    for (int k = 0; k < kFeatures; ++k)
      *out.texel(forward.features.levels, kFeatures * b + k, forward.level, y, x) = k < 3 ? to.v[k] : g[k * h * w];
  }
};

}  // namespace texvlm
