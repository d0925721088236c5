// Tells ThreadSanitizer which CUDA thread runs, and what orders them. A switch orders nothing; barriers, __syncwarp, fences and the
// ends of launches do. The scheduler itself is compiled without instrumentation, so that it orders nothing by accident.
#pragma once

#if defined(TEXVLM_SHIM_RACES)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void*, unsigned flags);  // flag 1: no synchronisation
void __tsan_acquire(void*);
void __tsan_release(void*);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#endif

namespace texvlm::shim {

#if defined(TEXVLM_SHIM_RACES)
constexpr bool kRaces = true;
inline void* host_identity() { return __tsan_get_current_fiber(); }
inline void* new_identity() { return __tsan_create_fiber(0); }
inline void assume_identity(void* identity) { __tsan_switch_to_fiber(identity, 1); }
inline void acquire(const void* object) { __tsan_acquire(const_cast<void*>(object)); }
inline void release(const void* object) { __tsan_release(const_cast<void*>(object)); }
struct Unchecked {
  Unchecked() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unchecked() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
};
#else
constexpr bool kRaces = false;
inline void* host_identity() { return nullptr; }
inline void* new_identity() { return nullptr; }
inline void assume_identity(void*) {}
inline void acquire(const void*) {}
inline void release(const void*) {}
struct Unchecked {
  Unchecked() {}
  ~Unchecked() {}
};
#endif

}  // namespace texvlm::shim
