// Keys and values pooled into cells, and the adjoint.
//
// A block takes a few cells of the coarsest level, finest level first, a warp for each cell, channels across lanes, four a lane;
// a coarser cell is made of the finer ones. Bytes moved: the keys and values of the places once (and again from the caches, for
// the deviations), the cells once out and once in. Adjoint: a warp, or a part of one where rows are short, gathers for each place
// from the cells above it, no atomics: the cells' gradients from the caches, those of the places once out; where the weights want
// a gradient, keys and values once in.
#include "attention.h"
#include "attention_rows.cuh"

namespace texvlm::cuda {
namespace {

constexpr int kPackWarps = kThreads / kLanes;

// ln of the sum of the weights of places, in all lanes of the warp.
template <class A>
__device__ A log_count_of(const A* log_weight, const CellBox& box) {
  if (!log_weight) return log_for(static_cast<A>(box.count()));
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  A top = nothing<A>(), sum = 0;
  for (int64_t i = lane; i < box.count(); i += kLanes) top = maximum(top, log_weight[box.cell(i)]);
  top = lanes_max(top);
  const A base = top == nothing<A>() ? A(0) : top;
  for (int64_t i = lane; i < box.count(); i += kLanes) sum += exp_for(log_weight[box.cell(i)] - base);
  return base + log_for(lanes_sum(sum));
}

// Lanes that share a row, four channels each; a warp then takes kLanes / row_lanes(dim) rows at a time.
__device__ inline int row_lanes(int64_t dim) { return dim > 64 ? 32 : dim > 32 ? 16 : 8; }

// The sum over the lanes that have the same channels of other rows.
template <class V>
__device__ V rows_sum(V value, int lanes) {
  for (int step = lanes; step < kLanes; step *= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// A cell of stage s from its children, by a warp.
template <class A>
__device__ void pack_cell(const AttentionPack<A>& f, int64_t b, int64_t h, int s, int64_t cell, bool wide) {
  const CellPyramid& cells = f.cells;
  const bool places = s + 1 == cells.stages;
  const CellBox box = cells.children(s, cell);
  const int64_t bh = b * f.heads + h, total = cells.total(), dim = f.dim, to = bh * total + cells.offset[s] + cell;
  // Rows of the children, and of what they hold besides.
  const int64_t first = places ? bh * cells.places() : bh * total + box.base;
  const void *const k = places ? f.k : f.keys, *const v = places ? f.v : f.values;
  const Storage storage = places ? f.storage : Storage::own;
  const A* const log_weight = f.log_weight ? f.log_weight + b * cells.places() : nullptr;
  const int me = static_cast<int>(threadIdx.x) % kLanes, lanes = row_lanes(dim), step = kLanes / lanes, sub = me / lanes;
  const int many = static_cast<int>(box.count());

  // A child for each lane: its row, and ln of its weight.
  int64_t row = 0;
  A log = nothing<A>();
  const auto find = [&](int begin) {
    const int child = begin + me < many ? static_cast<int>(box.cell(begin + me)) : -1;
    row = first + maximum(child, 0);
    if (places) {
      log = child < 0 ? nothing<A>() : log_weight ? log_weight[child] : A(0);
      return;
    }
    log = nothing<A>();
    for (int i = 0; i < minimum(kLanes, many - begin); ++i) {
      const A of = log_count_of(log_weight, cells.places_of(s + 1, __shfl_sync(kAllLanes, child, i)));
      if (i == me) log = of;
    }
  };
  A top = nothing<A>(), count = 0;
  for (int begin = 0; begin < many; begin += kLanes) {
    find(begin);
    top = maximum(top, lanes_max(log != log ? nothing<A>() : log));
  }
  const A base = top == nothing<A>() ? A(0) : top;
  for (int begin = 0; begin < many; begin += kLanes) {
    if (many > kLanes) find(begin);
    count += lanes_sum(exp_for(log - base));
  }
  const bool empty = count == A(0);

  // visit(row, weight) for each child that is there, by the lanes that take its row; all lanes are in step.
  const auto each_child = [&](const auto& visit) {
    for (int begin = 0; begin < many; begin += kLanes) {
      if (many > kLanes) find(begin);
      const A own = exp_for(log - base);
#pragma unroll 2
      for (int i = 0; i < minimum(kLanes, many - begin); i += step) {
        const A weight = __shfl_sync(kAllLanes, own, i + sub);
        const int64_t at = __shfl_sync(kAllLanes, row, i + sub);
        if (weight != A(0)) visit(at, weight);
      }
    }
  };
  A far_k = 0, far_v = 0;
  for (int64_t c0 = 0; c0 < dim; c0 += 4 * lanes) {
    const int64_t c = c0 + 4 * (me % lanes);
    A keys[4] = {}, values[4] = {}, low[4], high[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) low[w] = -nothing<A>(), high[w] = nothing<A>();
    const auto widen = [&](int w, A least, A most) {  // NaN stays
      if (least < low[w] || least != least) low[w] = least;
      if (most > high[w] || most != most) high[w] = most;
    };
    each_child([&](int64_t at, A weight) {
      A x[4], y[4];
      load_four(row_at<A>(k, storage, at, dim), storage, c, dim, wide, x);
      load_four(row_at<A>(v, storage, at, dim), storage, c, dim, wide, y);
#pragma unroll
      for (int w = 0; w < 4; ++w) keys[w] = fused(weight, x[w], keys[w]), values[w] = fused(weight, y[w], values[w]);
      if (!places)
        load_four(f.low + at * dim, Storage::own, c, dim, wide, x), load_four(f.high + at * dim, Storage::own, c, dim, wide, y);
#pragma unroll
      for (int w = 0; w < 4; ++w) widen(w, x[w], places ? x[w] : y[w]);
    });
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      keys[w] = rows_sum(keys[w], lanes), values[w] = rows_sum(values[w], lanes);
      for (int across = lanes; across < kLanes; across *= 2)
        widen(w, __shfl_xor_sync(kAllLanes, low[w], across), __shfl_xor_sync(kAllLanes, high[w], across));
      keys[w] = empty ? A(0) : keys[w] / count, values[w] = empty ? A(0) : values[w] / count;
      low[w] = empty ? A(0) : low[w], high[w] = empty ? A(0) : high[w];
    }
    each_child([&](int64_t at, A weight) {
      A x[4], y[4];
      load_four(row_at<A>(k, storage, at, dim), storage, c, dim, wide, x);
      load_four(row_at<A>(v, storage, at, dim), storage, c, dim, wide, y);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if (c + w >= dim) continue;
        x[w] -= keys[w], y[w] -= values[w];
        far_k = fused(weight * x[w], x[w], far_k), far_v = fused(weight * y[w], y[w], far_v);
      }
    });
    if (sub != 0) continue;
    store_four(f.keys + to * dim, Storage::own, c, dim, wide, keys);
    store_four(f.values + to * dim, Storage::own, c, dim, wide, values);
    store_four(f.low + to * dim, Storage::own, c, dim, wide, low);
    store_four(f.high + to * dim, Storage::own, c, dim, wide, high);
  }
  if (!places)  // the deviations within the children
    each_child([&](int64_t at, A weight) {
      if (me % lanes != 0) return;
      far_k = fused(weight, f.spread[2 * at], far_k), far_v = fused(weight, f.spread[2 * at + 1], far_v);
    });
  far_k = lanes_sum(far_k), far_v = lanes_sum(far_v);
  const A log_count = log_count_of(log_weight, cells.places_of(s, cell));
  if (me != 0) return;
  f.spread[2 * to] = empty ? A(0) : far_k / count;
  f.spread[2 * to + 1] = empty ? A(0) : far_v / count;
  if (h == 0) f.log_count[b * total + cells.offset[s] + cell] = log_count;
}

// The cells of stage s in cell i of the first.
__device__ inline CellBox within(const CellPyramid& cells, int s, int64_t i) {
  const int64_t step = int64_t{1} << (cells.level[0] - cells.level[s]), h = cells.rows_of(s), w = cells.columns_of(s);
  const int64_t y = i / cells.columns_of(0) * step, x = i % cells.columns_of(0) * step;
  return {y, minimum(y + step, h), x, minimum(x + step, w), w, cells.offset[s]};
}

// together: cells of the first stage that a block takes.
template <class A>
__global__ void __launch_bounds__(kThreads)
    attention_pack_kernel(const __grid_constant__ AttentionPack<A> f, int64_t groups, int64_t together, bool wide) {
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  for (int64_t item = blockIdx.x; item < f.batch * f.heads * groups; item += gridDim.x) {
    const int64_t group = item % groups, h = item / groups % f.heads, b = item / groups / f.heads;
    for (int s = f.cells.stages - 1; s >= 0; --s) {
      const int64_t step = int64_t{1} << (f.cells.level[0] - f.cells.level[s]);
      const int64_t each = minimum(step, f.cells.rows_of(s)) * minimum(step, f.cells.columns_of(s));
      for (int64_t i = warp; i < together * each; i += kPackWarps) {
        const int64_t first = group * together + i / each;
        if (first >= f.cells.cells(0)) break;
        const CellBox box = within(f.cells, s, first);
        if (i % each < box.count()) pack_cell(f, b, h, s, box.cell(i % each), wide);
      }
      __syncthreads();
    }
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    attention_pack_adjoint_kernel(const __grid_constant__ AttentionPackAdjoint<A> f, bool wide) {
  const CellPyramid& cells = f.cells;
  const int64_t places = cells.places(), total = cells.total(), dim = f.dim;
  const int me = static_cast<int>(threadIdx.x) % kLanes, lanes = row_lanes(dim), step = kLanes / lanes;
  for (int64_t first = (static_cast<int64_t>(blockIdx.x) * kPackWarps + threadIdx.x / kLanes) * step; first < f.batch * places;
       first += static_cast<int64_t>(gridDim.x) * kPackWarps * step) {
    const int64_t i = first + me / lanes;
    const bool mine = i < f.batch * places;
    const int64_t b = mine ? i / places : 0, j = mine ? i - b * places : 0, y = j / cells.columns, x = j % cells.columns;
    const A log_weight = f.log_weight ? f.log_weight[b * places + j] : A(0);
    const bool there = mine && log_weight != nothing<A>();
    A along = 0;
    for (int64_t h = 0; mine && h < f.heads; ++h) {
      const int64_t bh = b * f.heads + h, own = bh * places + j;
      for (int64_t c = 4 * (me % lanes); c < dim; c += 4 * lanes) {
        const auto gather = [&](const A* grad, const void* of, const A* mean, A* out) {
          A sum[4] = {};
          for (int s = 0; there && grad && s < cells.stages; ++s) {
            const int64_t cell = cells.above(s, y, x), at = (bh * total + cell) * dim;
            const A share = exp_for(log_weight - f.log_count[b * total + cell]);
            A g[4];
            load_four(grad + at, Storage::own, c, dim, wide, g);
#pragma unroll
            for (int w = 0; w < 4; ++w) sum[w] = fused(share, g[w], sum[w]);
            if (!f.grad_log_weight) continue;
            A value[4], m[4];
            load_four(row_at<A>(of, f.storage, own, dim), f.storage, c, dim, wide, value);
            load_four(mean + at, Storage::own, c, dim, wide, m);
#pragma unroll
            for (int w = 0; w < 4; ++w) along = fused(share * (value[w] - m[w]), g[w], along);
          }
          if (out) store_four(out + own * dim, Storage::own, c, dim, wide, sum);
        };
        gather(f.grad_keys, f.k, f.keys, f.grad_k);
        gather(f.grad_values, f.v, f.values, f.grad_v);
      }
    }
    if (!f.grad_log_weight) continue;
    along = lanes_sum(along, lanes);
    for (int s = 0; there && f.grad_log_count && s < cells.stages; ++s) {
      const int64_t cell = b * total + cells.above(s, y, x);
      along = fused(exp_for(log_weight - f.log_count[cell]), f.grad_log_count[cell], along);
    }
    if (mine && me % lanes == 0) f.grad_log_weight[b * places + j] = along;
  }
}

}  // namespace

template <class A>
void attention_pack(const AttentionPack<A>& f, void* stream) {
  if (f.batch <= 0 || f.heads <= 0 || f.cells.total() <= 0) return;
  const int64_t each = ceil_div(f.cells.cells(f.cells.stages - 1), f.cells.cells(0));
  const int64_t together = maximum<int64_t>(1, kPackWarps / each), groups = ceil_div(f.cells.cells(0), together);
  const bool wide =
      f.dim % 4 == 0 && aligned<A>(f.storage, f.k, f.v) && aligned<A>(Storage::own, f.keys, f.values, f.low, f.high);
  launch(attention_pack_kernel<A>, dim3(at_most(f.batch * f.heads * groups, 1 << 20)), kThreads, 0, stream, f, groups, together,
         wide);
}

template <class A>
void attention_pack_adjoint(const AttentionPackAdjoint<A>& f, void* stream) {
  const int64_t all = f.batch * f.cells.places();
  if (all <= 0 || (!f.grad_k && !f.grad_v && !f.grad_log_weight)) return;
  const bool wide = f.dim % 4 == 0 && aligned<A>(f.storage, f.k, f.v) &&
                    aligned<A>(Storage::own, f.grad_keys, f.grad_values, f.keys, f.values, f.grad_k, f.grad_v);
  launch(attention_pack_adjoint_kernel<A>, dim3(at_most(ceil_div(all, kPackWarps), 1 << 20)), kThreads, 0, stream, f, wide);
}

#define TEXVLM_ATTENTION_PACK(A)                                \
  template void attention_pack(const AttentionPack<A>&, void*); \
  template void attention_pack_adjoint(const AttentionPackAdjoint<A>&, void*)
TEXVLM_ATTENTION_PACK(float);
TEXVLM_ATTENTION_PACK(double);

}  // namespace texvlm::cuda
