// The cut of quadtrees by csrc/cuda/quadtree.cu against the same by one thread.
#include "../expect.h"

#include "../../../csrc/cuda/quadtree.cu"

#include <cmath>
#include <memory>
#include <vector>

namespace {

using namespace texvlm;

// Values of few different sizes, so that there are ties; here and there NaN and infinities.
std::vector<float> values_of(int64_t n, bool special) {
  std::vector<float> values(n);
  uint32_t state = 7;
  for (float& v : values) {
    state = state * 1664525u + 1013904223u;
    const uint32_t r = state >> 20;
    v = special && r % 50 == 7 ? NAN : special && r % 50 == 9 ? INFINITY : static_cast<float>(r % 40) * 0.25f;
  }
  return values;
}

struct Outcome {
  std::unique_ptr<bool[]> taken;
  std::vector<float> bound, price;
};

template <class Run>
Outcome cut(int64_t batch, const QuadTree& tree, int64_t k, const std::vector<float>& values, const Run& run) {
  const int64_t nodes = tree.nodes();
  Outcome out{std::unique_ptr<bool[]>(new bool[batch * nodes]), std::vector<float>(batch), std::vector<float>(batch)};
  std::vector<float> best(batch * nodes);
  std::vector<int32_t> tokens(batch * nodes);
  run(QuadTreeCut<float>{tree, values.data(), nodes, 1, k, out.taken.get(), out.bound.data(), out.price.data(), best.data(),
                         tokens.data()});
  return out;
}

void compare(int64_t batch, int64_t rows, int64_t columns, int levels, int64_t k, bool special) {
  const QuadTree tree = QuadTree::of(rows, columns, levels);
  const std::vector<float> values = values_of(batch * tree.nodes(), special);
  const Outcome one = cut(batch, tree, k, values, [&](const QuadTreeCut<float>& f) {
    for (int64_t b = 0; b < batch; ++b) f(OneThread{}, b);
  });
  const Outcome many = cut(batch, tree, k, values, [&](const QuadTreeCut<float>& f) { cuda::quadtree_cut(f, batch, nullptr); });
  int64_t taken = 0;
  for (int64_t i = 0; i < batch * tree.nodes(); ++i) {
    EXPECT(one.taken[i] == many.taken[i]);
    taken += many.taken[i];
  }
  EXPECT(taken == batch * std::min(k, rows * columns));
  for (int64_t b = 0; b < batch; ++b) {
    EXPECT(one.price[b] == many.price[b]);
    EXPECT(std::fabs(one.bound[b] - many.bound[b]) <= 1e-4f * std::fabs(one.bound[b]));
  }
}

}  // namespace

int main() {
  compare(1, 9, 13, 4, 21, false);
  compare(2, 5, 3, 3, 4, false);  // fewer nodes than threads
  compare(1, 8, 8, 3, 7, true);
  compare(1, 2, 2, 2, 3, false);   // everything covered by one: it gives way to its best children
  compare(1, 4, 4, 3, 16, false);  // all
  return done();
}
