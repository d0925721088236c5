// Rows of numbers of any dtype, read and written in that of the arithmetic, and the memory that takes.
#pragma once

#include <vector>

#include "scalar.h"

namespace texvlm {

// Memory of one thread, aligned to cache lines; what was in it is lost when it grows.
template <class A>
class Scratch {
 public:
  A* of(int64_t count) {
    if (static_cast<int64_t>(memory_.size()) < count + kLine) memory_.resize(static_cast<size_t>(count + kLine));
    const auto at = reinterpret_cast<uintptr_t>(memory_.data());
    return reinterpret_cast<A*>((at + 63) / 64 * 64);
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(A);
  std::vector<A> memory_;
};

// Rows as they are stored.
template <class A>
struct StoredRows {
  const void* data;
  int64_t dim;
  Storage storage;

  // Row i; where it is not stored as such, in `widened`.
  TEXVLM_HD const A* row(int64_t i, A* widened) const {
    if (storage == Storage::own) return static_cast<const A*>(data) + i * dim;
    const auto* const from = static_cast<const uint16_t*>(data) + i * dim;
    if (storage == Storage::half) {
      for (int64_t d = 0; d < dim; ++d) widened[d] = Half::template widened<float>(uint32_t{from[d]});
    } else {
      for (int64_t d = 0; d < dim; ++d) widened[d] = BFloat16::template widened<float>(uint32_t{from[d]});
    }
    return widened;
  }
};
template <class A>
struct StoredOut {
  void* data;
  int64_t dim;
  Storage storage;

  TEXVLM_HD void store(int64_t i, const A* row) const {
    if (storage == Storage::own) {
      for (int64_t d = 0; d < dim; ++d) static_cast<A*>(data)[i * dim + d] = row[d];
    } else {
      auto* const to = static_cast<uint16_t*>(data) + i * dim;
      for (int64_t d = 0; d < dim; ++d)
        to[d] = storage == Storage::half ? Half(static_cast<float>(row[d])).bits : BFloat16(static_cast<float>(row[d])).bits;
    }
  }
};

}  // namespace texvlm
