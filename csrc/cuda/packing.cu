// Packed cells and their adjoint.
//
// Forward: a block takes 256 samples of a channel of a cell, in the order of the rows, a thread each; where a sample is the mean
// of 2^l x 2^l pixels, up to a warp each. A resized pixel is computed from all its taps at once: of few cells that costs less
// than to resize the picture's columns first. Bytes moved: the pixels under the cells, from the caches beyond the first time, and
// the rows once, in runs of a patch. Adjoint: a block takes a square of pixels of the size of a cell of level 0, looks through
// all cells for those that cover it, and its threads gather from these in their order: no atomics, the same bits every time.
// Bytes moved: what the cells' rows hold once per level-0 cell, the gradient once and again for each cell; the list of cells per
// block, from the caches.
#include "packing.h"

#include "scan.cuh"

namespace texvlm::cuda {
namespace {

template <class S>
__global__ void __launch_bounds__(kThreads) pack_cells_kernel(PackCells<S> f, int64_t all, int64_t parts) {
  using A = Acc<S>;
  using T = typename PackCells<S>::T;
  const int64_t side = f.to.side(), patch = f.to.patch, plane = patch * patch, samples = side * side;
  for (int64_t i = blockIdx.x; i < all * f.to.channels * parts; i += gridDim.x) {
    const int64_t at = i / parts, part = i - at * parts, cell_at = at / f.to.channels, c = at - cell_at * f.to.channels;
    const int64_t b = cell_at / f.cells.count, k = cell_at - b * f.cells.count;
    const PackedCell cell = f.cells.at(b, k);
    const int lanes = cell.level <= 0 ? 1 : minimum(kLanes, 1 << minimum(2 * cell.level, 5));  // of a sample
    const int lane = static_cast<int>(threadIdx.x) % lanes;
    for (int pass = 0; pass < lanes; ++pass) {
      const int64_t s = part * kThreads + pass * (kThreads / lanes) + threadIdx.x / lanes;
      const bool here = s < samples;
      const int64_t p = (here ? s : 0) / plane, own = (here ? s : 0) - p * plane;  // in patch p of the cell
      const int64_t y = p / f.to.merge * patch + own / patch, x = p % f.to.merge * patch + own % patch;
      T* const out = f.rows + (cell_at * f.to.merge * f.to.merge + p) * f.to.row_values() + c * f.to.temporal * plane + own;
      T value = T(0.0f);
      if (cell.level >= 0) {
        const PixelSpan high = PixelSpan::of(cell.row * side + y, cell.level, f.to.height);
        const PixelSpan wide = PixelSpan::of(cell.column * side + x, cell.level, f.to.width);
        A sum = 0;
        for (int64_t n = lane; n < high.size() * wide.size(); n += lanes)
          sum += f.pixel(b, c, high.begin + n / wide.size(), wide.begin + n % wide.size());
        for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
        value = f.normalised(cell.level > 0 ? sum / static_cast<A>(high.size() * wide.size()) : sum, c);
      }
      if (!here) continue;
      for (int64_t t = lane; t < f.to.temporal; t += lanes) out[t * plane] = value;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) pack_cells_adjoint_kernel(PackCellsAdjoint<T> f, int64_t squares) {
  TEXVLM_SHARED(covering, unsigned[kThreads / kLanes]);
  const int64_t side = f.of.side(), pixels = side * side, grid = f.cells.rows * f.cells.columns;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  for (int64_t i = blockIdx.x; i < squares; i += gridDim.x) {
    const int64_t b = i / grid, row = (i - b * grid) / f.cells.columns, column = i % f.cells.columns;
    for (int64_t p = threadIdx.x; p < pixels; p += kThreads)
      for (int64_t c = 0; c < f.of.channels; ++c) *f.pixel(b, c, row * side + p / side, column * side + p % side) = 0;
    for (int64_t first = 0; first < f.cells.count; first += kThreads) {
      const int64_t k = first + threadIdx.x;
      const bool covers = k < f.cells.count && f.covers(f.cells.at(b, k), row, column);
      const unsigned found = __ballot_sync(kAllLanes, covers);
      if (threadIdx.x % kLanes == 0) covering[warp] = found;
      __syncthreads();
      for (int w = 0; w < kThreads / kLanes; ++w) {
        for (unsigned left = covering[w]; left != 0; left &= left - 1) {
          const int64_t found_at = first + w * kLanes + __ffs(static_cast<int>(left)) - 1;
          const PackedCell cell = f.cells.at(b, found_at);
          for (int64_t p = threadIdx.x; p < pixels; p += kThreads) {
            const int64_t y = row * side + p / side, x = column * side + p % side;
            for (int64_t c = 0; c < f.of.channels; ++c) *f.pixel(b, c, y, x) += f.from_cell(b, found_at, cell, c, y, x);
          }
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace

template <class S>
void pack_cells(const PackCells<S>& f, int64_t batch, void* stream) {
  const int64_t all = batch * f.cells.count, parts = ceil_div(f.to.side() * f.to.side(), kThreads);
  if (all <= 0 || f.to.channels <= 0) return;
  launch(pack_cells_kernel<S>, dim3(at_most(all * f.to.channels * parts, 1 << 20)), kThreads, 0, stream, f, all, parts);
}

template <class T>
void pack_cells_adjoint(const PackCellsAdjoint<T>& f, int64_t batch, void* stream) {
  const int64_t squares = batch * f.cells.rows * f.cells.columns;
  if (squares <= 0 || f.of.channels <= 0) return;
  launch(pack_cells_adjoint_kernel<T>, dim3(at_most(squares, 1 << 20)), kThreads, 0, stream, f, squares);
}

template void pack_cells<uint8_t>(const PackCells<uint8_t>&, int64_t, void*);
TEXVLM_QUERIES(MakeCubicTaps<int32_t>);
#define TEXVLM_PACKING(T)                                           \
  template void pack_cells<T>(const PackCells<T>&, int64_t, void*); \
  template void pack_cells_adjoint<T>(const PackCellsAdjoint<T>&, int64_t, void*)
TEXVLM_PACKING(float);
TEXVLM_PACKING(double);
TEXVLM_PACKING(Half);
TEXVLM_PACKING(BFloat16);
#define TEXVLM_RESIZING(T)                  \
  TEXVLM_QUERIES(MakeCubicTaps<T>);         \
  TEXVLM_TEXELS(CubicColumnsAdjoint<T, 0>); \
  TEXVLM_TEXELS(CubicRowsAdjoint<T, 0>)
TEXVLM_RESIZING(float);
TEXVLM_RESIZING(double);

}  // namespace texvlm::cuda
