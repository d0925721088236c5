// Packed cells by csrc/cuda/packing.cu, and their adjoint, against plain loops over samples and pixels.
#include "../expect.h"

#include "../../../csrc/cuda/packing.cu"

#include <cmath>
#include <vector>

namespace {

using namespace texvlm;

uint32_t state = 5;
unsigned random_below(int64_t n) {
  state = state * 1664525u + 1013904223u;
  return (state >> 8) % static_cast<unsigned>(n);
}
float random_value() { return static_cast<float>(random_below(4096)) / 4096.0f; }

bool near(double a, double b) { return std::fabs(a - b) <= 1e-4 * (1 + std::fabs(b)); }

// rows x columns cells of level 0, `count` of them with a level each; a picture of bytes or floats, channels last.
template <class S>
void compare(int64_t batch, int64_t channels, int64_t patch, int64_t merge, int64_t rows, int64_t columns, int64_t count,
             int levels) {
  using A = Acc<S>;
  const int64_t side = patch * merge, height = rows * side, width = columns * side, times = 2;
  const Packing packing{height, width, channels, patch, merge, times};
  std::vector<S> image;
  for (int64_t i = 0; i < batch * height * width * channels; ++i)
    image.push_back(std::is_same_v<S, uint8_t> ? static_cast<S>(random_below(256)) : static_cast<S>(random_value()));
  std::vector<int64_t> triples;
  for (int64_t i = 0; i < batch * count; ++i) {
    const int64_t level = static_cast<int64_t>(random_below(levels));
    triples.push_back(i % 7 == 3 ? -1 : level);
    triples.push_back(random_below(((rows - 1) >> level) + 1));
    triples.push_back(random_below(((columns - 1) >> level) + 1));
  }
  const PackedCells cells{triples.data(), 3 * count, 3, 1, count, rows, columns, true};
  const int64_t values = packing.row_values(), all_rows = count * merge * merge;

  PackCells<S> f{};
  f.image = {image.data(), height * width * channels, 1, width * channels, channels};
  f.cells = cells, f.to = packing, f.scale = A(0.5);
  for (int64_t c = 0; c < channels; ++c) f.mean[c] = A(c), f.deviation[c] = A(2);
  std::vector<typename PackCells<S>::T> out(batch * all_rows * values, -7);
  f.rows = out.data();
  const bool forward = batch * count * channels * 256 < 8000;  // a block of threads for each
  if (forward) cuda::pack_cells(f, batch, nullptr);

  std::vector<float> grad, found(batch * channels * height * width, -7), wanted(found.size());
  for (int64_t i = 0; i < batch * all_rows * values; ++i) grad.push_back(random_value());
  PackCellsAdjoint<float> adjoint{};
  adjoint.grad = grad.data(), adjoint.stride_b = all_rows * values, adjoint.stride_r = values, adjoint.stride_v = 1;
  adjoint.cells = cells, adjoint.of = packing, adjoint.out = found.data();
  for (int64_t c = 0; c < channels; ++c) adjoint.factor[c] = 0.25f;
  cuda::pack_cells_adjoint(adjoint, batch, nullptr);

  for (int64_t k = 0; k < batch * count; ++k) {
    const int64_t b = k / count, level = triples[3 * k], wide = int64_t{1} << (level < 0 ? 0 : level);
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t i = 0; i < side * side; ++i) {
        const int64_t y = i / side, x = i % side, row = k * merge * merge + y / patch * merge + x / patch;
        const int64_t value = (c * times * patch + y % patch) * patch + x % patch;
        // Samples beyond the picture are its last.
        const int64_t last_y = (height - 1) / wide, last_x = (width - 1) / wide;
        const int64_t sy = std::min(triples[3 * k + 1] * side + y, last_y), sx = std::min(triples[3 * k + 2] * side + x, last_x);
        double sum = 0, pixels = 0;
        for (int pass = 0; pass < 2; ++pass) {  // the mean, then the way back
          for (int64_t py = sy * wide; level >= 0 && py < std::min((sy + 1) * wide, height); ++py) {
            for (int64_t px = sx * wide; px < std::min((sx + 1) * wide, width); ++px) {
              if (pass == 0) {
                sum += static_cast<double>(f.image.at(b, c, py, px));
                pixels += 1;
                continue;
              }
              for (int64_t t = 0; t < times; ++t)
                wanted[((b * channels + c) * height + py) * width + px] +=
                    static_cast<float>(0.25 * grad[row * values + value + t * patch * patch] / pixels);
            }
          }
        }
        const double mean = level < 0 ? 0 : (sum / pixels * 0.5 - static_cast<double>(c)) / 2;
        for (int64_t t = 0; t < times && forward; ++t)
          EXPECT(near(static_cast<double>(out[row * values + value + t * patch * patch]), mean));
      }
    }
  }
  for (size_t i = 0; i < found.size(); ++i) EXPECT(near(found[i], wanted[i]));
}

}  // namespace

int main() {
  compare<float>(2, 3, 4, 2, 2, 3, 5, 1);
  compare<uint8_t>(1, 3, 3, 1, 5, 3, 9, 4);    // means by groups of lanes of any size; samples beyond the picture
  compare<float>(1, 2, 20, 1, 2, 2, 3, 2);     // more samples than threads
  compare<uint8_t>(1, 1, 1, 2, 2, 1, 300, 2);  // more cells than threads
  return done();
}
