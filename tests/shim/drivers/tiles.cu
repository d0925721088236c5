// Dirty tiles by csrc/cuda/tiles.cu against plain loops over tiles, blocks and pixels.
#include "../expect.h"

#include "../../../csrc/cuda/tiles.cu"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

namespace {

using namespace texvlm;

struct Case {
  int64_t batch, channels, height, width, tile;
  bool packed, by_means;
  int steps;  // of 255
};

template <class T>
struct Film {
  Case of;
  std::vector<T> frame, stored;

  // Noise everywhere, and things that have moved in some tiles; steps of 255 for bytes, multiples of 1/256 for floats, so that
  // sums are exact.
  explicit Film(const Case& c) : of(c) {
    uint32_t state = 7;
    const auto random = [&] { return static_cast<int>((state = state * 1664525u + 1013904223u) >> 16); };
    for (int64_t i = 0; i < c.batch * c.channels * c.height * c.width; ++i) {
      const int old = 20 + random() % 200;
      stored.push_back(value(old));
      frame.push_back(value(old + random() % (2 * c.steps + 1) - c.steps));
    }
    const int64_t rows = (c.height - 1) / c.tile + 1, columns = (c.width - 1) / c.tile + 1;
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t i = b; i < rows * columns; i += 3)
        for (int64_t y = i / columns * c.tile, x = i % columns * c.tile, k = 0; k < 9; ++k)
          frame[at(b, random() % c.channels, std::min(c.height - 1, y + k / 3), std::min(c.width - 1, x + k % 3))] = value(250);
  }
  static T value(int v) { return sizeof(T) == 1 ? static_cast<T>(v) : static_cast<T>(static_cast<float>(v) / 256.0f); }

  ImageView<const T> view(const std::vector<T>& values) const {
    const int64_t all = of.channels * of.height * of.width;
    if (of.packed) return {values.data(), all, 1, of.width * of.channels, of.channels};
    return {values.data(), all, of.height * of.width, of.width, 1};
  }
  int64_t at(int64_t b, int64_t c, int64_t y, int64_t x) const {
    const auto v = view(frame);
    return b * v.stride_b + c * v.stride_c + y * v.stride_y + x * v.stride_x;
  }

  double difference(int64_t b, int64_t c, int64_t y, int64_t x) const {
    return static_cast<double>(frame[at(b, c, y, x)]) - static_cast<double>(stored[at(b, c, y, x)]);
  }
  bool differs(int64_t b, int64_t y0, int64_t x0, double most) const {
    const int64_t side = of.by_means ? 8 : 1, y1 = std::min(of.height, y0 + of.tile), x1 = std::min(of.width, x0 + of.tile);
    for (int64_t c = 0; c < of.channels; ++c) {
      for (int64_t y = y0; y < y1; y += side) {
        for (int64_t x = x0; x < x1; x += side) {
          double sum = 0, count = 0;
          for (int64_t v = y; v < std::min(y1, y + side); ++v)
            for (int64_t u = x; u < std::min(x1, x + side); ++u, ++count) sum += difference(b, c, v, u);
          if (std::fabs(sum) / count > most) return true;
        }
      }
    }
    return false;
  }
};

template <class T>
void compare(const Case& c) {
  const Film<T> film(c);
  std::vector<T> stored = film.stored;
  const int64_t rows = (c.height - 1) / c.tile + 1, columns = (c.width - 1) / c.tile + 1;
  std::vector<char> found(c.batch * rows * columns, 2);
  const auto out = film.view(stored);
  const double most = sizeof(T) == 1 ? c.steps : c.steps / 256.0;
  const TiledFrames<T> frames{film.view(film.frame),
                              {stored.data(), out.stride_b, out.stride_c, out.stride_y, out.stride_x},
                              c.channels,
                              c.height,
                              c.width,
                              c.tile,
                              rows,
                              columns,
                              Limits<T>::within(sizeof(T) == 1 ? most / 255 : most)};
  cuda::dirty_tiles(frames, c.by_means, c.batch, reinterpret_cast<bool*>(found.data()), nullptr);
  int64_t dirty = 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t t = 0; t < rows * columns; ++t) {
      const int64_t y0 = t / columns * c.tile, x0 = t % columns * c.tile;
      const bool wanted = film.differs(b, y0, x0, most);
      EXPECT(found[b * rows * columns + t] == static_cast<char>(wanted));
      dirty += wanted;
      bool same = true;
      for (int64_t k = 0; k < c.channels; ++k)
        for (int64_t y = y0; y < std::min(c.height, y0 + c.tile); ++y)
          for (int64_t x = x0; x < std::min(c.width, x0 + c.tile); ++x)
            same &= stored[film.at(b, k, y, x)] == (wanted ? film.frame : film.stored)[film.at(b, k, y, x)];
      EXPECT(same);
    }
  }
  EXPECT(dirty > 0 && dirty < c.batch * rows * columns);
}

}  // namespace

int main() {
  for (const bool packed : {false, true}) {
    for (const bool by_means : {false, true}) {
      compare<uint8_t>({2, 3, 40, 70, 16, packed, by_means, 2});
#if !defined(__SANITIZE_THREAD__)                               // under which races are the same in both types
      compare<float>({1, 3, 45, 91, 20, packed, by_means, 3});  // partial blocks, and tiles
#endif
    }
  }
  compare<double>({1, 1, 19, 40, 9, false, true, 0});
  compare<uint8_t>({1, 4, 90, 33, 33, false, false, 0});
  return done();
}
