// Runs a reduction (math/reduce.h) over rows or planes, on whichever device.
#pragma once

#include "cuda/reduce.h"
#include "launch.h"
#include "memory.h"

namespace texvlm {

namespace host {

template <int C, class F>
TEXVLM_HD void reduce_rows(const F& f, int64_t count, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) reduce_row(f, row, count);
}
TEXVLM_ISA_DISPATCH(reduce_rows)

}  // namespace host

// f over rows [rows, count], each place standing for about `cost` values.
template <host::Isa Best, class F>
void for_each_row_reduced(c10::Device device, int64_t rows, int64_t count, int64_t cost, const F& f) {
  if (rows <= 0) return;
  if (on_cuda(device)) {
    const c10::DeviceGuard guard(device);
    return cuda::launch_rows_reduced(f, rows, count, current_stream(device));
  }
  host::parallel(rows, count * cost, [&](int64_t begin, int64_t end) { host::reduce_rows_any<0, Best>(f, count, begin, end); });
}

// f over planes [batch, h, w]: their rows, and then these. F<T, C> is built from `args`.
template <template <class, int> class F, class T, class... A>
void for_each_plane_reduced(c10::Device device, int64_t batch, int64_t h, int64_t w, int64_t cost, const A&... args) {
  using Part = typename F<T, 0>::template Part<1>;
  const F<T, 0> f{args...};
  const at::Tensor parts = new_tensor({batch * h * static_cast<int64_t>(sizeof(Part))}, at::kByte, device);
  Part* const each = static_cast<Part*>(parts.data_ptr());
  for_each_row_reduced<host::kBest<T>>(device, batch * h, w, cost, RowParts<F<T, 0>>{f, h, each});
  for_each_row_reduced<host::kBest<T>>(device, batch, h, cost, PlaneParts<F<T, 0>>{f, h, each});
}

}  // namespace texvlm
