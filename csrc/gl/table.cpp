#include "table.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace texvlm::gl {
namespace {

using Function = void (*)();
using GetProcAddress = Function (*)(const char*);

Table load() {
  void* library = dlopen("libEGL.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    throw std::runtime_error(std::string("texvlm: no OpenGL here: ") + (why != nullptr ? why : "libEGL.so.1 does not load") +
                             " (Debian, Ubuntu: apt install libegl1 libegl-mesa0 libgl1-mesa-dri)");
  }
  const auto find = reinterpret_cast<GetProcAddress>(dlsym(library, "eglGetProcAddress"));
  if (find == nullptr) throw std::runtime_error("texvlm: no OpenGL here: libEGL.so.1 has no eglGetProcAddress");
  Table t;
#define TEXVLM_OPTIONAL(name, ...) t.name = reinterpret_cast<decltype(t.name)>(find(#name));
#define TEXVLM_REQUIRED(name, ...) \
  TEXVLM_OPTIONAL(name, )          \
  if (t.name == nullptr) throw std::runtime_error("texvlm: no OpenGL here: libEGL.so.1 does not know " #name);
  TEXVLM_EGL_FUNCTIONS(TEXVLM_REQUIRED)
  TEXVLM_EGL_OPTIONAL(TEXVLM_OPTIONAL)
  TEXVLM_GL_FUNCTIONS(TEXVLM_REQUIRED)
  return t;
}

}  // namespace

const Table& table() {
  static const Table loaded = load();  // when load() throws, the next call tries again
  return loaded;
}

}  // namespace texvlm::gl
