// Sampling at an explicit level of detail, and its adjoint.
//
// Forward, more than 4 channels: 8 texels of a query in (two levels of four, most of them from the caches), its channels out.
// Adjoint: the same 8 texels and the incoming gradient in where uv or lod want a gradient, 8 texels added to; zeros are not
// added. Up to 4 channels a thread per query is as good: it reads whole texels, and nothing is computed twice.
#include "sample.h"

#include "lanes.cuh"

namespace texvlm::cuda {
namespace {

template <class T, int W>
__global__ void __launch_bounds__(kThreads) sample_kernel(SampleLod<T, 0> f, int64_t all, QueryShape shape) {
  using A = Acc<T>;
  TEXVLM_SHARED(taps, LodTaps<A>[kMostQueries]);
  TEXVLM_SHARED(nearest, int64_t[kMostQueries]);
  TEXVLM_SHARED(usable, bool[kMostQueries]);
  const int me = static_cast<int>(threadIdx.x), q = me / shape.lanes, s = me - q * shape.lanes;
  const int64_t channels = f.texture.channels;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * shape.queries; first < all;
       first += static_cast<int64_t>(gridDim.x) * shape.queries) {
    for (int i = me; i < shape.queries && first + i < all; i += static_cast<int>(blockDim.x)) {
      const int64_t b = (first + i) / f.count, n = first + i - b * f.count;
      const A u = f.queries.u(b, n), v = f.queries.v(b, n), lod = f.queries.level(b, n);
      usable[i] = finite(u) && finite(v) && finite(lod);
      if (!usable[i]) continue;
      taps[i] = ExactTaps::at(u, v, lod, f.texture.levels, f.filter, f.address);
      if (f.filter == Filter::nearest || f.reducers.any_mode) nearest[i] = nearest_texel(u, v, lod, f.texture.levels, f.address);
    }
    __syncthreads();
    if (q < shape.queries && first + q < all) {
      const int64_t b = (first + q) / f.count;
      const T* texels = f.texture.data + b * f.texture.batch_stride;
      for (int64_t c = static_cast<int64_t>(s) * W; c < channels; c += static_cast<int64_t>(shape.lanes) * W) {
        Pack<T, W> value;
        if (!usable[q]) {
#pragma unroll
          for (int w = 0; w < W; ++w) value.v[w] = not_a_number<T>();
        } else {
          if (f.filter != Filter::nearest) {
            A sum[W];
            fetch_pack(texels + c, channels, taps[q], sum);
#pragma unroll
            for (int w = 0; w < W; ++w) value.v[w] = static_cast<T>(sum[w]);
          }
          if (f.filter == Filter::nearest || f.reducers.any_mode) {
#pragma unroll
            for (int w = 0; w < W; ++w)
              if (f.filter == Filter::nearest || f.reducers.of(c + w) == Reducer::mode)
                value.v[w] = nearest[q] < 0 ? static_cast<T>(A(0)) : texels[nearest[q] * channels + c + w];
          }
        }
        *reinterpret_cast<Pack<T, W>*>(f.out + (first + q) * channels + c) = value;
      }
    }
    __syncthreads();
  }
}

template <class T, int W, class Sink>
__global__ void __launch_bounds__(kThreads)
    sample_adjoint_kernel(SampleLodAdjoint<T, 0> f, Sink sink, int64_t all, QueryShape shape) {
  using A = Acc<T>;
  TEXVLM_SHARED(taps, LodTaps<A>[kMostQueries]);
  TEXVLM_SHARED(nearest, int64_t[kMostQueries]);
  TEXVLM_SHARED(usable, bool[kMostQueries]);
  TEXVLM_SHARED(partial, A[3][kThreads]);
  const int me = static_cast<int>(threadIdx.x), q = me / shape.lanes, s = me - q * shape.lanes;
  const int64_t channels = f.texture.channels;
  sink.start();
  const bool whole = f.filter == Filter::nearest, coordinates = f.grad_uv || f.grad_lod;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * shape.queries; first < all;
       first += static_cast<int64_t>(gridDim.x) * shape.queries) {
    for (int i = me; i < shape.queries; i += static_cast<int>(blockDim.x)) {
      usable[i] = false;
      if (first + i >= all) continue;
      const int64_t b = (first + i) / f.count, n = first + i - b * f.count;
      const A u = f.queries.u(b, n), v = f.queries.v(b, n), lod = f.queries.level(b, n);
      usable[i] = finite(u) && finite(v) && finite(lod);
      if (!usable[i]) continue;
      if (whole) {
        nearest[i] = nearest_texel(u, v, lod, f.texture.levels, f.address);
        usable[i] = nearest[i] >= 0;
      } else {
        taps[i] = lod_taps(u, v, lod, f.texture.levels, f.filter, f.address);
      }
    }
    __syncthreads();
    const bool mine = q < shape.queries && usable[q < shape.queries ? q : 0];
    const int64_t query = first + (mine ? q : 0), b = query / f.count, n = query - b * f.count;
    const T* texels = f.texture.data + b * f.texture.batch_stride;
    const T* g = f.grad.data + b * f.grad.stride_b + n * f.grad.stride_n;
    const LodTaps<A>& tap = taps[mine ? q : 0];
    const bool blended = mine && !whole && tap.level.t != A(0), slope = mine && f.grad_lod && tap.level.slope != A(0);
    Corners<A> near{}, far{};
    for (int64_t c0 = 0; c0 < channels; c0 += static_cast<int64_t>(shape.lanes) * W) {  // as many times in all lanes
      const int64_t c = c0 + static_cast<int64_t>(s) * W;
      const bool here = mine && c < channels;
      A gc[W] = {};
      const bool live = here && load_gradient(g, f.grad.stride_c, c, f.reducers, gc);
      if (here && coordinates) {
        add_level(texels, c, channels, tap.near, gc, f.reducers, near);
        if (blended || slope) add_level(texels, c, channels, tap.far, gc, f.reducers, far);
      }
      if (!f.grad_data) continue;
      const int64_t at = b * f.texture.batch_stride + c;
      if (whole) {
        sink.add(live, at + (here ? nearest[q] : 0) * channels, gc);
      } else {
        const A t = here ? tap.level.t : A(0);
        const Bilinear<A> none{};
        scatter_packs(sink, at, channels, here ? tap.near : none, live, A(1) - t, gc);
        if (__any_sync(kAllLanes, blended)) scatter_packs(sink, at, channels, here ? tap.far : none, live && blended, t, gc);
      }
    }
    if (coordinates) {
      const PlaceGrad<A> d = mine && !whole ? place_grad(tap, near, far, f.texture.levels) : PlaceGrad<A>{};
      partial[0][me] = d.u;
      partial[1][me] = d.v;
      partial[2][me] = slope ? d.lod : A(0);
      __syncthreads();
      for (int i = me; i < shape.queries && first + i < all; i += static_cast<int>(blockDim.x)) {
        if (!usable[i]) continue;
        if (f.grad_uv) {
          f.grad_uv[2 * (first + i)] = sum_of_lanes(partial[0], shape.lanes, i);
          f.grad_uv[2 * (first + i) + 1] = sum_of_lanes(partial[1], shape.lanes, i);
        }
        if (f.grad_lod) f.grad_lod[first + i] = sum_of_lanes(partial[2], shape.lanes, i);
      }
    }
    __syncthreads();
  }
}

}  // namespace

template <class T>
void sample(const SampleLod<T, 0>& f, int64_t batch, void* stream) {
  const int64_t channels = f.texture.channels, all = batch * f.count;
  if (all <= 0 || channels <= 0) return;
  if (channels <= 4) return launch_queries(f, batch, f.count, channels, stream);
  with_width<T>(channels, packs<4>(f.texture.data) && packs<4>(f.out), [&](auto width) {
    constexpr int W = decltype(width)::value;
    const QueryShape shape = QueryShape::of(channels, W);
    launch(sample_kernel<T, W>, shape.grid(all), shape.threads(), 0, stream, f, all, shape);
  });
}

template <class T>
void sample_adjoint(const SampleLodAdjoint<T, 0>& f, int64_t batch, const FixedPoint& fixed, void* stream) {
  using A = Acc<T>;
  const int64_t channels = f.texture.channels, all = batch * f.count;
  if (all <= 0 || channels <= 0) return;
  with_width<T>(channels, packs<4>(f.texture.data) && packs<4>(f.grad_data), [&](auto width) {
    constexpr int W = decltype(width)::value;
    const QueryShape shape = QueryShape::of(channels, W);
    if (fixed.sums) {
      launch(sample_adjoint_kernel<T, W, FixedSink<A>>, shape.grid(all), shape.threads(), 0, stream, f,
             FixedSink<A>{f.grad_data, fixed, 0}, all, shape);
    } else {
      launch(sample_adjoint_kernel<T, W, FloatSink<A>>, shape.grid(all), shape.threads(), 0, stream, f, FloatSink<A>{f.grad_data},
             all, shape);
    }
  });
}

#define TEXVLM_SAMPLE(T)                                           \
  template void sample<T>(const SampleLod<T, 0>&, int64_t, void*); \
  template void sample_adjoint<T>(const SampleLodAdjoint<T, 0>&, int64_t, const FixedPoint&, void*)
TEXVLM_SAMPLE(float);
TEXVLM_SAMPLE(double);
TEXVLM_SAMPLE(Half);
TEXVLM_SAMPLE(BFloat16);

}  // namespace texvlm::cuda
