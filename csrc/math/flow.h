// Optical flow by coarse-to-fine inverse search on mips, and the forward-backward occlusion test.
//
// Both directions run at once: `direction` d < B moves the current picture b = d towards the previous one, d >= B the other way
// round. The mips of both pictures are one texture of 2 B, previous pictures first, so the picture that direction d searches is
// number d, and its template number d +- B. Each level has a grid of nodes, one every `stride` pixels, at texel centres of the
// grid; a node carries a flow in the level's pixels and how sure it is of it, as a 2 x 2 matrix.
//
// Sources: T. Kroeger et al., "Fast optical flow using dense inverse search" (2016), for the search; in place of its variational
// step the nodes, which are far fewer than pixels, are made smooth with the search's own normal matrices as the data term.
// Occlusion: S. Meister et al., "UnFlow" (2018).
#pragma once

#include "filter.h"
#include "lanes.h"
#include "luma.h"
#include "reduce.h"

namespace texvlm {

constexpr int kPatch = 8;                 // side of a patch, in pixels of its level
constexpr int kMostSteps = 8;             // Gauss-Newton steps of a patch
constexpr float kStillStep = 0.1f;        // a step shorter than this (pixels) ends the search
constexpr float kSearchRadius = 8.f;      // how far a patch may go from where it began, in pixels of its level
constexpr float kNoise = 3.5e-5f;         // variance of luma that is not motion: (1.5 / 255)^2
constexpr float kLeastCurvature = 5e-6f;  // added to the normal matrix: texture below the noise does not move a patch
constexpr float kMostGain = 4.f;          // pictures differ by no more than this in contrast
constexpr float kApart = 0.5f;            // a coarse node's flow is a candidate of its own when it differs by this much

constexpr float kOcclusionShare = 0.01f, kOcclusionFloor = 0.5f;  // |f + b|^2 > share (|f|^2 + |b|^2) + floor, as in UnFlow

#if defined(TEXVLM_HAS_LANES)
using Eight = Lanes<float, kPatch>;
#else
struct Eight {
  float v[kPatch];
  TEXVLM_HD float& operator[](int i) { return v[i]; }
  TEXVLM_HD float operator[](int i) const { return v[i]; }
};
#define TEXVLM_EIGHT(OP)                                        \
  TEXVLM_HD Eight operator OP(const Eight& a, const Eight& b) { \
    Eight r;                                                    \
    for (int i = 0; i < kPatch; ++i) r.v[i] = a.v[i] OP b.v[i]; \
    return r;                                                   \
  }                                                             \
  TEXVLM_HD Eight operator OP(const Eight& a, float b) {        \
    Eight r;                                                    \
    for (int i = 0; i < kPatch; ++i) r.v[i] = a.v[i] OP b;      \
    return r;                                                   \
  }
TEXVLM_EIGHT(+)
TEXVLM_EIGHT(-)
TEXVLM_EIGHT(*)
#undef TEXVLM_EIGHT
#endif

TEXVLM_HD Eight eight(const float* p) {
  Eight v;
  memcpy(&v, p, sizeof(v));
  return v;
}
TEXVLM_HD Eight eight(float value) {
  Eight v;
  for (int i = 0; i < kPatch; ++i) v[i] = value;
  return v;
}
// The sums of four, each in one fixed order, so that all devices agree.
TEXVLM_HD void sums(const Eight& a, const Eight& b, const Eight& c, const Eight& d, float* out) {
#if defined(TEXVLM_HAS_LANES) && (defined(__clang__) || __GNUC__ >= 12)
  using Four = Lanes<float, 4>;
  Four p = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  Four q = __builtin_shufflevector(b, b, 0, 1, 2, 3) + __builtin_shufflevector(b, b, 4, 5, 6, 7);
  Four r = __builtin_shufflevector(c, c, 0, 1, 2, 3) + __builtin_shufflevector(c, c, 4, 5, 6, 7);
  Four s = __builtin_shufflevector(d, d, 0, 1, 2, 3) + __builtin_shufflevector(d, d, 4, 5, 6, 7);
  transpose<float>(p, q, r, s);
  store_lanes<float, 4>(out, (p + r) + (q + s));
#else
  const auto sum = [](const Eight& v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); };
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
#endif
}

// One level of one picture.
struct LumaLevel {
  const float* data;
  int height, width;
};

// A window of rows x columns pixels, borders replicated: in place where it lies inside, else a copy.
template <int N>
struct Window {
  float copy[N * N];
  const float* data;
  int64_t stride;

  TEXVLM_HD Window(const LumaLevel& image, int y, int x) {
    if (y >= 0 && x >= 0 && y + N <= image.height && x + N <= image.width) {
      data = image.data + static_cast<int64_t>(y) * image.width + x;
      stride = image.width;
    } else {
      gather(image, y, x);
    }
  }
  TEXVLM_NOINLINE
#if defined(__CUDACC__)
  __host__ __device__
#endif
      void gather(const LumaLevel& image, int y, int x) {
    for (int i = 0; i < N; ++i) {
      const float* row = image.data + static_cast<int64_t>(clamp(y + i, 0, image.height - 1)) * image.width;
      for (int j = 0; j < N; ++j) copy[i * N + j] = row[clamp(x + j, 0, image.width - 1)];
    }
    data = copy;
    stride = N;
  }
};

// Standard deviation of a level of each picture: what an exposure or a fade multiplies.
template <class T, int C>
struct FlowContrast {
  template <int N>
  using Part = Sums<double, 2, N>;
  TextureView<const T> luma;
  int level;
  float* out;  // [2 B]

  template <class P>
  TEXVLM_HD void add(int64_t b, int64_t y, int64_t x, int n, P& to) const {
    const T* TEXVLM_RESTRICT from = luma.texel(b, level, y, x);
    for (int j = 0; j < n; ++j) {
      const double v = static_cast<double>(from[j]);
      to.of[0][j] += v;
      to.of[1][j] += v * v;
    }
  }
  TEXVLM_HD void finish(int64_t b, const Part<1>& total) const {
    const double count = static_cast<double>(luma.levels.height[level] * luma.levels.width[level]), mean = total.of[0][0] / count;
    out[b] = static_cast<float>(std::sqrt(maximum(total.of[1][0] / count - mean * mean, 0.0)));
  }
};

// The template of a patch: its luma and slopes times `gain`, and the normal matrix of their least squares. All sums are of
// differences from the patch's mean, so that a change of brightness does not count.
struct FlowPatch {
  Eight luma[kPatch], dx[kPatch], dy[kPatch];
  float sum_dx, sum_dy, xx, xy, yy;

  TEXVLM_HD FlowPatch(const LumaLevel& image, int y, int x, float gain) {
    const Window<kPatch + 2> w(image, y - 1, x - 1);
    Eight sx = eight(0.f), sy = sx, sxx = sx, sxy = sx, syy = sx;
    for (int i = 0; i < kPatch; ++i) {
      const float* row = w.data + (i + 1) * w.stride + 1;
      luma[i] = eight(row) * gain;
      dx[i] = (eight(row + 1) - eight(row - 1)) * (0.5f * gain);
      dy[i] = (eight(row + w.stride) - eight(row - w.stride)) * (0.5f * gain);
      sx = sx + dx[i], sy = sy + dy[i];
      sxx = sxx + dx[i] * dx[i], sxy = sxy + dx[i] * dy[i], syy = syy + dy[i] * dy[i];
    }
    constexpr float each = 1.f / (kPatch * kPatch);
    float total[4], last[4];
    sums(sx, sy, sxx, sxy, total);
    sums(syy, syy, syy, syy, last);
    sum_dx = total[0] * each, sum_dy = total[1] * each;
    xx = total[2] - total[0] * sum_dx;
    xy = total[3] - total[0] * sum_dy;
    yy = last[0] - total[1] * sum_dy;
  }
};

// How a patch fits at a place: the squared error, and the right-hand side of the normal equations.
struct FlowFit {
  float error, bx, by;

  FlowFit() = default;
  TEXVLM_HD FlowFit(const FlowPatch& patch, const LumaLevel& image, float y, float x) {
    // Farther outside than a patch everything is border.
    y = clamp(y, -2.f * kPatch, static_cast<float>(image.height + kPatch));
    x = clamp(x, -2.f * kPatch, static_cast<float>(image.width + kPatch));
    const float y0 = floorf(y), x0 = floorf(x), fy = y - y0, fx = x - x0;
    const Window<kPatch + 1> w(image, static_cast<int>(y0), static_cast<int>(x0));
    const auto across = [&](int i) {
      const float* row = w.data + i * w.stride;
      const Eight left = eight(row);
      return left + (eight(row + 1) - left) * fx;
    };
    Eight s = eight(0.f), ss = s, sx = s, sy = s, above = across(0);
    for (int i = 0; i < kPatch; ++i) {
      const Eight below = across(i + 1), r = above + (below - above) * fy - patch.luma[i];
      s = s + r, ss = ss + r * r, sx = sx + patch.dx[i] * r, sy = sy + patch.dy[i] * r;
      above = below;
    }
    float total[4];
    sums(s, ss, sx, sy, total);
    error = total[1] - total[0] * total[0] * (1.f / (kPatch * kPatch));
    bx = total[2] - total[0] * patch.sum_dx;
    by = total[3] - total[0] * patch.sum_dy;
  }
};

// The nodes of a level: planes [2 B, rows, columns] of the flow.
struct FlowGrid {
  const float *u, *v;
  int rows, columns;

  TEXVLM_HD int64_t nodes() const { return static_cast<int64_t>(rows) * columns; }
};

// What a search writes for the nodes: the flow and its precision matrix (xx xy; xy yy), planes as above.
struct FlowFound {
  float *u, *v, *xx, *xy, *yy;
  int rows, columns;

  TEXVLM_HD int64_t nodes() const { return static_cast<int64_t>(rows) * columns; }
  TEXVLM_HD FlowGrid grid() const { return {u, v, rows, columns}; }
};

// Between which nodes of a grid a place lies; `y`, `x` in [0, 1].
struct FlowPlace {
  int64_t at[4];
  float weight[4];
  int near_y, near_x;  // the nearest node

  TEXVLM_HD FlowPlace(const FlowGrid& grid, int64_t direction, float y, float x) {
    const AxisLerp<float> ay = axis_lerp(y, grid.rows, Address::clamp), ax = axis_lerp(x, grid.columns, Address::clamp);
    const int64_t top = direction * grid.nodes() + static_cast<int64_t>(ay.i0) * grid.columns,
                  bottom = direction * grid.nodes() + static_cast<int64_t>(ay.i1) * grid.columns;
    near_y = ay.w1 > ay.w0 ? ay.i1 : ay.i0, near_x = ax.w1 > ax.w0 ? ax.i1 : ax.i0;
    at[0] = top + ax.i0, at[1] = top + ax.i1, at[2] = bottom + ax.i0, at[3] = bottom + ax.i1;
    weight[0] = ay.w0 * ax.w0, weight[1] = ay.w0 * ax.w1, weight[2] = ay.w1 * ax.w0, weight[3] = ay.w1 * ax.w1;
  }
  TEXVLM_HD float of(const float* plane) const {
    return (weight[0] * plane[at[0]] + weight[1] * plane[at[1]]) + (weight[2] * plane[at[2]] + weight[3] * plane[at[3]]);
  }
};

// The search of one node: begins at the coarser level's flow there, or at that of one of its nodes around if it fits better.
template <class T, int C>
struct FlowSearch {
  TextureView<const T> luma;
  int level, stride;
  int64_t batch;
  const float* contrast;  // [2 B]
  FlowFound out;
  FlowGrid coarse;           // of the level before, of this one's last turn, or what is given; u is null where there is none
  float coarse_y, coarse_x;  // from pixels of this level to units of the coarser grid in [0, 1]
  float scale_y, scale_x;    // from pixels of the coarser level to pixels of this one
  bool given;                // what is given may be wrong: that nothing moves is a candidate too

  TEXVLM_HD LumaLevel picture(int64_t b) const {
    return {luma.texel(b, level, 0, 0), static_cast<int>(luma.levels.height[level]), static_cast<int>(luma.levels.width[level])};
  }

  // What turns the template's contrast into the target's.
  TEXVLM_HD static float gain(float target, float from) {
    return target > from * kMostGain ? kMostGain : from > target * kMostGain ? 1.f / kMostGain : from > 0.f ? target / from : 1.f;
  }

  TEXVLM_HD void operator()(int64_t direction, int64_t n, int64_t, int64_t) const {
    const int i = static_cast<int>(n / out.columns), j = static_cast<int>(n - static_cast<int64_t>(i) * out.columns);
    const LumaLevel target = picture(direction);
    // Inside the picture, where it is large enough: a patch of replicated border matches anything.
    const int y = maximum(minimum(i * stride + stride / 2 - kPatch / 2, target.height - kPatch), 0),
              x = maximum(minimum(j * stride + stride / 2 - kPatch / 2, target.width - kPatch), 0);
    const int64_t from = direction < batch ? direction + batch : direction - batch;
    const FlowPatch patch(picture(from), y, x, gain(contrast[direction], contrast[from]));
    const float xx = patch.xx + kLeastCurvature, yy = patch.yy + kLeastCurvature, xy = patch.xy,
                scale = 1.f / (xx * yy - xy * xy);

    const auto fit_at = [&](float u, float v) {
      return FlowFit(patch, target, static_cast<float>(y) + v, static_cast<float>(x) + u);
    };
    float u = 0.f, v = 0.f;
    FlowFit fit{};
    bool fitted = false;  // fit is that of (u, v)
    if (coarse.u) {
      const FlowPlace place(coarse, direction, (static_cast<float>(i) + 0.5f) * static_cast<float>(stride) * coarse_y,
                            (static_cast<float>(j) + 0.5f) * static_cast<float>(stride) * coarse_x);
      u = place.of(coarse.u) * scale_x, v = place.of(coarse.v) * scale_y;
      const float first_u = u, first_v = v;
      const int64_t first = direction * coarse.nodes();
      for (int k = 1; k < (given ? 11 : 9); k += 2) {  // above, left, right, below; still
        const int ci = clamp(place.near_y + k / 3 - 1, 0, coarse.rows - 1),
                  cj = clamp(place.near_x + k % 3 - 1, 0, coarse.columns - 1);
        const int64_t c = first + static_cast<int64_t>(ci) * coarse.columns + cj;
        const float cu = k < 9 ? coarse.u[c] * scale_x : 0.f, cv = k < 9 ? coarse.v[c] * scale_y : 0.f;
        if ((cu - first_u) * (cu - first_u) + (cv - first_v) * (cv - first_v) < kApart * kApart) continue;
        if ((cu - u) * (cu - u) + (cv - v) * (cv - v) < kApart * kApart) continue;
        if (!fitted) fit = fit_at(u, v), fitted = true;
        const FlowFit tried = fit_at(cu, cv);
        if (tried.error < fit.error) fit = tried, u = cu, v = cv;
      }
    }
    const float u0 = u, v0 = v;
    float best_u = u, best_v = v, least = 3e38f;
    for (int step = 0; step < kMostSteps; ++step) {
      if (step > 0 || !fitted) fit = fit_at(u, v);
      if (!(fit.error < least)) break;
      least = fit.error, best_u = u, best_v = v;
      const float du = (yy * fit.bx - xy * fit.by) * scale, dv = (xx * fit.by - xy * fit.bx) * scale;
      const float nu = u - du, nv = v - dv;
      if ((nu - u0) * (nu - u0) + (nv - v0) * (nv - v0) > kSearchRadius * kSearchRadius) break;
      u = nu, v = nv;
      if (du * du + dv * dv < kStillStep * kStillStep) {  // so short that it needs no check
        best_u = u, best_v = v;
        break;
      }
    }
    const int64_t at = direction * out.nodes() + n;
    const float precision = 1.f / (least * (1.f / (kPatch * kPatch)) + kNoise);
    out.u[at] = best_u, out.v[at] = best_v;
    out.xx[at] = patch.xx * precision, out.xy[at] = patch.xy * precision, out.yy[at] = patch.yy * precision;
  }
};

struct FlowVector {
  float u, v;
};

// One Jacobi step towards the nodes' flows that minimise
//   sum_p (u_p - s_p)' P_p (u_p - s_p) + smoothness sum_pq sqrt(|u_p - u_q|^2 + softness^2)
// where s and P are what the search found and pq are neighbours in the grid: a node without texture, or one whose patch did not
// fit, takes its flow from those around it; a node on an edge does so along the edge alone.
template <class T, int C>
struct FlowSmooth {
  FlowFound found;
  const float *from_u, *from_v;
  float *to_u, *to_v;
  float smoothness, softness;

  // A neighbour that does not exist (distance 0) pulls with no effect but to hold the node where it is.
  TEXVLM_HD float pull(float du, float dv) const { return smoothness / std::sqrt(du * du + dv * dv + softness * softness); }

  // The node at `at` of what was found, which lies in `u`, `v` at `own`, its neighbours at these distances from there.
  TEXVLM_HD FlowVector solved(int64_t at, const float* u, const float* v, int64_t own, int64_t up, int64_t down, int64_t left,
                              int64_t right) const {
    const float u0 = u[own], v0 = v[own];
    const float uu = u[own - up], vu = v[own - up], ud = u[own + down], vd = v[own + down];
    const float ul = u[own - left], vl = v[own - left], ur = u[own + right], vr = v[own + right];
    const float wu = pull(uu - u0, vu - v0), wd = pull(ud - u0, vd - v0), wl = pull(ul - u0, vl - v0),
                wr = pull(ur - u0, vr - v0);
    const float w = (wu + wd) + (wl + wr);
    const float su = (wu * uu + wd * ud) + (wl * ul + wr * ur), sv = (wu * vu + wd * vd) + (wl * vl + wr * vr);
    const float pxx = found.xx[at], pxy = found.xy[at], pyy = found.yy[at], fu = found.u[at], fv = found.v[at];
    const float bx = pxx * fu + pxy * fv + su, by = pxy * fu + pyy * fv + sv;
    const float xx = pxx + w, yy = pyy + w, scale = 1.f / (xx * yy - pxy * pxy);
    return {(yy * bx - pxy * by) * scale, (xx * by - pxy * bx) * scale};
  }
  TEXVLM_HD void solve(int64_t at, int64_t up, int64_t down, int64_t left, int64_t right) const {
    const FlowVector flow = solved(at, from_u, from_v, at, up, down, left, right);
    to_u[at] = flow.u, to_v[at] = flow.v;
  }
  TEXVLM_HD void operator()(int64_t d, int64_t y, int64_t x, int64_t, int64_t) const {
    const int64_t n = found.columns;
    solve(d * found.nodes() + y * n + x, y > 0 ? n : 0, y + 1 < found.rows ? n : 0, x > 0, x + 1 < n);
  }
  TEXVLM_HD void row(int64_t d, int64_t y, int64_t x0, int64_t x1) const {
    const int64_t n = found.columns, first = d * found.nodes() + y * n;
    const int64_t up = y > 0 ? n : 0, down = y + 1 < found.rows ? n : 0;
    const Inside in = inside(x0, x1, 1, n);
    for (int64_t x = x0; x < in.begin; ++x) (*this)(d, y, x, 0, 1);
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC ivdep  // no plane that is written is read
#endif
    for (int64_t x = in.begin; x < in.end; ++x) solve(first + x, up, down, 1, 1);
    for (int64_t x = in.end; x < x1; ++x) (*this)(d, y, x, 0, 1);
  }
};

// What is given as the flow of B directions, as nodes of 2 B: backwards it is the opposite, at the same place. What is not finite
// is 0, and nothing comes from farther than a picture.
template <class T, int C>
struct FlowGiven {
  ImageView<const T> flow;
  T *u, *v;
  int64_t batch, height, width;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const T fx = flow.at(b, 0, y, x), fy = flow.at(b, 1, y, x), h = static_cast<T>(height), w = static_cast<T>(width);
    const bool known = finite(fx) && finite(fy);
    const int64_t here = (b * height + y) * width + x, back = ((b + batch) * height + y) * width + x;
    u[here] = known ? clamp(fx, -w, w) : T(0), v[here] = known ? clamp(fy, -h, h) : T(0);
    u[back] = -u[here], v[back] = -v[here];
  }
};

// Luma of a picture into level 0 of picture `first` + b of a texture.
template <class S>
struct FlowLuma {
  template <class T, int C>
  struct For {
    ImageView<const S> image;
    TextureView<T> out;
    int64_t first;

    template <int N>
    TEXVLM_HD void pixels(int64_t b, int64_t y, int64_t x, int n) const {
      luma_run(image, b, y, x, n, out.texel(first + b, 0, y, x));
    }
  };
};

// The flow of every pixel [B, 2, H, W], between the four nodes around it.
template <class T, int C>
struct FlowDense {
  FlowGrid grid;
  float scale_y, scale_x;  // from pixels of the grid's level to pixels
  float* out;
  int64_t height, width;
  float grid_y, grid_x;  // from pixels to units of the grid in [0, 1]

  TEXVLM_HD float* plane(int64_t b, int c, int64_t y) const { return out + ((b * 2 + c) * height + y) * width; }
  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const auto ay = axis_lerp((static_cast<float>(y) + 0.5f) * grid_y, grid.rows, Address::clamp);
    const auto ax = axis_lerp((static_cast<float>(x) + 0.5f) * grid_x, grid.columns, Address::clamp);
    const int64_t top = b * grid.nodes() + static_cast<int64_t>(ay.i0) * grid.columns,
                  bottom = b * grid.nodes() + static_cast<int64_t>(ay.i1) * grid.columns;
    const auto blend = [&](const float* p) {
      return ax.w0 * (ay.w0 * p[top + ax.i0] + ay.w1 * p[bottom + ax.i0]) +
             ax.w1 * (ay.w0 * p[top + ax.i1] + ay.w1 * p[bottom + ax.i1]);
    };
    plane(b, 0, y)[x] = blend(grid.u) * scale_x;
    plane(b, 1, y)[x] = blend(grid.v) * scale_y;
  }

  int64_t scratch_bytes() const { return 2 * grid.columns * static_cast<int64_t>(sizeof(float)); }
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1, void* scratch) const {
    const auto ay = axis_lerp((static_cast<float>(y) + 0.5f) * grid_y, grid.rows, Address::clamp);
    const int64_t top = b * grid.nodes() + static_cast<int64_t>(ay.i0) * grid.columns,
                  bottom = b * grid.nodes() + static_cast<int64_t>(ay.i1) * grid.columns;
    float *TEXVLM_RESTRICT u = static_cast<float*>(scratch), *TEXVLM_RESTRICT v = u + grid.columns;
    for (int j = 0; j < grid.columns; ++j) {
      u[j] = ay.w0 * grid.u[top + j] + ay.w1 * grid.u[bottom + j];
      v[j] = ay.w0 * grid.v[top + j] + ay.w1 * grid.v[bottom + j];
    }
    float *TEXVLM_RESTRICT to_u = plane(b, 0, y), *TEXVLM_RESTRICT to_v = plane(b, 1, y);
    for (int64_t x = x0; x < x1; ++x) {
      const auto ax = axis_lerp((static_cast<float>(x) + 0.5f) * grid_x, grid.columns, Address::clamp);
      to_u[x] = (ax.w0 * u[ax.i0] + ax.w1 * u[ax.i1]) * scale_x;
      to_v[x] = (ax.w0 * v[ax.i0] + ax.w1 * v[ax.i1]) * scale_y;
    }
  }
};

// Where the current picture shows what the previous one does not: the flow there and the flow back do not cancel out, or it leads
// outside. One test for each block of pixels, at its centre: between the nodes the flow is bilinear.
template <class T, int C>
struct FlowOcclusion {
  FlowGrid grid;
  int64_t batch, height, width, block;
  float scale_y, scale_x, grid_y, grid_x;  // as in FlowDense
  bool* out;

  TEXVLM_HD bool occluded(int64_t b, float y, float x) const {
    const FlowPlace here(grid, b, y * grid_y, x * grid_x);
    const float u = here.of(grid.u) * scale_x, v = here.of(grid.v) * scale_y, to_y = y + v, to_x = x + u;
    const FlowPlace there(grid, batch + b, to_y * grid_y, to_x * grid_x);
    const float bu = there.of(grid.u) * scale_x, bv = there.of(grid.v) * scale_y;
    const float gap = (u + bu) * (u + bu) + (v + bv) * (v + bv);
    const bool outside = (to_y < 0.f) | (to_x < 0.f) | (to_y > static_cast<float>(height)) | (to_x > static_cast<float>(width));
    return outside | (gap > kOcclusionShare * ((u * u + v * v) + (bu * bu + bv * bv)) + kOcclusionFloor);
  }
  // y, x number blocks.
  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const int64_t y0 = y * block, x0 = x * block;
    const int64_t y1 = minimum(y0 + block, height), x1 = minimum(x0 + block, width);
    const bool value = occluded(b, static_cast<float>(y0 + y1) * 0.5f, static_cast<float>(x0 + x1) * 0.5f);
    for (int64_t i = y0; i < y1; ++i)
      for (int64_t j = x0; j < x1; ++j) out[(b * height + i) * width + j] = value;
  }
};

}  // namespace texvlm
