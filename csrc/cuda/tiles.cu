// A block per tile and picture: it compares the tile, and stores it where it differs. Warps take rows of pixels, lanes what lies
// beside each other. Bytes moved: frame and stored frame once, and once more, from a cache, what differs; that is also written.
#include "tiles.h"

#include "scan.cuh"

namespace texvlm::cuda {
namespace {

constexpr int kWarps = kThreads / kLanes;

struct Area {
  int64_t b, y, x, height, width;
};

// body(p, q) for each pair of values of a tile, by all threads of a block.
template <class T, class Body>
__device__ void each_value(const TiledFrames<T>& f, const Area& area, const Body& body) {
  const int64_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes, length = area.width * f.interleaved();
  const int64_t step_p = f.packed() ? 1 : f.frame.stride_x, step_q = f.packed() ? 1 : f.stored.stride_x;
  for (int64_t c = 0; c < f.runs(); ++c) {
    for (int64_t y = warp; y < area.height; y += kWarps) {
      const T* p = &f.frame.at(area.b, c, area.y + y, area.x);
      T* q = &f.stored.at(area.b, c, area.y + y, area.x);
      for (int64_t j = lane; j < length; j += kLanes) body(p + j * step_p, q + j * step_q);
    }
  }
}

template <class T>
__device__ bool values_differ(const TiledFrames<T>& f, const Area& area) {
  bool any = false;
  each_value(f, area, [&](const T* p, const T* q) { any |= Difference<T>::size(*p, *q) > f.limits.of(1); });
  return any;
}

// A lane sums a column of a block, and eight lanes side by side add theirs.
template <class T>
__device__ bool means_differ(const TiledFrames<T>& f, const Area& area) {
  using Signed = typename Difference<T>::Signed;
  const int64_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  bool any = false;
  for (int64_t c = 0; c < f.channels; ++c) {
    for (int64_t y = warp * kMeanBlock; y < area.height; y += kWarps * kMeanBlock) {
      const int64_t rows = minimum(kMeanBlock, area.height - y);
      for (int64_t first = 0; first < area.width; first += kLanes) {  // as many turns for all lanes of the warp
        const int64_t x = first + lane, wide = minimum(kMeanBlock, area.width - x);
        decltype(Signed(0) + Signed(0)) sum = 0;
        for (int64_t r = 0; x < area.width && r < rows; ++r)
          sum += Difference<T>::of(f.frame.at(area.b, c, area.y + y + r, area.x + x),
                                   f.stored.at(area.b, c, area.y + y + r, area.x + x));
        for (int step = 1; step < kMeanBlock; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
        if (x < area.width && lane % kMeanBlock == 0)
          any |= !(Difference<T>::size(static_cast<Signed>(sum)) <= f.limits.of(wide * rows));
      }
    }
  }
  return any;
}

template <class T>
__global__ void __launch_bounds__(kThreads) dirty_tiles_kernel(TiledFrames<T> f, bool by_means, int64_t batch, bool* dirty) {
  for (int64_t b = blockIdx.y; b < batch; b += gridDim.y) {
    for (int64_t t = blockIdx.x; t < f.rows * f.columns; t += gridDim.x) {
      const int64_t y = t / f.columns * f.tile, x = t % f.columns * f.tile;
      const Area area{b, y, x, minimum(f.tile, f.height - y), minimum(f.tile, f.width - x)};
      const bool differs = __syncthreads_or(by_means ? means_differ(f, area) : values_differ(f, area));
      if (threadIdx.x == 0) dirty[b * f.rows * f.columns + t] = differs;
      if (differs) each_value(f, area, [](const T* p, T* q) { *q = *p; });
    }
  }
}

}  // namespace

template <class T>
void dirty_tiles(const TiledFrames<T>& frames, bool by_means, int64_t batch, bool* dirty, void* stream) {
  const dim3 grid(at_most(frames.rows * frames.columns, 1 << 20), at_most(batch, kMaxGridYZ));
  launch(dirty_tiles_kernel<T>, grid, kThreads, 0, stream, frames, by_means, batch, dirty);
}

#define TEXVLM_DIRTY_TILES(T) template void dirty_tiles(const TiledFrames<T>&, bool, int64_t, bool*, void*)
TEXVLM_DIRTY_TILES(uint8_t);
TEXVLM_DIRTY_TILES(float);
TEXVLM_DIRTY_TILES(double);
TEXVLM_DIRTY_TILES(Half);
TEXVLM_DIRTY_TILES(BFloat16);

}  // namespace texvlm::cuda
