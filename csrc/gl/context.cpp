#include "context.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../cuda/gl.h"

namespace texvlm::gl {
namespace {

// Why there is no context: the constructor turns it into one line.
struct Refused {
  std::string why;
};

EglHandle software_display = nullptr;  // written by the worker without a CUDA device, read when that has ended
std::atomic<int> losses{0};            // still to simulate

std::string hex(int code) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%04x", static_cast<unsigned>(code));
  return text;
}

bool has_word(const char* list, const char* word) {
  if (list == nullptr) return false;
  const size_t length = std::strlen(word);
  for (const char* at = std::strstr(list, word); at != nullptr; at = std::strstr(at + length, word)) {
    if ((at == list || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0')) return true;
  }
  return false;
}

std::vector<EglHandle> devices(const Table& f) {
  int count = 0;
  if (f.eglQueryDevicesEXT == nullptr || !f.eglQueryDevicesEXT(0, nullptr, &count) || count <= 0) return {};
  std::vector<EglHandle> found(count);
  if (!f.eglQueryDevicesEXT(count, found.data(), &count)) return {};
  found.resize(count);
  return found;
}

}  // namespace

Context::Context(int cuda_device) : f(table()) {
  const std::vector<EglHandle> all = devices(f);
  std::string why =
      "EGL has neither a surfaceless platform nor a device (Debian, Ubuntu: apt install libegl-mesa0 libgl1-mesa-dri)";
  const auto works = [&](unsigned platform, EglHandle native) {
    try {
      open(platform, native);
      return true;
    } catch (const Refused& refused) {
      why = refused.why;
      close();
      return false;
    }
  };
  if (cuda_device < 0) {
    const char* extensions = f.eglQueryString(nullptr, egl::kExtensions);
    if (has_word(extensions, "EGL_MESA_platform_surfaceless") && works(egl::kPlatformSurfaceless, nullptr)) return;
    for (EglHandle device : all)
      if (works(egl::kPlatformDevice, device)) return;
    throw std::runtime_error("texvlm: no OpenGL here: " + why);
  }
  // CUDA_VISIBLE_DEVICES renumbers CUDA's devices and not EGL's, so the number only says where to look first; CUDA itself is
  // asked once the context is there.
  std::vector<EglHandle> candidates;
  for (EglHandle device : all) {
    intptr_t number = -1;
    if (f.eglQueryDeviceAttribEXT == nullptr || !f.eglQueryDeviceAttribEXT(device, egl::kCudaDevice, &number)) {
      f.eglGetError();  // a software device does not know the attribute
    } else {
      candidates.insert(number == cuda_device ? candidates.begin() : candidates.end(), device);
    }
  }
  why = candidates.empty() ? "they are software, or NVIDIA's libEGL_nvidia is not installed" : "CUDA recognises none of them";
  for (EglHandle device : candidates) {
    if (!works(egl::kPlatformDevice, device)) continue;
    if (cuda::gl_context_is_on(cuda_device)) return;
    close();
  }
  throw std::runtime_error("texvlm: no OpenGL here: none of the " + std::to_string(all.size()) + " EGL devices is CUDA device " +
                           std::to_string(cuda_device) + ": " + why);
}

void Context::open(unsigned which, EglHandle native) {
  platform = which == egl::kPlatformSurfaceless ? "surfaceless" : "device";
  display_ = f.eglGetPlatformDisplay(which, native, nullptr);
  if (display_ == nullptr || !f.eglInitialize(display_, nullptr, nullptr))
    throw Refused{"EGL finds no driver for the platform '" + platform + "', EGL error " + hex(f.eglGetError())};
  if (which == egl::kPlatformSurfaceless) software_display = display_;
  const char* extensions = f.eglQueryString(display_, egl::kExtensions);
  for (const char* needed : {"EGL_KHR_surfaceless_context", "EGL_KHR_no_config_context"})
    if (!has_word(extensions, needed)) throw Refused{std::string("the driver has no ") + needed};
  make();
}

void Context::make() {
  f.eglBindAPI(egl::kOpenGlApi);
  const int robust[] = {
      egl::kMajor, 4, egl::kMinor, 5, egl::kProfile, egl::kCoreProfile, egl::kResetStrategy, egl::kLoseContextOnReset,
      egl::kNone};
  const int plain[] = {egl::kMajor, 4, egl::kMinor, 5, egl::kProfile, egl::kCoreProfile, egl::kNone};
  context_ = f.eglCreateContext(display_, nullptr, nullptr, robust);
  if (context_ == nullptr) context_ = f.eglCreateContext(display_, nullptr, nullptr, plain);
  if (context_ == nullptr) throw Refused{"the driver makes no OpenGL 4.5 core context, EGL error " + hex(f.eglGetError())};
  if (!f.eglMakeCurrent(display_, nullptr, nullptr, context_))
    throw Refused{"the context cannot be made current, EGL error " + hex(f.eglGetError())};
  const auto text = [&](unsigned name) {
    const unsigned char* value = f.glGetString(name);
    return std::string(value == nullptr ? "" : reinterpret_cast<const char*>(value));
  };
  vendor = text(kVendorName), renderer = text(kRendererName), version = text(kVersionName);
  f.glGetIntegerv(kMaxTextureSize, &max_size);
  f.glGetIntegerv(kMaxArrayTextureLayers, &max_layers);
}

void Context::close() {
  if (context_ != nullptr) {
    f.eglMakeCurrent(display_, nullptr, nullptr, nullptr);
    f.eglDestroyContext(display_, context_);
  }
  if (display_ != nullptr) f.eglReleaseThread();
  context_ = display_ = nullptr;
}

void simulate_loss(int times) { losses = times; }

void terminate_software_display() {
  if (software_display != nullptr) table().eglTerminate(software_display);
  software_display = nullptr;
}

void Context::check(const char* where) const {
  if (losses > 0) {
    --losses;
    throw Lost();
  }
  const unsigned error = f.glGetError();
  if (error == kContextLost || f.glGetGraphicsResetStatus() != 0) throw Lost();
  if (error == kOutOfMemory) throw OutOfMemory(std::string("texvlm: OpenGL is out of memory in ") + where);
  if (error != 0) throw std::runtime_error(std::string("texvlm: OpenGL error ") + hex(static_cast<int>(error)) + " in " + where);
}

}  // namespace texvlm::gl
