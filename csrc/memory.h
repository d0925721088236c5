// Where outputs live. On the CPU, large tensors come from an allocator that keeps huge-page buffers: fresh memory costs more than
// most ops (measured: a 224 MB pyramid takes 16 ms in warm memory, 50 ms in fresh 4 KiB pages, 16 ms of page clearing in fresh
// huge pages).
#pragma once

#include <ATen/core/Tensor.h>

#include "export.h"

namespace texvlm {

// Uninitialised, or zero-filled; contiguous.
at::Tensor new_tensor(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);
at::Tensor new_zeros(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);

// Bytes of freed buffers that are kept for the next large tensor, at most $TEXVLM_CACHE_MB (512): those freed last.
TEXVLM_API int64_t cached_bytes();
TEXVLM_API void empty_cache();

}  // namespace texvlm
