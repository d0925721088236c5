// What a launch moves, at the least: the sectors of 32 bytes, the unit of a GPU's memory, that its threads read, and that they
// write, each counted once. Stacks and shared memory are no traffic. Only in builds with TEXVLM_SHIM_TRAFFIC, whose kernels are
// compiled with -fsanitize=thread: the calls that this puts before each access are answered here, not by ThreadSanitizer.
#pragma once

#include <cstdint>

namespace texvlm::shim {

struct Traffic {
  uint64_t read = 0, written = 0;  // bytes
};

#if defined(TEXVLM_SHIM_TRAFFIC)
void begin_traffic();
Traffic end_traffic();
#else
inline void begin_traffic() {}
inline Traffic end_traffic() { return {}; }
#endif

}  // namespace texvlm::shim
