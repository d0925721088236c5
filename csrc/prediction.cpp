// Host code of the stem `prediction`: which cells their neighbours predict.
#include "math/prediction.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "autograd.h"
#include "cuda/prediction.h"
#include "picture.h"

namespace texvlm {
namespace host {

// Rows of cells in turn, those of all pictures side by side, each by the thread that takes it: the row above is one that a
// running thread has taken before, or done.
struct Wavefront {
  int64_t batch, rows, columns;
  int64_t* source;                // [B, rows * columns]
  std::atomic<int64_t>* next;     // ticket
  std::atomic<int64_t>* decided;  // cells of each row, [B, rows]
};

struct ThreadTeam {
  Wavefront w;

  template <class T>
  TEXVLM_HD bool alike(const PredictedCells<T>& f, int64_t b, int64_t own, int64_t earlier) const {
    return f.alike(b, own, earlier);
  }
  TEXVLM_HD int64_t source(int64_t b, int64_t cell) const {
    const std::atomic<int64_t>& decided = w.decided[b * w.rows + cell / w.columns];
    while (decided.load(std::memory_order_acquire) <= cell % w.columns) std::this_thread::yield();
    return w.source[b * w.rows * w.columns + cell];
  }
  TEXVLM_HD void decide(int64_t b, int64_t cell, int64_t source) const {
    w.source[b * w.rows * w.columns + cell] = source;
    w.decided[b * w.rows + cell / w.columns].store(cell % w.columns + 1, std::memory_order_release);
  }
};

template <int C, class T>
TEXVLM_HD void predict_rows(const PredictedCells<T>& f, const Wavefront& w) {
  for (;;) {
    const int64_t ticket = w.next->fetch_add(1, std::memory_order_relaxed);
    if (ticket >= w.batch * w.rows) return;
    f.row(ThreadTeam{w}, ticket % w.batch, ticket / w.batch);
  }
}
TEXVLM_ISA_DISPATCH(predict_rows)

// Without a bound, what is equal to a neighbour is equal to what that is put back from. So no cell waits for another: rows of
// pixels are read as they lie, and each cell notes in what it differs from its neighbours.
enum Differs : uint8_t { kLeft = 1, kAbove = 2, kCorner = 4 };

template <class T>
TEXVLM_HD typename Near<T>::Flag difference(T a, T b) {
  if constexpr (sizeof(T) == 1) return a ^ b;
  return !(static_cast<Acc<T>>(a) - static_cast<Acc<T>>(b) == 0);  // infinities differ from themselves
}

// Of `count` values beside each other in Rows rows, p against q.
template <int Rows, class T>
TEXVLM_HD void note_differences(const T* p, const T* q, int64_t stride, int64_t count, typename Near<T>::Flag* noted) {
  for (int64_t j = 0; j < count; ++j) {
    typename Near<T>::Flag all = noted[j];
    for (int r = 0; r < Rows; ++r) all |= difference(p[j + r * stride], q[j + r * stride]);
    noted[j] = all;
  }
}

// differs: of the row's cells. work: three times as many flags as a row of pixels has values.
template <int C, class T>
TEXVLM_HD void differing_neighbours(const PredictedCells<T>& f, int64_t b, int64_t y, uint8_t* differs,
                                    typename Near<T>::Flag* work) {
  const bool packed = f.image.stride_c == 1 && f.image.stride_x == f.channels;
  const bool runs = (packed || f.image.stride_x == 1) && (y + 1) * f.cell <= f.height;
  const int64_t full = runs ? f.width / f.cell : 0, wide = packed ? f.cell * f.channels : f.cell, count = full * wide;
  auto *left = work, *above = work + count, *corner = above + count;
  std::fill_n(work, 3 * count, typename Near<T>::Flag{0});
  const auto rows = [&](auto number, int64_t r) __attribute__((always_inline)) {
    constexpr int kRows = decltype(number)::value;
    const int64_t stride = f.image.stride_y;
    for (int64_t c = 0; c < (packed ? 1 : f.channels); ++c) {
      const T* p = &f.image.at(b, c, y * f.cell + r, 0);
      note_differences<kRows>(p + wide, p, stride, count - wide, left + wide);
      if (y == 0) continue;
      const T* q = &f.image.at(b, c, (y - 1) * f.cell + r, 0);
      note_differences<kRows>(p, q, stride, count, above);
      note_differences<kRows>(p + wide, q, stride, count - wide, corner + wide);
    }
  };
  if (full > 0) {
    int64_t r = 0;
    for (; r + 4 <= f.cell; r += 4) rows(std::integral_constant<int, 4>{}, r);
    for (; r < f.cell; ++r) rows(std::integral_constant<int, 1>{}, r);
  }
  const auto any = [&](const auto* noted) {  // eight bytes at a time, the last eight perhaps once more
    const auto* bytes = reinterpret_cast<const uint8_t*>(noted);
    const int64_t length = wide * static_cast<int64_t>(sizeof(*noted));
    if (length < 8) return std::any_of(bytes, bytes + length, [](uint8_t byte) { return byte != 0; });
    const auto eight = [&](int64_t j) {
      uint64_t word;
      std::memcpy(&word, bytes + j, sizeof word);
      return word;
    };
    uint64_t all = eight(length - 8);
    for (int64_t j = 0; j + 8 <= length; j += 8) all |= eight(j);
    return all != 0;
  };
  for (int64_t x = 0; x < f.columns; ++x) {
    const int64_t own = y * f.columns + x;
    const auto apart = [&](auto* noted, int64_t earlier) { return x < full ? any(noted + x * wide) : !f.alike(b, own, earlier); };
    differs[x] = (x == 0 || apart(left, own - 1) ? kLeft : 0) | (y == 0 || apart(above, own - f.columns) ? kAbove : 0) |
                 (x == 0 || y == 0 || apart(corner, own - f.columns - 1) ? kCorner : 0);
  }
}
TEXVLM_ISA_DISPATCH(differing_neighbours)

template <class T>
void predict_equal(const PredictedCells<T>& f, int64_t batch, int64_t* source) {
  const int64_t cells = f.rows * f.columns;
  std::vector<uint8_t> differs(batch * cells);
  parallel(batch * f.rows, f.channels * f.cell * f.width, [&](int64_t begin, int64_t end) {
    std::vector<typename Near<T>::Flag> work(3 * f.width * f.channels);
    for (int64_t i = begin; i < end; ++i)
      differing_neighbours_any<0, kBest<T>>(f, i / f.rows, i % f.rows, &differs[i * f.columns], work.data());
  });
  for (int64_t i = 0; i < batch * cells; ++i) {
    const int64_t first = i - i % cells, left = i - 1, above = i - f.columns;
    source[i] = !(differs[i] & kLeft)     ? source[left]
                : !(differs[i] & kAbove)  ? source[above]
                : !(differs[i] & kCorner) ? source[above - 1]
                                          : i - first;
  }
}

}  // namespace host

namespace {

Tensor predict_cells(const Tensor& given, int64_t cell, double bound) {
  const char* op = "predict_cells";
  check_shape(op, "image", given, "[B, C, H, W]", {-1, -1, -1, -1});
  if (given.scalar_type() != at::kByte) check_texel_dtype(op, "image", given.scalar_type());
  const Tensor image = readable(given);
  const int64_t batch = image.size(0), channels = image.size(1), height = image.size(2), width = image.size(3);
  check_levels(op, height, width, 1);
  TEXVLM_CHECK(cell >= 1, op, "cell", "at least 1", cell);
  TEXVLM_CHECK(std::isfinite(bound) && bound >= 0, op, "bound", "finite and at least 0", bound);
  const int64_t tall = std::min(cell, height), wide = std::min(cell, width);
  TEXVLM_CHECK(tall <= INT32_MAX / wide, op, "cell", "of fewer than 2^31 pixels", cell);
  const int64_t rows = (height - 1) / cell + 1, columns = (width - 1) / cell + 1;
  TEXVLM_CHECK(rows <= (INT32_MAX - 1) / columns / std::max<int64_t>(1, batch), op, "cell",
               "so large that there are fewer than 2^31 cells in all", cell);
  const Tensor out = new_tensor({batch, rows * columns}, at::kLong, image.device());
  if (batch == 0) return out;
  dispatch_picture(image, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const PredictedCells<T> cells{image_view<const T>(image), channels, height, width, cell, rows, columns,
                                  Near<T>::within(bound)};
    if (on_cuda(image.device())) {
      const c10::DeviceGuard guard(image.device());
      const Tensor workspace = new_zeros({cuda::prediction_workspace(batch, rows * columns)}, at::kInt, image.device());
      return cuda::predict_cells(cells, batch, pointer<int64_t>(out), pointer<uint32_t>(workspace),
                                 current_stream(image.device()));
    }
    if (cells.near.most == 0) return host::predict_equal(cells, batch, pointer<int64_t>(out));
    std::atomic<int64_t> next{0};
    std::vector<std::atomic<int64_t>> decided(batch * rows);
    const host::Wavefront wavefront{batch, rows, columns, pointer<int64_t>(out), &next, decided.data()};
    // As many runners as threads, however the rows are shared out.
    const int64_t runners = std::min<int64_t>(at::get_num_threads(), batch * rows);
    host::parallel(runners, batch * channels * height * width / runners, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) host::predict_rows_any<0, host::kBest<T>>(cells, wavefront);
    });
  });
  return out;
}

}  // namespace

TEXVLM_OPS(ops) { ops.op<predict_cells>("predict_cells"); }

}  // namespace texvlm
