// Queries with their channels across lanes: a block takes `queries` queries, `lanes` threads each, W neighbouring channels a
// thread at a time. What a query needs is computed once, by one thread, and lies in shared memory for its lanes.
#pragma once

#include "../math/sample_adjoint.h"
#include "scatter.cuh"

namespace texvlm::cuda {

constexpr int kMostQueries = 64;  // of a block

struct QueryShape {
  int lanes, queries;

  static QueryShape of(int64_t channels, int width) {
    const int lanes = static_cast<int>(minimum<int64_t>(kThreads, ceil_div(channels, width)));
    return {lanes, minimum(kMostQueries, kThreads / lanes)};
  }
  unsigned threads() const { return static_cast<unsigned>(ceil_div(lanes * queries, kLanes) * kLanes); }
  dim3 grid(int64_t all) const { return dim3(at_most(ceil_div(all, queries), 1 << 20)); }
};

// body(std::integral_constant<int, W>): four channels at a time where the texels are aligned so.
template <class T, class Body>
void with_width(int64_t channels, bool aligned, const Body& body) {
  if (channels % 4 == 0 && aligned) return body(std::integral_constant<int, 4>{});
  body(std::integral_constant<int, 1>{});
}

namespace {

// The four texels of a bilinear fetch, W channels of each.
template <int W, class A, class T>
__device__ void load_corners(const T* texels, int64_t channels, const Bilinear<A>& q, Corners<A> (&to)[W]) {
  using P = const Pack<T, W>*;
  const Pack<T, W> p00 = *reinterpret_cast<P>(texels + q.t00 * channels), p01 = *reinterpret_cast<P>(texels + q.t01 * channels);
  const Pack<T, W> p10 = *reinterpret_cast<P>(texels + q.t10 * channels), p11 = *reinterpret_cast<P>(texels + q.t11 * channels);
#pragma unroll
  for (int w = 0; w < W; ++w)
    to[w] = {static_cast<A>(p00.v[w]), static_cast<A>(p01.v[w]), static_cast<A>(p10.v[w]), static_cast<A>(p11.v[w])};
}

// fetch() of W channels, by settled taps.
template <int W, class A, class T>
__device__ void fetch_pack(const T* texels, int64_t channels, const LodTaps<A>& q, A (&to)[W]) {
  Corners<A> near[W], far[W];
  load_corners(texels, channels, q.near, near);
  const A t = q.level.t;
  if (t != A(0)) load_corners(texels, channels, q.far, far);
#pragma unroll
  for (int w = 0; w < W; ++w) {
    to[w] = q.near.outside() ? A(0) : blend(near[w], q.near);
    if (t != A(0)) to[w] = (A(1) - t) * to[w] + t * (q.far.outside() ? A(0) : blend(far[w], q.far));
  }
}

// Adjoint of a blend: weight times g to the four texels, nothing where the weight is 0. All lanes of the warp call it.
template <int W, class A, class Sink>
__device__ void scatter_packs(const Sink& sink, int64_t at, int64_t channels, const Bilinear<A>& q, bool live, A share,
                              const A (&g)[W]) {
  const int64_t texel[4] = {q.t00, q.t01, q.t10, q.t11};
  const A weight[4] = {q.y.w0 * q.x.w0, q.y.w0 * q.x.w1, q.y.w1 * q.x.w0, q.y.w1 * q.x.w1};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    A value[W];
#pragma unroll
    for (int w = 0; w < W; ++w) value[w] = weight[k] * (share * g[w]);
    sink.add(live && weight[k] != A(0), at + texel[k] * channels, value);
  }
}

// W channels of an incoming gradient; zero where there is no gradient to give: false then.
template <int W, class A, class T>
__device__ bool load_gradient(const T* g, int64_t stride, int64_t c, const Reducers& reducers, A (&to)[W]) {
  bool any = false;
#pragma unroll
  for (int w = 0; w < W; ++w) {
    to[w] = reducers.any_mode && reducers.of(c + w) == Reducer::mode ? A(0) : static_cast<A>(g[(c + w) * stride]);
    any = any || to[w] != A(0);
  }
  return any;
}

// add_products() of W channels from `c` on; g: their incoming gradient.
template <int W, class A, class T>
__device__ void add_level(const T* texels, int64_t c, int64_t channels, const Bilinear<A>& q, const A (&g)[W],
                          const Reducers& reducers, Corners<A>& sums) {
  Corners<A> corner[W];
  load_corners(texels + c, channels, q, corner);
#pragma unroll
  for (int w = 0; w < W; ++w)
    if (!(reducers.any_mode && reducers.of(c + w) == Reducer::mode)) add_products(sums, g[w], corner[w]);
}

// Sum over the lanes of query `q`, in their order.
template <class A>
__device__ A sum_of_lanes(const A* partial, int lanes, int q) {
  A sum = 0;
  for (int s = 0; s < lanes; ++s) sum += partial[q * lanes + s];
  return sum;
}

}  // namespace
}  // namespace texvlm::cuda
