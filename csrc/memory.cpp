#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

// AddressSanitizer can only see overflows of memory that it hands out itself.
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
#include <pthread.h>
#include <sys/mman.h>
#define TEXVLM_CACHES_MEMORY 1
#endif

namespace texvlm {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLarge = size_t{4} << 20;  // below it malloc keeps the pages itself

// Pages of the system, aligned to huge ones, for `bytes` (a multiple of those); null where it has none.
void* map_pages([[maybe_unused]] size_t bytes) {
#if defined(TEXVLM_CACHES_MEMORY)
  // Map one huge page more and cut the ends off, so that the block is aligned.
  void* raw = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(raw) % kHugePage) % kHugePage;
  char* const data = static_cast<char*>(raw) + before;
  if (before > 0) munmap(raw, before);
  if (before < kHugePage) munmap(data + bytes, kHugePage - before);
  madvise(data, bytes, MADV_HUGEPAGE);  // advice only: failure costs speed, nothing else
  return data;
#else
  return nullptr;
#endif
}

void unmap_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(TEXVLM_CACHES_MEMORY)
  munmap(data, bytes);
#endif
}

size_t cache_limit() {
  static const size_t limit = [] {
    constexpr long long kUsual = 512, kMost = 1LL << 40;
    const char* const text = std::getenv("TEXVLM_CACHE_MB");
    if (text == nullptr) return size_t{kUsual} << 20;
    char* end = nullptr;
    errno = 0;
    const long long mb = std::strtoll(text, &end, 10);
    const bool good = end != text && *end == '\0' && errno == 0 && mb >= 0 && mb <= kMost;
    if (!good)
      TORCH_WARN("texvlm: TEXVLM_CACHE_MB must be a whole number of megabytes, 0 or more, got '", text, "'; ", kUsual,
                 " is used");
    return static_cast<size_t>(good ? mb : kUsual) << 20;
  }();
  return limit;
}

struct Block {
  void* data;
  size_t bytes;
  bool zero;  // fresh from the system
};

// PyTorch's allocator of CPU memory, but large blocks come from the system and are kept when they are freed; those that have
// waited longest make room for new ones.
class OutputMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const data = bytes < kLarge ? nullptr : acquire(bytes);
    if (data != nullptr) c10::profiledCPUMemoryReporter().New(data, bytes);
    void* const p = data != nullptr ? data : c10::GetDefaultCPUAllocator()->raw_allocate(bytes);
    return {p, p, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  // Whether a block that was just allocated holds zeros already.
  bool zero(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(data);
    return found != used_.end() && found->second.zero;
  }
  int64_t cached_bytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(cached_);
  }
  void empty_cache() {
    std::vector<Block> blocks;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      blocks.swap(free_);
      cached_ = 0;
    }
    for (const Block& b : blocks) unmap_pages(b.data, b.bytes);
  }

  // Never destroyed: tensors may be freed after static destructors have run. A fork waits for the lock, so that no child
  // inherits it held by a thread that the child does not have.
  static OutputMemory& get() {
    static OutputMemory* const instance = [] {
#if defined(TEXVLM_CACHES_MEMORY)
      pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); }, [] { get().mutex_.unlock(); });
#endif
      return new OutputMemory;
    }();
    return *instance;
  }

 private:
  // A block that wastes at most a quarter, the latest of the smallest ones; null where the system has none.
  void* acquire(size_t bytes) {
    const size_t need = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    cache_limit();  // whose complaint must not come from a deleter
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto best = free_.end();
      for (auto it = free_.begin(); it != free_.end(); ++it)
        if (it->bytes >= need && it->bytes <= need + need / 4 && (best == free_.end() || it->bytes <= best->bytes)) best = it;
      if (best != free_.end()) {
        const Block block = *best;
        used_.emplace(block.data, block);
        free_.erase(best);
        cached_ -= block.bytes;
        return block.data;
      }
    }
    void* data = map_pages(need);
    if (data == nullptr) {  // what is kept may be what is missing
      empty_cache();
      data = map_pages(need);
    }
    if (data != nullptr) {
      const std::lock_guard<std::mutex> lock(mutex_);
      used_.emplace(data, Block{data, need, true});
    }
    return data;
  }

  static void release(void* data) {
    if (!get().keep(data)) c10::GetDefaultCPUAllocator()->raw_deallocate(data);
  }

  // False if the block is not one of ours.
  bool keep(void* data) {
    std::vector<Block> out;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = used_.find(data);
      if (found == used_.end()) return false;
      c10::profiledCPUMemoryReporter().Delete(data);
      const Block block{data, found->second.bytes, false};
      used_.erase(found);
      if (block.bytes > cache_limit()) {
        out.push_back(block);
      } else {
        free_.push_back(block);
        cached_ += block.bytes;
        auto last = free_.begin();
        for (; cached_ > cache_limit(); ++last) cached_ -= last->bytes;
        out.assign(free_.begin(), last);
        free_.erase(free_.begin(), last);
      }
    }
    for (const Block& b : out) unmap_pages(b.data, b.bytes);
    return true;
  }

  std::mutex mutex_;
  std::vector<Block> free_;  // the one that was freed longest ago first
  size_t cached_ = 0;        // bytes in free_
  std::unordered_map<void*, Block> used_;
};

at::Tensor allocated(at::IntArrayRef sizes, at::ScalarType dtype) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  return at::Tensor(at::detail::empty_generic(sizes, &OutputMemory::get(), keys, dtype, std::nullopt));
}

}  // namespace

at::Tensor new_tensor(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  if (device.is_cpu()) return allocated(sizes, dtype);
  return at::empty(sizes, at::TensorOptions().dtype(dtype).device(device));
}

at::Tensor new_zeros(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  if (!device.is_cpu()) return at::zeros(sizes, at::TensorOptions().dtype(dtype).device(device));
  at::Tensor t = allocated(sizes, dtype);
  if (OutputMemory::get().zero(t.data_ptr())) return t;
  const auto bytes = static_cast<int64_t>(t.nbytes()), piece = static_cast<int64_t>(kHugePage);
  at::parallel_for(0, (bytes + piece - 1) / piece, 1, [&](int64_t begin, int64_t end) {
    std::memset(static_cast<char*>(t.data_ptr()) + begin * piece, 0, std::min(bytes, end * piece) - begin * piece);
  });
  return t;
}

int64_t cached_bytes() { return OutputMemory::get().cached_bytes(); }

void empty_cache() { OutputMemory::get().empty_cache(); }

}  // namespace texvlm
