// Rows of channels in whatever type they are stored, and products of many of them by a block: what the kernels of attention are
// made of. Included by the .cu files only; torch-free.
//
// A product is made of 4 x 4 numbers a thread, from slices of both operands in shared memory; the next slice is on its way while
// this one is multiplied. Multiply-adds are fused by name.
#pragma once

#include "scatter.cuh"

namespace texvlm::cuda {

constexpr int kSide = 16;  // the threads of a block as a square: kSide x kSide parts of a product
constexpr int kDepth = 16;
constexpr int kColumns = 64;          // of a product, at a time
constexpr int kPitch = kColumns + 4;  // of a row in shared memory: vectors are aligned, and columns spread over the banks
static_assert(kSide * kSide == kThreads && kColumns * kDepth == 4 * kThreads);

namespace {

__device__ inline float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline double fused(double a, double b, double c) { return fma(a, b, c); }
__device__ inline float exp_for(float v) { return expf(v); }  // exp_of() has no NaN, which has to get through here
__device__ inline double exp_for(double v) { return exp(v); }
__device__ inline float log_for(float v) { return logf(v); }
__device__ inline double log_for(double v) { return log(v); }
template <class A>
__device__ A nothing() {
  return -static_cast<A>(HUGE_VALF);
}

// The sum over `lanes` neighbouring lanes, in all of them.
template <class V>
__device__ V lanes_sum(V value, int lanes = kLanes) {
  for (int step = lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}
template <class V>
__device__ V lanes_max(V value, int lanes = kLanes) {
  for (int step = lanes / 2; step > 0; step /= 2) value = maximum(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

template <class A>
TEXVLM_HD int64_t bytes_each(Storage storage) {
  return storage == Storage::own ? static_cast<int64_t>(sizeof(A)) : 2;
}
// Whether rows at all of these can be read four at a time, if they are a multiple of four; null can.
template <class A, class... P>
bool aligned(Storage storage, P... rows) {
  return ((reinterpret_cast<uintptr_t>(rows) % (4 * bytes_each<A>(storage)) == 0) && ...);
}
template <class A>
__device__ const void* row_at(const void* rows, Storage storage, int64_t row, int64_t dim) {
  return static_cast<const char*>(rows) + row * dim * bytes_each<A>(storage);
}

// Four of a row, from `at` on: zeros beyond its end, and where there is no row. wide: rows are a multiple of four, aligned so.
template <class U, class A>
__device__ void load_four_of(const U* from, int64_t left, bool wide, A (&to)[4]) {
  if (wide) {
    const Pack<U, 4> four = *reinterpret_cast<const Pack<U, 4>*>(from);
#pragma unroll
    for (int w = 0; w < 4; ++w) to[w] = static_cast<A>(four.v[w]);
    return;
  }
#pragma unroll
  for (int w = 0; w < 4; ++w)
    if (w < left) to[w] = static_cast<A>(from[w]);
}
template <class A>
__device__ void load_four(const void* row, Storage storage, int64_t at, int64_t dim, bool wide, A (&to)[4]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) to[w] = A(0);
  if (!row || at >= dim) return;
  if constexpr (std::is_same_v<A, float>) {
    if (storage == kStorage<Half>) return load_four_of(static_cast<const Half*>(row) + at, dim - at, wide, to);
    if (storage == kStorage<BFloat16>) return load_four_of(static_cast<const BFloat16*>(row) + at, dim - at, wide, to);
  }
  load_four_of(static_cast<const A*>(row) + at, dim - at, wide, to);
}
template <class A>
__device__ A load_one(const void* row, Storage storage, int64_t at) {
  if constexpr (std::is_same_v<A, float>) {
    if (storage == kStorage<Half>) return static_cast<A>(static_cast<const Half*>(row)[at]);
    if (storage == kStorage<BFloat16>) return static_cast<A>(static_cast<const BFloat16*>(row)[at]);
  }
  return static_cast<const A*>(row)[at];
}
template <class U, class A>
__device__ void store_four_of(U* to, int64_t left, bool wide, const A (&from)[4]) {
  if (wide) {
    Pack<U, 4> four;
#pragma unroll
    for (int w = 0; w < 4; ++w) four.v[w] = static_cast<U>(from[w]);
    *reinterpret_cast<Pack<U, 4>*>(to) = four;
    return;
  }
#pragma unroll
  for (int w = 0; w < 4; ++w)
    if (w < left) to[w] = static_cast<U>(from[w]);
}
template <class A>
__device__ void store_four(void* row, Storage storage, int64_t at, int64_t dim, bool wide, const A (&from)[4]) {
  if (at >= dim) return;
  if constexpr (std::is_same_v<A, float>) {
    if (storage == kStorage<Half>) return store_four_of(static_cast<Half*>(row) + at, dim - at, wide, from);
    if (storage == kStorage<BFloat16>) return store_four_of(static_cast<BFloat16*>(row) + at, dim - at, wide, from);
  }
  store_four_of(static_cast<A*>(row) + at, dim - at, wide, from);
}

// R neighbours in shared memory, by 16 bytes where it can be.
template <int R, class A>
__device__ void read_shared(const A* from, A (&to)[R]) {
  constexpr int W = R < static_cast<int>(16 / sizeof(A)) ? R : static_cast<int>(16 / sizeof(A));
#pragma unroll
  for (int r = 0; r < R; r += W) {
    const Pack<A, W> pack = *reinterpret_cast<const Pack<A, W>*>(from + r);
#pragma unroll
    for (int w = 0; w < W; ++w) to[r + w] = pack.v[w];
  }
}
template <int R, class A>
__device__ void write_shared(A* to, const A (&from)[R]) {
  constexpr int W = R < static_cast<int>(16 / sizeof(A)) ? R : static_cast<int>(16 / sizeof(A));
#pragma unroll
  for (int r = 0; r < R; r += W) {
    Pack<A, W> pack;
#pragma unroll
    for (int w = 0; w < W; ++w) pack.v[w] = from[r + w];
    *reinterpret_cast<Pack<A, W>*>(to + r) = pack;
  }
}

// --- products -----------------------------------------------------------------------------------------------------------------

// What a block holds of two operands.
template <class A>
struct Operands {
  alignas(16) A side[2][kDepth][kPitch];
};

__device__ inline int down() { return static_cast<int>(threadIdx.x) / kSide; }    // this thread's rows of a product
__device__ inline int across() { return static_cast<int>(threadIdx.x) % kSide; }  // and its columns

// Rows that a block multiplies, in shared memory; null: zeros.
struct Rows {
  const void* const* at;
  Storage storage;
};

// A thread's four of the R rows of a product, at a depth: loaded ahead of their use, put where the block finds them.
template <int R, class A>
struct Fours {
  const void* row;
  Storage storage;
  A four[4];

  __device__ explicit Fours(const Rows& rows)
      : row(mine() ? rows.at[threadIdx.x / (kDepth / 4)] : nullptr), storage(rows.storage) {}
  static __device__ bool mine() { return threadIdx.x < R * kDepth / 4; }
  static __device__ int depth() { return static_cast<int>(threadIdx.x) % (kDepth / 4) * 4; }
  __device__ void load(int64_t d0, int64_t dim, bool wide) { load_four(row, storage, d0 + depth(), dim, wide, four); }
  __device__ void put(A (&to)[kDepth][kPitch]) const {
    if (!mine()) return;
#pragma unroll
    for (int w = 0; w < 4; ++w) to[depth() + w][threadIdx.x / (kDepth / 4)] = four[w];
  }
};

// c[i][j] = x[R down + i] . y[J across + j]. The block is in step after.
template <int R, int J, class A>
__device__ void dot_rows(A (&c)[R][J], Operands<A>& operands, const Rows& x, const Rows& y, int64_t dim, bool wide) {
#pragma unroll
  for (int i = 0; i < R; ++i)
#pragma unroll
    for (int j = 0; j < J; ++j) c[i][j] = A(0);
  Fours<R * kSide, A> left(x);
  Fours<J * kSide, A> right(y);
  left.load(0, dim, wide), right.load(0, dim, wide);
  for (int64_t d0 = 0; d0 < dim; d0 += kDepth) {
    left.put(operands.side[0]), right.put(operands.side[1]);
    __syncthreads();
    left.load(d0 + kDepth, dim, wide), right.load(d0 + kDepth, dim, wide);
#pragma unroll 8
    for (int d = 0; d < kDepth; ++d) {
      A a[R], b[J];
      read_shared(&operands.side[0][d][R * down()], a);
      read_shared(&operands.side[1][d][J * across()], b);
#pragma unroll
      for (int i = 0; i < R; ++i)
#pragma unroll
        for (int j = 0; j < J; ++j) c[i][j] = fused(a[i], b[j], c[i][j]);
    }
    __syncthreads();
  }
}

// c[g][i][j] += sum_t panel[t][R down + i] y_t[c0 + 64 g + 4 across + j], for t < many; panel has rows up to a multiple of
// kDepth, zeros where there is no y. The block is in step after.
template <int G, int R, int P, class A>
__device__ void add_rows(A (&c)[G][R][4], Operands<A>& operands, const A (*panel)[P], const Rows& y, int many, int64_t c0,
                         int64_t dim, bool wide) {
  static_assert(G <= 2);
  A four[G][4];
  const auto load = [&](int t0) {
    const void* const row = t0 < many ? y.at[t0 + down()] : nullptr;
#pragma unroll
    for (int g = 0; g < G; ++g) load_four(row, y.storage, c0 + kColumns * g + 4 * across(), dim, wide, four[g]);
  };
  load(0);
  for (int t0 = 0; t0 < many; t0 += kDepth) {
#pragma unroll
    for (int g = 0; g < G; ++g) write_shared(&operands.side[g][down()][4 * across()], four[g]);
    __syncthreads();
    load(t0 + kDepth);
#pragma unroll 8
    for (int t = 0; t < kDepth; ++t) {
      A a[R];
      read_shared(&panel[t0 + t][R * down()], a);
#pragma unroll
      for (int g = 0; g < G; ++g) {
        A b[4];
        read_shared(&operands.side[g][t][4 * across()], b);
#pragma unroll
        for (int i = 0; i < R; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) c[g][i][j] = fused(a[i], b[j], c[g][i][j]);
      }
    }
    __syncthreads();
  }
}

// --- one query ----------------------------------------------------------------------------------------------------------------

constexpr int kDotLanes = 8;                                    // that share a product of two rows
constexpr int kDotRows = 4;                                     // that a thread takes at a time
constexpr int kAloneEntries = kThreads / kDotLanes * kDotRows;  // of a chunk

// The products of x with the rows of a chunk: of row dot_row() + 32 u in c[u], in all lanes that share it.
__device__ inline int dot_row() { return static_cast<int>(threadIdx.x) / kDotLanes; }
template <class A>
__device__ void dot_alone(A (&c)[kDotRows], const void* x, Storage storage, const Rows& y, int64_t dim, bool wide) {
#pragma unroll
  for (int u = 0; u < kDotRows; ++u) c[u] = A(0);
  for (int64_t d = 4 * (static_cast<int>(threadIdx.x) % kDotLanes); d < dim; d += 4 * kDotLanes) {
    A a[4];
    load_four(x, storage, d, dim, wide, a);
#pragma unroll
    for (int u = 0; u < kDotRows; ++u) {
      A b[4];
      load_four(y.at[dot_row() + u * (kThreads / kDotLanes)], y.storage, d, dim, wide, b);
#pragma unroll
      for (int w = 0; w < 4; ++w) c[u] = fused(a[w], b[w], c[u]);
    }
  }
#pragma unroll
  for (int u = 0; u < kDotRows; ++u) c[u] = lanes_sum(c[u], kDotLanes);
}

// c[g][j] += sum weight_t y_t[c0 + 64 g + 4 across + j], over the rows t = down, down + 16, .. < many of a chunk.
template <int G, class A>
__device__ void add_alone(A (&c)[G][4], const A* weight, const Rows& y, int many, int64_t c0, int64_t dim, bool wide) {
#pragma unroll 4
  for (int t = down(); t < many; t += kSide) {
    if (!y.at[t]) continue;
#pragma unroll
    for (int g = 0; g < G; ++g) {
      A four[4];
      load_four(y.at[t], y.storage, c0 + kColumns * g + 4 * across(), dim, wide, four);
#pragma unroll
      for (int j = 0; j < 4; ++j) c[g][j] = fused(weight[t], four[j], c[g][j]);
    }
  }
}

// The sum of what the threads of a column have, in those that are first. The block is in step after.
template <int G, class A>
__device__ void sum_down(A (&c)[G][4], A (*partial)[kPitch]) {
#pragma unroll
  for (int g = 0; g < G; ++g) {
    write_shared(&partial[down()][4 * across()], c[g]);
    __syncthreads();
    if (down() == 0) {
      for (int t = 1; t < kSide; ++t) {
        A more[4];
        read_shared(&partial[t][4 * across()], more);
#pragma unroll
        for (int j = 0; j < 4; ++j) c[g][j] += more[j];
      }
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace texvlm::cuda
