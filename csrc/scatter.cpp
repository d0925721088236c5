#include "scatter.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace texvlm::host {
namespace {

// A pair of bands, as FindBands writes them.
template <class Visit>
void each_band(int32_t a, int32_t b, const Visit& visit) {
  if (a < 0) return;
  if (a > b) visit(b), visit(a);
  for (; a <= b; ++a) visit(a);
}

}  // namespace

bool worth_banding(int64_t queries, int64_t samples_each, int64_t pictures) {
  return queries * samples_each > kSerialSamples && queries < std::numeric_limits<int32_t>::max() && pictures < 65536;
}

bool worth_filling(int64_t samples, int64_t texels, int64_t bytes) { return bytes < (int64_t{32} << 20) || 8 * samples > texels; }

BandLists one_list(int64_t queries) {
  BandLists lists{{}, {0, queries}, std::unique_ptr<int32_t[]>(new int32_t[queries]), false};
  std::iota(lists.ids.get(), lists.ids.get() + queries, 0);
  return lists;
}

BandLists list_by_bands(const Levels& levels, int64_t pictures, int64_t queries, int64_t bytes_per_texel, int pairs,
                        const FindBands& find, bool fill) {
  BandLists lists{make_bands(levels, bytes_per_texel), {}, {}, fill};
  const int64_t bands = lists.table.total * pictures, slots = 2 * pairs;
  const int64_t most = std::clamp<int64_t>((int64_t{1} << 20) / bands, 1, 64);  // of portions, so that their counts stay small
  const int64_t portion = std::max<int64_t>(4096, (queries + most - 1) / most);
  const int64_t portions = (queries + portion - 1) / portion;
  const std::unique_ptr<int32_t[]> keys(new int32_t[queries * slots]);
  std::vector<int64_t> begin(portions * bands, 0);  // first counts, then where the queries of a portion in a band begin
  at::parallel_for(0, portions, 1, [&](int64_t p0, int64_t p1) {
    for (int64_t p = p0; p < p1; ++p) {
      const int64_t q0 = p * portion, q1 = std::min(queries, q0 + portion);
      find(lists.table, q0, q1, keys.get() + q0 * slots);
      int64_t* const counts = begin.data() + p * bands;
      for (int64_t i = q0 * slots; i < q1 * slots; i += 2) each_band(keys[i], keys[i + 1], [&](int32_t k) { ++counts[k]; });
    }
  });
  int64_t total = 0;
  lists.first.resize(bands + 1);
  for (int64_t k = 0; k < bands; ++k) {
    lists.first[k] = total;
    for (int64_t p = 0; p < portions; ++p) total += std::exchange(begin[p * bands + k], total);
  }
  lists.first[bands] = total;
  lists.ids.reset(new int32_t[total]);
  at::parallel_for(0, portions, 1, [&](int64_t p0, int64_t p1) {
    for (int64_t p = p0; p < p1; ++p) {
      int64_t* const at = begin.data() + p * bands;
      for (int64_t q = p * portion; q < std::min(queries, (p + 1) * portion); ++q)
        for (int64_t i = q * slots; i < (q + 1) * slots; i += 2)
          each_band(keys[i], keys[i + 1], [&](int32_t k) { lists.ids[at[k]++] = static_cast<int32_t>(q); });
    }
  });
  return lists;
}

}  // namespace texvlm::host
