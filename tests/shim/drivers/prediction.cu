// Predicted cells by csrc/cuda/prediction.cu against plain loops over cells and pixels.
#include "../expect.h"

#include "../../../csrc/cuda/prediction.cu"

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

using namespace texvlm;

// Cells of `kinds` contents, with noise of up to `noise`; channels last, so that no stride is 1 but that of channels.
std::vector<float> picture(int64_t batch, int64_t channels, int64_t height, int64_t width, int64_t cell, unsigned kinds,
                           float noise) {
  std::vector<float> values;
  uint32_t state = 5;
  const auto random = [&] { return (state = state * 1664525u + 1013904223u) >> 16; };
  const int64_t rows = (height + cell - 1) / cell, columns = (width + cell - 1) / cell;
  std::vector<unsigned> kind(batch * rows * columns);
  for (unsigned& k : kind) k = random() % kinds;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t y = 0; y < height; ++y)
      for (int64_t x = 0; x < width; ++x)
        for (int64_t c = 0; c < channels; ++c)
          values.push_back(static_cast<float>(kind[(b * rows + y / cell) * columns + x / cell]) * 0.25f +
                           noise * static_cast<float>(random() % 64) / 64.0f);
  return values;
}

void compare(int64_t batch, int64_t channels, int64_t height, int64_t width, int64_t cell, unsigned kinds, float noise,
             float bound) {
  const std::vector<float> values = picture(batch, channels, height, width, cell, kinds, noise);
  const int64_t rows = (height + cell - 1) / cell, columns = (width + cell - 1) / cell, cells = rows * columns;
  const auto at = [&](int64_t b, int64_t i, int64_t y, int64_t x, int64_t c) {
    const int64_t py = std::min(i / columns * cell + y, height - 1), px = std::min(i % columns * cell + x, width - 1);
    return values[((b * height + py) * width + px) * channels + c];
  };
  const auto far = [&](int64_t b, int64_t i, int64_t j) {
    float most = 0;
    for (int64_t y = 0; y < cell; ++y)
      for (int64_t x = 0; x < cell; ++x)
        for (int64_t c = 0; c < channels; ++c) most = std::max(most, std::fabs(at(b, i, y, x, c) - at(b, j, y, x, c)));
    return most > bound;
  };

  std::vector<int64_t> found(batch * cells, -1), wanted(batch * cells);
  std::vector<uint32_t> workspace(cuda::prediction_workspace(batch, cells));
  const ImageView<const float> image{values.data(), height * width * channels, 1, width * channels, channels};
  cuda::predict_cells<float>({image, channels, height, width, cell, rows, columns, Near<float>::within(bound)}, batch,
                             found.data(), workspace.data(), nullptr);
  int64_t left_out = 0;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < cells; ++i) {
      int64_t& own = wanted[b * cells + i] = i;
      const int64_t x = i % columns, from[3] = {x > 0 ? i - 1 : -1, i - columns, x > 0 ? i - columns - 1 : -1};
      for (int64_t k : from)
        if (own == i && k >= 0 && !far(b, i, wanted[b * cells + k])) own = wanted[b * cells + k];
      EXPECT(found[b * cells + i] == own);
      left_out += own != i;
    }
  }
  EXPECT(left_out > 0 && left_out < batch * cells - batch);
}

}  // namespace

int main() {
  compare(2, 3, 24, 40, 4, 2, 0.0f, 0.0f);
  compare(1, 1, 33, 29, 3, 3, 0.1f, 0.3f);    // partial cells; near to some, not to all
  compare(1, 2, 20, 45, 19, 2, 0.05f, 0.1f);  // cells of more pixels than threads
  compare(3, 3, 5, 50, 5, 2, 0.0f, 0.0f);     // rows that need not wait
  return done();
}
