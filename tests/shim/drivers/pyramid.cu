// The mip chain of csrc/cuda/pyramid.cu against loops: every texel the mean that its definition says, from the stored level above.
#include "../expect.h"

#include "../../../csrc/cuda/pyramid.cu"

#include <cmath>
#include <vector>

namespace {

// The weights of the texels 2 i, 2 i + 1, 2 i + 2 of an axis of n texels: (m - i, m, i + 1) / n for n = 2 m + 1, else a half each.
struct Taps {
  double weight[3];
  int count;
  Taps(int64_t n, int64_t i) {
    const auto m = static_cast<double>(n / 2), d = static_cast<double>(n), x = static_cast<double>(i);
    count = n == 1 ? 1 : n % 2 ? 3 : 2;
    if (n == 1) {
      weight[0] = 1;
    } else if (n % 2) {
      weight[0] = (m - x) / d, weight[1] = m / d, weight[2] = (x + 1) / d;
    } else {
      weight[0] = weight[1] = 0.5;
    }
  }
};

void chain(int64_t batch, int64_t channels, int64_t height, int64_t width, int levels) {
  const texvlm::Levels table = texvlm::make_levels(height, width, levels);
  std::vector<float> image(batch * channels * height * width), data(batch * table.texels * channels, NAN);
  for (size_t i = 0; i < image.size(); ++i) image[i] = static_cast<float>(i * 2654435761u % 1000);
  texvlm::Reducers reducers{};
  reducers.uniform = true;
  reducers.first = texvlm::Reducer::mean;
  const texvlm::TextureView<float> texture{data.data(), table.texels * channels, channels, table};
  std::vector<unsigned> counters(texvlm::cuda::mip_counters<float>(table, reducers, batch, channels), 0);
  const texvlm::ImageView<const float> view{image.data(), channels * height * width, height * width, width, 1};
  texvlm::cuda::mip_chain<float, float>(view, texture, reducers, batch, counters.data(), nullptr);
  for (int64_t b = 0; b < batch; ++b)
    for (int l = 0; l < levels; ++l)
      for (int64_t y = 0; y < table.height[l]; ++y)
        for (int64_t x = 0; x < table.width[l]; ++x)
          for (int64_t c = 0; c < channels; ++c) {
            double expected = 0;
            if (l == 0) {
              expected = view.at(b, c, y, x);
            } else {
              const Taps ty(table.height[l - 1], y), tx(table.width[l - 1], x);
              for (int i = 0; i < ty.count; ++i)
                for (int j = 0; j < tx.count; ++j)
                  expected += ty.weight[i] * tx.weight[j] * texture.texel(b, l - 1, 2 * y + i, 2 * x + j)[c];
            }
            EXPECT(std::fabs(texture.texel(b, l, y, x)[c] - expected) < 1e-3);
          }
}

}  // namespace

int main() {
  chain(1, 3, 150, 131, 8);  // tiles at odd edges, the last block makes the tail
  chain(2, 1, 64, 128, 8);
  chain(1, 6, 37, 70, 7);    // more channels than fit one group
  chain(1, 4, 1, 9, 4);
  return done();
}
