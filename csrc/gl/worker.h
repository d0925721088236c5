// The threads that own the OpenGL contexts: one for each CUDA device, and one (-1) for host memory. A GL context belongs to a
// thread, and PyTorch calls from many; requests are posted to the owner and waited for.
#pragma once

#include "textures.h"

namespace texvlm::gl {

struct Status {
  std::string vendor, renderer, version, platform;
  int max_size, max_layers;
  Filter filter;
};

// All of these start the thread and its context when there is none, and throw std::runtime_error with one line when that fails.
// They must not be called with the GIL held.
TEXVLM_API Status status(int cuda_device);
void reserve(int cuda_device, const Shape& shape);
void generate(int cuda_device, const Job& job);

// Ends all threads, their contexts and textures; later calls start anew. Happens by itself at exit and before a fork.
TEXVLM_API void close();

}  // namespace texvlm::gl
