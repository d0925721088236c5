#include "gl.h"

#include <algorithm>

#include "../math/gl.h"
#include "launch.cuh"

namespace texvlm::cuda {

TEXVLM_TEXELS(TexelsToGroups<float, 0>);
TEXVLM_TEXELS(TexelsToGroups<Half, 0>);
TEXVLM_TEXELS(GroupsToTexels<float, 0>);
TEXVLM_TEXELS(GroupsToTexels<Half, 0>);

}  // namespace texvlm::cuda

#if !defined(TEXVLM_EMULATE)

// From cuda_gl_interop.h, which would bring a GL header along.
extern "C" cudaError_t cudaGraphicsGLRegisterImage(cudaGraphicsResource_t*, unsigned texture, unsigned target, unsigned flags);
extern "C" cudaError_t cudaGLGetDevices(unsigned* count, int* devices, unsigned size, int list);

namespace texvlm::cuda {
namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    cudaGetLastError();  // clears it, so that later launches do not report it
    throw std::runtime_error(std::string("texvlm: ") + what + " failed: " + cudaGetErrorString(error));
  }
}

cudaGraphicsResource_t resource_of(const GlImage& image) { return static_cast<cudaGraphicsResource_t>(image.resource); }

void copy(const GlImage& image, const GlLevel& level, void* texels, bool write, void* stream) {
  auto* const where = static_cast<cudaStream_t>(stream);
  const size_t row = level.width * level.texel_bytes;
  if (image.layered) {
    cudaMipmappedArray_t all;
    cudaArray_t array;
    check(cudaGraphicsResourceGetMappedMipmappedArray(&all, resource_of(image)), "cudaGraphicsResourceGetMappedMipmappedArray");
    check(cudaGetMipmappedArrayLevel(&array, all, level.level), "cudaGetMipmappedArrayLevel");
    // Layers that lie one after another are one copy.
    const bool together = level.layer_bytes == static_cast<int64_t>(row) * level.height;
    const int64_t depth = together ? level.layers : 1;
    for (int64_t z = 0; z < level.layers; z += depth) {
      cudaMemcpy3DParms p = {};
      const cudaPitchedPtr linear =
          make_cudaPitchedPtr(static_cast<char*>(texels) + z * level.layer_bytes, row, level.width, level.height);
      if (write) {
        p.srcPtr = linear, p.dstArray = array, p.dstPos = make_cudaPos(0, 0, z);
      } else {
        p.dstPtr = linear, p.srcArray = array, p.srcPos = make_cudaPos(0, 0, z);
      }
      p.extent = make_cudaExtent(level.width, level.height, depth);
      p.kind = cudaMemcpyDeviceToDevice;
      check(cudaMemcpy3DAsync(&p, where), "copying a level of a GL texture");
    }
    return;
  }
  for (int64_t z = 0; z < level.layers; ++z) {
    cudaArray_t array;
    char* linear = static_cast<char*>(texels) + z * level.layer_bytes;
    check(cudaGraphicsSubResourceGetMappedArray(&array, resource_of(image), z, level.level),
          "cudaGraphicsSubResourceGetMappedArray");
    check(write ? cudaMemcpy2DToArrayAsync(array, 0, 0, linear, row, row, level.height, cudaMemcpyDeviceToDevice, where)
                : cudaMemcpy2DFromArrayAsync(linear, row, array, 0, 0, row, level.height, cudaMemcpyDeviceToDevice, where),
          "copying a layer of a GL texture");
  }
}

}  // namespace

bool stream_is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void stream_wait(void* stream) { check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize"); }

bool gl_context_is_on(int device) {
  constexpr int kAll = 1;  // cudaGLDeviceListAll
  unsigned count = 0;
  int devices[16] = {};
  // First the device: a new thread is on device 0, where the question would make a context. And this thread never captures:
  // what it maps must not end the capture of another.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  if (cudaSetDevice(device) != cudaSuccess || cudaThreadExchangeStreamCaptureMode(&mode) != cudaSuccess ||
      cudaGLGetDevices(&count, devices, 16, kAll) != cudaSuccess) {
    cudaGetLastError();  // a context of another vendor
    return false;
  }
  return std::find(devices, devices + std::min(count, 16u), device) != devices + std::min(count, 16u);
}

GlImage gl_register(unsigned texture, unsigned target, int64_t layers, void* stream) {
  GlImage image;
  cudaGraphicsResource_t resource;
  check(cudaGraphicsGLRegisterImage(&resource, texture, target, cudaGraphicsRegisterFlagsNone), "cudaGraphicsGLRegisterImage");
  image.resource = resource;
  try {
    cudaEvent_t event;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    image.event = event;
    // Whether the levels of a 2D-array texture come as layered arrays is written nowhere, so one is asked.
    gl_map(image, stream);
    cudaMipmappedArray_t all;
    cudaArray_t array;
    cudaChannelFormatDesc format = {};
    cudaExtent extent = {};
    unsigned flags = 0;
    if (cudaGraphicsResourceGetMappedMipmappedArray(&all, resource) == cudaSuccess &&
        cudaGetMipmappedArrayLevel(&array, all, 0) == cudaSuccess &&
        cudaArrayGetInfo(&format, &extent, &flags, array) == cudaSuccess) {
      image.layered = static_cast<int64_t>(extent.depth) == layers;
    } else {
      cudaGetLastError();
    }
    gl_unmap(image, stream);
  } catch (...) {
    gl_unregister(image);
    throw;
  }
  return image;
}

void gl_unregister(GlImage& image) {
  if (image.event != nullptr) {
    cudaEventSynchronize(static_cast<cudaEvent_t>(image.event));  // the last use may still be in its stream
    cudaEventDestroy(static_cast<cudaEvent_t>(image.event));
  }
  if (image.resource != nullptr) cudaGraphicsUnregisterResource(resource_of(image));
  cudaGetLastError();
  image = GlImage{};
}

void gl_map(const GlImage& image, void* stream) {
  auto* const where = static_cast<cudaStream_t>(stream);
  auto resource = resource_of(image);
  check(cudaStreamWaitEvent(where, static_cast<cudaEvent_t>(image.event), 0), "cudaStreamWaitEvent");
  check(cudaGraphicsMapResources(1, &resource, where), "cudaGraphicsMapResources");
}

void gl_unmap(const GlImage& image, void* stream) {
  auto* const where = static_cast<cudaStream_t>(stream);
  auto resource = resource_of(image);
  check(cudaGraphicsUnmapResources(1, &resource, where), "cudaGraphicsUnmapResources");
  check(cudaEventRecord(static_cast<cudaEvent_t>(image.event), where), "cudaEventRecord");
}

void gl_write(const GlImage& image, const GlLevel& level, const void* texels, void* stream) {
  copy(image, level, const_cast<void*>(texels), true, stream);
}

void gl_read(const GlImage& image, const GlLevel& level, void* texels, void* stream) {
  copy(image, level, texels, false, stream);
}

}  // namespace texvlm::cuda

#endif
