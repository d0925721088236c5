// Runs a grid of CUDA threads on the host: what kernels see of it, and how a launch gets there. The scheduler is in grid.cpp.
//
// Each CUDA thread runs until it waits (a barrier, an operation of its warp) and keeps its stack as a fiber while it does; all of
// them share one thread of the system. Which runs next is the schedule's choice:
//   fixed    first to last; what a kernel computes is then the same on every run
//   random   any that can run; a thread also stops at atomics, at random
//   starve   the same, but one warp at a time gets nothing to do as long as any other can run: finds writes after reads
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_runtime_api.h"
#include "where.h"

namespace texvlm::shim {

enum class Schedule { fixed, random, starve };

// From the environment: TEXVLM_SHIM_SEED (0, the default: fixed; odd: random; even: starve) and TEXVLM_SHIM_BLOCKS (1).
struct Settings {
  uint64_t seed;
  int resident_blocks;  // that run at the same time
  Schedule schedule() const { return seed == 0 ? Schedule::fixed : seed % 2 ? Schedule::random : Schedule::starve; }
};
Settings& settings();

// A kernel that a source file can launch: listed when the program is loaded, counted when it is launched. With
// TEXVLM_SHIM_LAUNCHES=file in the environment, "launched<TAB>source<TAB>kernel" is appended to that file on the first launch,
// "linked<TAB>..." for each when the program is loaded.
struct Site {
  const char *source, *kernel;
  bool launched = false;
  Site(const char* source, const char* kernel);
};

struct Launch {
  dim3 grid, block;
  size_t shared_bytes;
  void (*thread)(const void* arguments);  // runs the kernel for the current thread
  const void* arguments;
  Site* site;
};
void run(const Launch& launch);

// Tells somebody of each launch, once it has run, and of the bytes that it read and wrote (see traffic.h); null: nobody.
using Listener = void (*)(const char* source, const char* kernel, uint64_t read, uint64_t written);
extern "C" __attribute__((visibility("default"))) void texvlm_shim_tell(Listener listener);

// --- what a running thread may ask for; outside of kernels they do nothing ----------------------------------------------------

// All threads of the block that have not ended. Returns how many of them passed true.
int barrier(const char* kind, bool vote, Where where);

// All lanes of `mask`; kind names the operation, which must be the same in all. Returns the 32 values that the lanes passed.
const uint64_t* exchange(const char* kind, unsigned mask, uint64_t value, Where where);

// The lanes of this warp that are at the same place when no lane can go on.
unsigned converged(Where where);

void yield();            // lets another thread run
void yield_sometimes();  // the same, at random, unless the schedule is fixed
void fence(bool block);  // what this thread wrote before is seen by those that fence later

// Memory of the block: one piece for each key (a declaration), exactly as large as asked, filled with 0xFF.
void* shared(const void* key, size_t bytes);
void* dynamic_shared();

// Whether this lies on the current thread's stack or in its block's shared memory.
bool is_local(const void* p);

unsigned lane();

}  // namespace texvlm::shim

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;
