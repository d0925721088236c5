#include "superpixel.h"

#include "reduce.cuh"

namespace texvlm::cuda {

namespace {

constexpr int kMergeThreads = 256;

struct Candidate {
  int64_t cost;
  int32_t slot, edge;
  __device__ bool before(const Candidate& other) const { return cost < other.cost || (cost == other.cost && slot < other.slot); }
};

// A block a picture. The edges are gathered in any order; ties are broken by the slot, which is the host's order.
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(MergeRegions<int32_t, 0> merge, int64_t batch) {
  TEXVLM_SHARED(candidates, Candidate[kMergeThreads]);
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
      for (int i = t; i < count; i += kMergeThreads) {
        const Candidate c{e.cost[i], e.slot[i], i};
        if (c.before(best)) best = c;
      }
      candidates[t] = best;
      __syncthreads();
      for (int half = kMergeThreads / 2; half > 0; half /= 2) {
        if (t < half && candidates[t + half].before(candidates[t])) candidates[t] = candidates[t + half];
        __syncthreads();
      }
      const int edge = candidates[0].edge;
      const int32_t u = e.u[edge], v = e.v[edge];
      __syncthreads();  // all have read the edge before anyone changes it
      if (t == 0) merge.unite(b, u, v);
      __syncthreads();
      for (int i = t; i < count; i += kMergeThreads) merge.follow(b, e, i, u, v);
      __syncthreads();
    }
    if (t == 0) merge.number(b);
    __syncthreads();
  }
}

}  // namespace

void merge_regions(const MergeRegions<int32_t, 0>& merge, int64_t batch, void* stream) {
  if (batch <= 0) return;
  launch(merge_kernel, dim3(at_most(batch, 1 << 20)), dim3(kMergeThreads), 0, stream, merge, batch);
}

TEXVLM_QUERIES(LabTable<int32_t, 0>);
TEXVLM_TEXELS(StartCells<int32_t, 0>);
TEXVLM_QUERIES(RegionModel<int32_t, 0>);
TEXVLM_ROWS_REDUCED(PictureWeights<int64_t, 0>);
TEXVLM_QUERIES(TouchingRegions<int32_t, 0>);
TEXVLM_TEXELS(FinerLabels<int32_t, 0>);
TEXVLM_TEXELS(MoveBorders<PlaneLab>::For<int32_t, 0>);
#define TEXVLM_PICTURE_LAB(S)                   \
  TEXVLM_TEXELS(LabPlanes<S>::For<int32_t, 0>); \
  TEXVLM_TEXELS(MoveBorders<PictureLab<S>>::For<int32_t, 0>)
TEXVLM_PICTURE_LAB(uint8_t);
TEXVLM_PICTURE_LAB(float);
TEXVLM_PICTURE_LAB(double);
TEXVLM_QUERIES(RegionSums<int64_t, 0>);
TEXVLM_QUERIES(RegionShape<float, 0>);
TEXVLM_TEXELS(RegionPlanes<float, 0>);
TEXVLM_TEXELS(ObjectBoundary<float>::For<float, 0>);
TEXVLM_TEXELS(ObjectBoundary<double>::For<float, 0>);

}  // namespace texvlm::cuda
