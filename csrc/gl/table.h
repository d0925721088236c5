// The part of EGL and OpenGL that texvlm uses, declared by hand: no header and no library of either is needed to build it.
// libEGL is opened at run time, every function comes from eglGetProcAddress.
//
// Names, signatures and values: the Khronos registries of EGL 1.5 and OpenGL 4.5; EGL_EXT_device_enumeration,
// EGL_EXT_platform_device, EGL_MESA_platform_surfaceless, EGL_NV_device_cuda.
#pragma once

#include <cstdint>

namespace texvlm::gl {

using EglHandle = void*;  // EGLDisplay, EGLContext, EGLDeviceEXT: pointers all

namespace egl {
constexpr int kExtensions = 0x3055, kVendor = 0x3053;
constexpr unsigned kPlatformSurfaceless = 0x31DD, kPlatformDevice = 0x313F;
constexpr unsigned kOpenGlApi = 0x30A2;
constexpr int kMajor = 0x3098, kMinor = 0x30FB, kProfile = 0x30FD, kCoreProfile = 1, kNone = 0x3038;
constexpr int kResetStrategy = 0x31BD, kLoseContextOnReset = 0x31BF;
constexpr int kCudaDevice = 0x323A;  // EGL_CUDA_DEVICE_NV
}  // namespace egl

constexpr unsigned kTexture2DArray = 0x8C1A;
constexpr unsigned kRgba = 0x1908, kRgba32F = 0x8814, kRgba16F = 0x881A, kFloat = 0x1406, kHalfFloat = 0x140B;
constexpr unsigned kVendorName = 0x1F00, kRendererName = 0x1F01, kVersionName = 0x1F02;
constexpr unsigned kMaxTextureSize = 0x0D33, kMaxArrayTextureLayers = 0x88FF;
constexpr unsigned kOutOfMemory = 0x0505, kContextLost = 0x0507;

// name, result, arguments
#define TEXVLM_EGL_FUNCTIONS(F)                                               \
  F(eglGetError, int)                                                         \
  F(eglQueryString, const char*, EglHandle, int)                              \
  F(eglGetPlatformDisplay, EglHandle, unsigned, void*, const intptr_t*)       \
  F(eglInitialize, unsigned, EglHandle, int*, int*)                           \
  F(eglTerminate, unsigned, EglHandle)                                        \
  F(eglBindAPI, unsigned, unsigned)                                           \
  F(eglCreateContext, EglHandle, EglHandle, EglHandle, EglHandle, const int*) \
  F(eglDestroyContext, unsigned, EglHandle, EglHandle)                        \
  F(eglMakeCurrent, unsigned, EglHandle, EglHandle, EglHandle, EglHandle)     \
  F(eglReleaseThread, unsigned)
#define TEXVLM_EGL_OPTIONAL(F)                           \
  F(eglQueryDevicesEXT, unsigned, int, EglHandle*, int*) \
  F(eglQueryDeviceAttribEXT, unsigned, EglHandle, int, intptr_t*)
#define TEXVLM_GL_FUNCTIONS(F)                                                                               \
  F(glGetError, unsigned)                                                                                    \
  F(glGetGraphicsResetStatus, unsigned)                                                                      \
  F(glGetString, const unsigned char*, unsigned)                                                             \
  F(glGetIntegerv, void, unsigned, int*)                                                                     \
  F(glGenTextures, void, int, unsigned*)                                                                     \
  F(glDeleteTextures, void, int, const unsigned*)                                                            \
  F(glBindTexture, void, unsigned, unsigned)                                                                 \
  F(glTexStorage3D, void, unsigned, int, unsigned, int, int, int)                                            \
  F(glTexSubImage3D, void, unsigned, int, int, int, int, int, int, int, unsigned, unsigned, const void*)     \
  F(glGenerateMipmap, void, unsigned)                                                                        \
  F(glGetTextureSubImage, void, unsigned, int, int, int, int, int, int, int, unsigned, unsigned, int, void*) \
  F(glFinish, void)

#define TEXVLM_DECLARE(name, result, ...) result (*name)(__VA_ARGS__) = nullptr;
struct Table {
  TEXVLM_EGL_FUNCTIONS(TEXVLM_DECLARE)
  TEXVLM_EGL_OPTIONAL(TEXVLM_DECLARE)
  TEXVLM_GL_FUNCTIONS(TEXVLM_DECLARE)
};
#undef TEXVLM_DECLARE

// Opens libEGL on the first call and keeps it open: drivers leave thread-local destructors behind. Throws std::runtime_error
// with one line where there is none; the next call tries again.
const Table& table();

}  // namespace texvlm::gl
