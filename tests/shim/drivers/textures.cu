// Textures of the shim against the formulas of the CUDA programming guide, and the limits of arrays.
#include "../expect.h"

#include "../../../csrc/cuda/launch.cuh"

#include <cmath>

namespace texvlm::cuda {
namespace {

__global__ void fill(cudaSurfaceObject_t surface, int width, int height, float scale) {
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(blockIdx.x), layer = static_cast<int>(blockIdx.y);
  if (x >= width || y >= height) return;
  const auto v = scale * static_cast<float>(100 * layer + 10 * y + x);
  surf2DLayeredwrite(make_float4(v, v + 1, v + 2, v + 3), surface, 16 * x, y, layer);
}

__global__ void fetch(cudaTextureObject_t texture, float u, float v, int layer, float level, float4* out) {
  *out = tex2DLayeredLod<float4>(texture, u, v, layer, level);
}
__global__ void fetch(cudaTextureObject_t texture, float u, float v, int layer, float2 dx, float2 dy, float4* out) {
  *out = tex2DLayeredGrad<float4>(texture, u, v, layer, dx, dy);
}

struct Sampler {
  cudaMipmappedArray_t array;
  cudaTextureObject_t object = 0;

  Sampler(cudaMipmappedArray_t array, cudaTextureAddressMode address, cudaTextureFilterMode filter, unsigned anisotropy = 1)
      : array(array) {
    cudaResourceDesc resource{};
    resource.resType = cudaResourceTypeMipmappedArray;
    resource.res.mipmap.mipmap = array;
    cudaTextureDesc sampler{};
    for (cudaTextureAddressMode& mode : sampler.addressMode) mode = address;
    sampler.filterMode = sampler.mipmapFilterMode = filter;
    sampler.normalizedCoords = 1;
    sampler.maxAnisotropy = anisotropy;
    sampler.maxMipmapLevelClamp = 16;
    EXPECT(cudaCreateTextureObject(&object, &resource, &sampler, nullptr) == cudaSuccess);
  }
  ~Sampler() { cudaDestroyTextureObject(object); }
  float at(float x, float y, int layer = 0, float level = 0, float width = 4, float height = 3) const {  // in texels
    float4 v{};
    launch(static_cast<void (*)(cudaTextureObject_t, float, float, int, float, float4*)>(fetch), 1, 1, 0, nullptr, object,
           x / width, y / height, layer, level, &v);
    EXPECT(std::fabs(v.w - v.x - 3 * (v.y - v.x)) < 0.1f);
    return v.x;
  }
  float over(float x, float y, float2 dx, float2 dy) const {
    float4 v{};
    launch(static_cast<void (*)(cudaTextureObject_t, float, float, int, float2, float2, float4*)>(fetch), 1, 1, 0, nullptr, object,
           x / 4, y / 3, 0, dx, dy, &v);
    return v.x;
  }
};

bool near(float a, double b) { return std::fabs(a - b) < 1e-4; }

}  // namespace
}  // namespace texvlm::cuda

int main() {
  using namespace texvlm::cuda;
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<float4>();
  const unsigned flags = cudaArrayLayered | cudaArraySurfaceLoadStore;
  cudaMipmappedArray_t array;
  EXPECT(cudaMallocMipmappedArray(&array, &format, make_cudaExtent(40000, 1, 1), 1, flags) == cudaErrorInvalidValue);
  EXPECT(cudaMallocMipmappedArray(&array, &format, make_cudaExtent(4, 3, 3000), 1, flags) == cudaErrorInvalidValue);
  const cudaChannelFormatDesc three = cudaCreateChannelDesc(32, 32, 32, 0, cudaChannelFormatKindFloat);
  EXPECT(cudaMallocMipmappedArray(&array, &three, make_cudaExtent(4, 3, 2), 3, flags) == cudaErrorInvalidValue);
  EXPECT(cudaMallocMipmappedArray(&array, &format, make_cudaExtent(4, 3, 2), 9, flags) == cudaSuccess);
  cudaResourceDesc level{};
  EXPECT(cudaGetMipmappedArrayLevel(&level.res.array.array, array, 3) == cudaErrorInvalidValue);  // 4 x 3, 2 x 1, 1 x 1
  for (int l = 0; l < 3; ++l) {
    cudaSurfaceObject_t surface = 0;
    EXPECT(cudaGetMipmappedArrayLevel(&level.res.array.array, array, static_cast<unsigned>(l)) == cudaSuccess);
    EXPECT(cudaCreateSurfaceObject(&surface, &level) == cudaSuccess);
    launch(fill, dim3(3, 2), 4, 0, nullptr, surface, 4 >> l, l ? 1 : 3, l == 0 ? 1.0f : l == 1 ? 1000.0f : 3000.0f);
  }

  const Sampler clamp(array, cudaAddressModeClamp, cudaFilterModeLinear), wrap(array, cudaAddressModeWrap, cudaFilterModeLinear);
  const Sampler mirror(array, cudaAddressModeMirror, cudaFilterModeLinear), border(array, cudaAddressModeBorder, cudaFilterModeLinear);
  const Sampler point(array, cudaAddressModeClamp, cudaFilterModePoint), wide(array, cudaAddressModeClamp, cudaFilterModeLinear, 4);
  EXPECT(clamp.at(2.5f, 1.5f, 1) == 112);                   // a texel's centre is its value
  EXPECT(clamp.at(2.5f + 0.25f, 1.5f, 1) == 112.25f);       // 64 / 256 between two
  EXPECT(clamp.at(2.5f + 0.251f, 1.5f) == 12.25f);          // and as much a little further on: 8 bits
  EXPECT(clamp.at(2.5f + 0.2525f, 1.5f) == 12 + 65.0f / 256);
  EXPECT(clamp.at(1, 1) == 5.5f && point.at(1.9f, 1.2f) == 11);
  EXPECT(clamp.at(-5, 0.5f) == 0 && clamp.at(9, 0.5f) == 3 && wrap.at(-0.5f, 0.5f) == 3 && wrap.at(4.5f, 0.5f) == 0);
  EXPECT(mirror.at(4.5f, 0.5f) == 3 && mirror.at(5.5f, 0.5f) == 2 && mirror.at(-1.5f, 0.5f) == 1);
  EXPECT(border.at(4, 0.5f) == 1.5f && border.at(5, 0.5f) == 0);
  EXPECT(clamp.at(3, 1.5f, 0, 1) == 1000 && clamp.at(3, 1.5f, 1, 1) == 101000);   // level 1: texels 0 and 1000
  EXPECT(clamp.at(2.5f, 1.5f, 1, 0.5f) == 0.5f * 112 + 0.5f * (100000 + 1000 * 0.75f));
  EXPECT(near(clamp.at(3, 1.5f, 0, 0.2501f), 0.75 * 12.5 + 0.25 * 1000));      // 64 / 256 between two levels
  EXPECT(clamp.at(2.5f, 1.5f, 1, 7) == 300000);
  EXPECT(wide.over(2, 1.5f, make_float2(0.25f, 0), make_float2(0, 1 / 3.0f)) == 11.5f);       // one texel
  EXPECT(near(wide.over(2, 1.5f, make_float2(0.5f, 0), make_float2(0, 1 / 3.0f)), 11.5));     // two taps of level 0, x = 1.5, 2.5
  EXPECT(near(wide.over(2, 1.5f, make_float2(0.5f, 0), make_float2(0, 2 / 3.0f)), 500));      // two by two: level 1, between texels
  cudaFreeMipmappedArray(array);
  return done();
}
