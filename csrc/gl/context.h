// A surfaceless OpenGL 4.5 core context, made through EGL without any window system, and used by the one thread that made it.
#pragma once

#include <stdexcept>
#include <string>

#include "../export.h"
#include "table.h"

namespace texvlm::gl {

// The context is gone (the graphics driver was reset): everything in it has to be made again.
struct Lost : std::runtime_error {
  Lost() : std::runtime_error("texvlm: the OpenGL context was lost (the graphics driver was reset) and a new one was lost too") {}
};

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Context {
 public:
  // cuda_device: the context must be on this CUDA device, so that textures can be shared with it; -1: any that there is,
  // software first. Throws std::runtime_error with one line that says what is missing.
  explicit Context(int cuda_device);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() { close(); }

  const Table& f;
  std::string vendor, renderer, version, platform;
  int max_size = 0, max_layers = 0;

  void check(const char* where) const;  // glGetError and the reset status; throws Lost, OutOfMemory or std::runtime_error

 private:
  void open(unsigned platform, EglHandle native);
  void make();
  void close();

  EglHandle display_ = nullptr, context_ = nullptr;
};

// For tests: the next `times` checks, of any context, find it lost.
TEXVLM_API void simulate_loss(int times);

// Ends the software driver before a fork, when no context is left: a child would inherit the driver's state but not its threads,
// and wait for them for ever. At other times an EGL display stays open, because it is one for the whole process.
void terminate_software_display();

}  // namespace texvlm::gl
