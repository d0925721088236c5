#include "traffic.h"

#if defined(TEXVLM_SHIM_TRAFFIC)

#include <cstddef>
#include <cstring>
#include <unordered_map>

#include "grid.h"

namespace texvlm::shim {
namespace {

constexpr uintptr_t kSector = 32, kPage = 64 * kSector;

struct Touched {
  uint64_t read = 0, written = 0;  // a bit for each sector of a page
};

bool counting = false;
std::unordered_map<uintptr_t, Touched>& pages = *new std::unordered_map<uintptr_t, Touched>;
uintptr_t last_page = 0;
Touched* last = nullptr;

void touch(const void* p, size_t bytes, uint64_t Touched::* how) {
  if (!counting || is_local(p)) return;
  const uintptr_t first = reinterpret_cast<uintptr_t>(p) / kSector, end = (reinterpret_cast<uintptr_t>(p) + bytes - 1) / kSector;
  for (uintptr_t sector = first; sector <= end; ++sector) {
    const uintptr_t page = sector / (kPage / kSector);
    if (last == nullptr || page != last_page) {
      last = &pages[page];
      last_page = page;
    }
    last->*how |= uint64_t{1} << sector % (kPage / kSector);
  }
}

// What an atomic function does to memory, besides being counted as a read and a write.
template <class T, class F>
T change(volatile void* p, const F& f) {
  touch(const_cast<const void*>(p), sizeof(T), &Touched::read);
  touch(const_cast<const void*>(p), sizeof(T), &Touched::written);
  return f(static_cast<volatile T*>(p));
}

}  // namespace

void begin_traffic() {
  pages.clear();
  last = nullptr;
  counting = true;
}

Traffic end_traffic() {
  counting = false;
  Traffic sum;
  for (const auto& [page, touched] : pages) {
    sum.read += kSector * __builtin_popcountll(touched.read);
    sum.written += kSector * __builtin_popcountll(touched.written);
  }
  return sum;
}

}  // namespace texvlm::shim

using texvlm::shim::change;
using texvlm::shim::touch;
using texvlm::shim::Touched;

extern "C" {

void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_read_range(void* p, size_t n) { n ? touch(p, n, &Touched::read) : void(); }
void __tsan_write_range(void* p, size_t n) { n ? touch(p, n, &Touched::written) : void(); }

#define TEXVLM_ACCESS(n)                                                  \
  void __tsan_read##n(void* p) { touch(p, n, &Touched::read); }           \
  void __tsan_write##n(void* p) { touch(p, n, &Touched::written); }       \
  void __tsan_unaligned_read##n(void* p) { touch(p, n, &Touched::read); } \
  void __tsan_unaligned_write##n(void* p) { touch(p, n, &Touched::written); }
TEXVLM_ACCESS(1)
TEXVLM_ACCESS(2)
TEXVLM_ACCESS(4)
TEXVLM_ACCESS(8)
TEXVLM_ACCESS(16)
#undef TEXVLM_ACCESS

#define TEXVLM_ATOMIC(n, T)                                                                                           \
  T __tsan_atomic##n##_load(const volatile void* p, int) {                                                            \
    touch(const_cast<const void*>(p), sizeof(T), &Touched::read);                                                     \
    return __atomic_load_n(static_cast<const volatile T*>(p), __ATOMIC_SEQ_CST);                                      \
  }                                                                                                                   \
  void __tsan_atomic##n##_store(volatile void* p, T v, int) {                                                         \
    touch(const_cast<const void*>(p), sizeof(T), &Touched::written);                                                  \
    __atomic_store_n(static_cast<volatile T*>(p), v, __ATOMIC_SEQ_CST);                                               \
  }                                                                                                                   \
  T __tsan_atomic##n##_exchange(volatile void* p, T v, int) {                                                         \
    return change<T>(p, [v](volatile T* at) { return __atomic_exchange_n(at, v, __ATOMIC_SEQ_CST); });                \
  }                                                                                                                   \
  T __tsan_atomic##n##_fetch_add(volatile void* p, T v, int) {                                                        \
    return change<T>(p, [v](volatile T* at) { return __atomic_fetch_add(at, v, __ATOMIC_SEQ_CST); });                 \
  }                                                                                                                   \
  int __tsan_atomic##n##_compare_exchange_strong(volatile void* p, T* expected, T v, int, int) {                      \
    return change<T>(p, [=](volatile T* at) {                                                                         \
      return static_cast<T>(__atomic_compare_exchange_n(at, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)); \
    });                                                                                                               \
  }                                                                                                                   \
  int __tsan_atomic##n##_compare_exchange_weak(volatile void* p, T* expected, T v, int a, int b) {                    \
    return __tsan_atomic##n##_compare_exchange_strong(p, expected, v, a, b);                                          \
  }
TEXVLM_ATOMIC(8, uint8_t)
TEXVLM_ATOMIC(16, uint16_t)
TEXVLM_ATOMIC(32, uint32_t)
TEXVLM_ATOMIC(64, uint64_t)
#undef TEXVLM_ATOMIC
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
}

#endif
