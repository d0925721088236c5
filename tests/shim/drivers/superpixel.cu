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

// Sweeps over the borders: tiles of a kernel, which may measure the regions itself, or quarter by quarter in a loop.
template <bool Kernel, class Lab>
void borders(Scene& s, const Lab& lab, const Cells& within, int sweeps, bool measures = false) {
  const Cells& c = s.cells;
  const std::vector<int32_t> from = s.labels;
  const typename MoveBorders<Lab>::template For<int32_t, 0> move{
      lab, s.labels.data(), s.model.data(), c.height, c.width, c.count(), 0, within, s.weights.data()};
  if constexpr (Kernel) {
    const FinerLabels<int32_t, 0> same{from.data(), nullptr, nullptr, c.height, c.width, c.height, c.width, 0, 0};
    s.labels.assign(s.labels.size(), -7);
    if (measures) return cuda::sweep_cells(move, {c, from.data(), s.planes.data(), nullptr, nullptr}, same, kBatch, nullptr);
    return cuda::sweep_borders<Lab>(move, same, nullptr, sweeps, kBatch, nullptr);
  }
  for (int quarter = 0; quarter < 4 * sweeps; ++quarter)
    for (int64_t b = 0; b < kBatch; ++b)
      for (int64_t y = quarter / 2 % 2; y < c.height; y += 2)
        for (int64_t x = quarter % 2; x < c.width; x += 2) move.choose(b, y, x);
}

// Each step as a kernel or as a loop.
template <bool Kernel>
void run(Scene& s) {
  const Cells& c = s.cells;
  const auto queries = [&](const auto& f, int64_t count) {
    if constexpr (Kernel) return cuda::launch_queries(f, kBatch, count, 1, nullptr);
    for (int64_t b = 0; b < kBatch; ++b)
      for (int64_t n = 0; n < count; ++n) f(b, n, 0, 1);
  };
  for (int64_t b = 0; b < kBatch; ++b)
    for (int64_t y = 0; y < c.height; ++y)
      for (int64_t x = 0; x < c.width; ++x)
        s.labels[static_cast<size_t>((b * c.height + y) * c.width + x)] = static_cast<int32_t>(c.own(y, x));
  const RegionModel<int32_t, 0> measure{c, s.labels.data(), s.planes.data(), s.sums.data(), s.model.data()};
  queries(measure, c.count());
  const PictureWeights<int64_t, 0> weigh{c, s.model.data(), {4000, 300, 0}, s.weights.data()};
  if constexpr (Kernel) {
    cuda::launch_rows_reduced(weigh, kBatch, c.count(), nullptr);
  } else {
    for (int64_t b = 0; b < kBatch; ++b) reduce_row(weigh, b, c.count());
  }
  const PlaneLab lab{s.planes.data(), c.height, c.width};
  for (int sweep = 0; sweep < 3; ++sweep) {
    borders<Kernel>(s, lab, c, 1 + sweep % 2);
    queries(measure, c.count());
  }
  EXPECT(cuda::measures_cells(c));
  if constexpr (Kernel) s.model.assign(s.model.size(), -7);  // what is not read
  borders<Kernel>(s, lab, c, 1, true);
  queries(MeasureAndTouch<int32_t, 0>{measure, {c, s.labels.data(), s.touching.data()}}, c.count());
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
  compare(37, 70, 5, 9);  // more than one tile each way
  compare(1, 60, 1, 30);
  return done();
}
