#include "distance.h"

#include "launch.cuh"

namespace texvlm::cuda {

namespace {

constexpr int kBands = 16;
constexpr int32_t kNothingBelow = -kNoRow;

// A block takes 32 columns, each of its warps a band of their rows. What a band needs of the others is their first and their last
// feature: found in a first walk, after which every band is walked down, for the nearest feature above, and up.
// Bytes moved: the mask twice, the answer written twice and read once.
template <class Mask>
__global__ void __launch_bounds__(kLanes* kBands)
    columns_kernel(typename NearestInColumn<Mask>::template For<int32_t, 0> f, int64_t batch) {
  TEXVLM_SHARED(top, int32_t[kBands][kLanes]);
  TEXVLM_SHARED(bottom, int32_t[kBands][kLanes]);
  const int lane = static_cast<int>(threadIdx.x) % kLanes, band = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t x = static_cast<int64_t>(blockIdx.x) * kLanes + lane, rows = (f.height + kBands - 1) / kBands;
  const int64_t y0 = minimum(band * rows, f.height), y1 = minimum(y0 + rows, f.height);
  const bool inside = x < f.width;
  for (int64_t b = blockIdx.y; b < batch; b += gridDim.y) {
    int32_t first = kNothingBelow, last = kNoRow;
    for (int64_t y = y0; inside && y < y1; ++y) {
      if (!f.mask(b, y, x)) continue;
      last = static_cast<int32_t>(y);
      if (first == kNothingBelow) first = last;
    }
    top[band][lane] = first, bottom[band][lane] = last;
    __syncthreads();
    int32_t above = kNoRow, below = kNothingBelow;
    for (int other = 0; other < band; ++other) above = maximum(above, bottom[other][lane]);
    for (int other = kBands - 1; other > band; --other) below = minimum(below, top[other][lane]);
    int32_t* const near = f.near + b * f.height * f.width + x;
    for (int64_t y = y0; inside && y < y1; ++y) {
      if (f.mask(b, y, x)) above = static_cast<int32_t>(y);
      near[y * f.width] = above;
    }
    for (int64_t y = y1 - 1; inside && y >= y0; --y) {
      const int32_t here = static_cast<int32_t>(y), up = near[y * f.width];
      if (up == here) below = here;
      if (below != kNothingBelow && here - up > below - here) near[y * f.width] = below;
    }
    __syncthreads();
  }
}

}  // namespace

template <class Mask>
void nearest_in_columns(const typename NearestInColumn<Mask>::template For<int32_t, 0>& f, int64_t batch, void* stream) {
  if (batch <= 0 || f.width <= 0) return;
  const dim3 grid(static_cast<unsigned>((f.width + kLanes - 1) / kLanes), at_most(batch, kMaxGridYZ));
  launch(columns_kernel<Mask>, grid, dim3(kLanes * kBands), 0, stream, f, batch);
}

#define TEXVLM_COLUMNS(Mask) template void nearest_in_columns<Mask>(const NearestInColumn<Mask>::For<int32_t, 0>&, int64_t, void*)
TEXVLM_COLUMNS(BoolMask);
TEXVLM_COLUMNS(AboveMask<float>);
TEXVLM_COLUMNS(AboveMask<double>);
#define TEXVLM_NEAREST_IN_ROW(SINK)                   \
  TEXVLM_TEXELS(NearestInRow<SINK>::For<int32_t, 0>); \
  TEXVLM_TEXELS(NearestInRow<SINK>::For<int64_t, 0>)
TEXVLM_NEAREST_IN_ROW(SquaredSink);
TEXVLM_NEAREST_IN_ROW(DiagonalSink<float>);
TEXVLM_NEAREST_IN_ROW(DiagonalSink<double>);
TEXVLM_TEXELS(FloodStart<BoolMask>::For<int64_t, 0>);
TEXVLM_TEXELS(FloodStep<int64_t, 0>);
TEXVLM_TEXELS(FloodEnd<int64_t, 0>);

}  // namespace texvlm::cuda
