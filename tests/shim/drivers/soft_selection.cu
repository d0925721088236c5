// Soft selection by csrc/cuda/soft_selection.cu against the same by one thread.
#include "../expect.h"

#include "../../../csrc/cuda/soft_selection.cu"

#include <cmath>
#include <vector>

namespace {

using namespace texvlm;

std::vector<float> scores_of(int64_t n, bool special) {
  std::vector<float> scores(n);
  uint32_t state = 11;
  for (float& s : scores) {
    state = state * 1664525u + 1013904223u;
    const uint32_t r = state >> 16;
    s = special && r % 20 == 7 ? NAN : special && r % 20 == 9 ? -INFINITY : static_cast<float>(r % 1000) * 0.01f;
  }
  return scores;
}

template <Link kLink>
void compare(int64_t batch, int64_t count, double k, double temperature, bool special) {
  const std::vector<float> scores = scores_of(batch * count, special), grad = scores_of(batch * count, false);
  const std::vector<double> along(batch, 0.5);
  std::vector<float> weights[2], gradients[2], row(count);
  std::vector<double> threshold[2];
  for (int way = 0; way < 2; ++way) {
    weights[way].resize(batch * count), gradients[way].resize(batch * count), threshold[way].resize(batch);
    const SoftTopK<kLink, float> forward{scores.data(), count, count, k, temperature, weights[way].data(), threshold[way].data()};
    // both by the same threshold, so that they can be compared
    const SoftTopKBackward<kLink, float> backward{grad.data(),          scores.data(),       count, count, count,
                                                  along.data(),         threshold[0].data(), 1,     1,     temperature,
                                                  gradients[way].data()};
    if (way == 0) {
      for (int64_t b = 0; b < batch; ++b) forward(OneThreadWithRow<float>{{}, row.data()}, b);
      for (int64_t b = 0; b < batch; ++b) backward(OneThreadWithRow<float>{{}, row.data()}, b);
    } else {
      cuda::launch_soft_rows(forward, batch, nullptr);
      cuda::launch_soft_rows(backward, batch, nullptr);
    }
  }
  for (int64_t i = 0; i < batch * count; ++i) {
    EXPECT(std::fabs(weights[0][i] - weights[1][i]) <= 2e-5f);
    EXPECT(std::fabs(gradients[0][i] - gradients[1][i]) <= 1e-3f * (1 + std::fabs(gradients[0][i])));
  }
  for (int64_t b = 0; b < batch; ++b) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += weights[1][b * count + i];
    EXPECT(std::fabs(sum - k) <= 1e-4);
  }
}

}  // namespace

int main() {
  compare<Link::logistic>(3, 300, 20, 0.5, false);
  compare<Link::logistic>(2, 700, 50, 0.003, true);
  compare<Link::gumbel>(2, 300, 20, 0.5, true);
  compare<Link::gumbel>(1, 40, 3, 0.01, false);
  compare<Link::logistic>(2, 40, 0, 0.5, false);
  return done();
}
