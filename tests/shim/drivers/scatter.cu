// Sums that many threads add to: the sinks of csrc/cuda/scatter.cuh against a loop. On sm_90 float4 atomics; scatter_sm75.cu is
// the same for cards below, where lanes that hit one texel add up among themselves first.
#include "../expect.h"

#include "../../../csrc/cuda/scatter.cu"

#include <cmath>
#include <memory>
#include <vector>

namespace texvlm::cuda {
namespace {

template <class Sink>
__global__ void scatter(Sink sink, const int* places, const float* values, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const bool live = i < count && places[i] >= 0;
  float value[4] = {};
  for (int w = 0; w < 4; ++w) value[w] = live ? values[i] * static_cast<float>(w + 1) : 0.0f;
  sink.start();
  sink.add(live, live ? 4 * int64_t{places[i]} : 0, value);
}

void check(int count, int texels) {
  std::vector<int> places(count);
  std::vector<float> values(count);
  std::vector<double> expected(4 * texels, 0);
  for (int i = 0; i < count; ++i) {
    places[i] = i % 11 == 3 ? -1 : static_cast<int>(i * 2654435761u % static_cast<unsigned>(texels));
    values[i] = static_cast<float>(i % 17) - 8;
    for (int w = 0; w < 4 && places[i] >= 0; ++w) expected[4 * places[i] + w] += values[i] * static_cast<float>(w + 1);
  }
  const dim3 grid(static_cast<unsigned>((count + 127) / 128));
  // 16 bytes apart, as tensors are
  const std::unique_ptr<float4[]> floats(new float4[texels]()), fixed(new float4[texels]());
  launch(scatter<FloatSink<float>>, grid, 128, 0, nullptr, FloatSink<float>{&floats[0].x}, places.data(), values.data(), count);

  std::vector<unsigned long long> sums(4 * texels, 0);
  unsigned long long largest = 0;
  const FixedPoint point{sums.data(), &largest, count};
  std::vector<float> all(4 * count);
  for (int i = 0; i < 4 * count; ++i) all[i] = values[i / 4] * static_cast<float>(i % 4 + 1);
  largest_magnitude(all.data(), 4 * count, &largest, nullptr);
  launch(scatter<FixedSink<float>>, grid, 128, 0, nullptr, FixedSink<float>{&fixed[0].x, point}, places.data(), values.data(),
         count);
  add_fixed(point, &fixed[0].x, 4 * texels, nullptr);
  for (int i = 0; i < 4 * texels; ++i) {
    EXPECT(std::fabs((&floats[i / 4].x)[i % 4] - expected[i]) < 1e-3);
    EXPECT((&fixed[i / 4].x)[i % 4] == static_cast<float>(expected[i]));
  }
}

}  // namespace
}  // namespace texvlm::cuda

int main() {
  texvlm::cuda::check(300, 5);
  texvlm::cuda::check(513, 100);
  return done();
}
