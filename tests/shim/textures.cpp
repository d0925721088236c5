#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../../csrc/math/scalar.h"
#include "grid.h"

struct cudaArray {
  cudaChannelFormatDesc format;
  cudaExtent extent;  // depth: layers
  unsigned flags;
  std::vector<std::unique_ptr<char[]>> rows;  // each on its own, so that AddressSanitizer guards its ends

  int channels() const { return (format.x != 0) + (format.y != 0) + (format.z != 0) + (format.w != 0); }
  int texel_bytes() const { return channels() * format.x / 8; }
  size_t row_bytes() const { return extent.width * static_cast<size_t>(texel_bytes()); }
  char* row(size_t y, size_t layer) const { return rows[layer * extent.height + y].get(); }
};

struct cudaMipmappedArray {
  static inline int count = 0;
  std::vector<std::unique_ptr<cudaArray>> levels;
  cudaMipmappedArray() { ++count; }
  ~cudaMipmappedArray() { --count; }
};

namespace texvlm::shim {
namespace {

constexpr size_t kMaxSize = 32768, kMaxLayers = 2048;

struct Texture {
  std::vector<const cudaArray*> levels;
  cudaTextureDesc sampler;
};

bool sensible(const cudaChannelFormatDesc& f) {
  const int n = (f.x != 0) + (f.y != 0) + (f.z != 0) + (f.w != 0);
  const bool same = (f.y == 0 || f.y == f.x) && (f.z == 0 || f.z == f.x) && (f.w == 0 || f.w == f.x);
  return f.f == cudaChannelFormatKindFloat && (f.x == 16 || f.x == 32) && same && n != 3 && (f.y != 0) == (n > 1);
}

cudaArray* new_array(const cudaChannelFormatDesc& format, cudaExtent extent, unsigned flags) {
  const bool fits = extent.width >= 1 && extent.width <= kMaxSize && extent.height >= 1 && extent.height <= kMaxSize &&
                    extent.depth >= 1 && extent.depth <= kMaxLayers;
  if (!fits || !(flags & cudaArrayLayered) || !sensible(format)) return nullptr;
  auto array = std::make_unique<cudaArray>();
  array->format = format;
  array->extent = extent;
  array->flags = flags;
  for (size_t i = 0; i < extent.height * extent.depth; ++i) {
    array->rows.emplace_back(new char[array->row_bytes()]);
    std::memset(array->rows.back().get(), 0xFF, array->row_bytes());
  }
  return array.release();
}

float4 decode(const cudaArray& a, const char* texel) {
  float v[4] = {0, 0, 0, 0};
  for (int c = 0; c < a.channels(); ++c) {
    if (a.format.x == 32) {
      std::memcpy(&v[c], texel + 4 * c, 4);
    } else {
      Half half;
      std::memcpy(&half, texel + 2 * c, 2);
      v[c] = half;
    }
  }
  return {v[0], v[1], v[2], v[3]};
}

// The texel that an index names under an address mode, or -1 for the border.
int64_t addressed(int64_t i, int64_t n, cudaTextureAddressMode mode) {
  const auto modulo = [](int64_t a, int64_t b) { return (a % b + b) % b; };
  switch (mode) {
    case cudaAddressModeWrap:
      return modulo(i, n);
    case cudaAddressModeMirror:
      i = modulo(i, 2 * n);
      return i < n ? i : 2 * n - 1 - i;
    case cudaAddressModeBorder:
      return i < 0 || i >= n ? -1 : i;
    default:
      return std::clamp<int64_t>(i, 0, n - 1);
  }
}

float4 texel(const Texture& t, const cudaArray& a, int64_t x, int64_t y, size_t layer) {
  x = addressed(x, static_cast<int64_t>(a.extent.width), t.sampler.addressMode[0]);
  y = addressed(y, static_cast<int64_t>(a.extent.height), t.sampler.addressMode[1]);
  const float* border = t.sampler.borderColor;
  if (x < 0 || y < 0) return {border[0], border[1], border[2], border[3]};
  return decode(a, a.row(static_cast<size_t>(y), layer) + x * a.texel_bytes());
}

float4 sum(float4 a, float wa, float4 b, float wb) {
  return {a.x * wa + b.x * wb, a.y * wa + b.y * wb, a.z * wa + b.z * wb, a.w * wa + b.w * wb};
}

// As a card does that has been asked: "8 nearest", or "8 down" (see texvlm/reference/hardware.py).
double fixed_point(double v) {
  static const char* const asked = std::getenv("TEXVLM_TEXTURE_ROUNDING");
  static const double scale = std::exp2(asked ? std::atoi(asked) : 8), add = asked && std::strstr(asked, "down") ? 0 : 0.5;
  return std::floor(v * scale + add) / scale;
}

float4 in_level(const Texture& t, size_t level, float u, float v, size_t layer) {
  const cudaArray& a = *t.levels[level];
  constexpr double kFar = 1e9;  // no texture is so large that it matters where beyond this a place lies
  const double x = std::clamp<double>(static_cast<double>(u) * static_cast<double>(a.extent.width), -kFar, kFar);
  const double y = std::clamp<double>(static_cast<double>(v) * static_cast<double>(a.extent.height), -kFar, kFar);
  if (t.sampler.filterMode == cudaFilterModePoint)
    return texel(t, a, static_cast<int64_t>(std::floor(x)), static_cast<int64_t>(std::floor(y)), layer);
  const double left = std::floor(x - 0.5), top = std::floor(y - 0.5);
  const auto fx = static_cast<float>(fixed_point(x - 0.5 - left)), fy = static_cast<float>(fixed_point(y - 0.5 - top));
  const auto i = static_cast<int64_t>(left), j = static_cast<int64_t>(top);
  const float4 above = sum(texel(t, a, i, j, layer), 1 - fx, texel(t, a, i + 1, j, layer), fx);
  const float4 below = sum(texel(t, a, i, j + 1, layer), 1 - fx, texel(t, a, i + 1, j + 1, layer), fx);
  return sum(above, 1 - fy, below, fy);
}

const Texture& texture_of(Where where, cudaTextureObject_t handle, int layer) {
  const auto* t = reinterpret_cast<const Texture*>(handle);
  if (t == nullptr) fail(where, "a fetch from no texture");
  if (layer < 0 || static_cast<size_t>(layer) >= t->levels[0]->extent.depth)
    fail(where, "a fetch from layer %d of %zu", layer, t->levels[0]->extent.depth);
  return *t;
}

}  // namespace

float4 fetch(Where where, cudaTextureObject_t texture, float u, float v, int layer, float level) {
  const Texture& t = texture_of(where, texture, layer);
  const double last = static_cast<double>(t.levels.size() - 1);
  const double biased = static_cast<double>(level) + static_cast<double>(t.sampler.mipmapLevelBias);
  const double lod =
      std::clamp<double>(std::clamp<double>(biased, t.sampler.minMipmapLevelClamp, t.sampler.maxMipmapLevelClamp), 0, last);
  const auto z = static_cast<size_t>(layer);
  if (t.sampler.mipmapFilterMode == cudaFilterModePoint) return in_level(t, static_cast<size_t>(std::floor(lod + 0.5)), u, v, z);
  const double fixed = fixed_point(lod);
  const auto near = static_cast<size_t>(fixed);
  const auto blend = static_cast<float>(fixed - std::floor(fixed));
  const float4 sharp = in_level(t, near, u, v, z);
  return blend == 0 ? sharp : sum(sharp, 1 - blend, in_level(t, near + 1, u, v, z), blend);
}

// The footprint is an ellipse, whose axes are the singular vectors of [dx dy] in texels: here from the eigenvalues of M M'.
float4 fetch(Where where, cudaTextureObject_t texture, float u, float v, int layer, float2 dx, float2 dy) {
  const Texture& t = texture_of(where, texture, layer);
  const double w = static_cast<double>(t.levels[0]->extent.width), h = static_cast<double>(t.levels[0]->extent.height);
  const double ax = dx.x * w, ay = dx.y * h, bx = dy.x * w, by = dy.y * h;
  const double xx = ax * ax + bx * bx, yy = ay * ay + by * by, xy = ax * ay + bx * by;
  const double mean = (xx + yy) / 2, spread = std::hypot((xx - yy) / 2, xy), angle = std::atan2(2 * xy, xx - yy) / 2;
  const double major = std::sqrt(mean + spread), minor = major > 0 ? std::fabs(ax * by - ay * bx) / major : 0;
  const double most = std::max(1u, t.sampler.maxAnisotropy), radius = std::max(minor, major / most);
  const double last = std::min<double>(static_cast<double>(t.levels.size() - 1), t.sampler.maxMipmapLevelClamp);
  const double lod = radius > 0 ? std::clamp(std::log2(radius), 0.0, last) : 0;
  const int taps = static_cast<int>(std::clamp(std::ceil(major * std::exp2(-lod) * (1 - 1e-5)), 1.0, most));
  float4 all{0, 0, 0, 0};
  for (int i = 0; i < taps; ++i) {
    const double along = ((i + 0.5) / taps - 0.5) * major;
    const auto at_u = static_cast<float>(u + along * std::cos(angle) / w),
               at_v = static_cast<float>(v + along * std::sin(angle) / h);
    all = sum(all, 1, fetch(where, texture, at_u, at_v, layer, static_cast<float>(lod)), 1.0f / static_cast<float>(taps));
  }
  return all;
}

void* surface_texel(Where where, cudaSurfaceObject_t surface, int x, int y, int layer, int size) {
  const auto* a = reinterpret_cast<const cudaArray*>(surface);
  if (a == nullptr) fail(where, "an access to no surface");
  const bool inside = x >= 0 && static_cast<size_t>(x) + static_cast<size_t>(size) <= a->row_bytes() && y >= 0 &&
                      static_cast<size_t>(y) < a->extent.height && layer >= 0 && static_cast<size_t>(layer) < a->extent.depth;
  if (!inside)
    fail(where, "surface out of bounds: byte %d of row %d of layer %d, in an array of %zu bytes x %zu rows x %zu layers", x, y,
         layer, a->row_bytes(), a->extent.height, a->extent.depth);
  if (x % size != 0 || size != a->texel_bytes())
    fail(where, "a surface access of %d bytes at byte %d, in an array of texels of %d bytes", size, x, a->texel_bytes());
  return a->row(static_cast<size_t>(y), static_cast<size_t>(layer)) + x;
}

}  // namespace texvlm::shim

using texvlm::shim::new_array;
using texvlm::shim::Texture;

cudaError_t cudaMalloc3DArray(cudaArray_t* array, const cudaChannelFormatDesc* format, cudaExtent extent, unsigned flags) {
  *array = new_array(*format, extent, flags);
  return *array ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaFreeArray(cudaArray_t array) {
  delete array;
  return cudaSuccess;
}
cudaError_t cudaArrayGetInfo(cudaChannelFormatDesc* format, cudaExtent* extent, unsigned* flags, cudaArray_t array) {
  if (format) *format = array->format;
  if (extent) *extent = array->extent;
  if (flags) *flags = array->flags;
  return cudaSuccess;
}

cudaError_t cudaMallocMipmappedArray(cudaMipmappedArray_t* array, const cudaChannelFormatDesc* format, cudaExtent extent,
                                     unsigned levels, unsigned flags) {
  const char* const most = std::getenv("TEXVLM_SHIM_ARRAYS");  // that there is memory for
  if (most && cudaMipmappedArray::count >= std::atoi(most)) return cudaErrorMemoryAllocation;
  auto all = std::make_unique<cudaMipmappedArray>();
  for (unsigned l = 0; l < levels && (l == 0 || std::max(extent.width, extent.height) >> l); ++l) {
    const cudaExtent size = {std::max<size_t>(1, extent.width >> l), std::max<size_t>(1, extent.height >> l), extent.depth};
    all->levels.emplace_back(new_array(*format, size, flags));
    if (all->levels.back() == nullptr) return cudaErrorInvalidValue;
  }
  if (all->levels.empty()) return cudaErrorInvalidValue;
  *array = all.release();
  return cudaSuccess;
}
cudaError_t cudaGetMipmappedArrayLevel(cudaArray_t* level, cudaMipmappedArray_const_t array, unsigned index) {
  if (index >= array->levels.size()) return cudaErrorInvalidValue;
  *level = array->levels[index].get();
  return cudaSuccess;
}
cudaError_t cudaFreeMipmappedArray(cudaMipmappedArray_t array) {
  delete array;
  return cudaSuccess;
}

cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms* copy, cudaStream_t) {
  const cudaArray_const_t any = copy->srcArray ? copy->srcArray : copy->dstArray;
  const size_t texel = any ? static_cast<size_t>(any->texel_bytes()) : 1, bytes = copy->extent.width * texel;
  const auto row = [&](cudaArray_const_t array, cudaPos at, const cudaPitchedPtr& linear, size_t y, size_t z) {
    if (array == nullptr) return static_cast<char*>(linear.ptr) + ((at.z + z) * linear.ysize + at.y + y) * linear.pitch + at.x;
    if ((at.x * texel + bytes > array->row_bytes()) || at.y + y >= array->extent.height || at.z + z >= array->extent.depth)
      texvlm::shim::fail({}, "cudaMemcpy3DAsync: row %zu of layer %zu is outside of the array", at.y + y, at.z + z);
    return array->row(at.y + y, at.z + z) + at.x * texel;
  };
  for (size_t z = 0; z < copy->extent.depth; ++z)
    for (size_t y = 0; y < copy->extent.height; ++y)
      std::memcpy(row(copy->dstArray, copy->dstPos, copy->dstPtr, y, z), row(copy->srcArray, copy->srcPos, copy->srcPtr, y, z),
                  bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DToArrayAsync(cudaArray_t to, size_t x, size_t y, const void* from, size_t pitch, size_t width,
                                     size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t i = 0; i < height; ++i) std::memcpy(to->row(y + i, 0) + x, static_cast<const char*>(from) + i * pitch, width);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DFromArrayAsync(void* to, size_t pitch, cudaArray_const_t from, size_t x, size_t y, size_t width,
                                       size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t i = 0; i < height; ++i) std::memcpy(static_cast<char*>(to) + i * pitch, from->row(y + i, 0) + x, width);
  return cudaSuccess;
}

cudaError_t cudaCreateTextureObject(cudaTextureObject_t* texture, const cudaResourceDesc* resource,
                                    const cudaTextureDesc* sampler, const cudaResourceViewDesc* view) {
  auto t = std::make_unique<Texture>();
  if (resource->resType == cudaResourceTypeMipmappedArray) {
    for (const auto& level : resource->res.mipmap.mipmap->levels) t->levels.push_back(level.get());
  } else if (resource->resType == cudaResourceTypeArray) {
    t->levels.push_back(resource->res.array.array);
  }
  if (t->levels.empty() || !sampler->normalizedCoords || view != nullptr) return cudaErrorInvalidValue;
  t->sampler = *sampler;
  *texture = reinterpret_cast<cudaTextureObject_t>(t.release());
  return cudaSuccess;
}
cudaError_t cudaDestroyTextureObject(cudaTextureObject_t texture) {
  delete reinterpret_cast<Texture*>(texture);
  return cudaSuccess;
}
cudaError_t cudaCreateSurfaceObject(cudaSurfaceObject_t* surface, const cudaResourceDesc* resource) {
  if (resource->resType != cudaResourceTypeArray || !(resource->res.array.array->flags & cudaArraySurfaceLoadStore))
    return cudaErrorInvalidValue;
  *surface = reinterpret_cast<cudaSurfaceObject_t>(resource->res.array.array);
  return cudaSuccess;
}
cudaError_t cudaDestroySurfaceObject(cudaSurfaceObject_t) { return cudaSuccess; }
