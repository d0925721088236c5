// Exact selection of the best k, and compaction.
//
// Both ways find the k-th best key digit by digit, from the top (radix select), take the winners in the order of their indices,
// and sort them stably: best first, ties by the lowest index, NaN last. Where the order of the indices is asked for, that is all.
//   Rows of up to 2^15 scores and k up to 2048: one launch, a block per row, winners sorted in shared memory.
//   Longer rows: selection, compaction and sort by launches over the whole device; with k = N there is nothing to select.
// Bytes moved: the scores once per digit (from the L2 cache where they fit) and once more, then the k winners.
#include "cascade.h"

#include <type_traits>

#include "radix.cuh"

namespace texvlm::cuda {
namespace {

constexpr int kRowThreads = 512;
constexpr int kRowLoads = 4;  // that a thread has under way
constexpr int64_t kRowScores = int64_t{1} << 15;
constexpr int64_t kRowWinners = 2048;

template <class T>
struct Order {
  using Bits = std::make_unsigned_t<decltype(rank_key(Acc<T>(0)))>;
  static constexpr int kBits = 8 * sizeof(Bits);

  // Ascending: the best first.
  static __device__ Bits of(T score) {
    return ~(static_cast<Bits>(rank_key(static_cast<Acc<T>>(score))) ^ (Bits{1} << (kBits - 1)));
  }
};

// Where the k-th best key is: keys below `limit` are in, and of those equal to it, the first `equal`.
template <class Bits>
struct Threshold {
  Bits limit;
  unsigned equal;
};

// Whether the key has the digits above `shift` that have been found so far.
template <class Bits>
__device__ bool on_the_way(Bits key, Bits found, int shift) {
  return shift + 8 >= static_cast<int>(8 * sizeof(Bits)) || (key >> (shift + 7) >> 1) == (found >> (shift + 7) >> 1);
}

template <class T>
__global__ void __launch_bounds__(kRowThreads) topk_row_kernel(TopKView<T> view, int64_t batch) {
  using Bits = typename Order<T>::Bits;
  TEXVLM_SHARED(histogram, unsigned[kDigits]);
  TEXVLM_SHARED(found, Threshold<Bits>);
  TEXVLM_SHARED(keys, Bits[kRowWinners]);
  TEXVLM_SHARED(places, unsigned[kRowWinners]);
  const int count = static_cast<int>(view.count), k = static_cast<int>(view.k), me = static_cast<int>(threadIdx.x);
  int padded = 1;
  while (padded < k) padded *= 2;
  for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
    const T* row = view.scores + b * view.stride_b;
    // Calls f(i, key) for all of the row in chunks of the block, every thread as often: i may lie beyond the row. Loads of
    // several chunks are under way at once.
    const auto each = [&](const auto& f) {
      for (int first = me; first - me < count; first += kRowThreads * kRowLoads) {
        Bits key[kRowLoads];
#pragma unroll
        for (int u = 0; u < kRowLoads; ++u) {
          const int i = first + u * kRowThreads;
          key[u] = i < count ? Order<T>::of(row[i * view.stride_n]) : Bits(0);
        }
#pragma unroll
        for (int u = 0; u < kRowLoads && first - me + u * kRowThreads < count; ++u) f(first + u * kRowThreads, key[u]);
      }
    };
    Threshold<Bits> limit{static_cast<Bits>(~Bits(0)), 0};
    if (k < count) {
      limit = {0, static_cast<unsigned>(k)};
      for (int shift = Order<T>::kBits - 8; shift >= 0; shift -= 8) {
        if (me < kDigits) histogram[me] = 0;
        __syncthreads();
        each([&](int i, Bits key) {
          count_digit(histogram, i < count && on_the_way(key, limit.limit, shift), digit_of(key, shift));
        });
        __syncthreads();
        const unsigned own = me < kDigits ? histogram[me] : 0;
        unsigned all;
        const unsigned before = block_exclusive<kRowThreads>(own, all);
        if (before < limit.equal && limit.equal <= before + own)
          found = {static_cast<Bits>(limit.limit | static_cast<Bits>(me) << shift), limit.equal - before};
        __syncthreads();
        limit = found;
        __syncthreads();
      }
    }
    // Winners of a row that is sorted as a whole are all; else in the order of their indices, and where they are to be sorted,
    // those below the limit first.
    unsigned below = 0, equal = 0;
    each([&](int i, Bits key) {
      if (k == count) {
        if (i < count) keys[i] = key, places[i] = static_cast<unsigned>(i);
        return;
      }
      const bool less = i < count && key < limit.limit, same = i < count && key == limit.limit;
      unsigned all;  // both counts in one scan: at most 512 each
      const unsigned before = block_exclusive<kRowThreads>(less ? 0x10000u : same ? 1u : 0u, all);
      const unsigned under = below + (before >> 16), alike = equal + (before & 0xffffu);
      if (less || (same && alike < limit.equal)) {
        if (view.ordered()) {
          const unsigned slot = less ? under : static_cast<unsigned>(k) - limit.equal + alike;
          keys[slot] = key, places[slot] = static_cast<unsigned>(i);
        } else {
          view.indices[b * view.k + under + minimum(alike, limit.equal)] = view.cell(b, i);
        }
      }
      below += all >> 16;
      equal += all & 0xffffu;
    });
    if (!view.ordered()) {
      for (int i = me; k == count && i < count; i += kRowThreads) view.indices[b * view.k + i] = view.cell(b, i);
      continue;
    }
    for (int i = k + me; i < padded; i += kRowThreads) keys[i] = ~Bits(0), places[i] = ~0u;
    __syncthreads();
    // Bitonic sort (K. Batcher, 1968) by key and index: indices are distinct, so the order is the stable one.
    for (int size = 2; size <= padded; size *= 2) {
      for (int step = size / 2; step > 0; step /= 2) {
        for (int pair = me; pair < padded / 2; pair += kRowThreads) {
          const int i = 2 * pair - (pair & (step - 1)), j = i + step;
          const bool ascending = (i & size) == 0;
          const bool swapped = keys[j] < keys[i] || (keys[j] == keys[i] && places[j] < places[i]);
          if (swapped == ascending) {
            const Bits key = keys[i];
            const unsigned place = places[i];
            keys[i] = keys[j], places[i] = places[j];
            keys[j] = key, places[j] = place;
          }
        }
        __syncthreads();
      }
    }
    for (int j = me; j < k; j += kRowThreads) {
      view.indices[b * view.k + j] = static_cast<int64_t>(places[j]);
      view.values[b * view.k + j] = row[static_cast<int64_t>(places[j]) * view.stride_n];
    }
    __syncthreads();
  }
}

// ---- long rows ----

template <class Bits>
__global__ void __launch_bounds__(kThreads)
    select_start_kernel(Threshold<Bits>* found, unsigned* histogram, int64_t batch, Threshold<Bits> start) {
  for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
    histogram[b * kDigits + threadIdx.x] = 0;
    if (threadIdx.x == 0) found[b] = start;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    select_count_kernel(TopKView<T> view, int64_t batch, int shift, const Threshold<typename Order<T>::Bits>* found,
                        unsigned* histogram) {
  using Bits = typename Order<T>::Bits;
  TEXVLM_SHARED(own, unsigned[kDigits]);
  for (int64_t b = blockIdx.y; b < batch; b += gridDim.y) {
    own[threadIdx.x] = 0;
    __syncthreads();
    const Bits limit = found[b].limit;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads; first < view.count;
         first += static_cast<int64_t>(gridDim.x) * kThreads) {
      const int64_t i = first + threadIdx.x;
      const Bits key = i < view.count ? Order<T>::of(view.scores[b * view.stride_b + i * view.stride_n]) : Bits(0);
      count_digit(own, i < view.count && on_the_way(key, limit, shift), digit_of(key, shift));
    }
    __syncthreads();
    if (own[threadIdx.x]) atomicAdd(histogram + b * kDigits + threadIdx.x, own[threadIdx.x]);
  }
}

template <class Bits>
__global__ void __launch_bounds__(kThreads)
    select_digit_kernel(Threshold<Bits>* found, unsigned* histogram, int64_t batch, int shift) {
  for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
    const Threshold<Bits> limit = found[b];
    const unsigned own = histogram[b * kDigits + threadIdx.x];
    unsigned all;
    const unsigned before = block_exclusive<kThreads>(own, all);
    if (before < limit.equal && limit.equal <= before + own)
      found[b] = {static_cast<Bits>(limit.limit | static_cast<Bits>(threadIdx.x) << shift), limit.equal - before};
    histogram[b * kDigits + threadIdx.x] = 0;
  }
}

// The winners in the order of their indices, and where they are to be sorted, those below the limit first: both counts in one
// scan.
template <class T>
struct TakeWinners {
  using Value = unsigned long long;
  using Bits = typename Order<T>::Bits;
  TopKView<T> view;
  const Threshold<Bits>* found;  // null: all win
  Pairs<Bits> out;

  __device__ Bits key(int64_t b, int64_t i) const { return Order<T>::of(view.scores[b * view.stride_b + i * view.stride_n]); }
  __device__ Value count(int64_t b, int64_t i) const {
    if (!found) return 0;
    const Bits own = key(b, i), limit = found[b].limit;
    return own < limit ? Value{1} << 32 : own == limit ? 1 : 0;
  }
  __device__ void emit(int64_t b, int64_t i, Value before, Value own) const {
    int64_t slot = i;
    if (found) {
      const unsigned equal = static_cast<unsigned>(before & 0xffffffffu), wanted = found[b].equal;
      if (own == 0 || (own == 1 && equal >= wanted)) return;
      slot = static_cast<int64_t>(before >> 32);
      if (!view.ordered()) {
        slot += minimum(equal, wanted);
      } else if (own == 1) {
        slot = view.k - wanted + equal;
      }
    }
    if (!view.ordered()) {
      view.indices[b * view.k + slot] = view.cell(b, i);
      return;
    }
    out.keys[b * view.k + slot] = key(b, i);
    out.values[b * view.k + slot] = static_cast<uint32_t>(i);
  }
  __device__ void total(int64_t, Value) const {}
};

template <class T>
__global__ void __launch_bounds__(kThreads) topk_write_kernel(TopKView<T> view, const uint32_t* places, int64_t batch) {
  for (int64_t b = blockIdx.y; b < batch; b += gridDim.y) {
    for (int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; j < view.k;
         j += static_cast<int64_t>(gridDim.x) * kThreads) {
      const int64_t i = places[b * view.k + j];
      view.indices[b * view.k + j] = i;
      view.values[b * view.k + j] = view.scores[b * view.stride_b + i * view.stride_n];
    }
  }
}

bool is_short(int64_t count, int64_t k) { return count <= kRowScores && k <= kRowWinners; }

template <class T>
struct TopKWorkspace {
  using Bits = typename Order<T>::Bits;
  Threshold<Bits>* found;
  unsigned* histogram;
  Pairs<Bits> winners, spare;
  unsigned long long* sums;
  SortWorkspace sort;

  static TopKWorkspace carve(Carver& carver, int64_t batch, int64_t count, int64_t k) {
    TopKWorkspace w{};
    w.found = carver.take<Threshold<Bits>>(batch);
    w.histogram = carver.take<unsigned>(batch * kDigits);
    w.winners = {carver.take<Bits>(batch * k), carver.take<uint32_t>(batch * k)};
    w.spare = {carver.take<Bits>(batch * k), carver.take<uint32_t>(batch * k)};
    w.sums = carver.take<unsigned long long>(scan_values<TakeWinners<T>>(batch, count));
    w.sort = SortWorkspace::carve(carver, batch, k);
    return w;
  }
};

// Stable compaction: the set positions come first, in order; a position that is not set writes one of the -1 behind them.
struct Compact {
  using Value = unsigned long long;
  CompactView view;

  __device__ Value count(int64_t b, int64_t i) const { return view.mask[b * view.stride_b + i * view.stride_n] ? 1 : 0; }
  __device__ void emit(int64_t b, int64_t i, Value before, Value own) const {
    const int64_t set = static_cast<int64_t>(before), slot = own ? set : view.count - 1 - (i - set);
    view.indices[b * view.count + slot] = own ? i : -1;
  }
  __device__ void total(int64_t b, Value all) const { view.set[b] = static_cast<int64_t>(all); }
};

}  // namespace

template <class T>
int64_t topk_workspace(int64_t batch, int64_t count, int64_t k) {
  if (is_short(count, k)) return 0;
  Carver carver{nullptr};
  TopKWorkspace<T>::carve(carver, batch, count, k);
  return carver.bytes;
}

template <class T>
void topk(const TopKView<T>& view, int64_t batch, void* workspace, void* stream) {
  using Bits = typename Order<T>::Bits;
  if (batch <= 0 || view.k <= 0) return;
  if (is_short(view.count, view.k)) {
    launch(topk_row_kernel<T>, dim3(at_most(batch, 1 << 20)), kRowThreads, 0, stream, view, batch);
    return;
  }
  Carver carver{static_cast<char*>(workspace)};
  const auto w = TopKWorkspace<T>::carve(carver, batch, view.count, view.k);
  const bool all = view.k == view.count;
  if (!all) {
    const Threshold<Bits> start{0, static_cast<unsigned>(view.k)};
    const dim3 rows(at_most(batch, 1 << 20)),
        grid(at_most(ceil_div(view.count, 16 * kThreads), 2048), at_most(batch, kMaxGridYZ));
    launch(select_start_kernel<Bits>, rows, kThreads, 0, stream, w.found, w.histogram, batch, start);
    for (int shift = Order<T>::kBits - 8; shift >= 0; shift -= 8) {
      launch(select_count_kernel<T>, grid, kThreads, 0, stream, view, batch, shift, w.found, w.histogram);
      launch(select_digit_kernel<Bits>, rows, kThreads, 0, stream, w.found, w.histogram, batch, shift);
    }
  }
  scan(TakeWinners<T>{view, all ? nullptr : w.found, w.winners}, batch, view.count, w.sums, stream);
  if (!view.ordered()) return;
  sort_pairs(w.winners, w.spare, batch, view.k, w.sort, stream);
  const dim3 grid(at_most(ceil_div(view.k, kThreads), 1 << 20), at_most(batch, kMaxGridYZ));
  launch(topk_write_kernel<T>, grid, kThreads, 0, stream, view, static_cast<const uint32_t*>(w.winners.values), batch);
}

int64_t compact_workspace(int64_t batch, int64_t count) {
  return scan_values<Compact>(batch, count) * static_cast<int64_t>(sizeof(Compact::Value));
}

void compact(const CompactView& view, int64_t batch, void* workspace, void* stream) {
  scan(Compact{view}, batch, view.count, static_cast<Compact::Value*>(workspace), stream);
}

#define TEXVLM_TOPK(T)                                           \
  template int64_t topk_workspace<T>(int64_t, int64_t, int64_t); \
  template void topk<T>(const TopKView<T>&, int64_t, void*, void*)
TEXVLM_TOPK(float);
TEXVLM_TOPK(double);
TEXVLM_TOPK(Half);
TEXVLM_TOPK(BFloat16);

TEXVLM_FOR_TEXEL_TYPES(TEXVLM_QUERIES, ScatterTopK);

}  // namespace texvlm::cuda
