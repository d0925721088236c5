// Hardware arrays that are kept from call to call, because creating one stops the device and filling one costs more than building
// the pyramid.
//
// An array is found by its shape (device, height, width, levels, layers, format). It is filled again only when its content is not
// what is asked for: the same storage (a weak reference: its memory may be freed meanwhile), the same address and the same
// version of the tensor. Tensors without a version (made in inference mode) are always copied; so is everything while a CUDA
// graph is captured, since a replay may find other texels. Writes that PyTorch does not count (through .data, by Triton or the
// replay of a graph) are not seen: empty_texture_cache() after them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "cuda/hardware.h"
#include "export.h"

namespace texvlm {

struct TextureCacheStats {
  int64_t arrays, bytes, limit;           // what is kept; limit: $TEXVLM_TEXTURE_CACHE_MB (1024)
  int64_t held;                           // arrays that captured CUDA graphs hold
  int64_t hits, fills, created, evicted;  // since the process began
};
TEXVLM_API TextureCacheStats texture_cache_stats();
TEXVLM_API void empty_texture_cache();  // all but what graphs hold

// Texels that hardware has a format for.
void check_hardware_dtype(const char* op, const at::Tensor& data);

#if defined(TEXVLM_WITH_CUDA)
// The array that holds `data` [B, T, C], or an error that names the limit. channels: of a layer, 4 or 1.
cuda::ArrayShape array_shape(const char* op, const at::Tensor& data, const Levels& table, int channels);
void fill_array(cuda::MipArray& array, const at::Tensor& data, const Levels& table, const cuda::Stream& stream);

// Runs body on an array that is filled with `data` and has these samplers, in the order of the current stream, under the lock of
// the cache.
using UseArray = std::function<void(cuda::MipArray&, const cuda::Stream&)>;
void with_array(const char* op, const at::Tensor& data, const Levels& table, const std::vector<cuda::SamplerState>& samplers,
                const UseArray& body);

// A new array. Arrays come from the driver, which cannot use what torch keeps for tensors to come: where it has no memory left,
// `give_back` and torch are asked to release what they keep, and the driver is asked once more.
std::unique_ptr<cuda::MipArray> new_array(const cuda::ArrayShape& shape, const std::function<void()>& give_back);

// Frees an array, or keeps it until the graphs that hold it are gone.
void retire(std::unique_ptr<cuda::MipArray> array);
#endif

}  // namespace texvlm
