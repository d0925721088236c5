// Exclusive scans and stable compaction over whole rows, for any number of items and rows.
//
// Sums of tiles, one scan of these sums per row, then every tile again with its offset: three launches, and one where a row is a
// single tile. The single-pass form with decoupled look-back (D. Merrill and M. Garland, NVR-2016-002) reads the items once
// instead of twice, but blocks of it wait for blocks before them; here nothing waits, so any order of blocks is fine.
// Bytes moved: what count() reads, twice, and what emit() writes; the sums are 1 / 2048 of it.
#pragma once

#include "launch.cuh"

namespace texvlm::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Hands out parts of a workspace; with a null base it only measures.
struct Carver {
  char* base;
  int64_t bytes = 0;

  template <class V>
  V* take(int64_t count) {
    V* const here = reinterpret_cast<V*>(base ? base + bytes : nullptr);
    bytes += (count * static_cast<int64_t>(sizeof(V)) + 255) / 256 * 256;
    return here;
  }
};

namespace {  // kernels with shared memory are local to their file

// Sum of the values of the threads before this one, and of all. Every thread of the block calls it; the block is in step after.
template <int Threads, class V>
__device__ V block_exclusive(V value, V& total) {
  constexpr int kWarps = Threads / kLanes;
  TEXVLM_SHARED(warp_total, V[kWarps]);
  const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
  V sum = value;
  for (int step = 1; step < kLanes; step *= 2) {
    const V below = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += below;
  }
  if (lane == kLanes - 1) warp_total[warp] = sum;
  __syncthreads();
  V before = sum - value, all = 0;
  for (int w = 0; w < kWarps; ++w) {
    const V other = warp_total[w];
    if (w < warp) before += other;
    all += other;
  }
  __syncthreads();
  total = all;
  return before;
}

// F: Value count(row, i), what item i adds; emit(row, i, before, own) with the sum of the items before it; total(row, all).
constexpr int kScanItems = 8;
constexpr int64_t kScanTile = int64_t{kThreads} * kScanItems;

template <class F>
__global__ void __launch_bounds__(kThreads)
    tile_sums_kernel(F f, int64_t rows, int64_t count, int64_t tiles, typename F::Value* sums) {
  using V = typename F::Value;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      V own = 0, all;
      for (int k = 0; k < kScanItems; ++k) {
        const int64_t i = tile * kScanTile + k * kThreads + threadIdx.x;
        if (i < count) own += f.count(row, i);
      }
      block_exclusive<kThreads>(own, all);
      if (threadIdx.x == 0) sums[row * tiles + tile] = all;
    }
  }
}

template <class F>
__global__ void __launch_bounds__(kThreads) scan_sums_kernel(F f, int64_t rows, int64_t tiles, typename F::Value* sums) {
  using V = typename F::Value;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    V carry = 0;
    for (int64_t first = 0; first < tiles; first += kThreads) {
      const int64_t tile = first + threadIdx.x;
      V* const place = sums + row * tiles + tile;
      const V own = tile < tiles ? *place : V(0);
      V all;
      const V before = block_exclusive<kThreads>(own, all);
      if (tile < tiles) *place = carry + before;
      carry += all;
    }
    if (threadIdx.x == 0) f.total(row, carry);
  }
}

// sums: of the tiles before each; null where a row is one tile.
template <class F>
__global__ void __launch_bounds__(kThreads)
    emit_kernel(F f, int64_t rows, int64_t count, int64_t tiles, const typename F::Value* sums) {
  using V = typename F::Value;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      V offset = sums ? sums[row * tiles + tile] : V(0);
      for (int k = 0; k < kScanItems; ++k) {
        const int64_t i = tile * kScanTile + k * kThreads + threadIdx.x;
        const V own = i < count ? f.count(row, i) : V(0);
        V all;
        const V before = block_exclusive<kThreads>(own, all);
        if (i < count) f.emit(row, i, offset + before, own);
        offset += all;
      }
      if (!sums && threadIdx.x == 0) f.total(row, offset);
    }
  }
}

template <class F>
int64_t scan_values(int64_t rows, int64_t count) {  // of the workspace
  return count > kScanTile ? rows * ceil_div(count, kScanTile) : 0;
}

template <class F>
void scan(const F& f, int64_t rows, int64_t count, typename F::Value* workspace, void* stream) {
  if (rows <= 0) return;
  const int64_t tiles = count > kScanTile ? ceil_div(count, kScanTile) : 1;
  const dim3 grid(at_most(tiles, 1 << 20), at_most(rows, kMaxGridYZ));
  const typename F::Value* offsets = nullptr;
  if (tiles > 1) {
    launch(tile_sums_kernel<F>, grid, kThreads, 0, stream, f, rows, count, tiles, workspace);
    launch(scan_sums_kernel<F>, dim3(at_most(rows, 1 << 20)), kThreads, 0, stream, f, rows, tiles, workspace);
    offsets = workspace;
  }
  launch(emit_kernel<F>, grid, kThreads, 0, stream, f, rows, count, tiles, offsets);
}

}  // namespace
}  // namespace texvlm::cuda
