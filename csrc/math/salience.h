// Bottom-up saliency from the mips of a picture: centre-surround differences of Lab, edge and motion, peaks promoted.
//
// Source: L. Itti, C. Koch and E. Niebur, "A model of saliency-based visual attention for rapid scene analysis" (1998). The
// pyramid holds five channels (red, green, blue by mean; edge, motion by max) from level 1 of the picture on; from level kBase on
// the colours are turned into Lab in place. `feature level s` is level kBase + s of the picture, s = 0..4.
#pragma once

#include "luma.h"
#include "pyramid.h"

namespace texvlm {

constexpr int kFeatures = 5;        // L, a, b, edge, motion
constexpr int kMaps = 4;            // intensity, colour, edge, motion
constexpr int kBase = 2;            // the level whose texels are the places of the map
constexpr int kSalienceLevels = 5;  // levels kBase .. kBase + 4: centres 0, 1 and surrounds 2, 3 above a centre
constexpr double kMapFloor = 1e-4;  // a map whose maximum is not above this is flat: its rounding noise must not be promoted
constexpr double kEdgeThreshold = 2;  // an edge pixel is above this many times the picture's mean edge
constexpr double kSrgbLinearEnd = 0.04045;
constexpr double kLabDelta = 6.0 / 29.0;

// ---- Lab ----

// x^(1/5) and x^(1/3) of a normal positive number by Newton's and Halley's iteration from an estimate on the bits: exact to an
// ulp or two, the same on all machines, and free of calls, so that loops vectorise.
template <class A>
TEXVLM_HD A fifth_root(A x) {
  A y = static_cast<A>(bits_float(float_bits(static_cast<float>(x)) / 5u + 0x32c9af22u));
  for (int i = 0; i < (sizeof(A) == 8 ? 5 : 3); ++i) {
    const A y2 = y * y;
    y += A(0.2) * (x / (y2 * y2) - y);
  }
  return y;
}
template <class A>
TEXVLM_HD A cube_root(A x) {
  A y = static_cast<A>(bits_float(float_bits(static_cast<float>(x)) / 3u + 0x2a555555u));
  for (int i = 0; i < (sizeof(A) == 8 ? 4 : 2); ++i) {
    const A y3 = y * y * y;
    y *= (y3 + A(2) * x) / (A(2) * y3 + x);
  }
  return y;
}

// The sRGB transfer curve (IEC 61966-2-1) and its derivative.
template <class A>
TEXVLM_HD A linear_of(A v) {
  const bool low = v <= A(kSrgbLinearEnd);
  const A t = low ? A(1) : (v + A(0.055)) / A(1.055), root = fifth_root(t);
  return low ? v / A(12.92) : t * t * (root * root);
}
template <class A>
TEXVLM_HD A linear_slope(A v) {
  if (v <= A(kSrgbLinearEnd)) return A(1) / A(12.92);
  const A t = (v + A(0.055)) / A(1.055), root = fifth_root(t);
  return A(2.4 / 1.055) * t * (root * root);
}

// The curve of CIE L*a*b* (CIE 15:2004) and its derivative.
template <class A>
TEXVLM_HD A lab_curve(A t) {
  constexpr A delta = A(kLabDelta);
  const bool root = t > delta * delta * delta;
  const A c = cube_root(root ? t : A(1));
  return root ? c : t / (A(3) * delta * delta) + A(4.0 / 29.0);
}
template <class A>
TEXVLM_HD A lab_curve_slope(A t) {
  constexpr A delta = A(kLabDelta);
  if (!(t > delta * delta * delta)) return A(1) / (A(3) * delta * delta);
  const A c = cube_root(t);
  return A(1) / (A(3) * c * c);
}

// Linear sRGB to XYZ over the XYZ of white (D65): each row of the matrix over its sum, so that grey has a = b = 0 up to rounding.
template <class A>
TEXVLM_HD A xyz_weight(int i, int c) {
  constexpr double m[3][3] = {
      {0.4124564, 0.3575761, 0.1804375}, {0.2126729, 0.7151522, 0.0721750}, {0.0193339, 0.1191920, 0.9503041}};
  return static_cast<A>(m[i][c] / (m[i][0] + m[i][1] + m[i][2]));
}

template <class A>
struct Triple {
  A v[3];
};

// L, a, b over 100 of sRGB values.
template <class A>
TEXVLM_HD Triple<A> lab_of(A r, A g, A b) {
  const A lr = linear_of(r), lg = linear_of(g), lb = linear_of(b);
  const A fx = lab_curve(xyz_weight<A>(0, 0) * lr + xyz_weight<A>(0, 1) * lg + xyz_weight<A>(0, 2) * lb);
  const A fy = lab_curve(xyz_weight<A>(1, 0) * lr + xyz_weight<A>(1, 1) * lg + xyz_weight<A>(1, 2) * lb);
  const A fz = lab_curve(xyz_weight<A>(2, 0) * lr + xyz_weight<A>(2, 1) * lg + xyz_weight<A>(2, 2) * lb);
  return {{(A(116) * fy - A(16)) / A(100), A(5) * (fx - fy), A(2) * (fy - fz)}};
}
template <class A>
TEXVLM_HD Triple<A> lab_adjoint(const Triple<A>& rgb, const Triple<A>& g) {
  const A gf[3] = {A(5) * g.v[1], A(1.16) * g.v[0] - A(5) * g.v[1] + A(2) * g.v[2], -A(2) * g.v[2]};
  A lin[3];
  for (int c = 0; c < 3; ++c) lin[c] = linear_of(rgb.v[c]);
  Triple<A> out{};
  for (int i = 0; i < 3; ++i) {
    const A t = xyz_weight<A>(i, 0) * lin[0] + xyz_weight<A>(i, 1) * lin[1] + xyz_weight<A>(i, 2) * lin[2];
    const A gt = gf[i] * lab_curve_slope(t);
    for (int c = 0; c < 3; ++c) out.v[c] += gt * xyz_weight<A>(i, c);
  }
  for (int c = 0; c < 3; ++c) out.v[c] *= linear_slope(rgb.v[c]);
  return out;
}

// ---- the pyramid ----

// Level 1 of the picture (level 0 of `texture`), straight from the picture and its planes. The same arithmetic as MipDown.
template <class S>
struct SalienceLevel1 {
  template <class T, int C>
  struct For {
    ImageView<const S> image, previous;  // previous: null data if there is none
    const T *luma, *edge;
    int64_t height, width;
    TextureView<T> texture;

    TEXVLM_HD T value(int64_t b, int64_t y, int64_t x, int c) const {
      const int64_t at = (b * height + y) * width + x;
      if (c < 3) return pixel<T>(image.at(b, c, y, x));
      if (c == 3) return edge[at];
      return previous.data ? std::abs(luma[at] - luma_at<T>(previous, b, y, x)) : T(0);
    }

    TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
      const AxisTaps<T> ty = axis_taps<T>(y, height), tx = axis_taps<T>(x, width);
      T* out = texture.texel(b, 0, y, x);
      for (int c = 0; c < kFeatures; ++c) {
        T sum = 0, best = value(b, ty.first, tx.first, c);
        for (int j = 0; j < tx.count; ++j) {
          T column = 0;
          for (int i = 0; i < ty.count; ++i) {
            const T v = value(b, ty.first + i, tx.first + j, c);
            column += ty.weight[i] * v;
            best = maximum(best, v);
          }
          sum += tx.weight[j] * column;
        }
        out[c] = c < 3 ? sum : best;
      }
    }

    TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
      if (height % 2 || width % 2 || image.stride_x != 1) {
        for (int64_t x = x0; x < x1; ++x) (*this)(b, y, x, 0, kFeatures);
        return;
      }
      for (int64_t x = x0; x < x1; x += kRun) {
        const int n = static_cast<int>(minimum<int64_t>(kRun, x1 - x));
        T v[kFeatures][kRun];
        for (int c = 0; c < 3; ++c) {
          const S *TEXVLM_RESTRICT top = &image.at(b, c, 2 * y, 2 * x),
                                   *TEXVLM_RESTRICT bottom = &image.at(b, c, 2 * y + 1, 2 * x);
          T column[2 * kRun];
          for (int j = 0; j < 2 * n; ++j) column[j] = T(0.5) * pixel<T>(top[j]) + T(0.5) * pixel<T>(bottom[j]);
          for (int j = 0; j < n; ++j) v[c][j] = T(0.5) * column[2 * j] + T(0.5) * column[2 * j + 1];
        }
        const int64_t at = (b * height + 2 * y) * width + 2 * x;
        maxima(edge + at, edge + at + width, n, v[3]);
        if (previous.data) {
          T top[2 * kRun], bottom[2 * kRun];
          for (int half = 0; half < 2; ++half) {
            const int from = half * n;
            luma_run(previous, b, 2 * y, 2 * x + from, n, top + from);
            luma_run(previous, b, 2 * y + 1, 2 * x + from, n, bottom + from);
          }
          for (int j = 0; j < 2 * n; ++j) {
            top[j] = std::abs(luma[at + j] - top[j]);
            bottom[j] = std::abs(luma[at + width + j] - bottom[j]);
          }
          maxima(top, bottom, n, v[4]);
        } else {
          for (int j = 0; j < n; ++j) v[4][j] = T(0);
        }
        T* TEXVLM_RESTRICT out = texture.texel(b, 0, y, x);
        for (int j = 0; j < n; ++j)
          for (int c = 0; c < kFeatures; ++c) out[j * kFeatures + c] = v[c][j];
      }
    }

    TEXVLM_HD static void maxima(const T* TEXVLM_RESTRICT top, const T* TEXVLM_RESTRICT bottom, int n, T* TEXVLM_RESTRICT out) {
      T column[2 * kRun];
      for (int j = 0; j < 2 * n; ++j) column[j] = maximum(top[j], bottom[j]);
      for (int j = 0; j < n; ++j) out[j] = maximum(column[2 * j], column[2 * j + 1]);
    }
  };
};

// The five planes of level 0, out [B, kFeatures, H, W], for the way back.
template <class S>
struct SaliencePlanes {
  template <class T, int C>
  struct For {
    typename SalienceLevel1<S>::template For<T, C> from;
    T* out;

    TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
      for (int c = 0; c < kFeatures; ++c) out[((b * kFeatures + c) * from.height + y) * from.width + x] = from.value(b, y, x, c);
    }
  };
};

// sRGB to Lab in `level` of the texture, in place.
template <class T, int C>
struct LabTexels {
  TextureView<T> texture;
  int level;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    T* p = texture.texel(b, level, y, x);
    const Triple<T> lab = lab_of(p[0], p[1], p[2]);
    for (int c = 0; c < 3; ++c) p[c] = lab.v[c];
  }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    for (int64_t x = x0; x < x1; x += kRun) {
      const int n = static_cast<int>(minimum<int64_t>(kRun, x1 - x));
      T v[3][kRun];
      T* TEXVLM_RESTRICT p = texture.texel(b, level, y, x);
      for (int j = 0; j < n; ++j)
        for (int c = 0; c < 3; ++c) v[c][j] = p[j * kFeatures + c];
      for (int j = 0; j < n; ++j) {
        const Triple<T> lab = lab_of(v[0][j], v[1][j], v[2][j]);
        for (int c = 0; c < 3; ++c) v[c][j] = lab.v[c];
      }
      for (int j = 0; j < n; ++j)
        for (int c = 0; c < 3; ++c) p[j * kFeatures + c] = v[c][j];
    }
  }
};

// ---- enlarging a level ----

// The two texels of an axis of `coarse` texels around the centre of texel i of `fine`, clamped, and their weights.
template <class A>
struct AxisEnlarge {
  int64_t i0, i1;
  A w0, w1;
};
template <class A>
TEXVLM_HD AxisEnlarge<A> axis_enlarge(int64_t i, int64_t fine, int64_t coarse) {
  const double ratio = static_cast<double>(coarse) / static_cast<double>(fine);
  const double at = (static_cast<double>(static_cast<int32_t>(i)) + 0.5) * ratio - 0.5, base = floor(at);
  const int64_t i0 = static_cast<int32_t>(base);
  const A w = static_cast<A>(at - base);
  return {i0 < 0 ? 0 : i0, i0 + 1 < coarse ? i0 + 1 : coarse - 1, A(1) - w, w};
}

// A plane [B, h, w] read bilinearly at the pixels of a height x width picture.
template <class A>
struct Enlarged {
  const A* plane;
  int64_t h, w, height, width;

  TEXVLM_HD A at(int64_t b, int64_t y, int64_t x) const {
    const AxisEnlarge<A> ty = axis_enlarge<A>(y, height, h), tx = axis_enlarge<A>(x, width, w);
    const A *p = plane + (b * h + ty.i0) * w, *q = plane + (b * h + ty.i1) * w;
    const A left = ty.w0 * p[tx.i0] + ty.w1 * q[tx.i0], right = ty.w0 * p[tx.i1] + ty.w1 * q[tx.i1];
    return tx.w0 * left + tx.w1 * right;
  }

  TEXVLM_HD void run(int64_t b, int64_t y, int64_t x, int n, A* TEXVLM_RESTRICT out) const {
    const AxisEnlarge<A> ty = axis_enlarge<A>(y, height, h);
    const A *TEXVLM_RESTRICT p = plane + (b * h + ty.i0) * w, *TEXVLM_RESTRICT q = plane + (b * h + ty.i1) * w;
    const double ratio = static_cast<double>(w) / static_cast<double>(width);
    const int first = static_cast<int>(x);
    const int last = static_cast<int>(w) - 1;
    int i0[kRun];
    A weight[kRun];
    for (int j = 0; j < n; ++j) {
      const double at = (static_cast<double>(first + j) + 0.5) * ratio - 0.5, base = floor(at);
      i0[j] = static_cast<int>(base);
      weight[j] = static_cast<A>(at - base);
    }
    for (int j = 0; j < n; ++j) {
      const int l = maximum(i0[j], 0), r = minimum(i0[j] + 1, last);
      const A left = ty.w0 * p[l] + ty.w1 * q[l], right = ty.w0 * p[r] + ty.w1 * q[r];
      out[j] = (A(1) - weight[j]) * left + weight[j] * right;
    }
  }
};

template <class T, int C>
struct EnlargePlane {
  Enlarged<Acc<T>> from;
  T* out;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    out[(b * from.height + y) * from.width + x] = static_cast<T>(from.at(b, y, x));
  }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    for (int64_t x = x0; x < x1; x += kRun) {
      const int n = static_cast<int>(minimum<int64_t>(kRun, x1 - x));
      Acc<T> v[kRun];
      from.run(b, y, x, n, v);
      T* TEXVLM_RESTRICT to = out + (b * from.height + y) * from.width + x;
      for (int j = 0; j < n; ++j) to[j] = static_cast<T>(v[j]);
    }
  }
};

// Adjoint of enlarging, in gather form: the gradients [B, fine_h, fine_w, channels] of the pixels that read texel (y, x), summed.
template <class A>
struct EnlargeAdjoint {
  const A* grad;
  int64_t channels, fine_h, fine_w, h, w;

  TEXVLM_HD static int64_t first(int64_t i, int64_t fine, int64_t coarse) {  // no pixel before it reads texel i
    return i <= 1 ? 0 : (2 * i - 1) * fine / (2 * coarse) - 1;
  }
  TEXVLM_HD static int64_t last(int64_t i, int64_t fine, int64_t coarse) {
    return i >= coarse - 2 ? fine - 1 : minimum(fine - 1, (2 * i + 3) * fine / (2 * coarse) + 1);
  }
  TEXVLM_HD static A weight(int64_t pixel, int64_t i, int64_t fine, int64_t coarse) {
    const AxisEnlarge<A> t = axis_enlarge<A>(pixel, fine, coarse);
    return (t.i0 == i ? t.w0 : A(0)) + (t.i1 == i ? t.w1 : A(0));
  }
  TEXVLM_HD void at(int64_t b, int64_t y, int64_t x, A* out) const {
    constexpr int kColumns = 32;
    const int64_t begin = maximum<int64_t>(0, first(x, fine_w, w)), end = last(x, fine_w, w) + 1;
    for (int64_t x0 = begin; x0 < end; x0 += kColumns) {
      const int n = static_cast<int>(minimum<int64_t>(kColumns, end - x0));
      A wx[kColumns];
      for (int j = 0; j < n; ++j) wx[j] = weight(x0 + j, x, fine_w, w);
      for (int64_t i = maximum<int64_t>(0, first(y, fine_h, h)); i <= last(y, fine_h, h); ++i) {
        const A wy = weight(i, y, fine_h, h);
        if (wy == A(0)) continue;
        const A* g = grad + ((b * fine_h + i) * fine_w + x0) * channels;
        for (int j = 0; j < n; ++j)
          for (int64_t c = 0; c < channels; ++c) out[c] += wy * wx[j] * g[j * channels + c];
      }
    }
  }
};

// ---- centre-surround maps ----

// The pairs of feature levels (centre, surround), the last level standing in beyond the coarsest.
TEXVLM_HD int centre_of(int pair) { return pair / 2; }
TEXVLM_HD int surround_of(int pair) { return pair / 2 + 2 + pair % 2; }

template <class T, int C>
struct SalienceMaps {
  TextureView<const T> texture;  // feature level s is its level kBase - 1 + s
  int slots;                     // feature levels there are, at most kSalienceLevels
  T* maps;                       // [B, kMaps, h, w]

  TEXVLM_HD int slot(int s) const { return s < slots - 1 ? s : slots - 1; }
  TEXVLM_HD int level(int s) const { return kBase - 1 + s; }

  // All features of feature level s at texel (y, x) of the base level.
  TEXVLM_HD void features(int64_t b, int64_t y, int64_t x, int s, T* out) const {
    const Levels& levels = texture.levels;
    const int at = level(s), base = level(0);
    if (s == 0) {
      const T* p = texture.texel(b, base, y, x);
      for (int c = 0; c < kFeatures; ++c) out[c] = p[c];
      return;
    }
    const AxisEnlarge<T> ty = axis_enlarge<T>(y, levels.height[base], levels.height[at]),
                         tx = axis_enlarge<T>(x, levels.width[base], levels.width[at]);
    const T *p0 = texture.texel(b, at, ty.i0, tx.i0), *p1 = texture.texel(b, at, ty.i0, tx.i1);
    const T *q0 = texture.texel(b, at, ty.i1, tx.i0), *q1 = texture.texel(b, at, ty.i1, tx.i1);
    for (int c = 0; c < kFeatures; ++c) {
      const T left = ty.w0 * p0[c] + ty.w1 * q0[c], right = ty.w0 * p1[c] + ty.w1 * q1[c];
      out[c] = tx.w0 * left + tx.w1 * right;
    }
  }

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    T f[kSalienceLevels][kFeatures], sum[kMaps] = {};
    for (int s = 0; s < slots; ++s) features(b, y, x, s, f[s]);
    for (int pair = 0; pair < 4; ++pair) {
      const T *c = f[slot(centre_of(pair))], *s = f[slot(surround_of(pair))];
      const T da = c[1] - s[1], db = c[2] - s[2];
      sum[0] += std::abs(c[0] - s[0]);
      sum[1] += std::sqrt(da * da + db * db);
      sum[2] += std::abs(c[3] - s[3]);
      sum[3] += std::abs(c[4] - s[4]);
    }
    const int64_t h = texture.levels.height[level(0)], w = texture.levels.width[level(0)];
    for (int k = 0; k < kMaps; ++k) maps[((b * kMaps + k) * h + y) * w + x] = sum[k] / T(4);
  }
};

// Adjoint: grad [B, kMaps, h, w] -> what each feature level, enlarged, receives, out [slots, B, h, w, kFeatures].
template <class T, int C>
struct SalienceMapsAdjoint {
  SalienceMaps<T, C> forward;
  const T* grad;
  T* out;
  int64_t batch;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const int slots = forward.slots;
    const int64_t h = forward.texture.levels.height[forward.level(0)], w = forward.texture.levels.width[forward.level(0)];
    T f[kSalienceLevels][kFeatures], g[kSalienceLevels][kFeatures] = {}, in[kMaps];
    for (int s = 0; s < slots; ++s) forward.features(b, y, x, s, f[s]);
    for (int k = 0; k < kMaps; ++k) in[k] = grad[((b * kMaps + k) * h + y) * w + x] / T(4);
    for (int pair = 0; pair < 4; ++pair) {
      const int c = forward.slot(centre_of(pair)), s = forward.slot(surround_of(pair));
      T d[kFeatures];
      for (int i = 0; i < kFeatures; ++i) d[i] = f[c][i] - f[s][i];
      const T norm = std::sqrt(d[1] * d[1] + d[2] * d[2]), over = norm > T(0) ? in[1] / norm : T(0);
      const auto sign = [](T v) { return v > T(0) ? T(1) : v < T(0) ? T(-1) : T(0); };
      const T to[kFeatures] = {in[0] * sign(d[0]), over * d[1], over * d[2], in[2] * sign(d[3]), in[3] * sign(d[4])};
      for (int i = 0; i < kFeatures; ++i) {
        g[c][i] += to[i];
        g[s][i] -= to[i];
      }
    }
    for (int s = 0; s < slots; ++s)
      for (int i = 0; i < kFeatures; ++i) out[(((s * batch + b) * h + y) * w + x) * kFeatures + i] = g[s][i];
  }
};

// Adjoint of enlarging and of Lab: the gradient of the pyramid [B, T, kFeatures] of the whole picture at one level.
template <class T, int C>
struct SalienceTexelAdjoint {
  EnlargeAdjoint<T> enlarge;
  TextureView<const T> rgb;  // the pyramid before Lab, from level 0 of the picture on
  TextureView<T> out;
  int level;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    T g[kFeatures] = {};
    if (enlarge.h == enlarge.fine_h && enlarge.w == enlarge.fine_w) {
      for (int i = 0; i < kFeatures; ++i) g[i] = enlarge.grad[((b * enlarge.h + y) * enlarge.w + x) * kFeatures + i];
    } else {
      enlarge.at(b, y, x, g);
    }
    const T* p = rgb.texel(b, level, y, x);
    const Triple<T> to = lab_adjoint(Triple<T>{{p[0], p[1], p[2]}}, Triple<T>{{g[0], g[1], g[2]}});
    T* q = out.texel(b, level, y, x);
    for (int c = 0; c < 3; ++c) q[c] = to.v[c];
    q[3] = g[3];
    q[4] = g[4];
  }
};

// ---- maxima, means, and their adjoints, in two steps so that the order of the sums is fixed ----

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

// The sum of the promoted maps: map / max * (1 - mean)^2, 0 for a flat map.
template <class T, int C>
struct SalienceSum {
  const T* maps;             // [B, kMaps, h, w]
  const MapStats<T>* stats;  // [B, kMaps]
  T* out;                    // [B, h, w]
  int64_t h, w;

  TEXVLM_HD T scale(int64_t b, int k) const {  // 1 / max
    const T max = stats[b * kMaps + k].max;
    return max > T(kMapFloor) ? T(1) / max : T(0);
  }
  TEXVLM_HD T mean(int64_t b, int k) const {
    const MapStats<T>& s = stats[b * kMaps + k];
    return s.max > T(kMapFloor) ? static_cast<T>(s.sum / (static_cast<double>(s.max) * static_cast<double>(h * w))) : T(0);
  }
  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const { row(b, y, x, x + 1); }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    T* TEXVLM_RESTRICT to = out + (b * h + y) * w;
    for (int64_t x = x0; x < x1; ++x) to[x] = T(0);
    for (int k = 0; k < kMaps; ++k) {
      const T m = mean(b, k), factor = (T(1) - m) * (T(1) - m) * scale(b, k);
      const T* TEXVLM_RESTRICT p = maps + ((b * kMaps + k) * h + y) * w;
      for (int64_t x = x0; x < x1; ++x) to[x] += p[x] * factor;
    }
  }
};

// Divides by the maximum, in place; 0 where flat.
template <class T, int C>
struct OverMaximum {
  T* plane;  // [B, h, w]
  const MapStats<T>* stats;
  int64_t h, w;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const { row(b, y, x, x + 1); }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    const T max = stats[b].max;
    T* p = plane + (b * h + y) * w;
    for (int64_t x = x0; x < x1; ++x) p[x] = max > T(kMapFloor) ? p[x] / max : T(0);
  }
};

// Adjoint of OverMaximum: grad of the quotient to grad of `plane`. dot[b].sum = <grad, quotient>.
template <class T, int C>
struct OverMaximumAdjoint {
  T* grad;  // in place
  const MapStats<T>*stats, *dot;
  int64_t h, w;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const MapStats<T> s = stats[b];
    T* g = grad + (b * h + y) * w + x;
    if (!(s.max > T(kMapFloor))) {
      *g = T(0);
      return;
    }
    const T at_top = y * w + x == s.at ? static_cast<T>(dot[b].sum / static_cast<double>(s.max)) : T(0);
    *g = *g / s.max - at_top;
  }
};

// Adjoint of SalienceSum: grad [B, h, w] to out [B, kMaps, h, w]. dots[b, k].sum = <grad, map k>.
template <class T, int C>
struct SalienceSumAdjoint {
  SalienceSum<T, C> forward;  // its `out` is not used
  const T* grad;
  const MapStats<T>* dots;
  T* out;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const int64_t h = forward.h, w = forward.w;
    const T g = grad[(b * h + y) * w + x];
    for (int k = 0; k < kMaps; ++k) {
      const MapStats<T>& s = forward.stats[b * kMaps + k];
      const T scale = forward.scale(b, k), mean = forward.mean(b, k), rest = T(1) - mean;
      // p = map / max; d(sum p_i rest^2) = rest^2 dp_i - 2 rest <grad, p> dmean
      const T dot = static_cast<T>(dots[b * kMaps + k].sum) * scale;  // <grad, p>
      const T through_mean = T(-2) * rest * dot / static_cast<T>(h * w);
      const T to_p = rest * rest * g + through_mean;
      // <to_p, p>, for the maximum
      const T along = rest * rest * dot + through_mean * mean * static_cast<T>(h * w);
      out[((b * kMaps + k) * h + y) * w + x] = to_p * scale - (y * w + x == s.at ? along * scale : T(0));
    }
  }
};

// Adjoint of enlarging a plane.
template <class T, int C>
struct EnlargePlaneAdjoint {
  EnlargeAdjoint<T> enlarge;
  T* out;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    T sum = 0;
    enlarge.at(b, y, x, &sum);
    out[(b * enlarge.h + y) * enlarge.w + x] = sum;
  }
};

}  // namespace texvlm
