// Fibers: stacks that one thread of the system switches between. A CUDA thread that waits keeps its stack.
#pragma once

#include <cstddef>

namespace texvlm::shim {

struct Fiber {
  void* context = nullptr;   // where it goes on: its stack pointer, or a ucontext_t
  char* stack = nullptr;     // lowest byte; a page without access lies below it, so that an overflow is a crash at once
  size_t size = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's, while the fiber does not run
};

// A fiber that runs `entry`, which never returns. Fibers are kept for the life of the process.
Fiber* new_fiber(void (*entry)());

// Leaves `from`, which goes on when somebody switches to it again. `from` may be a Fiber{} for the thread's own stack.
void switch_fiber(Fiber& from, Fiber& to);

// The first thing that an entry does.
void fiber_entered();

}  // namespace texvlm::shim
