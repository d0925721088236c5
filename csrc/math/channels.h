// The channels that are a formula of the picture, and level 0 of the texture that holds them.
//
// What reads a neighbourhood goes through planes [B, H, W] (luma, edge, contrast-normalised luma, distance to an edge) or a small
// map (saliency); then each texel is written once, with all the channels that are asked for. Adjoints are in gather form: no
// atomics.
#pragma once

#include "contrast.h"
#include "given.h"
#include "rarity.h"
#include "regions.h"

namespace texvlm {

constexpr int kChannels = 40, kMaxChannels = 64;

enum Channel : int8_t {
  kRed = 0,
  kGreen = 1,
  kBlue = 2,
  kEdge = 3,
  kContrastEdge = 4,
  kHighPass = 5,
  kLowPass = 6,
  kMotion = 7,
  kSaliency = 8,
  kX = 9,
  kY = 10,
  kEccentricity = 11,
  kCluster = 12,
  kFixationHistory = 17,
  kEdgeDistance = 34,
  kGazeHistory = 37,
  kBoundary = 38,
  kText = 39,
};

struct ChannelList {
  int count;
  int8_t id[kMaxChannels];
};

// ---- low and high pass ----

constexpr double kOuter = 1.0 / 16, kInner = 4.0 / 16, kMiddle = 6.0 / 16;  // binomial weights

template <class A>
struct Rows5 {
  const A* row[5];
};
template <class A>
TEXVLM_HD Rows5<A> rows5(const A* plane, int64_t b, int64_t y, int64_t height, int64_t width) {
  Rows5<A> r;
  for (int i = 0; i < 5; ++i) r.row[i] = plane + (b * height + clamp<int64_t>(y + i - 2, 0, height - 1)) * width;
  return r;
}
template <class A>
TEXVLM_HD A binomial(A a, A b, A c, A d, A e) {
  return A(kOuter) * a + A(kInner) * b + A(kMiddle) * c + A(kInner) * d + A(kOuter) * e;
}
template <int N, class A>
TEXVLM_HD void low_pass_run(const A* plane, int64_t b, int64_t y, int64_t x, int n, int64_t height, int64_t width,
                            A* TEXVLM_RESTRICT out) {
  const Rows5<A> r = rows5(plane, b, y, height, width);
  A column[N + 4];  // [j] is column x - 2 + j
  const int first = static_cast<int>(maximum<int64_t>(0, 2 - x)), last = static_cast<int>(minimum<int64_t>(n + 4, width - x + 2));
  const A *TEXVLM_RESTRICT p = r.row[0] + x - 2, *TEXVLM_RESTRICT q = r.row[1] + x - 2, *TEXVLM_RESTRICT s = r.row[2] + x - 2;
  const A *TEXVLM_RESTRICT t = r.row[3] + x - 2, *TEXVLM_RESTRICT u = r.row[4] + x - 2;
  for (int j = first; j < last; ++j) column[j] = binomial(p[j], q[j], s[j], t[j], u[j]);
  for (int j = 0; j < first; ++j) column[j] = column[first];
  for (int j = last; j < n + 4; ++j) column[j] = column[last - 1];
  for (int j = 0; j < n; ++j) out[j] = binomial(column[j], column[j + 1], column[j + 2], column[j + 3], column[j + 4]);
}

// Adjoint of low pass and of luma - low pass, added to the gradient of luma.
template <class T, int C>
struct PassAdjoint {
  ImageView<const T> high, low;  // channel 0; data is null where there is no gradient
  T* to_luma;
  int64_t height, width;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const T kernel[5] = {T(kOuter), T(kInner), T(kMiddle), T(kInner), T(kOuter)};
    const AxisAdjoint<T, 2> ay = axis_adjoint<2>(y, height, kernel), ax = axis_adjoint<2>(x, width, kernel);
    T sum = high.data ? high.at(b, 0, y, x) : T(0);
    for (int i = 0; i < ay.count; ++i)
      for (int j = 0; j < ax.count; ++j) {
        const int64_t v = ay.first + i, u = ax.first + j;
        const T g = (low.data ? low.at(b, 0, v, u) : T(0)) - (high.data ? high.at(b, 0, v, u) : T(0));
        sum += ay.weight[i] * ax.weight[j] * g;
      }
    to_luma[(b * height + y) * width + x] += sum;
  }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    const T kernel[5] = {T(kOuter), T(kInner), T(kMiddle), T(kInner), T(kOuter)};
    const AxisAdjoint<T, 2> ay = axis_adjoint<2>(y, height, kernel);
    const Inside in = inside(x0, x1, 2, width);
    for (int64_t x = x0; x < in.begin; ++x) (*this)(b, y, x, 0, 1);
    for (int64_t x = in.begin; x < in.end; x += kRun) {
      const int n = static_cast<int>(minimum<int64_t>(kRun, in.end - x));
      T column[kRun + 4];  // [j] is column x - 2 + j
      for (int j = 0; j < n + 4; ++j) column[j] = T(0);
      for (int i = 0; i < ay.count; ++i) {
        if (low.data) add(low, b, ay.first + i, x - 2, n + 4, ay.weight[i], column);
        if (high.data) add(high, b, ay.first + i, x - 2, n + 4, -ay.weight[i], column);
      }
      T* TEXVLM_RESTRICT to = to_luma + (b * height + y) * width + x;
      for (int j = 0; j < n; ++j) to[j] += binomial(column[j], column[j + 1], column[j + 2], column[j + 3], column[j + 4]);
      if (high.data) add(high, b, y, x, n, T(1), to);
    }
    for (int64_t x = in.end; x < x1; ++x) (*this)(b, y, x, 0, 1);
  }
  TEXVLM_HD static void add(const ImageView<const T>& grad, int64_t b, int64_t y, int64_t x, int n, T weight,
                            T* TEXVLM_RESTRICT to) {
    const T* TEXVLM_RESTRICT g = &grad.at(b, 0, y, x);
    if (grad.stride_x == 1) {
      for (int j = 0; j < n; ++j) to[j] += weight * g[j];
    } else {
      for (int j = 0; j < n; ++j) to[j] += weight * g[j * grad.stride_x];
    }
  }
};

// ---- eccentricity ----

// A fixation in pixels, and the distance of the farthest corner (of equally far ones the right and the lower one). One that is
// not finite gives 0 and has gradient 0.
template <class A>
struct Fixation {
  A x, y, far_x, far_y, far, sign_x, sign_y;
  bool is_finite;
};
constexpr int kFarthest = 65536;  // a fixation is taken to be within so many pictures: its distances then have finite squares
template <class A>
TEXVLM_HD Fixation<A> fixation_of(const A* uv, int64_t b, int64_t height, int64_t width) {
  const A u = uv ? uv[2 * b] : A(0.5), v = uv ? uv[2 * b + 1] : A(0.5), w = static_cast<A>(width), h = static_cast<A>(height);
  Fixation<A> f;
  f.is_finite = finite(u) && finite(v);
  f.x = (f.is_finite ? clamp(u, -A(kFarthest), A(kFarthest)) : A(0.5)) * w;
  f.y = (f.is_finite ? clamp(v, -A(kFarthest), A(kFarthest)) : A(0.5)) * h;
  f.sign_x = w - f.x >= f.x ? A(-1) : A(1);
  f.sign_y = h - f.y >= f.y ? A(-1) : A(1);
  f.far_x = f.sign_x < A(0) ? w - f.x : f.x;
  f.far_y = f.sign_y < A(0) ? h - f.y : f.y;
  f.far = std::sqrt(f.far_x * f.far_x + f.far_y * f.far_y);
  return f;
}
template <class A>
TEXVLM_HD A eccentricity_at(const Fixation<A>& f, int64_t y, int64_t x) {
  const A dx = static_cast<A>(x) + A(0.5) - f.x, dy = static_cast<A>(y) + A(0.5) - f.y;
  return f.is_finite ? std::sqrt(dx * dx + dy * dy) / f.far : A(0);
}

// Adjoint: the gradient of the fixation, out [B, 2].
template <class T, int C>
struct FixationAdjoint {
  template <int N>
  using Part = Sums<double, 2, N>;
  ImageView<const T> grad;  // channel 0
  const T* uv;
  T* out;
  int64_t height, width;

  template <class P>
  TEXVLM_HD void add(int64_t b, int64_t y, int64_t x, int n, P& to) const {
    const Fixation<T> f = fixation_of(uv, b, height, width);
    if (!f.is_finite) return;
    for (int j = 0; j < n; ++j) {
      const T dx = static_cast<T>(x + j) + T(0.5) - f.x, dy = static_cast<T>(y) + T(0.5) - f.y;
      const T d = std::sqrt(dx * dx + dy * dy), g = grad.at(b, 0, y, x + j), toward = d > T(0) ? g / (d * f.far) : T(0);
      const T shrink = g * d / (f.far * f.far * f.far);
      to.of[0][j] -= static_cast<double>(toward * dx + shrink * f.far_x * f.sign_x);
      to.of[1][j] -= static_cast<double>(toward * dy + shrink * f.far_y * f.sign_y);
    }
  }
  TEXVLM_HD void finish(int64_t b, const Part<1>& total) const {
    out[b * 2] = static_cast<T>(total.of[0][0] * static_cast<double>(width));
    out[b * 2 + 1] = static_cast<T>(total.of[1][0] * static_cast<double>(height));
  }
};

// ---- level 0 ----

template <class A>
struct ChannelPlanes {
  const A *luma, *edge, *contrast, *distance;  // null where no channel needs it
  Enlarged<A> salience;
  const A* fixation;  // [B, 2] uv, or null
  Given<A> given[kChannels];
  const double* threshold = nullptr;  // [B], of edges, where a channel asks
};

template <class S>
struct ChannelTexels {
  template <class T, int C>
  struct For {
    using A = Acc<S>;
    ImageView<const S> image, previous;
    ChannelPlanes<A> planes;
    ChannelList list;
    TextureView<T> texture;
    static constexpr bool kOwnWays = true;

    TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
      T* out = texture.texel(b, 0, y, x);
      for (int64_t c = c0; c < c1; ++c) {
        A value;
        EnlargedRun<A> run;
        fill<1>(list.id[c], b, y, x, 1, nullptr, run, &value);
        out[c] = static_cast<T>(value);
      }
    }

    // Channel `id` of n pixels from column x on. low: their low pass, or null to compute it.
    template <int N>
    TEXVLM_HD void fill(int id, int64_t b, int64_t y, int64_t x, int n, const A* low, EnlargedRun<A>& run,
                        A* TEXVLM_RESTRICT out) const {
      const int64_t height = texture.levels.height[0], width = texture.levels.width[0], at = (b * height + y) * width + x;
      const auto copy = [&](const A* TEXVLM_RESTRICT from) {
        for (int j = 0; j < n; ++j) out[j] = from[j];
      };
      if (planes.given[id].plane) return planes.given[id].run(b, y, x, n, height, width, run, out);
      switch (id) {
        case kRed:
        case kGreen:
        case kBlue: {
          const S* TEXVLM_RESTRICT p = &image.at(b, id, y, x);
          if (image.stride_x == 1) {
            for (int j = 0; j < n; ++j) out[j] = pixel<A>(p[j]);
          } else {
            for (int j = 0; j < n; ++j) out[j] = pixel<A>(p[j * image.stride_x]);
          }
          return;
        }
        case kEdge:
          return copy(planes.edge + at);
        case kContrastEdge:
          sobel_run<N>(planes.contrast, b, y, x, n, height, width, out);
          for (int j = 0; j < n; ++j) out[j] = minimum(out[j] / A(kContrastScale), A(1));
          return;
        case kHighPass:
        case kLowPass:
          low ? copy(low) : low_pass_run<N>(planes.luma, b, y, x, n, height, width, out);
          for (int j = 0; j < n && id == kHighPass; ++j) out[j] = planes.luma[at + j] - out[j];
          return;
        case kMotion:
          if (previous.data) {
            luma_run(previous, b, y, x, n, out);
            for (int j = 0; j < n; ++j) out[j] = motion_of(planes.luma[at + j], out[j]);
            return;
          }
          break;
        case kSaliency:
          return planes.salience.run(b, y, x, n, out);
        case kX:
          for (int j = 0; j < n; ++j) out[j] = (static_cast<A>(static_cast<int>(x) + j) + A(0.5)) / static_cast<A>(width);
          return;
        case kY:
          for (int j = 0; j < n; ++j) out[j] = (static_cast<A>(y) + A(0.5)) / static_cast<A>(height);
          return;
        case kEccentricity: {
          const Fixation<A> fixation = fixation_of(planes.fixation, b, height, width);
          for (int j = 0; j < n; ++j) out[j] = eccentricity_at(fixation, y, static_cast<int>(x) + j);
          return;
        }
        case kEdgeDistance:
          return copy(planes.distance + at);
        case kBoundary: {
          const Given<A>& labels = planes.given[kCluster];
          if (!labels.plane) break;
          const auto label = [&](int64_t v, int64_t u) { return labels.at(b, v, u, height, width); };
          for (int j = 0; j < n; ++j)
            out[j] = static_cast<double>(planes.edge[at + j]) > planes.threshold[b] && at_border(y, x + j, height, width, label)
                         ? A(1)
                         : A(0);
          return;
        }
        default:
          break;
      }
      for (int j = 0; j < n; ++j) out[j] = A(0);
    }

    // Planes to texels, in tiles of 4 channels and 4 texels; the last tile overlaps the one before.
    TEXVLM_HD static void interleave(const A (&v)[kMaxChannels][kRun], int n, int64_t channels, T* out) {
      int j = 0;
#if defined(TEXVLM_HAS_LANES)
      if constexpr (!std::is_same_v<A, T>) {  // rounded along x, where it vectorises
        T rounded[kMaxChannels][kRun];
        for (int64_t c = 0; c < channels; ++c)
          for (int i = 0; i < n; ++i) rounded[c][i] = static_cast<T>(v[c][i]);
        for (; j < n; ++j)
          for (int64_t c = 0; c < channels; ++c) out[j * channels + c] = rounded[c][j];
        return;
      }
      using V = Lanes<A, 4>;
      for (; channels >= 4 && j + 4 <= n; j += 4) {
        for (int64_t tile = 0; tile < channels; tile += 4) {
          const int64_t c = minimum(tile, channels - 4);
          V p = load_lanes<A, 4>(v[c] + j), q = load_lanes<A, 4>(v[c + 1] + j);
          V r = load_lanes<A, 4>(v[c + 2] + j), s = load_lanes<A, 4>(v[c + 3] + j);
          transpose<A>(p, q, r, s);
          T* texel = out + j * channels + c;
          store_lanes<A, 4>(texel, p);
          store_lanes<A, 4>(texel + channels, q);
          store_lanes<A, 4>(texel + 2 * channels, r);
          store_lanes<A, 4>(texel + 3 * channels, s);
        }
      }
#endif
      for (; j < n; ++j)
        for (int64_t c = 0; c < channels; ++c) out[j * channels + c] = static_cast<T>(v[c][j]);
    }

    // What row y will touch that the row above it has not: in runs too short for the hardware to find out.
    TEXVLM_HD void prefetch(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
      const int64_t height = texture.levels.height[0], width = texture.levels.width[0];
      const auto lines = [](const auto* from, const auto* to) {
        for (; from < to; from += 64 / sizeof(*from)) TEXVLM_PREFETCH(from);
      };
      const auto plane = [&](const A* p, int64_t below) {
        if (p == nullptr) return;
        p += (b * height + minimum(y + below, height - 1)) * width;
        lines(p + x0, p + x1);
      };
      plane(planes.luma, 2);
      plane(planes.edge, 0);
      plane(planes.contrast, 1);
      if (planes.given[kMotion].h == height && planes.given[kMotion].w == width) plane(planes.given[kMotion].plane, 0);
      for (int c = 0; c < 3; ++c) lines(&image.at(b, c, y, x0), &image.at(b, c, y, x0) + (x1 - x0));
      const T* const out = texture.texel(b, 0, y, 0);
      lines(out + x0 * texture.channels, out + x1 * texture.channels);
    }

    TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
      const int64_t height = texture.levels.height[0], width = texture.levels.width[0], channels = list.count;
      bool wants_low = false;
      for (int c = 0; c < list.count; ++c) {
        const int id = list.id[c];
        wants_low = wants_low || ((id == kHighPass || id == kLowPass) && !planes.given[id].plane);
      }
      if (x1 - x0 <= kRun) prefetch(b, minimum(y + 1, height - 1), x0, x1);
      A v[kMaxChannels][kRun], low[kRun];
      EnlargedRun<A> run;
      for (int64_t x = x0; x < x1; x += kRun) {
        const int n = static_cast<int>(minimum<int64_t>(kRun, x1 - x));
        run.h = -1;
        if (wants_low) low_pass_run<kRun>(planes.luma, b, y, x, n, height, width, low);
        for (int c = 0; c < list.count; ++c) fill<kRun>(list.id[c], b, y, x, n, low, run, v[c]);
        interleave(v, n, channels, texture.texel(b, 0, y, x));
      }
    }
  };
};

// ---- in place ----

// Luma of the picture over that of the one before, and the size of its change; motion may be null.
template <class S>
struct LumaChange {
  template <class T, int C>
  struct For {
    ImageView<const S> image;
    T *luma, *motion;
    int64_t height, width;

    template <int N>
    TEXVLM_HD void pixels(int64_t b, int64_t y, int64_t x, int n) const {
      T now[N];
      luma_run(image, b, y, x, n, now);
      const int64_t at = (b * height + y) * width + x;
      T* TEXVLM_RESTRICT old = luma + at;
      if (motion) {
        T* TEXVLM_RESTRICT change = motion + at;
        for (int j = 0; j < n; ++j) change[j] = motion_of(now[j], old[j]);
      }
      for (int j = 0; j < n; ++j) old[j] = now[j];
    }
  };
};

// Where nothing changes any more.
template <class T, int C>
struct NoMotion {
  T* motion;
  int64_t height, width;

  template <int N>
  TEXVLM_HD void pixels(int64_t b, int64_t y, int64_t x, int n) const {
    T* TEXVLM_RESTRICT to = motion + (b * height + y) * width + x;
    for (int j = 0; j < n; ++j) to[j] = T(0);
  }
};

}  // namespace texvlm
