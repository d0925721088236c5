// A stable radix sort of (key, value) pairs, ascending, rows at a time; and the digits that selection by radix shares with it.
//
// Least digit first, 8 bits a pass: counts per tile and digit, their scan (digit-major, so that equal digits keep the order of
// their tiles), then each tile writes its pairs in order. Method: N. Satish, M. Harris and M. Garland, "Designing efficient
// sorting algorithms for manycore GPUs", IPDPS 2009. Bytes moved per pass: keys twice, values once, in; both once out.
#pragma once

#include "scan.cuh"

namespace texvlm::cuda {
namespace {

constexpr int kDigits = 256;
constexpr int kWarps = kThreads / kLanes;
constexpr int kSortRounds = 16;
constexpr int64_t kSortTile = int64_t{kThreads} * kSortRounds;
static_assert(kThreads == kDigits, "one thread per digit");

template <class Key>
__device__ unsigned digit_of(Key key, int shift) {
  return static_cast<unsigned>(key >> shift) & (kDigits - 1);
}

// The lanes whose digit is this lane's own; lanes that are not live have a group of their own. All lanes of the warp call it.
__device__ inline unsigned same_digit(bool live, unsigned digit) { return __match_any_sync(kAllLanes, live ? digit : kDigits); }
__device__ inline unsigned lanes_below() { return (1u << (threadIdx.x % kLanes)) - 1u; }

// One addition per digit and warp: scores of one octave share their first digit, and 32 additions to one place would take turns.
__device__ inline void count_digit(unsigned* counts, bool live, unsigned digit) {
  const unsigned peers = same_digit(live, digit);
  if (live && (peers & lanes_below()) == 0) atomicAdd(counts + digit, static_cast<unsigned>(__popc(peers)));
}

template <class Key>
struct Pairs {  // [rows, count]
  Key* keys;
  uint32_t* values;
};

template <class Key>
__global__ void __launch_bounds__(kThreads)
    sort_count_kernel(Pairs<Key> in, int64_t rows, int64_t count, int64_t tiles, int shift, unsigned* counts) {
  TEXVLM_SHARED(histogram, unsigned[kDigits]);
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      histogram[threadIdx.x] = 0;
      __syncthreads();
      for (int k = 0; k < kSortRounds; ++k) {
        const int64_t i = tile * kSortTile + k * kThreads + threadIdx.x;
        count_digit(histogram, i < count, i < count ? digit_of(in.keys[row * count + i], shift) : 0);
      }
      __syncthreads();
      counts[(row * kDigits + threadIdx.x) * tiles + tile] = histogram[threadIdx.x];
    }
  }
}

struct ScanCounts {
  using Value = unsigned;
  unsigned* counts;
  int64_t each;  // of a row

  __device__ Value count(int64_t row, int64_t i) const { return counts[row * each + i]; }
  __device__ void emit(int64_t row, int64_t i, Value before, Value) const { counts[row * each + i] = before; }
  __device__ void total(int64_t, Value) const {}
};

template <class Key>
__global__ void __launch_bounds__(kThreads) sort_move_kernel(Pairs<Key> in, Pairs<Key> out, int64_t rows, int64_t count,
                                                             int64_t tiles, int shift, const unsigned* counts) {
  TEXVLM_SHARED(place, unsigned[kWarps][kDigits]);  // per warp: first how many, then where they go
  const unsigned warp = threadIdx.x / kLanes;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      unsigned next = counts[(row * kDigits + threadIdx.x) * tiles + tile];  // of the digit that this thread keeps
      for (int k = 0; k < kSortRounds; ++k) {
        for (int w = 0; w < kWarps; ++w) place[w][threadIdx.x] = 0;
        __syncthreads();
        const int64_t i = tile * kSortTile + k * kThreads + threadIdx.x;
        const bool live = i < count;
        const Key key = live ? in.keys[row * count + i] : Key(0);
        const unsigned digit = digit_of(key, shift), peers = same_digit(live, digit), rank = __popc(peers & lanes_below());
        if (live && rank == 0) place[warp][digit] = static_cast<unsigned>(__popc(peers));
        __syncthreads();
        for (int w = 0; w < kWarps; ++w) {
          const unsigned here = place[w][threadIdx.x];
          place[w][threadIdx.x] = next;
          next += here;
        }
        __syncthreads();
        if (live) {
          const int64_t to = row * count + place[warp][digit] + rank;
          out.keys[to] = key;
          out.values[to] = in.values[row * count + i];
        }
        __syncthreads();
      }
    }
  }
}

inline int64_t sort_tiles(int64_t count) { return ceil_div(count, kSortTile); }

struct SortWorkspace {
  unsigned *counts, *sums;

  static SortWorkspace carve(Carver& carver, int64_t rows, int64_t count) {
    const int64_t each = kDigits * sort_tiles(count);
    return {carver.take<unsigned>(rows * each), carver.take<unsigned>(scan_values<ScanCounts>(rows, each))};
  }
};

// Sorts `pairs` with the help of `spare`; the number of passes is even, so the result is in `pairs`.
template <class Key>
void sort_pairs(Pairs<Key> pairs, Pairs<Key> spare, int64_t rows, int64_t count, const SortWorkspace& workspace, void* stream) {
  static_assert(sizeof(Key) % 2 == 0, "an even number of passes");
  const int64_t tiles = sort_tiles(count), each = kDigits * tiles;
  const dim3 grid(at_most(tiles, 1 << 20), at_most(rows, kMaxGridYZ));
  for (int shift = 0; shift < 8 * static_cast<int>(sizeof(Key)); shift += 8) {
    launch(sort_count_kernel<Key>, grid, kThreads, 0, stream, pairs, rows, count, tiles, shift, workspace.counts);
    scan(ScanCounts{workspace.counts, each}, rows, each, workspace.sums, stream);
    launch(sort_move_kernel<Key>, grid, kThreads, 0, stream, pairs, spare, rows, count, tiles, shift, workspace.counts);
    const Pairs<Key> other = pairs;
    pairs = spare;
    spare = other;
  }
}

}  // namespace
}  // namespace texvlm::cuda
