// The exact distance transform as a step of other stems.
#pragma once

#include "cuda/distance.h"
#include "launch.h"
#include "tensor.h"

namespace texvlm {

// Runs the two passes; Mask and Sink are those of math/distance.h. Workspace: 4 bytes a pixel.
template <class Mask, class Sink>
void run_distance(c10::Device device, int64_t batch, int64_t height, int64_t width, const Mask& mask, const Sink& sink) {
  const at::Tensor near = new_tensor({batch, height, width}, at::kInt, device);
  int32_t* const rows = pointer<int32_t>(near);
  const typename NearestInColumn<Mask>::template For<int32_t, 0> columns{mask, rows, height, width};
  if (on_cuda(device)) {
    const c10::DeviceGuard guard(device);
    cuda::nearest_in_columns<Mask>(columns, batch, current_stream(device));
  } else {
    host::parallel(batch * width, 8 * height, [&](int64_t begin, int64_t end) {
      host::query_range_any<0, host::kBest<int32_t>>(columns, width, int64_t{1}, begin, end);
    });
  }
  const Rect all{batch, 0, height, 0, width};
  const bool small = height < 32768 && width < 32768 && height * height + 2 * width * width < (int64_t{1} << 31);
  const int32_t* const found = rows;
  if (small) {
    for_each_pixel<NearestInRow<Sink>::template For, int32_t>(device, all, Work{}, found, height, width, sink);
  } else {
    for_each_pixel<NearestInRow<Sink>::template For, int64_t>(device, all, Work{}, found, height, width, sink);
  }
}

}  // namespace texvlm
