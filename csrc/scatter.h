// The scatter of a *_backward op on the CPU, in parallel and independent of the number of threads (see math/bands.h).
#pragma once

#include <ATen/Parallel.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "launch.h"
#include "math/bands.h"

namespace texvlm::host {

// The queries of each band, in their order.
struct BandLists {
  BandTable table;
  std::vector<int64_t> first;  // of each band of all pictures and behind the last, in `ids`
  std::unique_ptr<int32_t[]> ids;
  bool fill;  // each band fills its rows with zeros

  int64_t bands() const { return static_cast<int64_t>(first.size()) - 1; }
};

// Below this many samples sorting costs more than a second thread brings.
constexpr int64_t kSerialSamples = 2048;
bool worth_banding(int64_t queries, int64_t samples_each, int64_t pictures);

// Whether a gradient [pictures, T, channels] is filled with zeros band by band, so that they stay in the caches of those who add.
// One that is large, and of which little is written, is cleared at once, past the caches, or not even touched where pages are
// fresh.
bool worth_filling(int64_t samples, int64_t texels, int64_t bytes);

// find(table, begin, end, out) writes for each query of [begin, end) `pairs` of bands (a, b): all from a to b, or where a > b
// these two alone; a < 0: none. One counting sort, by fixed portions of the queries.
using FindBands = std::function<void(const BandTable&, int64_t begin, int64_t end, int32_t* out)>;
BandLists list_by_bands(const Levels& levels, int64_t pictures, int64_t queries, int64_t bytes_per_texel, int pairs,
                        const FindBands& find, bool fill = true);

// All queries in one band that is everything.
BandLists one_list(int64_t queries);

template <int C, class F>
TEXVLM_HD void band_list(const F& f, const int32_t* ids, int64_t many, int64_t picture, const Band& band) {
  f.list(ids, many, picture, band);
}
TEXVLM_ISA_DISPATCH(band_list)

// f.list of all bands. `target`: the gradient of the texels [pictures, T, channels], uninitialised if they are filled.
template <int C, Isa Best, class F, class A>
void run_bands(const F& f, const BandLists& lists, const Levels& levels, int64_t channels, A* target) {
  std::atomic<int64_t> next{0};  // which thread takes a band does not matter
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    for (int64_t k; (k = next.fetch_add(1, std::memory_order_relaxed)) < lists.bands();) {
      const int32_t* const ids = lists.ids.get() + lists.first[k];
      const int64_t many = lists.first[k + 1] - lists.first[k];
      if (lists.table.total == 0) {
        band_list_any<C, Best>(f, ids, many, int64_t{0}, everywhere());  // of the same type as below: one loop
        continue;
      }
      const int64_t picture = k / lists.table.total;
      const Band band = lists.table.band(levels, static_cast<int>(k % lists.table.total));
      const int64_t row = levels.width[band.level] * channels;
      A* const rows = target + (picture * levels.texels + levels.offset[band.level]) * channels;
      if (lists.fill) std::memset(rows + band.y0 * row, 0, (band.y1 - band.y0) * row * sizeof(A));
      if (many) band_list_any<C, Best>(f, ids, many, picture, band);
    }
  });
}

// The same of an adjoint functor F<T, C>.
template <template <class, int> class F, class T, class... A>
void scatter_by_bands(const BandLists& lists, const Levels& levels, int64_t channels, Acc<T>* target, const A&... args) {
  with_channels<T>(channels, [&](auto constant) {
    constexpr int C = decltype(constant)::value;
    run_bands<C, kBest<T>>(F<T, C>{args...}, lists, levels, channels, target);
  });
}

}  // namespace texvlm::host
