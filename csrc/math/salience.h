// Bottom-up saliency: how rare the centre-surround differences of a place are in its picture.
//
// Mips give colours and oriented edges; levels of the a-trous transform (undecimated mips) of those give centres and surrounds. Their
// differences are whitened over the picture, and the length of what comes out is the saliency: a direction in which the places of
// the picture vary little is promoted, one in which they vary much is not, so the odd one out has the peak, whatever it is odd in.
// Sources: L. Itti, C. Koch and E. Niebur, "A model of saliency-based visual attention for rapid scene analysis" (1998), for the
// features and the differences; A. Garcia-Diaz, X. Fdez-Vidal, X. Pardo and R. Dosil, "Saliency from hierarchical adaptation through
// decorrelation and variance normalization" (2012), for whitening in the place of separate peak promotions.
#pragma once

#include "enlarge.h"
#include "lab.h"
#include "pyramid.h"

namespace texvlm {

constexpr int kFeatures = 7;           // L, a, b, edge strength, the two components of edge orientation, motion
constexpr int kBase = 2;               // the coarsest the gradient is taken from is this many levels above the places of the map
constexpr int kTopSide = 6;            // the map's larger side has 2^kTopSide places or up to twice that many
constexpr int kScales = 5;             // steps of the a-trous transform
constexpr int kPairs = 2;              // centre 2 and surround 4, centre 3 and surround 5, counted in steps
constexpr double kWhitenFloor = 1e-6;  // added to variances: differences of 1e-3 and below are noise
constexpr double kTurnFloor = 1e-2;    // gradients below this have no orientation
constexpr double kMapFloor = 1e-4;     // a map whose maximum is not above this is flat: its rounding noise must not be promoted

TEXVLM_HD int centre_of(int pair) { return pair + 2; }
TEXVLM_HD int surround_of(int pair) { return pair + 4; }

// ---- colours and edges ----

// A level of the picture's colours, into level 0 of a texture of three channels: the picture itself, or the level above it, by the
// arithmetic of MipDown.
template <class S>
struct SalienceColours {
  template <class T, int C>
  struct For {
    ImageView<const S> image;
    int64_t height, width;
    bool halve;
    TextureView<T> texture;

    TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
      T* out = texture.texel(b, 0, y, x);
      if (!halve) {
        for (int c = 0; c < 3; ++c) out[c] = pixel<T>(image.at(b, c, y, x));
        return;
      }
      const AxisTaps<T> ty = axis_taps<T>(y, height), tx = axis_taps<T>(x, width);
      for (int c = 0; c < 3; ++c) {
        T sum = 0;
        for (int j = 0; j < tx.count; ++j) {
          T column = 0;
          for (int i = 0; i < ty.count; ++i) column += ty.weight[i] * pixel<T>(image.at(b, c, ty.first + i, tx.first + j));
          sum += tx.weight[j] * column;
        }
        out[c] = sum;
      }
    }
    TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
      if (!halve || height % 2 || width % 2 || image.stride_x != 1) {
        for (int64_t x = x0; x < x1; ++x) (*this)(b, y, x, 0, 3);
        return;
      }
      for (int64_t x = x0; x < x1; x += kRun) {
        const int n = static_cast<int>(minimum<int64_t>(kRun, x1 - x));
        T v[3][kRun];
        for (int c = 0; c < 3; ++c) {
          const S *TEXVLM_RESTRICT top = &image.at(b, c, 2 * y, 2 * x),
                                   *TEXVLM_RESTRICT bottom = &image.at(b, c, 2 * y + 1, 2 * x);
          T column[2 * kRun];
          for (int j = 0; j < 2 * n; ++j) column[j] = T(0.5) * pixel<T>(top[j]) + T(0.5) * pixel<T>(bottom[j]);
          for (int j = 0; j < n; ++j) v[c][j] = T(0.5) * column[2 * j] + T(0.5) * column[2 * j + 1];
        }
        T* TEXVLM_RESTRICT out = texture.texel(b, 0, y, x);
        for (int j = 0; j < n; ++j)
          for (int c = 0; c < 3; ++c) out[3 * j + c] = v[c][j];
      }
    }
  };
};

// The gradient of all three colours at a texel, Sobel over 8: as the sums of squares and products, and each colour's own.
// Source: S. Di Zenzo, "A note on the gradient of a multi-image" (1986).
template <class A>
struct ColourGradient {
  A x[3], y[3], xx, yy, xy;
};
template <class A>
TEXVLM_HD ColourGradient<A> colour_gradient(const TextureView<const A>& colours, int level, int64_t b, int64_t y, int64_t x) {
  const int64_t h = colours.levels.height[level], w = colours.levels.width[level];
  const int64_t left = x > 0 ? x - 1 : 0, right = x + 1 < w ? x + 1 : x, up = y > 0 ? y - 1 : 0, down = y + 1 < h ? y + 1 : y;
  const A *a = colours.texel(b, level, up, 0), *m = colours.texel(b, level, y, 0), *d = colours.texel(b, level, down, 0);
  ColourGradient<A> g{};
  for (int c = 0; c < 3; ++c) {
    const A smooth_l = a[3 * left + c] + A(2) * m[3 * left + c] + d[3 * left + c],
            smooth_r = a[3 * right + c] + A(2) * m[3 * right + c] + d[3 * right + c];
    const A slope = (d[3 * left + c] - a[3 * left + c]) + A(2) * (d[3 * x + c] - a[3 * x + c]) +
                    (d[3 * right + c] - a[3 * right + c]);
    g.x[c] = (smooth_r - smooth_l) * A(0.125);
    g.y[c] = slope * A(0.125);
    g.xx += g.x[c] * g.x[c];
    g.yy += g.y[c] * g.y[c];
    g.xy += g.x[c] * g.y[c];
  }
  return g;
}

// Level 0 of the texture of features: red, green, blue, then edge strength m = sqrt(xx + yy), its orientation as the double angle
// (xx - yy, 2 xy) / (m + kTurnFloor), and the change of luma.
template <class T, int C>
struct SalienceFeatures {
  TextureView<const T> colours, previous;  // previous: null data if there is none
  int level;
  TextureView<T> out;

  TEXVLM_HD T change(int64_t b, int64_t y, int64_t x) const {
    const T *p = colours.texel(b, level, y, x), *q = previous.texel(b, level, y, x);
    return luma_of(p[0], p[1], p[2]) - luma_of(q[0], q[1], q[2]);
  }
  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const ColourGradient<T> g = colour_gradient(colours, level, b, y, x);
    const T* from = colours.texel(b, level, y, x);
    T* to = out.texel(b, 0, y, x);
    for (int c = 0; c < 3; ++c) to[c] = from[c];
    const T m = std::sqrt(g.xx + g.yy), over = T(1) / (m + T(kTurnFloor));
    to[3] = m;
    to[4] = (g.xx - g.yy) * over;
    to[5] = T(2) * g.xy * over;
    to[6] = previous.data ? std::abs(change(b, y, x)) : T(0);
  }
};

// Adjoint, first half: what the Sobel sums of each colour receive, to_x and to_y [B, 3, h, w], and what the colours receive directly,
// added to both pictures' gradients [B, 3, h, w]. m has gradient 0 at 0, and so has |change|.
template <class T, int C>
struct SalienceFeaturesAdjoint {
  SalienceFeatures<T, C> forward;  // its `out` is not used
  const T* grad;                   // [B, kFeatures, h, w]
  T *to_x, *to_y, *to_colours, *to_previous;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const int level = forward.level;
    const int64_t h = forward.colours.levels.height[level], w = forward.colours.levels.width[level], plane = h * w;
    const int64_t at = b * 3 * plane + y * w + x;
    const T* g = grad + b * kFeatures * plane + y * w + x;
    const ColourGradient<T> d = colour_gradient(forward.colours, level, b, y, x);
    const T m = std::sqrt(d.xx + d.yy), over = T(1) / (m + T(kTurnFloor)), g1 = g[4 * plane], g2 = g[5 * plane];
    const T to_m = g[3 * plane] - (g1 * (d.xx - d.yy) + g2 * T(2) * d.xy) * over * over;
    const T radial = m > T(0) ? to_m / m : T(0);
    for (int c = 0; c < 3; ++c) {
      to_x[at + c * plane] = T(0.125) * ((radial + T(2) * g1 * over) * d.x[c] + T(2) * g2 * over * d.y[c]);
      to_y[at + c * plane] = T(0.125) * ((radial - T(2) * g1 * over) * d.y[c] + T(2) * g2 * over * d.x[c]);
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

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const int64_t h = features.levels.height[level], w = features.levels.width[level];
    const T* p = features.texel(b, level, y, x);
    const Triple<T> lab = lab_of(p[0], p[1], p[2]);
    for (int c = 0; c < kFeatures; ++c) out[((b * kFeatures + c) * h + y) * w + x] = c < 3 ? lab.v[c] : p[c];
  }
};

// Adjoint: into that level of the gradient of the features.
template <class T, int C>
struct SaliencePlanesAdjoint {
  SaliencePlanes<T, C> forward;  // its `out` is not used
  const T* grad;                 // [B, kFeatures, h, w]
  TextureView<T> out;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const int64_t h = forward.features.levels.height[forward.level], w = forward.features.levels.width[forward.level];
    const T* g = grad + b * kFeatures * h * w + y * w + x;
    const T* p = forward.features.texel(b, forward.level, y, x);
    T* to = out.texel(b, forward.level, y, x);
    const Triple<T> rgb =
        lab_adjoint(Triple<T>{{p[0], p[1], p[2]}}, Triple<T>{{g[0], g[h * w], g[2 * h * w]}});
    for (int c = 0; c < kFeatures; ++c) to[c] = c < 3 ? rgb.v[c] : g[c * h * w];
  }
};

}  // namespace texvlm
