// Optical flow. The nodes are made smooth by tiles: a block holds its tile and all that can reach it within the steps in shared
// memory, so that all steps are one launch, and what is computed twice (five sixths of little) costs less than waiting.
#include "flow.h"

#include "launch.cuh"
#include "reduce.cuh"

namespace texvlm::cuda {
namespace {

constexpr int kSmoothTile = 16;                                  // nodes a side that a block answers for
constexpr int kSmoothSide = kSmoothTile + 2 * kMostSmoothSteps;  // and that it holds

__global__ void __launch_bounds__(kThreads) smooth_kernel(FlowSmooth<float, 0> f, int64_t directions, int steps) {
  TEXVLM_SHARED(us, float[2][kSmoothSide * kSmoothSide]);
  TEXVLM_SHARED(vs, float[2][kSmoothSide * kSmoothSide]);
  const int rows = f.found.rows, columns = f.found.columns;
  const int across = (columns + kSmoothTile - 1) / kSmoothTile, down = (rows + kSmoothTile - 1) / kSmoothTile;
  for (int64_t i = blockIdx.x; i < directions * across * down; i += gridDim.x) {
    const int64_t d = i / (across * down), first = d * f.found.nodes();
    const int tile = static_cast<int>(i - d * across * down), y = tile / across * kSmoothTile, x = tile % across * kSmoothTile;
    // What is held: up to the grid's border, or `steps` nodes beyond the tile.
    const int y0 = maximum(y - steps, 0), y1 = minimum(y + kSmoothTile + steps, rows);
    const int x0 = maximum(x - steps, 0), x1 = minimum(x + kSmoothTile + steps, columns), width = x1 - x0;
    for (int n = threadIdx.x; n < (y1 - y0) * width; n += kThreads) {
      const int64_t at = first + static_cast<int64_t>(y0 + n / width) * columns + x0 + n % width;
      us[0][n] = f.from_u[at], vs[0][n] = f.from_v[at];
    }
    for (int k = 1; k <= steps; ++k) {
      __syncthreads();
      const float *u = us[(k + 1) % 2], *v = vs[(k + 1) % 2];
      // What k steps can know: nodes nearer than that to a border that is not the grid's lack a neighbour.
      const int top = y0 > 0 ? y0 + k : 0, bottom = y1 < rows ? y1 - k : rows;
      const int left = x0 > 0 ? x0 + k : 0, right = x1 < columns ? x1 - k : columns, count = right - left;
      for (int n = threadIdx.x; n < (bottom - top) * count; n += kThreads) {
        const int i = top + n / count, j = left + n % count, own = (i - y0) * width + j - x0;
        const int64_t at = first + static_cast<int64_t>(i) * columns + j;
        const FlowVector flow = f.solved(at, u, v, own, i > 0 ? width : 0, i + 1 < rows ? width : 0, j > 0, j + 1 < columns);
        if (k < steps) {
          us[k % 2][own] = flow.u, vs[k % 2][own] = flow.v;
        } else if (i >= y && i < y + kSmoothTile && j >= x && j < x + kSmoothTile) {
          f.to_u[at] = flow.u, f.to_v[at] = flow.v;
        }
      }
    }
    __syncthreads();  // before the next tile's nodes are put there
  }
}

}  // namespace

void smooth_flow(const FlowSmooth<float, 0>& f, int64_t directions, int steps, void* stream) {
  const auto tiles = [](int64_t nodes) { return (nodes + kSmoothTile - 1) / kSmoothTile; };
  const int64_t all = directions * tiles(f.found.rows) * tiles(f.found.columns);
  if (all > 0) launch(smooth_kernel, dim3(at_most(all, 1 << 20)), kThreads, 0, stream, f, directions, steps);
}

TEXVLM_TEXELS(FlowLuma<uint8_t>::For<float, 0>);
TEXVLM_TEXELS(FlowLuma<float>::For<float, 0>);
TEXVLM_TEXELS(FlowLuma<double>::For<float, 0>);
TEXVLM_TEXELS(FlowGiven<float, 0>);
TEXVLM_PLANES_REDUCED(FlowContrast<float, 0>);
TEXVLM_QUERIES(FlowSearch<float, 0>);
TEXVLM_TEXELS(FlowDense<float, 0>);
TEXVLM_TEXELS(FlowOcclusion<float, 0>);

}  // namespace texvlm::cuda
