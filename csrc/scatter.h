// The scatter of a *_backward op on the CPU, in parallel and independent of the number of threads (see math/bands.h).
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "launch.h"
#include "math/bands.h"

namespace texvlm::host {

template <int C, class F>
TEXVLM_HD void band_list(const F& f, const int32_t* ids, int64_t many, int64_t picture, const Band& band) {
  f.list(ids, many, picture, band);
}
TEXVLM_ISA_DISPATCH(band_list)

// Below this many queries sorting costs more than a second thread brings.
constexpr int64_t kSerialQueries = 2048;

inline bool worth_banding(int64_t queries, int64_t pictures) {
  return queries > kSerialQueries && queries < std::numeric_limits<int32_t>::max() && pictures < 65536;
}

// Runs the adjoint functor F<T, C> over all bands of `pictures` textures. `target`: the gradient of the texels
// [pictures, T, channels], uninitialised: each band fills its own rows with zeros first, and they stay in its cache.
// `find(bands, begin, end, out)` writes the bands that queries touch, `slots` for each, -1 for none. Queries are numbered 0 ..
// queries - 1; one counting sort, by fixed portions of them.
template <template <class, int> class F, class T, class Find, class... A>
void scatter_by_bands(const Levels& levels, int64_t pictures, int64_t queries, int64_t channels, const Find& find, Acc<T>* target,
                      const A&... args) {
  const int slots = find.slots();
  const BandTable table = make_bands(levels, channels * static_cast<int64_t>(sizeof(Acc<T>)));
  const int64_t bands = table.total * pictures;
  const int64_t most = std::clamp<int64_t>((int64_t{1} << 20) / bands, 1, 64);  // of portions, so that their counts stay small
  const int64_t portion = std::max<int64_t>(4096, (queries + most - 1) / most);
  const int64_t portions = (queries + portion - 1) / portion;
  const std::unique_ptr<int32_t[]> keys(new int32_t[queries * slots]);
  std::vector<int64_t> begin((portions + 1) * bands, 0);  // first counts, then where the queries of a portion in a band begin

  with_channels<T>(channels, [&](auto constant) {
    constexpr int C = decltype(constant)::value;
    const F<T, C> f{args...};
    at::parallel_for(0, portions, 1, [&](int64_t p0, int64_t p1) {
      for (int64_t p = p0; p < p1; ++p) {
        const int64_t q0 = p * portion, q1 = std::min(queries, q0 + portion);
        find(table, q0, q1, keys.get() + q0 * slots);
        int64_t* counts = begin.data() + p * bands;
        for (int64_t i = q0 * slots; i < q1 * slots; ++i)
          if (keys[i] >= 0) ++counts[keys[i]];
      }
    });
    int64_t total = 0;
    std::vector<int64_t> first(bands + 1);
    for (int64_t k = 0; k < bands; ++k) {
      first[k] = total;
      for (int64_t p = 0; p < portions; ++p) total += std::exchange(begin[p * bands + k], total);
    }
    first[bands] = total;
    const std::unique_ptr<int32_t[]> ids(new int32_t[total]);
    at::parallel_for(0, portions, 1, [&](int64_t p0, int64_t p1) {
      for (int64_t p = p0; p < p1; ++p) {
        int64_t* at = begin.data() + p * bands;
        const int64_t q1 = std::min(queries, (p + 1) * portion);
        for (int64_t q = p * portion; q < q1; ++q)
          for (int s = 0; s < slots; ++s)
            if (const int32_t k = keys[q * slots + s]; k >= 0) ids[at[k]++] = static_cast<int32_t>(q);
      }
    });
    std::atomic<int64_t> next{0};  // which thread takes a band does not matter
    at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
      for (int64_t k; (k = next.fetch_add(1, std::memory_order_relaxed)) < bands;) {
        const int64_t picture = k / table.total;
        const Band band = table.band(levels, static_cast<int>(k % table.total));
        const int64_t row = levels.width[band.level] * channels;
        Acc<T>* rows = target + (picture * levels.texels + levels.offset[band.level]) * channels;
        std::memset(rows + band.y0 * row, 0, (band.y1 - band.y0) * row * sizeof(Acc<T>));
        if (first[k] < first[k + 1]) band_list_any<C, kFast<T>>(f, ids.get() + first[k], first[k + 1] - first[k], picture, band);
      }
    });
  });
}

}  // namespace texvlm::host
