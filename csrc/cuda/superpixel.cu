#include "superpixel.h"

#include "reduce.cuh"

namespace texvlm::cuda {

namespace {

constexpr int kMergeThreads = 256, kSweepThreads = 256;
constexpr int kTile = 32, kMostSide = kTile + 2 * 4 * kFineSweeps;

constexpr int kMostCellsSeen = 384;  // by a tile that measures them

// Regions as they were measured before.
struct KnownRegions {
  TEXVLM_HD static constexpr int seen() { return 1; }
  __device__ void measure(int64_t, int64_t, int64_t, int, int64_t*) {}
  template <class Move>
  __device__ const int64_t* operator()(const Move& move, int64_t b, int32_t label, const int64_t*) const {
    return move.model + (b * move.regions + label) * kModel;
  }
};

// Regions of the cells that a tile sees, measured by a warp each, as RegionModel does.
struct SeenRegions {
  RegionModel<int32_t, 0> each;
  int64_t row = 0, column = 0, columns = 0;  // the first cell, and how many side by side

  TEXVLM_HD static constexpr int seen() { return kMostCellsSeen; }
  __device__ void measure(int64_t b, int64_t y0, int64_t x0, int side, int64_t* models) {
    const Cells& c = each.cells;
    const auto first = [&](int64_t at, int64_t size, int64_t cells) {
      return maximum<int64_t>(Cells::of(clamp<int64_t>(at, 0, size - 1), size, cells) - 1, 0);
    };
    const auto last = [&](int64_t at, int64_t size, int64_t cells) {
      return minimum<int64_t>(Cells::of(clamp<int64_t>(at, 0, size - 1), size, cells) + 1, cells - 1);
    };
    row = first(y0, c.height, c.rows), column = first(x0, c.width, c.columns);
    columns = last(x0 + side - 1, c.width, c.columns) - column + 1;
    const int64_t count = (last(y0 + side - 1, c.height, c.rows) - row + 1) * columns;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    for (int64_t i = static_cast<int64_t>(threadIdx.x) / kLanes; i < count; i += kSweepThreads / kLanes) {
      const int64_t k = (row + i / columns) * c.columns + column + i % columns;
      const Cells::Window in = c.window(k);
      const int64_t w = in.x1 - in.x0, area = c.height * c.width;
      Sums<int64_t, kModel, 1> total;
      total.clear();
      for (int64_t j = lane; j < (in.y1 - in.y0) * w; j += kLanes) {
        const int64_t y = in.y0 + j / w, x = in.x0 + j % w, at = y * c.width + x;
        if (each.labels[b * area + at] != k) continue;
        const int32_t* p = each.planes + 3 * b * area + at;
        const int64_t own[kModel] = {p[0], p[area], p[2 * area], y, x, 1};
        for (int m = 0; m < kModel; ++m) total.of[m][0] += own[m];
      }
      for (int step = kLanes / 2; step > 0; step /= 2) total.join(0, of_lane_across(total, step), 0, 1);
      if (lane > 0) continue;
      int64_t sums[kModel];
      for (int m = 0; m < kModel; ++m) sums[m] = total.of[m][0];
      means_of(sums, models + i * kModel);
    }
  }
  template <class Move>
  __device__ const int64_t* operator()(const Move&, int64_t, int32_t label, const int64_t* models) const {
    const int64_t r = label / each.cells.columns - row, c = label % each.cells.columns - column;
    return models + (r * columns + c) * kModel;
  }
};

// All rounds of the sweeps over a tile of pixels, in one launch. What a pixel chooses depends on its neighbours alone, so a block
// takes as many pixels around its tile as there are rounds: after each round, the labels are right one pixel further from the
// edge of what it took. It moves the labels once in, (1 + 2 halo / kTile)^2 times as many as there are pixels, and once out, and
// the colours of pixels at borders.
template <class Lab, class Regions>
__global__ void __launch_bounds__(kSweepThreads)
    sweep_kernel(typename MoveBorders<Lab>::template For<int32_t, 0> move, FinerLabels<int32_t, 0> begin, Regions regions,
                 int64_t* wide, int rounds, int64_t batch) {
  TEXVLM_SHARED(labels, int32_t[kMostSide * kMostSide]);
  TEXVLM_SHARED(models, int64_t[Regions::seen() * kModel]);
  const int t = static_cast<int>(threadIdx.x), side = kTile + 2 * rounds;
  const int64_t tiles = (move.height + kTile - 1) / kTile, x0 = static_cast<int64_t>(blockIdx.x) * kTile - rounds;
  const auto inside = [&](int64_t y, int64_t x) { return y >= 0 && y < move.height && x >= 0 && x < move.width; };
  for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    for (int64_t tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
      const int64_t y0 = tile * kTile - rounds;
      for (int i = t; i < side * side; i += kSweepThreads) {
        const int64_t y = y0 + i / side, x = x0 + i % side;
        labels[i] = inside(y, x) ? begin.label(b, y, x) : -1;
      }
      regions.measure(b, y0, x0, side, models);
      __syncthreads();
      const auto model_of = [&](int32_t label) { return regions(move, b, label, models); };
      for (int round = 0; round < rounds; ++round) {
        const int edge = round + 1, odd_y = round / 2 % 2, odd_x = round % 2;
        const int top = edge + static_cast<int>((y0 + edge + odd_y) & 1), left = edge + static_cast<int>((x0 + edge + odd_x) & 1);
        const int rows = (side - edge - top + 1) / 2, columns = (side - edge - left + 1) / 2;
        for (int i = t; i < rows * columns; i += kSweepThreads) {
          const int v = top + 2 * (i / columns), u = left + 2 * (i % columns);
          if (inside(y0 + v, x0 + u))
            labels[v * side + u] = move.chosen(b, y0 + v, x0 + u, labels + v * side + u, side, model_of);
        }
        __syncthreads();
      }
      for (int i = t; i < kTile * kTile; i += kSweepThreads) {
        const int v = rounds + i / kTile, u = rounds + i % kTile;
        if (!inside(y0 + v, x0 + u)) continue;
        const int64_t at = (b * move.height + y0 + v) * move.width + x0 + u;
        if (wide) {
          wide[at] = labels[v * side + u];
        } else {
          move.labels[at] = labels[v * side + u];
        }
      }
      __syncthreads();
    }
  }
}

struct Candidate {
  int64_t cost;
  int32_t slot, edge;

  __device__ void least(const Candidate& other) {
    if (other.cost < cost || (other.cost == cost && other.slot < slot)) *this = other;
  }
};

// MergeRegions::number by a block. The workspace of the edges is free by then: u gets the numbers of the cells that stayed.
__device__ void number_regions(const MergeRegions<int32_t, 0>& merge, int64_t b, const Edges& e) {
  const int t = static_cast<int>(threadIdx.x);
  int32_t* const lut = merge.lut + b * merge.cells;
  unsigned numbered = 0;
  for (int64_t first = 0; first < merge.cells; first += kMergeThreads) {
    const int64_t k = first + t;
    const bool stayed = k < merge.cells && lut[k] == k;
    unsigned all;
    const unsigned number = numbered + block_exclusive<kMergeThreads>(stayed ? 1u : 0u, all);
    if (stayed) {
      e.u[k] = static_cast<int32_t>(number);
      merge.keep(b, k, number);
    }
    numbered += all;
  }
  __syncthreads();
  for (int64_t k = t; k < merge.cells; k += kMergeThreads) {
    int32_t into = static_cast<int32_t>(k);
    while (lut[into] != into) into = lut[into];
    e.v[k] = e.u[into];
  }
  __syncthreads();
  for (int64_t k = t; k < merge.cells; k += kMergeThreads) lut[k] = e.v[k];
  __syncthreads();
}

// A block a picture, since each merge needs the one before it: what a round costs is how often the block waits. A warp finds its
// cheapest edge by shuffles, every thread then the cheapest of the warps; three waits a round. The edges are gathered in any
// order; ties are broken by the slot, which is the host's order.
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(MergeRegions<int32_t, 0> merge, int64_t batch) {
  constexpr int kWarps = kMergeThreads / kLanes;
  TEXVLM_SHARED(candidates, Candidate[kWarps]);
  TEXVLM_SHARED(count, int);
  const int t = static_cast<int>(threadIdx.x);
  for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
    const Edges e = merge.edges(b);
    if (t == 0) count = 0;
    __syncthreads();
    for (int64_t k = t; k < merge.cells; k += kMergeThreads) {
      merge.lut[b * merge.cells + k] = static_cast<int32_t>(k);
      const uint32_t bits = merge.touching[b * merge.cells + k];
      for (int bit = 0; bit < kNeighbours; ++bit) {
        if (!(bits >> bit & 1)) continue;
        const int i = atomicAdd(&count, 1);
        const int64_t other = neighbour_of(k, bit, merge.columns);
        e.u[i] = static_cast<int32_t>(k);
        e.v[i] = static_cast<int32_t>(other);
        e.slot[i] = static_cast<int32_t>(k * kNeighbours + bit);
        e.cost[i] = merge.cost_of(b, k, other);
      }
    }
    __syncthreads();
    for (int64_t left = merge.cells; left > merge.wanted; --left) {
      Candidate best{kNoEdge, INT32_MAX, 0};
      for (int i = t; i < count; i += kMergeThreads) best.least({e.cost[i], e.slot[i], i});
      for (int step = kLanes / 2; step > 0; step /= 2) best.least(of_lane_across(best, step));
      if (t % kLanes == 0) candidates[t / kLanes] = best;
      __syncthreads();
      for (int w = 0; w < kWarps; ++w) best.least(candidates[w]);
      const int32_t u = e.u[best.edge], v = e.v[best.edge];
      __syncthreads();  // all have read the edge before anyone changes it
      if (t == 0) merge.unite(b, u, v);
      __syncthreads();
      for (int i = t; i < count; i += kMergeThreads)
        merge.follow(b, e, i, u, v);  // own edges: the next round reads no others' costs
    }
    __syncthreads();
    number_regions(merge, b, e);
  }
}

}  // namespace

void merge_regions(const MergeRegions<int32_t, 0>& merge, int64_t batch, void* stream) {
  if (batch <= 0) return;
  launch(merge_kernel, dim3(at_most(batch, 1 << 20)), dim3(kMergeThreads), 0, stream, merge, batch);
}

namespace {

template <class Lab, class Regions>
void sweep(const typename MoveBorders<Lab>::template For<int32_t, 0>& move, const FinerLabels<int32_t, 0>& begin,
           const Regions& regions, int64_t* wide, int rounds, int64_t batch, void* stream) {
  const auto tiles = [](int64_t n) { return (n + kTile - 1) / kTile; };
  const dim3 grid(static_cast<unsigned>(tiles(move.width)), at_most(tiles(move.height), kMaxGridYZ), at_most(batch, kMaxGridYZ));
  launch(sweep_kernel<Lab, Regions>, grid, dim3(kSweepThreads), 0, stream, move, begin, regions, wide, rounds, batch);
}

}  // namespace

template <class Lab>
void sweep_borders(const typename MoveBorders<Lab>::template For<int32_t, 0>& move, const FinerLabels<int32_t, 0>& begin,
                   int64_t* wide, int sweeps, int64_t batch, void* stream) {
  sweep<Lab>(move, begin, KnownRegions{}, wide, 4 * sweeps, batch, stream);
}

bool measures_cells(const Cells& cells) {
  constexpr int64_t kSide = kTile + 2 * 4;
  const auto seen = [](int64_t size, int64_t count) { return minimum(count, (kSide * count + size - 1) / size + 3); };
  return seen(cells.height, cells.rows) * seen(cells.width, cells.columns) <= kMostCellsSeen;
}

void sweep_cells(const MoveBorders<PlaneLab>::For<int32_t, 0>& move, const RegionModel<int32_t, 0>& measure,
                 const FinerLabels<int32_t, 0>& begin, int64_t batch, void* stream) {
  sweep<PlaneLab>(move, begin, SeenRegions{measure}, nullptr, 4, batch, stream);
}

TEXVLM_QUERIES(StartSuperpixels<int32_t, 0>);
TEXVLM_QUERIES(RegionModel<int32_t, 0>);
TEXVLM_ROWS_REDUCED(PictureWeights<int64_t, 0>);
TEXVLM_QUERIES(MeasureAndTouch<int32_t, 0>);
#define TEXVLM_SWEEPS(Lab)                                                                                                  \
  template void sweep_borders<Lab>(const MoveBorders<Lab>::For<int32_t, 0>&, const FinerLabels<int32_t, 0>&, int64_t*, int, \
                                   int64_t, void*)
TEXVLM_SWEEPS(PlaneLab);
#define TEXVLM_PICTURE_LAB(S)                   \
  TEXVLM_TEXELS(LabPlanes<S>::For<int32_t, 0>); \
  TEXVLM_SWEEPS(PictureLab<S>)
TEXVLM_PICTURE_LAB(uint8_t);
TEXVLM_PICTURE_LAB(float);
TEXVLM_PICTURE_LAB(double);
TEXVLM_QUERIES(RegionSums<int64_t, 0>);
TEXVLM_QUERIES(RegionShape<float, 0>);
TEXVLM_TEXELS(RegionPlanes<float, 0>);
TEXVLM_TEXELS(ObjectBoundary<float>::For<float, 0>);
TEXVLM_TEXELS(ObjectBoundary<double>::For<float, 0>);

}  // namespace texvlm::cuda
