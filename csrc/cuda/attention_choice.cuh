// Which cells a tile splits. Included by attention.cu only; torch-free.
//
// A warp finds the rank of a cell, from the scores in work memory; the best are found digit by digit. Bytes moved: the scores of
// the stage, two numbers and two rows for each cell; what ranks are made of is read again for each digit, from the caches.
#pragma once

#include "../math/order.h"
#include "attention.cuh"

namespace texvlm::cuda {
namespace {

// Over the cells of a stage: the sum of their importances and the largest bound, where these are finite; how many they are.
template <class A>
struct RankSums {
  A total, top;
  unsigned many, unused;

  __device__ void clear() { total = 0, top = nothing<A>(), many = 0, unused = 0; }
  __device__ void join(int, const RankSums& other, int, int) {
    total += other.total, top = maximum(top, other.top), many += other.many;
  }
};

// Of scores: the largest, and the sum of the exponentials of what they are below it.
template <class A>
struct LogSum {
  A top, sum;

  __device__ void clear() { top = nothing<A>(), sum = 0; }
  __device__ A base() const { return top == nothing<A>() ? A(0) : top; }
  __device__ void meet(A score) { join(0, {score != score ? nothing<A>() : score, score != score ? score : A(1)}, 0, 1); }
  __device__ void join(int, const LogSum& other, int, int) {
    const A before = top, from = other.top;
    top = maximum(top, from);
    sum = sum * exp_for(before - base()) + other.sum * exp_for(from - base());
  }
  __device__ A log() const { return base() + log_for(sum); }
};

template <class A>
struct Selection {
  using Bits = std::make_unsigned_t<decltype(rank_key(A(0)))>;
  unsigned histogram[kDigits];
  Bits limit;
  unsigned ties;

  static __device__ Bits of(A value) {  // ascending: the best first
    return ~(static_cast<Bits>(rank_key(value)) ^ (Bits{1} << (8 * sizeof(Bits) - 1)));
  }
};

// Which of the cells that are there are split: their bits and their list, both of the stage. Returns how many. scores:
// [number][Q] in the work memory; lse [Q]: over all that is there, not finite for a query that has no say. The same in every
// block that is given the same.
template <int Q, class A>
__device__ int choose(const Attend<A>& f, Descent<A>& at, int64_t b, int64_t kv, const void* const* query, const A* lse,
                      A (*partial)[kPitch]) {
  TEXVLM_SHARED(selection, Selection<A>);
  using Bits = typename Selection<A>::Bits;
  const AttentionShape& shape = f.shape;
  const TileSpace<A>& space = at.space;
  const int me = static_cast<int>(threadIdx.x), lane = me % kLanes;
  const int64_t offset = shape.cells.offset[at.stage], total = shape.cells.total(), dim = shape.dim;
  const A none = static_cast<A>(NAN);
  const bool bounded = f.importance != Importance::mass, massive = f.importance != Importance::bound;

  const int said = __syncthreads_count(me < Q && finite(lse[me < Q ? me : 0]));
  for (int64_t c0 = 0; bounded && c0 < dim; c0 += kColumns) {  // the mean of the queries
    const int64_t c = c0 + me % kColumns;
    A sum = 0;
    for (int q = me / kColumns; c < dim && q < Q; q += kThreads / kColumns)
      if (finite(lse[q])) sum += load_one<A>(query[q], f.storage, c);
    partial[me / kColumns][me % kColumns] = sum;
    __syncthreads();
    if (me < kColumns && c < dim) {
      for (int g = 1; g < kThreads / kColumns; ++g) sum += partial[g][me];
      space.mean[c] = static_cast<A>(shape.scale) * sum / static_cast<A>(maximum(said, 1));
    }
    __syncthreads();
  }

  // What cells are to be ranked by; the slots, which have no other use yet, hold what they are.
  enum State : int { absent, empty, there };
  for (int i = me / kLanes; i < at.present; i += kThreads / kLanes) {
    const int cell = at.cell(i);
    const bool full = cell >= 0 && f.log_count[b * total + offset + cell] != nothing<A>();
    const int64_t entry = kv * total + offset + maximum(cell, 0);
    A value = 0, bound = 0;
    for (int q = lane; full && massive && q < Q; q += kLanes)
      if (finite(lse[q])) value += exp_for(space.scores[static_cast<int64_t>(i) * Q + q] - lse[q]);
    for (int64_t c = lane; full && bounded && c < dim; c += kLanes) {
      const A u = space.mean[c], x = u * f.low[entry * dim + c], y = u * f.high[entry * dim + c];
      bound += finite(x + y) ? maximum(x, y) : none;
    }
    value = lanes_sum(value), bound = lanes_sum(bound);
    if (lane != 0) continue;
    if (full && f.importance == Importance::spread) value = value * f.spread[2 * entry] * sqrt_of(f.spread[2 * entry + 1]);
    space.values[i] = value, space.bounds[i] = bound;
    space.slot[i] = full ? there : cell < 0 ? absent : empty;
  }
  __syncthreads();
  RankSums<A> part;
  part.clear();
  for (int i = me; i < at.present; i += kThreads) {
    if (space.slot[i] != absent) ++part.many;
    if (space.slot[i] != there) continue;
    if (finite(space.values[i])) part.total += space.values[i];
    if (finite(space.bounds[i])) part.top = maximum(part.top, space.bounds[i]);
  }
  part = block_join(part);
  A shares = 0;
  for (int i = me; bounded && i < at.present; i += kThreads)
    if (space.slot[i] == there && finite(space.bounds[i])) shares += exp_for(space.bounds[i] - part.top);
  shares = block_sum(shares);
  for (int i = me; i < at.present; i += kThreads) {
    const A amount = space.values[i], bound = space.bounds[i];
    A value = part.total > A(0) ? amount / part.total : A(0);
    if (bounded) value += (massive ? static_cast<A>(kBoundShare) : A(1)) * (exp_for(bound - part.top) / shares);
    if (!finite(amount + bound)) value = -nothing<A>();
    space.values[i] = space.slot[i] == there ? value : space.slot[i] == empty ? A(-1) : none;
  }
  __syncthreads();

  // The best, by radix (see cascade.cu): keys below the limit, and of those equal to it the first.
  const unsigned wanted = static_cast<unsigned>(minimum<int64_t>(shape.counts[at.stage], part.many));
  Bits limit = wanted < part.many ? 0 : ~Bits(0);
  unsigned ties = wanted < part.many ? wanted : 0;
  for (int shift = 8 * sizeof(Bits) - 8; ties > 0 && shift >= 0; shift -= 8) {
    selection.histogram[me] = 0;
    __syncthreads();
    for (int first = 0; first < at.present; first += kThreads) {
      const Bits key = first + me < at.present ? Selection<A>::of(space.values[first + me]) : Bits(0);
      const bool on_the_way =
          shift + 8 >= static_cast<int>(8 * sizeof(Bits)) || key >> (shift + 7) >> 1 == limit >> (shift + 7) >> 1;
      count_digit(selection.histogram, first + me < at.present && on_the_way, digit_of(key, shift));
    }
    __syncthreads();
    const unsigned own = selection.histogram[me];
    unsigned all;
    const unsigned before = block_exclusive<kThreads>(own, all);
    if (before < ties && ties <= before + own)
      selection.limit = static_cast<Bits>(limit | static_cast<Bits>(me) << shift), selection.ties = ties - before;
    __syncthreads();
    limit = selection.limit, ties = selection.ties;
    __syncthreads();
  }
  at.clear(at.bits);
  at.clear(space.equal);
  for (int i = me; i < at.present; i += kThreads) {
    const Bits key = Selection<A>::of(space.values[i]);
    if (key < limit) at.set(at.bits, at.cell(i));
    if (key == limit && ties > 0) at.set(space.equal, at.cell(i));
  }
  __syncthreads();
  return at.list_split(space.equal, ties);
}

}  // namespace
}  // namespace texvlm::cuda
