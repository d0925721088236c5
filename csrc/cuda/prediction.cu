// A block per row of cells, from the left on, as soon as the row above is one cell ahead: a wavefront in one launch.
//
// Blocks wait for blocks here. Each takes its row by a ticket, so the row above is one that a running block has taken before or
// that is done; whichever block runs first, some row can always go on. What one block tells another is a single word (0: not
// decided, else 1 + the cell's source), so relaxed atomics do. Bytes moved: of each cell as many pixels as it takes to tell it
// from up to three others, which are near enough to be in a cache; all of them where it is predicted.
#include "prediction.h"

#include "launch.cuh"

namespace texvlm::cuda {
namespace {

template <class T>
struct BlockTeam {
  uint32_t* sources;  // [B, cells]
  int64_t* out;
  int64_t cells;
  uint32_t* shared;

  __device__ bool alike(const PredictedCells<T>& f, int64_t b, int64_t own_cell, int64_t earlier_cell) const {
    const auto own = f.area(own_cell), earlier = f.area(earlier_cell);
    const int wide = static_cast<int>(earlier.width), pixels = static_cast<int>(earlier.height) * wide;
    bool near = true;
    for (int64_t i = threadIdx.x; near && i < pixels; i += kThreads) {
      const int y = static_cast<int>(i) / wide, x = static_cast<int>(i) - y * wide;
      const T* p = &f.image.at(b, 0, own.y + minimum<int64_t>(y, own.height - 1), own.x + minimum<int64_t>(x, own.width - 1));
      const T* q = &f.image.at(b, 0, earlier.y + y, earlier.x + x);
#pragma unroll 4
      for (int64_t c = 0; c < f.channels; ++c) near &= f.near(p[c * f.image.stride_c], q[c * f.image.stride_c]);
    }
    return __syncthreads_and(near);
  }

  // The first thread's value in all of them.
  template <class F>
  __device__ uint32_t from_first(const F& value) const {
    if (threadIdx.x == 0) *shared = value();
    __syncthreads();
    const uint32_t found = *shared;
    __syncthreads();
    return found;
  }
  __device__ int64_t source(int64_t b, int64_t cell) const {
    return static_cast<int64_t>(from_first([&] {
             uint32_t word;
             while ((word = atomicAdd(sources + b * cells + cell, 0u)) == 0) __nanosleep(20);
             return word;
           })) -
           1;
  }
  __device__ void decide(int64_t b, int64_t cell, int64_t source) const {
    if (threadIdx.x != 0) return;
    out[b * cells + cell] = source;
    atomicExch(sources + b * cells + cell, static_cast<uint32_t>(source + 1));
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    predict_cells_kernel(PredictedCells<T> f, int64_t batch, int64_t* out, uint32_t* next, uint32_t* sources) {
  TEXVLM_SHARED(shared, uint32_t);
  const BlockTeam<T> team{sources, out, f.rows * f.columns, &shared};
  for (;;) {
    const int64_t ticket = team.from_first([&] { return atomicAdd(next, 1u); });
    if (ticket >= batch * f.rows) return;
    f.row(team, ticket % batch, ticket / batch);  // the first rows of all pictures first: none of them waits
  }
}

}  // namespace

template <class T>
void predict_cells(const PredictedCells<T>& cells, int64_t batch, int64_t* out, uint32_t* workspace, void* stream) {
  launch(predict_cells_kernel<T>, dim3(at_most(batch * cells.rows, 1 << 20)), kThreads, 0, stream, cells, batch, out, workspace,
         workspace + 1);
}

#define TEXVLM_PREDICTION(T) template void predict_cells(const PredictedCells<T>&, int64_t, int64_t*, uint32_t*, void*)
TEXVLM_PREDICTION(uint8_t);
TEXVLM_PREDICTION(float);
TEXVLM_PREDICTION(double);

}  // namespace texvlm::cuda
