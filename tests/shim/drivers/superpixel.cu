// Superpixels by csrc/cuda/superpixel.cu against the same functors in plain loops: borders moved by quarters, regions measured
// and merged by a block.
#include "../../../csrc/cuda/superpixel.cu"

#include <algorithm>
#include <vector>

#include "../expect.h"

namespace {

using namespace texvlm;

constexpr int64_t kBatch = 2, kWanted = 7;

struct Scene {
  Cells cells;
  std::vector<int32_t> planes, labels, lut, ends;
  std::vector<int64_t> sums, model, merged, costs;
  std::vector<uint32_t> touching;
  std::vector<Weights> weights;

  explicit Scene(Cells c) : cells(c) {
    const int64_t pixels = kBatch * c.height * c.width, all = kBatch * c.count();
    planes.resize(3 * pixels), labels.resize(pixels), lut.resize(all), touching.resize(all);
    ends.assign(3 * kNeighbours * all, -7), costs.assign(kNeighbours * all, -7);
    sums.resize(kModel * all), model.resize(kModel * all), merged.resize(kModel * kBatch * kWanted), weights.resize(kBatch);
    uint32_t state = 5;
    for (int64_t i = 0; i < 3 * pixels; ++i) {
      state = state * 1664525u + 1013904223u;
      planes[i] = static_cast<int32_t>(300 * ((i / 9) % 5) + (state >> 26));  // stripes with noise; equal costs are common
    }
  }
  MergeRegions<int32_t, 0> merge() {
    return {touching.data(), sums.data(),    model.data(),  merged.data(), lut.data(), ends.data(),
            costs.data(),    weights.data(), cells.count(), cells.columns, kWanted};
  }
};

// Each step as a kernel or as a loop.
template <bool Kernel>
void run(Scene& s) {
  const Cells& c = s.cells;
  const auto queries = [&](const auto& f, int64_t count) {
    if constexpr (Kernel) return cuda::launch_queries(f, kBatch, count, 1, nullptr);
    for (int64_t b = 0; b < kBatch; ++b)
      for (int64_t n = 0; n < count; ++n) f(b, n, 0, 1);
  };
  const auto texels = [&](const auto& f, int64_t h, int64_t w) {
    if (h == 0 || w == 0) return;
    if constexpr (Kernel) return cuda::launch_texels(f, kBatch, 0, h, 0, w, 1, nullptr);
    for (int64_t b = 0; b < kBatch; ++b)
      for (int64_t y = 0; y < h; ++y)
        for (int64_t x = 0; x < w; ++x) f(b, y, x, 0, 1);
  };
  texels(StartCells<int32_t, 0>{c, s.labels.data()}, c.height, c.width);
  const RegionModel<int32_t, 0> measure{c, s.labels.data(), s.planes.data(), s.sums.data(), s.model.data()};
  queries(measure, c.count());
  const PictureWeights<int64_t, 0> weigh{c, s.model.data(), {4000, 300, 0}, s.weights.data()};
  if constexpr (Kernel) {
    cuda::launch_rows_reduced(weigh, kBatch, c.count(), nullptr);
  } else {
    for (int64_t b = 0; b < kBatch; ++b) reduce_row(weigh, b, c.count());
  }
  for (int sweep = 0; sweep < 3; ++sweep) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int odd_y = quarter / 2, odd_x = quarter % 2;
      texels(MoveBorders<PlaneLab>::For<int32_t, 0>{{s.planes.data(), c.height, c.width},
                                                    s.labels.data(),
                                                    s.model.data(),
                                                    c.height,
                                                    c.width,
                                                    c.count(),
                                                    odd_y,
                                                    odd_x,
                                                    c,
                                                    s.weights.data()},
             (c.height - odd_y + 1) / 2, (c.width - odd_x + 1) / 2);
    }
    queries(measure, c.count());
  }
  queries(TouchingRegions<int32_t, 0>{c, s.labels.data(), s.touching.data()}, c.count());
  if constexpr (Kernel) {
    cuda::merge_regions(s.merge(), kBatch, nullptr);
  } else {
    for (int64_t b = 0; b < kBatch; ++b) s.merge()(b, 0, 0, 1);
  }
}

void compare(int64_t height, int64_t width, int64_t rows, int64_t columns) {
  Scene kernel(Cells{height, width, rows, columns}), loop(Cells{height, width, rows, columns});
  run<true>(kernel);
  run<false>(loop);
  EXPECT(kernel.labels == loop.labels);
  EXPECT(kernel.touching == loop.touching);
  EXPECT(kernel.lut == loop.lut);
  EXPECT(kernel.merged == loop.merged);
  EXPECT(*std::max_element(loop.lut.begin(), loop.lut.end()) == kWanted - 1);
}

}  // namespace

int main() {
  compare(13, 60, 4, 12);
  compare(15, 3, 7, 2);
  compare(1, 60, 1, 30);
  return done();
}
