// Smoothing of flow by tiles, all steps at once (csrc/cuda/flow.cu), against single steps in plain loops.
#include "../../../csrc/cuda/flow.cu"

#include <utility>
#include <vector>

#include "../expect.h"

namespace {

using namespace texvlm;

constexpr int64_t kDirections = 2;

void smooth(int rows, int columns, int steps) {
  const int64_t nodes = kDirections * rows * columns;
  std::vector<float> planes[5];
  uint32_t state = 5;
  for (int p = 0; p < 5; ++p)
    for (int64_t i = 0; i < nodes; ++i) {
      state = state * 1664525u + 1013904223u;
      const float random = static_cast<float>(state >> 8) / (1 << 24);
      planes[p].push_back(p < 2 ? 8 * random - 4 : p == 3 ? 9 * random : 100 * random);  // xx yy > xy^2 but for few
    }
  const FlowFound found{planes[0].data(), planes[1].data(), planes[2].data(), planes[3].data(), planes[4].data(), rows, columns};
  std::vector<float> u(nodes, -7.f), v(nodes, -7.f), from_u = planes[0], from_v = planes[1], to_u(nodes), to_v(nodes);
  cuda::smooth_flow({found, found.u, found.v, u.data(), v.data(), 36.f, 0.2f}, kDirections, steps, nullptr);
  for (int k = 0; k < steps; ++k) {
    const FlowSmooth<float, 0> one{found, from_u.data(), from_v.data(), to_u.data(), to_v.data(), 36.f, 0.2f};
    for (int64_t d = 0; d < kDirections; ++d)
      for (int64_t y = 0; y < rows; ++y)
        for (int64_t x = 0; x < columns; ++x) one(d, y, x, 0, 1);
    std::swap(from_u, to_u), std::swap(from_v, to_v);
  }
  EXPECT(u == from_u && v == from_v);
}

}  // namespace

int main() {
  for (const int steps : {1, 4, 12}) {
    smooth(1, 1, steps);
    smooth(3, 40, steps);
    smooth(41, 35, steps);  // a tile in the middle, which touches no border where steps are few, and parts of tiles
  }
  return done();
}
