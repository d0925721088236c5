// Rows and planes reduced by csrc/cuda/reduce.cuh against the host's own loop, bit for bit: sums of doubles, whose order shows,
// integers, and maxima with the first of several places.
#include "../../../csrc/cuda/reduce.cuh"

#include <cmath>
#include <vector>

#include "../../../csrc/math/stats.h"
#include "../expect.h"

namespace {

using namespace texvlm;

struct RowSums {
  template <int N>
  using Part = Sums<double, 3, N>;
  const float* rows;
  int64_t count;
  double* out;

  template <class P>
  TEXVLM_HD void add(int64_t row, int64_t x, int n, P& to) const {
    for (int j = 0; j < n; ++j) {
      const double v = static_cast<double>(rows[row * count + x + j]);
      to.of[0][j] += v, to.of[1][j] += 1 / (v + 0.5), to.of[2][j] += 1;
    }
  }
  TEXVLM_HD void finish(int64_t row, const Part<1>& total) const {
    for (int k = 0; k < 3; ++k) out[3 * row + k] = total.of[k][0];
  }
};

std::vector<float> values(int64_t count) {
  std::vector<float> v(count);
  uint32_t state = 7;
  for (float& f : v) {
    state = state * 1664525u + 1013904223u;
    f = static_cast<float>(state >> 22) / 1024.f;  // 1024 different ones: maxima are found several times
  }
  return v;
}

template <class F>
void planes_on_host(const F& f, int64_t batch, int64_t h, int64_t w) {
  std::vector<typename F::template Part<1>> parts(batch * h);
  for (int64_t row = 0; row < batch * h; ++row) reduce_row(RowParts<F>{f, h, parts.data()}, row, w);
  for (int64_t b = 0; b < batch; ++b) reduce_row(PlaneParts<F>{f, h, parts.data()}, b, h);
}
template <class F>
void planes_by_kernel(const F& f, int64_t batch, int64_t h, int64_t w) {
  std::vector<typename F::template Part<1>> parts(batch * h);
  cuda::launch_rows_reduced(RowParts<F>{f, h, parts.data()}, batch * h, w, nullptr);
  cuda::launch_rows_reduced(PlaneParts<F>{f, h, parts.data()}, batch, h, nullptr);
}

void rows(int64_t count) {
  constexpr int64_t kRows = 3;
  const std::vector<float> v = values(kRows * count);
  std::vector<double> host(3 * kRows), kernel(3 * kRows, -1);
  const RowSums f{v.data(), count, host.data()};
  for (int64_t row = 0; row < kRows; ++row) reduce_row(f, row, count);
  cuda::launch_rows_reduced(RowSums{v.data(), count, kernel.data()}, kRows, count, nullptr);
  EXPECT(host == kernel);
  for (int64_t row = 0; row < kRows; ++row) {
    double sum = 0;
    for (int64_t x = 0; x < count; ++x) sum += static_cast<double>(v[row * count + x]);
    EXPECT(std::abs(kernel[3 * row] - sum) <= 1e-12 * sum && kernel[3 * row + 2] == static_cast<double>(count));
  }
}

void planes(int64_t h, int64_t w) {
  constexpr int64_t kBatch = 2;
  const std::vector<float> v = values(kBatch * h * w);
  MapStats<float> host[kBatch], kernel[kBatch];
  double means_host[kBatch], means_kernel[kBatch];
  planes_on_host(PlaneStats<float, 0>{v.data(), v.data(), host, h, w}, kBatch, h, w);
  planes_by_kernel(PlaneStats<float, 0>{v.data(), v.data(), kernel, h, w}, kBatch, h, w);
  planes_on_host(EdgeThreshold<float, 0>{v.data(), means_host, h, w}, kBatch, h, w);
  planes_by_kernel(EdgeThreshold<float, 0>{v.data(), means_kernel, h, w}, kBatch, h, w);
  for (int64_t b = 0; b < kBatch; ++b) {
    const float* p = v.data() + b * h * w;
    int64_t first = 0;
    for (int64_t i = 1; i < h * w; ++i)
      if (p[i] > p[first]) first = i;
    EXPECT(kernel[b].at[0] == first && kernel[b].max[0] == p[first]);
    EXPECT(host[b].at[0] == first && host[b].sum[0] == kernel[b].sum[0] && means_host[b] == means_kernel[b]);
  }
}

}  // namespace

int main() {
  for (const int64_t count : {1, 31, 32, 33, 255, 256, 257, 1100}) rows(count);
  planes(1, 1);
  planes(5, 70);
  planes(90, 3);
  planes(40, 300);
  return done();
}
