#include "tensor.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "launch.h"

#if defined(TEXVLM_WITH_CUDA) && __has_include(<c10/cuda/impl/cuda_cmake_macros.h>)
#include <c10/cuda/CUDAStream.h>
#define TEXVLM_TORCH_HAS_CUDA 1
#endif

namespace texvlm {

namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kAdviseBytes = int64_t{32} << 20;  // above it, glibc returns freed memory to the system, so every allocation is fresh

int64_t bytes_of(at::IntArrayRef sizes, at::ScalarType dtype) {
  int64_t n = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t s : sizes) n *= s;
  return n;
}

void advise_huge([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) & ~static_cast<uintptr_t>(kHugePage - 1);
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~static_cast<uintptr_t>(kHugePage - 1);
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice only: failure costs speed, nothing else
#endif
}

}  // namespace

at::Tensor new_tensor(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  at::Tensor t = at::empty(sizes, at::TensorOptions().dtype(dtype).device(device));
  const int64_t bytes = bytes_of(sizes, dtype);
  if (device.is_cpu() && bytes >= kAdviseBytes) advise_huge(t.data_ptr(), bytes);
  return t;
}

at::Tensor new_zeros(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
#if defined(__linux__)
  // Fresh anonymous pages are zero already, and pages that no gradient reaches are never touched.
  const int64_t bytes = bytes_of(sizes, dtype);
  if (device.is_cpu() && bytes >= kAdviseBytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p != MAP_FAILED) {
      advise_huge(p, bytes);
      return at::from_blob(p, sizes, [bytes](void* q) { munmap(q, bytes); }, at::TensorOptions().dtype(dtype));
    }
  }
#endif
  return at::zeros(sizes, at::TensorOptions().dtype(dtype).device(device));
}

void* current_stream([[maybe_unused]] c10::Device device) {
#if defined(TEXVLM_TORCH_HAS_CUDA)
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
#else
  TORCH_CHECK(false, "texvlm: this build of PyTorch has no CUDA; build texvlm beside one that has");
#endif
}

namespace host {

Isa isa() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const Isa found = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
      return Isa::v4;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return Isa::v3;
    return Isa::base;
  }();
  return found;
#else
  return Isa::base;
#endif
}

}  // namespace host
}  // namespace texvlm
