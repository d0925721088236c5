#include "memory.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

// AddressSanitizer can only see overflows of memory that it hands out itself.
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
#include <sys/mman.h>
#define TEXVLM_CACHES_MEMORY 1
#endif

namespace texvlm {
namespace {

#if defined(TEXVLM_CACHES_MEMORY)

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kLarge = int64_t{4} << 20;  // below it malloc keeps the pages itself

struct Block {
  void* data;
  int64_t bytes;
  bool zero;  // fresh from the system
};

struct Cache {
  std::mutex mutex;
  std::vector<Block> free;
  int64_t bytes = 0;
};

// Never destroyed: tensors may be freed after static destructors have run.
Cache& cache() {
  static Cache* const instance = new Cache;
  return *instance;
}

int64_t cache_limit() {
  static const int64_t limit = [] {
    const char* mb = std::getenv("TEXVLM_CACHE_MB");
    return (mb ? std::max<int64_t>(0, std::atoll(mb)) : 512) << 20;
  }();
  return limit;
}

// A block of at least `need` bytes (a multiple of the huge page) that wastes at most a quarter; data is null where the system has
// none.
Block acquire(int64_t need) {
  Cache& c = cache();
  {
    const std::lock_guard<std::mutex> lock(c.mutex);
    auto best = c.free.end();
    for (auto it = c.free.begin(); it != c.free.end(); ++it)
      if (it->bytes >= need && it->bytes <= need + need / 4 && (best == c.free.end() || it->bytes < best->bytes)) best = it;
    if (best != c.free.end()) {
      const Block block = *best;
      c.free.erase(best);
      c.bytes -= block.bytes;
      return block;
    }
  }
  // Map one huge page more and cut the ends off, so that the block is aligned.
  void* raw = mmap(nullptr, need + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return {nullptr, 0, false};
  char* const begin = static_cast<char*>(raw);
  char* const data =
      reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw) + kHugePage - 1) & ~static_cast<uintptr_t>(kHugePage - 1));
  if (data > begin) munmap(begin, data - begin);
  char* const end = begin + need + kHugePage;
  if (end > data + need) munmap(data + need, end - (data + need));
  madvise(data, need, MADV_HUGEPAGE);  // advice only: failure costs speed, nothing else
  return {data, need, true};
}

void release(void* data, int64_t bytes) {
  Cache& c = cache();
  {
    const std::lock_guard<std::mutex> lock(c.mutex);
    if (c.bytes + bytes <= cache_limit()) {
      c.free.push_back({data, bytes, false});
      c.bytes += bytes;
      return;
    }
  }
  munmap(data, bytes);
}

void clear(void* data, int64_t bytes) {
  at::parallel_for(0, (bytes + kHugePage - 1) / kHugePage, 1, [&](int64_t begin, int64_t end) {
    std::memset(static_cast<char*>(data) + begin * kHugePage, 0, std::min(bytes, end * kHugePage) - begin * kHugePage);
  });
}

// Undefined where the tensor is small or on another device: torch's own allocator then.
at::Tensor cached_tensor(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device, bool zero) {
  int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t s : sizes) bytes *= s;
  if (!device.is_cpu() || bytes < kLarge) return {};
  const Block block = acquire((bytes + kHugePage - 1) & ~(kHugePage - 1));
  if (block.data == nullptr) return {};
  if (zero && !block.zero) clear(block.data, bytes);
  return at::from_blob(block.data, sizes, [size = block.bytes](void* p) { release(p, size); }, at::TensorOptions().dtype(dtype));
}

#else

at::Tensor cached_tensor(at::IntArrayRef, at::ScalarType, at::Device, bool) { return {}; }

#endif

}  // namespace

at::Tensor new_tensor(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  at::Tensor t = cached_tensor(sizes, dtype, device, false);
  return t.defined() ? t : at::empty(sizes, at::TensorOptions().dtype(dtype).device(device));
}

at::Tensor new_zeros(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  at::Tensor t = cached_tensor(sizes, dtype, device, true);
  return t.defined() ? t : at::zeros(sizes, at::TensorOptions().dtype(dtype).device(device));
}

int64_t cached_bytes() {
#if defined(TEXVLM_CACHES_MEMORY)
  const std::lock_guard<std::mutex> lock(cache().mutex);
  return cache().bytes;
#else
  return 0;
#endif
}

void empty_cache() {
#if defined(TEXVLM_CACHES_MEMORY)
  std::vector<Block> blocks;
  {
    const std::lock_guard<std::mutex> lock(cache().mutex);
    blocks.swap(cache().free);
    cache().bytes = 0;
  }
  for (const Block& b : blocks) munmap(b.data, b.bytes);
#endif
}

}  // namespace texvlm
