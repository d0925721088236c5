#include "fibers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
// void texvlm_shim_switch(void** save, void* load): the registers that a call preserves (System V AMD64 ABI 3.2.1) go to the old
// stack and come from the new one. The control words of SSE and x87 are the same for all fibers.
extern "C" __attribute__((visibility("hidden"))) void texvlm_shim_switch(void** save, void* load);
asm(R"(
.text
.hidden texvlm_shim_switch
.globl texvlm_shim_switch
.type texvlm_shim_switch, @function
texvlm_shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size texvlm_shim_switch, .-texvlm_shim_switch
)");
#else
#include <ucontext.h>
#endif

namespace texvlm::shim {
namespace {

constexpr size_t kStack = size_t{256} << 10;  // reserved; the system commits what is touched

[[maybe_unused]] Fiber* switched_from = nullptr;

char* new_stack() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* p = mmap(nullptr, kStack + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED || mprotect(p, page, PROT_NONE) != 0) {
    std::perror("texvlm shim: no memory for the stack of a fiber");
    std::abort();
  }
  return static_cast<char*>(p) + page;
}

void arrived([[maybe_unused]] void* fake_stack) {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom = nullptr;
  size_t size = 0;
  __sanitizer_finish_switch_fiber(fake_stack, &bottom, &size);
  if (switched_from->stack == nullptr) {  // a thread's own stack, whose bounds only the sanitizer knows
    switched_from->stack = static_cast<char*>(const_cast<void*>(bottom));
    switched_from->size = size;
  }
#endif
}

}  // namespace

Fiber* new_fiber(void (*entry)()) {
  Fiber* f = new Fiber;
  f->stack = new_stack();
  f->size = kStack;
#if defined(__x86_64__)
  // As if `entry` had been called with return address 0 and then switched away: six registers, the address to go on at.
  void** top = reinterpret_cast<void**>(f->stack + kStack);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  f->context = top;
#else
  ucontext_t* context = new ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = f->stack;
  context->uc_stack.ss_size = kStack;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  f->context = context;
#endif
  return f;
}

void fiber_entered() { arrived(nullptr); }

void switch_fiber(Fiber& from, Fiber& to) {
  switched_from = &from;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.size);
#endif
#if defined(__x86_64__)
  texvlm_shim_switch(&from.context, to.context);
#else
  if (from.context == nullptr) from.context = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(from.context), static_cast<ucontext_t*>(to.context));
#endif
  arrived(from.fake_stack);
}

}  // namespace texvlm::shim
