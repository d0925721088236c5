// The adjoint of anisotropic sampling: channels across lanes as in sample.cu, tap after tap of all queries of a block together.
// Bytes moved: per tap 8 texels in where coordinates want a gradient, and 8 texels added to; zeros are not added.
#include "footprint.h"

#include "lanes.cuh"

namespace texvlm::cuda {
namespace {

template <class T, int W, class Sink>
__global__ void __launch_bounds__(kThreads)
    sample_grad_adjoint_kernel(SampleGradAdjoint<T, 0> f, Sink sink, int64_t all, QueryShape shape) {
  using A = Acc<T>;
  TEXVLM_SHARED(footprints, Footprint<A>[kMostQueries]);
  TEXVLM_SHARED(taps, LodTaps<A>[kMostQueries]);
  TEXVLM_SHARED(along, Tap<A>[kMostQueries]);
  TEXVLM_SHARED(partial, A[5][kThreads]);
  const int me = static_cast<int>(threadIdx.x), q = me / shape.lanes, s = me - q * shape.lanes;
  const int64_t channels = f.texture.channels;
  sink.start();
  const Levels& levels = f.texture.levels;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * shape.queries; first < all;
       first += static_cast<int64_t>(gridDim.x) * shape.queries) {
    for (int i = me; i < shape.queries; i += static_cast<int>(blockDim.x)) {
      footprints[i].taps = 0;
      if (first + i >= all) continue;
      const int64_t b = (first + i) / f.count, n = first + i - b * f.count;
      footprints[i] = f.queries.footprint(b, n, levels, f.max_anisotropy);
      if (!(footprints[i].finite && finite(f.queries.u(b, n)) && finite(f.queries.v(b, n)))) footprints[i].taps = 0;
    }
    __syncthreads();
    const int taps_here = q < shape.queries ? footprints[q].taps : 0;
    const int64_t query = first + (taps_here > 0 ? q : 0), b = query / f.count, n = query - b * f.count;
    const T* texels = f.texture.data + b * f.texture.batch_stride;
    const T* g = f.grad.data + b * f.grad.stride_b + n * f.grad.stride_n;
    const A each = taps_here > 0 ? A(1) / static_cast<A>(taps_here) : A(0);
    FootprintSums<A> sums{};
    for (int i = 0; __syncthreads_or(i < taps_here); ++i) {
      for (int k = me; k < shape.queries; k += static_cast<int>(blockDim.x)) {
        if (i >= footprints[k].taps) continue;
        const int64_t own_b = (first + k) / f.count, own_n = first + k - own_b * f.count;
        along[k] = tap_of(line_of(footprints[k], f.queries.u(own_b, own_n), f.queries.v(own_b, own_n), levels), i);
        taps[k] = lod_taps(along[k].u, along[k].v, footprints[k].lod, levels, Filter::trilinear, f.address);
      }
      __syncthreads();
      const bool mine = i < taps_here;
      const LodTaps<A>& tap = taps[mine ? q : 0];
      const A t = mine ? tap.level.t : A(0);
      const bool two = mine && tap.level.l1 != tap.level.l0;
      Corners<A> near{}, far{};
      for (int64_t c0 = 0; c0 < channels; c0 += static_cast<int64_t>(shape.lanes) * W) {  // as many times in all lanes
        const int64_t c = c0 + static_cast<int64_t>(s) * W;
        const bool here = mine && c < channels;
        A gc[W] = {};
        const bool live = here && load_gradient(g, f.grad.stride_c, c, f.reducers, gc);
#pragma unroll
        for (int w = 0; w < W; ++w) gc[w] = each * gc[w];
        if (here && f.coordinates()) {
          add_level(texels, c, channels, tap.near, gc, f.reducers, near);
          if (two) add_level(texels, c, channels, tap.far, gc, f.reducers, far);
        }
        if (!f.grad_data) continue;
        const int64_t at = b * f.texture.batch_stride + c;
        const Bilinear<A> none{};
        scatter_packs(sink, at, channels, here ? tap.near : none, live, A(1) - t, gc);
        if (__any_sync(kAllLanes, t != A(0))) scatter_packs(sink, at, channels, here ? tap.far : none, live && t != A(0), t, gc);
      }
      if (mine && f.coordinates()) sums.add(along[q].along, place_grad(tap, near, far, levels));
      __syncthreads();
    }
    if (f.coordinates()) {
      const A own[5] = {sums.u, sums.v, sums.axis_u, sums.axis_v, sums.lod};
#pragma unroll
      for (int k = 0; k < 5; ++k) partial[k][me] = own[k];
      __syncthreads();
      for (int i = me; i < shape.queries && first + i < all; i += static_cast<int>(blockDim.x)) {
        if (footprints[i].taps == 0) continue;
        const int64_t own_b = (first + i) / f.count, own_n = first + i - own_b * f.count;
        f.finish(own_b, own_n, footprints[i],
                 {sum_of_lanes(partial[0], shape.lanes, i), sum_of_lanes(partial[1], shape.lanes, i),
                  sum_of_lanes(partial[2], shape.lanes, i), sum_of_lanes(partial[3], shape.lanes, i),
                  sum_of_lanes(partial[4], shape.lanes, i)});
      }
    }
    __syncthreads();
  }
}

}  // namespace

template <class T>
void sample_grad_adjoint(const SampleGradAdjoint<T, 0>& f, int64_t batch, const FixedPoint& fixed, void* stream) {
  using A = Acc<T>;
  const int64_t channels = f.texture.channels, all = batch * f.count;
  if (all <= 0 || channels <= 0 || !(f.grad_data || f.coordinates())) return;
  with_width<T>(channels, packs<4>(f.texture.data) && packs<4>(f.grad_data), [&](auto width) {
    constexpr int W = decltype(width)::value;
    const QueryShape shape = QueryShape::of(channels, W);
    if (fixed.sums) {
      launch(sample_grad_adjoint_kernel<T, W, FixedSink<A>>, shape.grid(all), shape.threads(), 0, stream, f,
             FixedSink<A>{f.grad_data, fixed, 0}, all, shape);
    } else {
      launch(sample_grad_adjoint_kernel<T, W, FloatSink<A>>, shape.grid(all), shape.threads(), 0, stream, f,
             FloatSink<A>{f.grad_data}, all, shape);
    }
  });
}

#define TEXVLM_SAMPLE_GRAD(T) \
  template void sample_grad_adjoint<T>(const SampleGradAdjoint<T, 0>&, int64_t, const FixedPoint&, void*)
TEXVLM_SAMPLE_GRAD(float);
TEXVLM_SAMPLE_GRAD(double);
TEXVLM_SAMPLE_GRAD(Half);
TEXVLM_SAMPLE_GRAD(BFloat16);

TEXVLM_FOR_TEXEL_TYPES(TEXVLM_QUERIES, SampleGrad);

}  // namespace texvlm::cuda
