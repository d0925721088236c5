// The nearest feature of each column by csrc/cuda/distance.cu, bands of rows by warps, against the same functor in plain loops.
#include "../../../csrc/cuda/distance.cu"

#include <memory>
#include <vector>

#include "../expect.h"

namespace {

using namespace texvlm;

constexpr int64_t kBatch = 2;

// `every`: about one pixel of so many is a feature; 0: none.
void columns(int64_t height, int64_t width, int every) {
  const int64_t pixels = kBatch * height * width;
  const std::unique_ptr<bool[]> mask(new bool[static_cast<size_t>(pixels)]);
  uint32_t state = 3;
  for (int64_t i = 0; i < pixels; ++i) {
    state = state * 1664525u + 1013904223u;
    mask[i] = every > 0 && (state >> 16) % static_cast<uint32_t>(every) == 0;
  }
  std::vector<int32_t> near(pixels, -7), expected(pixels, -7);
  const BoolMask view{mask.get(), height * width, width, 1};
  using Columns = NearestInColumn<BoolMask>::For<int32_t, 0>;
  cuda::nearest_in_columns<BoolMask>(Columns{view, near.data(), height, width}, kBatch, nullptr);
  const Columns loops{view, expected.data(), height, width};
  for (int64_t b = 0; b < kBatch; ++b)
    for (int64_t x = 0; x < width; ++x) loops(b, x, 0, 1);
  EXPECT(near == expected);
}

}  // namespace

int main() {
  for (const int every : {0, 1, 3, 40, 400}) {
    columns(1, 5, every);
    columns(7, 40, every);   // fewer rows than warps
    columns(33, 33, every);  // bands of unequal length, a part of a warp
  }
  return done();
}
