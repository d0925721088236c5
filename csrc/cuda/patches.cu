// Patches and their adjoint: a thread per sample, samples of a patch across lanes.
//
// Forward: the taps of a sample once for all channels, W channels of each texel at once, and the planes [C, size, size] written
// whole cache lines at a time. Adjoint: the incoming planes read so, texels added to, and what the patch's centre, LOD and axes
// receive summed by the block in a fixed order.
// Bytes moved: the planes once; texels from the caches, as neighbouring samples share them.
#include "patches.h"

#include "lanes.cuh"

namespace texvlm::cuda {
namespace {

constexpr int64_t kPatchChannels = 16;  // of a block, where more blocks are wanted

template <class T, int W>
__global__ void __launch_bounds__(kThreads) patches_kernel(ExtractPatches<T, 0> f, int64_t all, int64_t parts) {
  using A = Acc<T>;
  const int64_t plane = f.plane(), channels = f.texture.channels;
  const int64_t c0 = blockIdx.y * kPatchChannels, c1 = minimum(channels, c0 + kPatchChannels);
  for (int64_t i = blockIdx.x; i < all * parts; i += gridDim.x) {
    const int64_t q = i / parts, k = (i - q * parts) * kThreads + threadIdx.x;
    if (k >= plane) continue;
    const int64_t b = q / f.grid.count, n = q - b * f.grid.count;
    const PatchFrame<A> frame = f.grid.frame(b, n);
    const int row = static_cast<int>(k / f.grid.size), column = static_cast<int>(k % f.grid.size);
    const PatchPoint<A> p = f.grid.point(frame, row, column);
    T* out = f.patch(b, n) + k;
    if (!frame.usable || !finite(p.u) || !finite(p.v)) {
      for (int64_t c = c0; c < c1; ++c) out[c * plane] = not_a_number<T>();
      continue;
    }
    const T* texels = f.texture.texel(b, 0, 0, 0);
    const LodTaps<A> taps = f.grid.settled_taps(frame, p, row, column, f.texture.levels);
    for (int64_t c = c0; c < c1; c += W) {
      A value[W];
      fetch_pack(texels + c, channels, taps, value);
#pragma unroll
      for (int w = 0; w < W; ++w) out[(c + w) * plane] = static_cast<T>(value[w]);
    }
    if (f.reducers.any_mode) f.nearest(texels, frame, p.u, p.v, out, c0, c1);
  }
}

template <class T, int W, class Sink>
__global__ void __launch_bounds__(kThreads)
    patches_adjoint_kernel(ExtractPatchesAdjoint<T, 0> f, Sink sink, int64_t all, int64_t parts, int64_t part_channels) {
  using A = Acc<T>;
  const int64_t plane = static_cast<int64_t>(f.grid.size) * f.grid.size, channels = f.texture.channels;
  const int64_t c0 = blockIdx.y * part_channels, c1 = minimum(channels, c0 + part_channels);
  sink.start();
  const bool framed = f.center || f.lod || f.axes;
  for (int64_t i = blockIdx.x; i < all * parts; i += gridDim.x) {
    const int64_t patch = i / parts, part = i - patch * parts, b = patch / f.grid.count, n = patch - b * f.grid.count;
    const PatchFrame<A> frame = f.grid.frame(b, n);
    if (!frame.usable) continue;  // the whole block
    const A t = frame.level.t, share = A(1) - t;
    const bool both = f.needs_coarse(frame);
    const T* in = f.texture.texel(b, 0, 0, 0);
    PatchFrameGrad<A> sum{};
    // Where the frame wants a gradient, one block goes through all samples of the patch.
    for (int64_t first = part * kThreads; first < plane; first += parts * kThreads) {
      const int64_t k = first + threadIdx.x < plane ? first + threadIdx.x : plane - 1;
      const int row = static_cast<int>(k / f.grid.size), column = static_cast<int>(k % f.grid.size);
      const PatchPoint<A> p = f.grid.point(frame, row, column);
      const bool here = first + threadIdx.x < plane && finite(p.u) && finite(p.v);
      const PatchPoint<A> at = here ? p : PatchPoint<A>{};
      const Bilinear<A> fine = f.grid.taps(frame, at, row, column, f.texture.levels, frame.level.l0);
      const Bilinear<A> coarse = both ? f.grid.taps(frame, at, row, column, f.texture.levels, frame.level.l1) : fine;
      const T* g = f.grad.at(b, n, row, column);
      Corners<A> near{}, far{};  // sums over the channels
      for (int64_t c = c0; c < c1; c += W) {
        A gc[W] = {};
        const bool live = here && load_gradient(g, f.grad.stride[2], c, f.reducers, gc);
        if (f.texels.data) {
          const int64_t at = b * f.texels.batch_stride + c;
          scatter_packs(sink, at, channels, fine, live, share, gc);
          if (t != A(0)) scatter_packs(sink, at, channels, coarse, live, t, gc);
        }
        if (!framed || !here) continue;
        add_level(in, c, channels, fine, gc, f.reducers, near);
        if (both) add_level(in, c, channels, coarse, gc, f.reducers, far);
      }
      if (framed && here) f.add_sample(frame, p, place_grad({frame.level, fine, coarse}, near, far, f.texture.levels), sum);
    }
    if (!framed) continue;
    const A total[7] = {block_sum(sum.u),       block_sum(sum.v),       block_sum(sum.lod),    block_sum(sum.axes[0]),
                        block_sum(sum.axes[1]), block_sum(sum.axes[2]), block_sum(sum.axes[3])};
    if (threadIdx.x != 0) continue;
    if (f.center) f.center[2 * patch] = total[0], f.center[2 * patch + 1] = total[1];
    if (f.lod) f.lod[patch] = total[2];
    for (int k = 0; k < 4 && f.axes; ++k) f.axes[4 * patch + k] = total[3 + k];
  }
}

}  // namespace

template <class T>
void patches(const ExtractPatches<T, 0>& f, int64_t batch, void* stream) {
  const int64_t all = batch * f.grid.count, channels = f.texture.channels, parts = ceil_div(f.plane(), kThreads);
  if (all <= 0 || channels <= 0) return;
  const dim3 grid(at_most(all * parts, INT32_MAX), static_cast<unsigned>(ceil_div(channels, kPatchChannels)));
  with_width<T>(channels, packs<4>(f.texture.data),
                [&](auto width) { launch(patches_kernel<T, decltype(width)::value>, grid, kThreads, 0, stream, f, all, parts); });
}

template <class T>
void patches_adjoint(const ExtractPatchesAdjoint<T, 0>& f, int64_t batch, const FixedPoint& fixed, void* stream) {
  using A = Acc<T>;
  const int64_t all = batch * f.grid.count, channels = f.texture.channels;
  if (all <= 0 || channels <= 0) return;
  const bool framed = f.center || f.lod || f.axes;
  const int64_t parts = framed ? 1 : ceil_div(static_cast<int64_t>(f.grid.size) * f.grid.size, kThreads);
  const int64_t part_channels = framed ? channels : kPatchChannels;
  const dim3 grid(at_most(all * parts, INT32_MAX), static_cast<unsigned>(ceil_div(channels, part_channels)));
  with_width<T>(channels, packs<4>(f.texture.data) && packs<4>(f.texels.data), [&](auto width) {
    constexpr int W = decltype(width)::value;
    if (fixed.sums) {
      launch(patches_adjoint_kernel<T, W, FixedSink<A>>, grid, kThreads, 0, stream, f, FixedSink<A>{f.texels.data, fixed, 0}, all,
             parts, part_channels);
    } else {
      launch(patches_adjoint_kernel<T, W, FloatSink<A>>, grid, kThreads, 0, stream, f, FloatSink<A>{f.texels.data}, all, parts,
             part_channels);
    }
  });
}

#define TEXVLM_PATCHES(T)                                                \
  template void patches<T>(const ExtractPatches<T, 0>&, int64_t, void*); \
  template void patches_adjoint<T>(const ExtractPatchesAdjoint<T, 0>&, int64_t, const FixedPoint&, void*)
TEXVLM_PATCHES(float);
TEXVLM_PATCHES(double);
TEXVLM_PATCHES(Half);
TEXVLM_PATCHES(BFloat16);

}  // namespace texvlm::cuda
