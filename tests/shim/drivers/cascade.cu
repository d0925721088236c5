// Top-k and compaction by csrc/cuda/cascade.cu against a stable sort and a loop.
#include "../expect.h"

#include "../../../csrc/cuda/cascade.cu"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

namespace {

// Few different values, so that there are ties; here and there NaN and infinities.
std::vector<float> scores(int64_t n) {
  std::vector<float> s(n);
  uint32_t state = 1;
  for (float& v : s) {
    state = state * 1664525u + 1013904223u;
    const uint32_t r = state >> 20;
    v = r == 7 ? NAN : r == 9 ? INFINITY : static_cast<float>(r % 300) - 100.0f;
  }
  return s;
}

void topk(int64_t batch, int64_t count, int64_t k) {
  const std::vector<float> s = scores(batch * count);
  std::vector<float> values(batch * k);
  std::vector<int64_t> indices(batch * k), order(count);
  std::vector<char> workspace(texvlm::cuda::topk_workspace<float>(batch, count, k), 'x');
  const texvlm::TopKView<float> view{s.data(), count, 1, count, k, values.data(), indices.data()};
  texvlm::cuda::topk<float>(view, batch, workspace.data(), nullptr);
  for (int64_t b = 0; b < batch; ++b) {
    const float* row = s.data() + b * count;
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) {
      return std::isnan(row[j]) ? !std::isnan(row[i]) : row[i] > row[j];
    });
    for (int64_t j = 0; j < k; ++j) {
      const float value = values[b * k + j];
      EXPECT(indices[b * k + j] == order[j]);
      EXPECT(value == row[order[j]] || (std::isnan(value) && std::isnan(row[order[j]])));
    }
  }
}

void compact(int64_t batch, int64_t count) {
  const std::vector<float> s = scores(batch * count);
  const std::unique_ptr<bool[]> mask(new bool[batch * count]);
  for (int64_t i = 0; i < batch * count; ++i) mask[i] = s[i] > 0;
  std::vector<int64_t> indices(batch * count), set(batch);
  std::vector<char> workspace(texvlm::cuda::compact_workspace(batch, count), 'x');
  texvlm::cuda::compact({mask.get(), count, 1, count, indices.data(), set.data()}, batch, workspace.data(), nullptr);
  for (int64_t b = 0; b < batch; ++b) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i)
      if (mask[b * count + i]) EXPECT(indices[b * count + found++] == i);
    EXPECT(set[b] == found);
    for (; found < count; ++found) EXPECT(indices[b * count + found] == -1);
  }
}

}  // namespace

int main() {
  topk(3, 700, 50);     // one launch, a block per row
  topk(2, 97, 97);      // all of them
  topk(1, 33000, 273);  // launches over the whole device
  topk(1, 2500, 2100);
  compact(2, 300);
  compact(1, 6000);  // several tiles
  return done();
}
