// Anisotropic sampling: a pixel's footprint becomes a row of trilinear taps along its major axis.
//
// The footprint is the parallelogram of dx = ddx (W, H) and dy = ddy (W, H), in level-0 pixels. Pmax and Pmin are the singular
// values of the matrix [dx dy], the axis its left singular vector for Pmax: the Direct3D 11.3 ellipse transform (7.18.11), taken
// literally, mirrors the axis of half of all footprints. The decomposition is that of J. Blinn, "Consider the lowly 2x2 matrix",
// IEEE CG&A 16(2), 1996: the matrix is a scaled rotation (e, h) plus a scaled reflection (f, g); it needs no trigonometry.
#pragma once

#include "sample_adjoint.h"

namespace texvlm {

// sqrt(x^2 + y^2); no intermediate result overflows, or vanishes where the length does not.
template <class A>
TEXVLM_HD A length(A x, A y) {
  const A ax = x < A(0) ? -x : x, ay = y < A(0) ? -y : y, m = maximum(ax, ay);
  if (!(m > A(0))) return m;
  const A s = ax / m, t = ay / m;
  return m * sqrt_of(s * s + t * t);
}

template <class A>
struct Footprint {
  A lod, axis_x, axis_y;       // the axis has length Pmax, in level-0 pixels; its sign has no meaning
  A slope_minor, slope_major;  // d lod / d Pmin and d lod / d Pmax
  A cos, sin, major;           // the axis as a direction and a length
  A q, r, ex, hy, fx, gy;      // lengths and directions of (e, h) and (f, g)
  int taps;
  bool finite;
};

template <class A>
TEXVLM_HD Footprint<A> footprint(A ddx_u, A ddx_v, A ddy_u, A ddy_v, A width, A height, int levels, int max_anisotropy) {
  const A half = A(0.5), a = half * ddx_u * width, c = half * ddx_v * height, b = half * ddy_u * width, d = half * ddy_v * height;
  const A e = a + d, f = a - d, g = c + b, h = c - b;
  Footprint<A> p{};
  p.q = length(e, h);
  p.r = length(f, g);
  p.major = p.q + p.r;
  p.finite = finite(p.major) && finite(ddx_u) && finite(ddx_v) && finite(ddy_u) && finite(ddy_v);
  p.taps = 1;
  if (!p.finite) return p;
  if (p.q > A(0)) {
    p.ex = e / p.q;
    p.hy = h / p.q;
  }
  if (p.r > A(0)) {
    p.fx = f / p.r;
    p.gy = g / p.r;
  }
  // The axis halves the angle between the two directions: their sum, or where they are opposed, what is normal to the difference.
  // A circle (one length is zero) has its axis along dx, a zero footprint has none.
  const bool opposed = p.ex * p.fx + p.hy * p.gy < A(0);
  const A x = opposed ? p.gy - p.hy : p.ex + p.fx, y = opposed ? p.ex - p.fx : p.hy + p.gy, norm = length(x, y);
  if (norm > A(0)) {
    p.cos = x / norm;
    p.sin = y / norm;
  }
  p.axis_x = p.major * p.cos;
  p.axis_y = p.major * p.sin;

  const A minor = p.q < p.r ? p.r - p.q : p.q - p.r, most = static_cast<A>(max_anisotropy), limited = p.major / most;
  const bool round = minor >= limited;
  const A radius = round ? minor : limited;
  if (radius > A(0)) {
    const A last = static_cast<A>(levels - 1), lod = log2_of(radius);
    p.lod = clamp(lod, A(0), last);
    if (lod >= A(0) && lod <= last)
      (round ? p.slope_minor : p.slope_major) = A(1) / (radius * A(0.6931471805599453) * (round ? A(1) : most));
  }
  const A ratio = p.major * exp2_of(-p.lod) * A(1 - 1e-5);  // rounding shall not add a tap
  const A wanted = floor_of(ratio), ceiled = wanted < ratio ? wanted + A(1) : wanted;
  p.taps = static_cast<int>(clamp(ceiled, A(1), most));
  return p;
}

template <class A>
struct FootprintGrad {
  A ddx_u, ddx_v, ddy_u, ddy_v;
};

// Adjoint of footprint: from the gradients of the axis and of the LOD. The number of taps is piecewise constant, and the axis of
// a circle does not turn.
template <class A>
TEXVLM_HD FootprintGrad<A> footprint_adjoint(const Footprint<A>& p, A axis_x, A axis_y, A lod, A width, A height) {
  const A major = axis_x * p.cos + axis_y * p.sin + lod * p.slope_major;
  const A sign = p.q > p.r ? A(1) : (p.q < p.r ? A(-1) : A(0)), minor = sign * lod * p.slope_minor;
  // Where one length is rounding noise of the other, so is its direction.
  constexpr A kNoise = sizeof(A) == 8 ? A(2.3e-16) : A(1.2e-7);
  const bool circle = minimum(p.q, p.r) <= kNoise * maximum(p.q, p.r);
  const A turn = circle ? A(0) : A(0.5) * (axis_y * p.cos - axis_x * p.sin);  // times Pmax: d / d(angle of either direction)
  const A turn_q = circle ? A(0) : turn * (p.major / p.q), turn_r = circle ? A(0) : turn * (p.major / p.r);
  const A e = (major + minor) * p.ex - turn_q * p.hy, h = (major + minor) * p.hy + turn_q * p.ex;
  const A f = (major - minor) * p.fx - turn_r * p.gy, g = (major - minor) * p.gy + turn_r * p.fx;
  return {A(0.5) * (e + f) * width, A(0.5) * (g + h) * height, A(0.5) * (g - h) * width, A(0.5) * (e - f) * height};
}

// uv, ddx, ddy [B, N, 2] with any strides.
template <class A>
struct FootprintView {
  const A* data[3];
  int64_t stride_b[3], stride_n[3], stride_c[3];

  TEXVLM_HD A at(int which, int64_t b, int64_t n, int c) const {
    return data[which][b * stride_b[which] + n * stride_n[which] + c * stride_c[which]];
  }
  TEXVLM_HD A u(int64_t b, int64_t n) const { return at(0, b, n, 0); }
  TEXVLM_HD A v(int64_t b, int64_t n) const { return at(0, b, n, 1); }
  TEXVLM_HD Footprint<A> footprint(int64_t b, int64_t n, const Levels& levels, int max_anisotropy) const {
    return texvlm::footprint(at(1, b, n, 0), at(1, b, n, 1), at(2, b, n, 0), at(2, b, n, 1), static_cast<A>(levels.width[0]),
                             static_cast<A>(levels.height[0]), levels.count, max_anisotropy);
  }
};

// Where tap i lies: at `along` on the axis, from -1/2 to 1/2.
template <class A>
struct Tap {
  A along, u, v;
};
template <class A>
TEXVLM_HD Tap<A> tap_of(const Footprint<A>& p, int i, A u, A v, const Levels& levels) {
  const A along = (static_cast<A>(i) + A(0.5)) / static_cast<A>(p.taps) - A(0.5);
  return {along, u + along * (p.axis_x / static_cast<A>(levels.width[0])),
          v + along * (p.axis_y / static_cast<A>(levels.height[0]))};
}

// Channels that a thread sums at a time: CUDA's slice, or a feature map's texel.
#if defined(__CUDA_ARCH__)
constexpr int64_t kTapChunk = 4;
#else
constexpr int64_t kTapChunk = 64;
#endif

template <class A>
TEXVLM_HD bool all_inside(const Bilinear<A>& q) {
  return q.x.d0 != A(0) && q.x.d1 != A(0) && q.y.d0 != A(0) && q.y.d1 != A(0);
}

template <class T, int C, class Taps>
struct SampleFootprint {
  using A = Acc<T>;
  TextureView<const T> texture;
  FootprintView<A> queries;
  T* out;  // [B, N, C]
  int64_t count;
  Reducers reducers;
  int max_anisotropy;
  Address address;

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t c0, int64_t c1) const {
    const int64_t channels = C ? C : texture.channels;
    T* to = out + (b * count + n) * channels;
    const A u = queries.u(b, n), v = queries.v(b, n);
    const Footprint<A> p = queries.footprint(b, n, texture.levels, max_anisotropy);
    if (!(p.finite && finite(u) && finite(v))) {
      for (int64_t c = c0; c < c1; ++c) to[c] = not_a_number<T>();
      return;
    }
    const T* texels = texture.data + b * texture.batch_stride;
    for (int64_t c = c0; c < c1; c += kTapChunk) smooth(p, u, v, texels + c, minimum(kTapChunk, c1 - c), to + c);
    if (reducers.any_mode)
      copy_nearest(texture, reducers, false, b, nearest_texel(u, v, p.lod, texture.levels, address), c0, c1, to);
  }

  TEXVLM_HD void smooth(const Footprint<A>& p, A u, A v, const T* texels, int64_t wide, T* to) const {
    const int64_t channels = C ? C : texture.channels;
    A sum[kTapChunk];
    for (int64_t c = 0; c < wide; ++c) sum[c] = A(0);
    for (int i = 0; i < p.taps; ++i) {
      const Tap<A> tap = tap_of(p, i, u, v, texture.levels);
      const LodTaps<A> q = Taps::at(tap.u, tap.v, p.lod, texture.levels, Filter::trilinear, address);
      add(texels, channels, q.near, A(1) - q.level.t, wide, sum);
      if (q.level.t != A(0)) add(texels, channels, q.far, q.level.t, wide, sum);
    }
    for (int64_t c = 0; c < wide; ++c) to[c] = static_cast<T>(sum[c] / static_cast<A>(p.taps));
  }

  TEXVLM_HD static void add(const T* texels, int64_t channels, const Bilinear<A>& q, A share, int64_t wide,
                            A* TEXVLM_RESTRICT sum) {
    if (!all_inside(q)) {
      for (int64_t c = 0; c < wide; ++c) sum[c] += share * blend(corners(texels + c, channels, q), q);
      return;
    }
    const T *p00 = texels + q.t00 * channels, *p01 = texels + q.t01 * channels;
    const T *p10 = texels + q.t10 * channels, *p11 = texels + q.t11 * channels;
    const A x0 = q.x.w0, x1 = q.x.w1, y0 = q.y.w0, y1 = q.y.w1;
    for (int64_t c = 0; c < wide; ++c)
      sum[c] += share * (y0 * (x0 * static_cast<A>(p00[c]) + x1 * static_cast<A>(p01[c])) +
                         y1 * (x0 * static_cast<A>(p10[c]) + x1 * static_cast<A>(p11[c])));
  }

#if defined(TEXVLM_HOST_LOOPS)
  // The taps of query after query, in blocks that are placed together (taps.h) as if each were a query.
  struct TapBlock {
    A uv[2 * kBlock], lod[kBlock];
    int64_t query[kBlock];
    int taps[kBlock], count = 0;  // taps: of the tap's query
  };
  struct TapSum {
    A sum[kTapChunk];
    int64_t query = -1;
    int taps = 1;
  };

  TEXVLM_HD void block(int64_t b, int64_t n0, int64_t n1) const {
    const int64_t channels = C ? C : texture.channels;
    if (!std::is_same_v<Taps, ExactTaps> || channels > kTapChunk || reducers.any_mode) {
      for (int64_t n = n0; n < n1; ++n) (*this)(b, n, 0, channels);
      return;
    }
    const Placing placing{level_sizes(texture.levels), Filter::trilinear, address, channels, false, false};
    TapBlock taps;
    TapSum sum;
    for (int64_t n = n0; n < n1; ++n) {
      const A u = queries.u(b, n), v = queries.v(b, n);
      const Footprint<A> p = queries.footprint(b, n, texture.levels, max_anisotropy);
      if (!(p.finite && finite(u) && finite(v))) {
        T* to = out + (b * count + n) * channels;
        for (int64_t c = 0; c < channels; ++c) to[c] = not_a_number<T>();
        continue;
      }
      for (int i = 0; i < p.taps; ++i) {
        const Tap<A> tap = tap_of(p, i, u, v, texture.levels);
        const int k = taps.count++;
        taps.uv[2 * k] = tap.u, taps.uv[2 * k + 1] = tap.v, taps.lod[k] = p.lod;
        taps.query[k] = n, taps.taps[k] = p.taps;
        if (taps.count == kBlock) apply(b, taps, placing, sum);
      }
    }
    apply(b, taps, placing, sum);
    finish(b, sum);
  }

  TEXVLM_HD void apply(int64_t b, TapBlock& taps, const Placing& placing, TapSum& sum) const {
    const int64_t channels = C ? C : texture.channels;
    const T* texels = texture.data + b * texture.batch_stride;
    BlockTaps<A> placed;
    place_run(QueryView<A>{taps.uv, taps.lod, 0, 2, 1, 0, 1}, 0, 0, taps.count, placing, placed);
    fetch_ahead(texels, channels, placed.near);
    if (placed.two) fetch_ahead(texels, channels, placed.far);
    for (int i = 0; i < taps.count; ++i) {
      if (taps.query[i] != sum.query) {
        finish(b, sum);
        sum.query = taps.query[i], sum.taps = taps.taps[i];
        for (int64_t c = 0; c < channels; ++c) sum.sum[c] = A(0);
      }
      if (placed.slow[i]) {
        const LodTaps<A> q =
            Taps::at(taps.uv[2 * i], taps.uv[2 * i + 1], taps.lod[i], texture.levels, Filter::trilinear, address);
        add(texels, channels, q.near, A(1) - q.level.t, channels, sum.sum);
        if (q.level.t != A(0)) add(texels, channels, q.far, q.level.t, channels, sum.sum);
      } else {
        add(texels, channels, placed.near, i, A(1) - placed.t[i], sum.sum);
        if (placed.t[i] != A(0)) add(texels, channels, placed.far, i, placed.t[i], sum.sum);
      }
    }
    taps.count = 0;
  }

  TEXVLM_HD static void add(const T* texels, int64_t channels, const LevelTaps<A>& taps, int i, A share, A* TEXVLM_RESTRICT sum) {
    const T *top = texels + taps.top[i], *bottom = texels + taps.bottom[i];
    const int64_t step = taps.step[i];
    const A x1 = taps.fx[i], x0 = A(1) - x1, y1 = share * taps.fy[i], y0 = share - y1;
    for (int64_t c = 0; c < channels; ++c)
      sum[c] += y0 * (x0 * static_cast<A>(top[c]) + x1 * static_cast<A>(top[step + c])) +
                y1 * (x0 * static_cast<A>(bottom[c]) + x1 * static_cast<A>(bottom[step + c]));
  }

  TEXVLM_HD void finish(int64_t b, const TapSum& sum) const {
    if (sum.query < 0) return;
    const int64_t channels = C ? C : texture.channels;
    T* to = out + (b * count + sum.query) * channels;
    for (int64_t c = 0; c < channels; ++c) to[c] = static_cast<T>(sum.sum[c] / static_cast<A>(sum.taps));
  }
#endif
};

template <class T, int C>
using SampleGrad = SampleFootprint<T, C, ExactTaps>;

// What the taps of a query tell: gradients of uv, of the axis (along it) and of the LOD.
template <class A>
struct FootprintSums {
  A u, v, axis_u, axis_v, lod;

  TEXVLM_HD void add(const Tap<A>& tap, const LevelLerp<A>& level, const LevelSums<A>& near, const LevelSums<A>& far,
                     const Levels& levels) {
    const A t = level.t;
    A tap_u = (A(1) - t) * static_cast<A>(levels.width[level.l0]) * near.dx;
    A tap_v = (A(1) - t) * static_cast<A>(levels.height[level.l0]) * near.dy;
    if (t != A(0)) {
      tap_u += t * static_cast<A>(levels.width[level.l1]) * far.dx;
      tap_v += t * static_cast<A>(levels.height[level.l1]) * far.dy;
    }
    u += tap_u;
    v += tap_v;
    axis_u += tap.along * tap_u;
    axis_v += tap.along * tap_v;
    if (level.l1 != level.l0) lod += far.value - near.value;
  }
};

// Adjoint of SampleGrad: adds to grad_data [Bt, T, C], grad_uv, grad_ddx and grad_ddy [B, N, 2], each of which may be null. CUDA
// has csrc/cuda/footprint.cu.
template <class T, int C>
struct SampleGradAdjoint {
  using A = Acc<T>;
  TextureView<const T> texture;
  FootprintView<A> queries;
  GradView<T> grad;
  A *grad_data, *grad_uv, *grad_ddx, *grad_ddy;
  int64_t count;
  Reducers reducers;
  int max_anisotropy;
  Address address;

  TEXVLM_HD bool coordinates() const { return grad_uv || grad_ddx || grad_ddy; }

  TEXVLM_HD void operator()(int64_t b, int64_t n, int64_t c0, int64_t c1) const {
    const int64_t channels = C ? C : texture.channels;
    const A u = queries.u(b, n), v = queries.v(b, n);
    const Footprint<A> p = queries.footprint(b, n, texture.levels, max_anisotropy);
    if (!(p.finite && finite(u) && finite(v))) return;
    const T* texels = texture.data + b * texture.batch_stride;
    const T* g = grad.data + b * grad.stride_b + n * grad.stride_n;
    A* target = grad_data ? grad_data + b * texture.batch_stride : nullptr;
    const A each = A(1) / static_cast<A>(p.taps);
    FootprintSums<A> sums{};
    for (int i = 0; i < p.taps; ++i) {
      const Tap<A> tap = tap_of(p, i, u, v, texture.levels);
      const LodTaps<A> q = lod_taps(tap.u, tap.v, p.lod, texture.levels, Filter::trilinear, address);
      const A t = q.level.t;
      LevelSums<A> near{}, far{};
      for (int64_t c = c0; c < c1; ++c) {
        if (reducers.any_mode && reducers.of(c) == Reducer::mode) continue;
        const A gc = each * static_cast<A>(g[c * grad.stride_c]);
        if (coordinates()) {
          SampleLodAdjoint<T, C>::add_channel(texels + c, channels, q.near, gc, near);
          if (q.level.l1 != q.level.l0) SampleLodAdjoint<T, C>::add_channel(texels + c, channels, q.far, gc, far);
        }
        if (target) {
          scatter_corners(target + c, channels, q.near, q.level.l0, everywhere(), (A(1) - t) * gc);
          if (t != A(0)) scatter_corners(target + c, channels, q.far, q.level.l1, everywhere(), t * gc);
        }
      }
      if (coordinates()) sums.add(tap, q.level, near, far, texture.levels);
    }
    finish(b, n, p, sums);
  }

  TEXVLM_HD void finish(int64_t b, int64_t n, const Footprint<A>& p, const FootprintSums<A>& sums) const {
    const int64_t at = 2 * (b * count + n);
    if (grad_uv) {
      accumulate(grad_uv + at, sums.u);
      accumulate(grad_uv + at + 1, sums.v);
    }
    if (!grad_ddx && !grad_ddy) return;
    const A width = static_cast<A>(texture.levels.width[0]), height = static_cast<A>(texture.levels.height[0]);
    const FootprintGrad<A> d = footprint_adjoint(p, sums.axis_u / width, sums.axis_v / height, sums.lod, width, height);
    if (grad_ddx) {
      accumulate(grad_ddx + at, d.ddx_u);
      accumulate(grad_ddx + at + 1, d.ddx_v);
    }
    if (grad_ddy) {
      accumulate(grad_ddy + at, d.ddy_u);
      accumulate(grad_ddy + at + 1, d.ddy_v);
    }
  }
};

}  // namespace texvlm
