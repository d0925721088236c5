// Compaction of masks, for the op `compact` and for every stem that lists what is set.
#pragma once

#include <tuple>

#include "cuda/cascade.h"
#include "launch.h"
#include "tensor.h"

namespace texvlm {
namespace host {

template <int C, class F>
TEXVLM_HD void each_row(const F& f, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) f(b);
}
TEXVLM_ISA_DISPATCH(each_row)

}  // namespace host

// mask bool [B, N] -> int64 indices [B, N] of what is set, in order, then -1; int64 counts [B]. Nothing is read back.
inline std::tuple<at::Tensor, at::Tensor> compacted(const at::Tensor& mask) {
  const int64_t batch = mask.size(0), count = mask.size(1);
  const at::Tensor indices = new_tensor({batch, count}, at::kLong, mask.device());
  const at::Tensor set = new_tensor({batch}, at::kLong, mask.device());
  if (batch == 0) return {indices, set};
  const CompactView view{pointer<const bool>(mask), mask.stride(0),       mask.stride(1), count,
                         pointer<int64_t>(indices), pointer<int64_t>(set)};
  if (on_cuda(mask.device())) {
    const c10::DeviceGuard guard(mask.device());
    const at::Tensor workspace = new_tensor({cuda::compact_workspace(batch, count)}, at::kByte, mask.device());
    cuda::compact(view, batch, workspace.data_ptr(), current_stream(mask.device()));
  } else {
    host::parallel(batch, count, [&](int64_t begin, int64_t end) { host::each_row_any<0>(CompactRow{view}, begin, end); });
  }
  return {indices, set};
}

}  // namespace texvlm
