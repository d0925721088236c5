// Runs the adjoint of enlarging (math/enlarge.h), on whichever device.
#pragma once

#include "math/enlarge.h"
#include "reduce.h"

namespace texvlm {

// A functor F<T, C>, built from `from` and `args`, for the texels of `items`. On CUDA by a thread each, or by a block where each
// is read by many pixels.
template <template <class, int> class F, class T, int K, class... A>
void for_each_gathered(c10::Device device, int64_t items, const EnlargeAdjoint<T, K>& from, const A&... args) {
  constexpr int64_t kFew = 512;
  const GatheredTexels<F<T, 0>> texels{{from, args...}};
  if (on_cuda(device) && items > 0 && texels.places() > kFew) {
    const c10::DeviceGuard guard(device);
    return cuda::launch_rows_reduced(texels, items * from.h * from.w, texels.places(), current_stream(device));
  }
  const int64_t cost = 4 * (from.fine_h / from.h + 1) * (from.fine_w / from.w + 1);
  for_each_pixel<F, T>(device, {items, 0, from.h, 0, from.w}, Work{1, cost}, from, args...);
}

}  // namespace texvlm
