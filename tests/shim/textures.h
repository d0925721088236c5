// Arrays, texture objects and surface objects: what csrc/cuda uses of them, as the CUDA programming guide describes it ("Texture
// Fetching"; "Surface Functions"). Textures are two-dimensional and layered, of 1, 2 or 4 channels of float or half.
//
// Fractions between texels and between levels are rounded to 8 bits (9-bit fixed point, so that 1.0 is exact); rounding to
// nearest, and as many bits for levels, are assumed, unless TEXVLM_TEXTURE_ROUNDING says otherwise: neither is documented. So are
// the taps of anisotropic filtering: equal weights along the major axis of the footprint. Where hardware would quietly clamp or
// trap (layers, texels outside), this aborts and says where.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vectors.h"
#include "where.h"

using cudaTextureObject_t = unsigned long long;
using cudaSurfaceObject_t = unsigned long long;
using cudaArray_t = struct cudaArray*;
using cudaArray_const_t = const struct cudaArray*;
using cudaMipmappedArray_t = struct cudaMipmappedArray*;
using cudaMipmappedArray_const_t = const struct cudaMipmappedArray*;

enum cudaChannelFormatKind { cudaChannelFormatKindSigned, cudaChannelFormatKindUnsigned, cudaChannelFormatKindFloat };
struct cudaChannelFormatDesc {
  int x, y, z, w;  // bits
  cudaChannelFormatKind f;
};
inline cudaChannelFormatDesc cudaCreateChannelDesc(int x, int y, int z, int w, cudaChannelFormatKind kind) {
  return {x, y, z, w, kind};
}
template <class T>
cudaChannelFormatDesc cudaCreateChannelDesc() {  // of float, float2, float4
  constexpr int n = sizeof(T) / sizeof(float);
  return {32, n > 1 ? 32 : 0, n > 2 ? 32 : 0, n > 2 ? 32 : 0, cudaChannelFormatKindFloat};
}

struct cudaExtent {
  size_t width, height, depth;
};
struct cudaPos {
  size_t x, y, z;
};
struct cudaPitchedPtr {
  void* ptr;
  size_t pitch, xsize, ysize;
};
inline cudaExtent make_cudaExtent(size_t width, size_t height, size_t depth) { return {width, height, depth}; }
inline cudaPos make_cudaPos(size_t x, size_t y, size_t z) { return {x, y, z}; }
inline cudaPitchedPtr make_cudaPitchedPtr(void* ptr, size_t pitch, size_t xsize, size_t ysize) {
  return {ptr, pitch, xsize, ysize};
}
struct cudaMemcpy3DParms {
  cudaArray_t srcArray;
  cudaPos srcPos;
  cudaPitchedPtr srcPtr;
  cudaArray_t dstArray;
  cudaPos dstPos;
  cudaPitchedPtr dstPtr;
  cudaExtent extent;
  cudaMemcpyKind kind;
};

constexpr unsigned cudaArrayDefault = 0, cudaArrayLayered = 1, cudaArraySurfaceLoadStore = 2;
cudaError_t cudaMalloc3DArray(cudaArray_t* array, const cudaChannelFormatDesc* format, cudaExtent extent, unsigned flags = 0);
cudaError_t cudaFreeArray(cudaArray_t array);
cudaError_t cudaArrayGetInfo(cudaChannelFormatDesc* format, cudaExtent* extent, unsigned* flags, cudaArray_t array);
cudaError_t cudaMallocMipmappedArray(cudaMipmappedArray_t* array, const cudaChannelFormatDesc* format, cudaExtent extent,
                                     unsigned levels, unsigned flags = 0);
cudaError_t cudaGetMipmappedArrayLevel(cudaArray_t* level, cudaMipmappedArray_const_t array, unsigned index);
cudaError_t cudaFreeMipmappedArray(cudaMipmappedArray_t array);
cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms* copy, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy2DToArrayAsync(cudaArray_t to, size_t x, size_t y, const void* from, size_t pitch, size_t width,
                                     size_t height, cudaMemcpyKind kind, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy2DFromArrayAsync(void* to, size_t pitch, cudaArray_const_t from, size_t x, size_t y, size_t width,
                                       size_t height, cudaMemcpyKind kind, cudaStream_t stream = nullptr);

enum cudaResourceType { cudaResourceTypeArray, cudaResourceTypeMipmappedArray, cudaResourceTypeLinear };
struct cudaResourceDesc {
  cudaResourceType resType;
  union {
    struct {
      cudaArray_t array;
    } array;
    struct {
      cudaMipmappedArray_t mipmap;
    } mipmap;
  } res;
};
enum cudaTextureAddressMode { cudaAddressModeWrap, cudaAddressModeClamp, cudaAddressModeMirror, cudaAddressModeBorder };
enum cudaTextureFilterMode { cudaFilterModePoint, cudaFilterModeLinear };
enum cudaTextureReadMode { cudaReadModeElementType, cudaReadModeNormalizedFloat };
struct cudaTextureDesc {
  cudaTextureAddressMode addressMode[3];
  cudaTextureFilterMode filterMode;
  cudaTextureReadMode readMode;
  int sRGB;
  float borderColor[4];
  int normalizedCoords;
  unsigned maxAnisotropy;
  cudaTextureFilterMode mipmapFilterMode;
  float mipmapLevelBias, minMipmapLevelClamp, maxMipmapLevelClamp;
  int disableTrilinearOptimization;  // snapping to whole levels is not emulated
  int seamlessCubemap;
};
struct cudaResourceViewDesc;
cudaError_t cudaCreateTextureObject(cudaTextureObject_t* texture, const cudaResourceDesc* resource,
                                    const cudaTextureDesc* sampler, const cudaResourceViewDesc* view);
cudaError_t cudaDestroyTextureObject(cudaTextureObject_t texture);
cudaError_t cudaCreateSurfaceObject(cudaSurfaceObject_t* surface, const cudaResourceDesc* resource);
cudaError_t cudaDestroySurfaceObject(cudaSurfaceObject_t surface);

// --- in kernels
// -----------------------------------------------------------------------------------------------------------------

namespace texvlm::shim {

float4 fetch(Where where, cudaTextureObject_t texture, float u, float v, int layer, float level);
float4 fetch(Where where, cudaTextureObject_t texture, float u, float v, int layer, float2 dx, float2 dy);
// A texel that has `size` bytes; x in bytes.
void* surface_texel(Where where, cudaSurfaceObject_t surface, int x, int y, int layer, int size);

inline void narrow(float4 v, float* to) { *to = v.x; }
inline void narrow(float4 v, float2* to) { *to = {v.x, v.y}; }
inline void narrow(float4 v, float4* to) { *to = v; }
template <class T, class... A>
T fetch_as(A... a) {
  T result;
  narrow(fetch(a...), &result);
  return result;
}

}  // namespace texvlm::shim

template <class T>
T tex2DLayered(cudaTextureObject_t texture, float u, float v, int layer, texvlm::shim::Where where = {}) {
  return texvlm::shim::fetch_as<T>(where, texture, u, v, layer, 0.0f);
}
template <class T>
T tex2DLayeredLod(cudaTextureObject_t texture, float u, float v, int layer, float level, texvlm::shim::Where where = {}) {
  return texvlm::shim::fetch_as<T>(where, texture, u, v, layer, level);
}
template <class T>
T tex2DLayeredGrad(cudaTextureObject_t texture, float u, float v, int layer, float2 dx, float2 dy,
                   texvlm::shim::Where where = {}) {
  return texvlm::shim::fetch_as<T>(where, texture, u, v, layer, dx, dy);
}

template <class T>
void surf2DLayeredwrite(T value, cudaSurfaceObject_t surface, int x, int y, int layer, texvlm::shim::Where where = {}) {
  *static_cast<T*>(texvlm::shim::surface_texel(where, surface, x, y, layer, sizeof(T))) = value;
}
template <class T>
T surf2DLayeredread(cudaSurfaceObject_t surface, int x, int y, int layer, texvlm::shim::Where where = {}) {
  return *static_cast<T*>(texvlm::shim::surface_texel(where, surface, x, y, layer, sizeof(T)));
}
template <class T>
void surf2DLayeredread(T* value, cudaSurfaceObject_t surface, int x, int y, int layer, texvlm::shim::Where where = {}) {
  *value = surf2DLayeredread<T>(surface, x, y, layer, where);
}
