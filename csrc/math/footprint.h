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

// The row of taps of a footprint around (u, v): all that placing them takes. No taps: the query is not finite.
template <class A>
struct TapLine {
  A u, v, axis_u, axis_v, lod;
  int taps;
};
template <class A>
TEXVLM_HD TapLine<A> line_of(const Footprint<A>& p, A u, A v, const Levels& levels) {
  return {u,
          v,
          p.axis_x / static_cast<A>(levels.width[0]),
          p.axis_y / static_cast<A>(levels.height[0]),
          p.lod,
          p.finite && finite(u) && finite(v) ? p.taps : 0};
}

// Where tap i lies: at `along` on the axis, from -1/2 to 1/2.
template <class A>
struct Tap {
  A along, u, v;
};
template <class A>
TEXVLM_HD Tap<A> tap_of(const TapLine<A>& line, int i) {
  const A along = (static_cast<A>(i) + A(0.5)) / static_cast<A>(line.taps) - A(0.5);
  return {along, line.u + along * line.axis_u, line.v + along * line.axis_v};
}

#if defined(TEXVLM_HOST_LOOPS)
// The taps of query after query, in blocks that are placed together (taps.h) as if each were a query.
template <class A>
struct TapBlock {
  A uv[2 * kBlock], lod[kBlock], along[kBlock];
  int64_t query[kBlock];
  int taps[kBlock];  // of the tap's query; negative: this is its last
  int count = 0;

  TapLine<A> line{};  // the one that is being cut into taps, and the next of them
  int64_t of = 0;
  int next = 0;

  // Fills the block with the taps of the lines that another(line, query) gives as long as it is true. False: none is left.
  template <class Another>
  TEXVLM_HD bool fill(const Another& another) {
    int k = 0;
    while (k < kBlock) {
      if (next == line.taps) {
        if (!another(line, of)) break;
        next = 0;
      }
      const TapLine<A> now = line;
      const int end = minimum(now.taps, next + kBlock - k);
      for (; next < end; ++next, ++k) {
        const Tap<A> tap = tap_of(now, next);
        uv[2 * k] = tap.u, uv[2 * k + 1] = tap.v, lod[k] = now.lod, along[k] = tap.along, query[k] = of, taps[k] = now.taps;
      }
      if (next == now.taps && now.taps) taps[k - 1] = -now.taps;
    }
    count = k;
    return k > 0;
  }
  TEXVLM_HD void place(const Placing& placing, BlockTaps<A>& to) const {
    place_run(QueryView<A>{uv, lod, 0, 2, 1, 0, 1}, 0, 0, count, placing, to);
  }
};
#endif

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
  TEXVLM_HD TapLine<A> line(int64_t b, int64_t n, const Levels& levels, int max_anisotropy) const {
    return line_of(footprint(b, n, levels, max_anisotropy), u(b, n), v(b, n), levels);
  }
};

// Channels that a thread sums at a time: CUDA's slice, or a feature map's texel.
#if defined(__CUDA_ARCH__)
constexpr int64_t kTapChunk = 4;
#else
constexpr int64_t kTapChunk = 64;
#endif

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
    const TapLine<A> line = queries.line(b, n, texture.levels, max_anisotropy);
    if (!line.taps) {
      for (int64_t c = c0; c < c1; ++c) to[c] = not_a_number<T>();
      return;
    }
    const T* texels = texture.data + b * texture.batch_stride;
    for (int64_t c = c0; c < c1; c += kTapChunk) smooth(line, texels + c, minimum(kTapChunk, c1 - c), to + c);
    if (reducers.any_mode)
      copy_nearest(texture, reducers, false, b, nearest_texel(line.u, line.v, line.lod, texture.levels, address), c0, c1, to);
  }

  TEXVLM_HD void smooth(const TapLine<A>& line, const T* texels, int64_t wide, T* to) const {
    A sum[kTapChunk];
    for (int64_t c = 0; c < wide; ++c) sum[c] = A(0);
    for (int i = 0; i < line.taps; ++i) {
      const Tap<A> tap = tap_of(line, i);
      add(texels, Taps::at(tap.u, tap.v, line.lod, texture.levels, Filter::trilinear, address), wide, sum);
    }
    for (int64_t c = 0; c < wide; ++c) to[c] = static_cast<T>(sum[c] / static_cast<A>(line.taps));
  }

  TEXVLM_HD void add(const T* texels, const LodTaps<A>& q, int64_t wide, A* TEXVLM_RESTRICT sum) const {
    for (int64_t c = 0; c < wide; ++c) sum[c] += fetch(texels + c, C ? C : texture.channels, q);
  }

#if defined(TEXVLM_HOST_LOOPS)
  TEXVLM_HD void block(int64_t b, int64_t n0, int64_t n1) const {
    const int64_t channels = C ? C : texture.channels;
    if (!std::is_same_v<Taps, ExactTaps> || channels > kTapChunk || reducers.any_mode) {
      for (int64_t n = n0; n < n1; ++n) (*this)(b, n, 0, channels);
      return;
    }
    const Placing placing{level_sizes(texture.levels), Filter::trilinear, address, channels, true, false, false};
    TapBlock<A> taps;
    A sum[kTapChunk];
    for (int64_t c = 0; c < channels; ++c) sum[c] = A(0);
    int64_t n = n0;
    const auto another = [&](TapLine<A>& line, int64_t& of) {
      if (n == n1) return false;
      line = queries.line(b, n, texture.levels, max_anisotropy);
      of = n++;
      for (int64_t c = 0; c < channels && !line.taps; ++c) out[(b * count + of) * channels + c] = not_a_number<T>();
      return true;
    };
    while (taps.fill(another)) apply(b, taps, placing, sum);
  }

  TEXVLM_HD void apply(int64_t b, const TapBlock<A>& taps, const Placing& placing, A* TEXVLM_RESTRICT sum) const {
    const int64_t channels = C ? C : texture.channels;
    const T* texels = texture.data + b * texture.batch_stride;
    BlockTaps<A> placed;
    taps.place(placing, placed);
    fetch_ahead(texels, channels, placed.near);
    if (placed.two) fetch_ahead(texels, channels, placed.far);
    for (int i = 0; i < taps.count; ++i) {
      if (placed.slow[i]) {
        add(texels, Taps::at(taps.uv[2 * i], taps.uv[2 * i + 1], taps.lod[i], texture.levels, Filter::trilinear, address),
            channels, sum);
      } else {
        add(texels, placed.near, i, A(1) - placed.t[i], sum);
        if (placed.t[i] != A(0)) add(texels, placed.far, i, placed.t[i], sum);
      }
      if (taps.taps[i] > 0) continue;
      T* to = out + (b * count + taps.query[i]) * channels;
      for (int64_t c = 0; c < channels; ++c) {
        to[c] = static_cast<T>(sum[c] / static_cast<A>(-taps.taps[i]));
        sum[c] = A(0);
      }
    }
  }

  TEXVLM_HD void add(const T* texels, const LevelTaps<A>& taps, int i, A share, A* TEXVLM_RESTRICT sum) const {
    const A x1 = taps.fx[i], x0 = A(1) - x1, y0 = share * (A(1) - taps.fy[i]), y1 = share * taps.fy[i];
    for (int64_t c = 0; c < (C ? C : texture.channels); ++c) sum[c] += blend(taps.corners(texels, i, c), x0, x1, y0, y1);
  }
#endif
};

template <class T, int C>
using SampleGrad = SampleFootprint<T, C, ExactTaps>;

// What the taps of a query tell: gradients of uv, of the axis (along it) and of the LOD.
template <class A>
struct FootprintSums {
  A u, v, axis_u, axis_v, lod;

  TEXVLM_HD void add(A along, const PlaceGrad<A>& tap) {
    u += tap.u;
    v += tap.v;
    axis_u += along * tap.u;
    axis_v += along * tap.v;
    lod += tap.lod;
  }
};

// Adjoint of SampleGrad: adds to grad_data [Bt, T, C], grad_uv, grad_ddx and grad_ddy [B, N, 2], each of which may be null. CUDA
// has csrc/cuda/footprint.cu; the host takes the places query by query (`block`) and the texels band by band (`list`).
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
  const TapLine<A>* lines;  // [B, N], for `list`

  TEXVLM_HD bool coordinates() const { return grad_uv || grad_ddx || grad_ddy; }

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

#if defined(TEXVLM_HOST_LOOPS)
  using Level = SampleLodAdjoint<T, C>;

  TEXVLM_HD void block(int64_t b, int64_t n0, int64_t n1) const {
    const Level adjoint = level_adjoint();
    TapBlock<A> taps;
    Footprint<A> footprints[2 * kBlock];  // of the latest queries: they are finished in the order in which they begin
    FootprintSums<A> sums{};
    int64_t n = n0, begun = 0, finished = 0;
    const auto another = [&](TapLine<A>& line, int64_t& of) {
      if (n == n1) return false;
      const Footprint<A> p = queries.footprint(b, n, texture.levels, max_anisotropy);
      line = line_of(p, queries.u(b, n), queries.v(b, n), texture.levels);
      if (line.taps) footprints[begun++ % (2 * kBlock)] = p;
      of = b * count + n++;
      return true;
    };
    while (taps.fill(another))
      each_tap<true>(adjoint, taps, everywhere(), [&](int i, const PlaceGrad<A>& tap) {
        sums.add(taps.along[i], tap);
        if (taps.taps[i] > 0) return;
        finish(b, taps.query[i] - b * count, footprints[finished++ % (2 * kBlock)], sums);
        sums = {};
      });
  }

  // What the queries with these numbers (b * count + n) give to the rows of one band.
  TEXVLM_HD void list(const int32_t* ids, int64_t many, int64_t, const Band& band) const {
    const Level adjoint = level_adjoint();
    TapBlock<A> taps;
    int64_t k = 0;
    const auto another = [&](TapLine<A>& line, int64_t& of) {
      if (k == many) return false;
      of = ids[k++];
      line = lines[of];
      return true;
    };
    while (taps.fill(another)) each_tap<false>(adjoint, taps, band, [](int, const PlaceGrad<A>&) {});
  }

  TEXVLM_HD Level level_adjoint() const {
    return {texture, {}, grad, grad_data, nullptr, nullptr, count, reducers, Filter::trilinear, address};
  }

  // Either the places of a block's taps, found(i, what it tells), or their texels.
  template <bool kPlaces, class Found>
  TEXVLM_HD void each_tap(const Level& adjoint, const TapBlock<A>& taps, const Band& band, const Found& found) const {
    const int64_t channels = C ? C : texture.channels;
    const Placing placing{level_sizes(texture.levels), Filter::trilinear, address, channels, false, kPlaces, false};
    BlockTaps<A> placed;
    taps.place(placing, placed);
    if (kPlaces) {  // all of one picture
      const T* texels = texture.data + taps.query[0] / count * texture.batch_stride;
      fetch_ahead(texels, channels, placed.near);
      if (placed.two) fetch_ahead(texels, channels, placed.far);
    }
    for (int i = 0; i < taps.count; ++i) {
      const int64_t b = taps.query[i] < count ? 0 : taps.query[i] / count, n = taps.query[i] - b * count;
      const T* const g = grad.data + b * grad.stride_b + n * grad.stride_n;
      const T* const texels = texture.data + b * texture.batch_stride;
      A* const target = kPlaces ? nullptr : grad_data + b * texture.batch_stride;
      const A each = A(1) / static_cast<A>(taps.taps[i] < 0 ? -taps.taps[i] : taps.taps[i]);
      PlaceGrad<A> tap{};
      if (placed.slow[i] || !adjoint.in_blocks()) {
        tap = slow_tap(adjoint, taps.uv[2 * i], taps.uv[2 * i + 1], taps.lod[i], texels, target, g, band, each);
      } else {
        const bool far_too = kPlaces && placed.l1[i] != placed.l0[i];
        Corners<A> near{}, far{};
        adjoint.spread(texels, target, g, placed, i, band, each, kPlaces, far_too, near, far);
        if (kPlaces)
          tap = place_grad(LevelLerp<A>{placed.l0[i], placed.l1[i], placed.t[i], A(1)}, Level::slopes_of(near, placed.near, i),
                           far_too ? Level::slopes_of(far, placed.far, i) : Slopes<A>{}, texture.levels);
      }
      if (kPlaces) found(i, PlaceGrad<A>{each * tap.u, each * tap.v, each * tap.lod});
    }
  }

  TEXVLM_NOINLINE PlaceGrad<A> slow_tap(const Level& adjoint, A u, A v, A lod, const T* texels, A* target, const T* g,
                                        const Band& band, A each) const {
    const LodTaps<A> q = lod_taps(u, v, lod, texture.levels, Filter::trilinear, address);
    Corners<A> near{}, far{};
    adjoint.spread(texels, target, g, q, band, each, 0, C ? C : texture.channels, !target, !target && q.level.l1 != q.level.l0,
                   near, far);
    return place_grad(q, near, far, texture.levels);
  }
#endif
};

#if defined(TEXVLM_HOST_LOOPS)
// The bands that a footprint touches, as SampleKeys has them; its line of taps is kept for SampleGradAdjoint.
template <class A>
struct FootprintKeys {
  FootprintView<A> queries;
  Levels levels;
  bool own_textures;
  int64_t count;
  int max_anisotropy;
  Address address;
  TapLine<A>* lines;

  static constexpr int kPairs = 2;

  void line(int64_t q) const { lines[q] = queries.line(q / count, q % count, levels, max_anisotropy); }

  void operator()(const BandTable& bands, int64_t begin, int64_t end, int32_t* out) const {
    for (int64_t q = begin; q < end; ++q, out += 2 * kPairs) {
      line(q);
      const TapLine<A>& at = lines[q];
      out[0] = out[2] = -1;
      if (!at.taps) continue;
      const int first = own_textures ? static_cast<int>(q / count) * bands.total : 0;
      const A v0 = tap_of(at, 0).v, v1 = tap_of(at, at.taps - 1).v;
      const LevelLerp<A> level = level_lerp(at.lod, levels.count);
      bands_between(bands, levels, level.l0, v0, v1, address, first, out);
      if (level.t != A(0)) bands_between(bands, levels, level.l1, v0, v1, address, first, out + 2);
    }
  }
};
#endif

}  // namespace texvlm
