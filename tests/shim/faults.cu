// Kernels with one fault each, and the same kernels without: `faults NAME` runs one. What must report it is in tests/test_shim.py.
#include "../../csrc/cuda/launch.cuh"

#include <cstdio>
#include <cstring>
#include <memory>

namespace texvlm::cuda {
namespace {

constexpr int kBlock = 64;

// Sums of neighbours through shared memory, in two rounds. The barriers are where the fault is.
template <bool ReadAfterWrite, bool WriteAfterRead>
__global__ void neighbours(const int* in, int* out) {
  TEXVLM_SHARED(tile, int[kBlock]);
  const int i = static_cast<int>(threadIdx.x), next = (i + 1) % kBlock;
  tile[i] = in[i];
  if (ReadAfterWrite) __syncthreads();
  const int sum = tile[i] + tile[next];
  if (WriteAfterRead) __syncthreads();
  tile[i] = sum;
  __syncthreads();
  out[i] = tile[next];
}

template <int Beyond>
__global__ void fill_static(int* out) {
  TEXVLM_SHARED(tile, int[kBlock]);
  int* const t = tile;
  t[threadIdx.x + Beyond] = 1;
  __syncthreads();
  out[threadIdx.x] = t[threadIdx.x];
}

template <int Beyond>
__global__ void fill_dynamic(int* out) {
  TEXVLM_DYNAMIC_SHARED(tile, int);
  tile[threadIdx.x + Beyond] = 1;
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}

template <int Beyond>
__global__ void fill_global(int* out) {
  out[threadIdx.x + Beyond] = 1;
}

template <bool Sound>
__global__ void through_a_warp(int* out) {
  TEXVLM_SHARED(tile, int[kBlock]);
  tile[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (Sound) __syncwarp();
  out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

template <bool Sound>
__global__ void count(int* out) {
  if (Sound) {
    atomicAdd(out, 1);
  } else {
    *out += 1;
  }
}

// The last block sums what all blocks have written.
template <bool Sound>
__global__ void last_block(int* parts, unsigned* counter, int* out) {
  if (threadIdx.x != 0) return;
  parts[blockIdx.x] = 1;
  if (Sound) __threadfence();
  if (atomicAdd(counter, 1u) != gridDim.x - 1) return;
  if (Sound) __threadfence();
  int sum = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) sum += parts[b];
  *out = sum;
}

template <int Offset>
__global__ void wide(const float* in, float* out) {
  const float4 v = *reinterpret_cast<const float4*>(in + Offset);
  *out = v.x + v.y + v.z + v.w;
}

template <bool Sound>
__global__ void divergent(int* out) {
  if (Sound || threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

template <unsigned Mask>
__global__ void votes(int* out) {
  out[threadIdx.x] = static_cast<int>(__ballot_sync(Mask, 1));
}

template <bool Sound>
__global__ void after_the_end(int* out) {
  if (!Sound && threadIdx.x % 32 == 5) return;
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
}

// Lane 0 waits for the others, which wait for it elsewhere.
template <bool Sound>
__global__ void stuck(int* out) {
  if (!Sound && threadIdx.x == 0) {
    __syncthreads();
    __syncwarp();
  } else {
    __syncwarp();
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

template <int Beyond>
__global__ void store(cudaSurfaceObject_t surface) {
  surf2DLayeredwrite(1.0f, surface, static_cast<int>(threadIdx.x + Beyond) * 4, 0, 0);
}

struct Surface {
  cudaResourceDesc resource{};
  cudaSurfaceObject_t object = 0;

  Surface() {
    const cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    cudaMalloc3DArray(&resource.res.array.array, &format, make_cudaExtent(kBlock, 1, 1), cudaArrayLayered | cudaArraySurfaceLoadStore);
    cudaCreateSurfaceObject(&object, &resource);
  }
  ~Surface() { cudaFreeArray(resource.res.array.array); }
};

// Runs `sound NAME` or `faulty NAME`; false if the result is wrong.
bool run(bool sound, const char* name) {
  const auto is = [&](const char* other) { return std::strcmp(name, other) == 0; };
  const auto go = [&](auto good, auto bad, dim3 grid, size_t shared, auto... arguments) {
    launch(sound ? good : bad, grid, kBlock, shared, nullptr, arguments...);
  };
  const std::unique_ptr<int[]> in(new int[kBlock]), out(new int[kBlock]);
  for (int i = 0; i < kBlock; ++i) in[i] = i * i, out[i] = 0;
  int *const from = in.get(), *const to = out.get();
  const auto all = [&](auto expected) {
    bool ok = true;
    for (int i = 0; i < kBlock; ++i) ok &= to[i] == expected(i);
    return ok;
  };
  const auto one = [](int) { return 1; };
  const auto sums = [&](int i) {
    const int a = (i + 1) % kBlock, b = (i + 2) % kBlock;
    return a * a + b * b;
  };
  if (is("read after write")) return go(neighbours<true, true>, neighbours<false, true>, 1, 0, from, to), all(sums);
  if (is("write after read")) return go(neighbours<true, true>, neighbours<true, false>, 1, 0, from, to), all(sums);
  if (is("static shared memory")) return go(fill_static<0>, fill_static<1>, 1, 0, to), all(one);
  if (is("dynamic shared memory")) return go(fill_dynamic<0>, fill_dynamic<1>, 1, kBlock * sizeof(int), to), all(one);
  if (is("global memory")) return go(fill_global<0>, fill_global<1>, 1, 0, to), all(one);
  if (is("syncwarp")) return go(through_a_warp<true>, through_a_warp<false>, 1, 0, to), all([](int i) { return i ^ 1; });
  if (is("atomic")) return go(count<true>, count<false>, 1, 0, to), *to == kBlock;
  if (is("fence")) {
    unsigned counter = 0;
    int sum = 0;
    go(last_block<true>, last_block<false>, 8, 0, to, &counter, &sum);
    return sum == 8;
  }
  if (is("alignment")) {
    alignas(16) const float values[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    float sum = 0;
    return launch(sound ? wide<4> : wide<1>, 1, 1, 0, nullptr, values, &sum), sum == 4;
  }
  if (is("divergent barrier")) return go(divergent<true>, divergent<false>, 1, 0, to), all(one);
  if (is("mask")) return go(votes<0xffffffffu>, votes<0x0000ffffu>, 1, 0, to), all([](int) { return -1; });
  if (is("ended lane")) return go(after_the_end<true>, after_the_end<false>, 1, 0, to), all(one);
  if (is("deadlock")) return go(stuck<true>, stuck<false>, 1, 0, to), all(one);
  if (is("surface")) return go(store<0>, store<1>, 1, 0, Surface().object), true;
  std::fprintf(stderr, "no such fault: %s\n", name);
  return false;
}

}  // namespace
}  // namespace texvlm::cuda

int main(int argc, char** argv) {
  const bool right = argc == 3 && texvlm::cuda::run(std::strcmp(argv[1], "sound") == 0, argv[2]);
  std::puts(right ? "right" : "wrong");
  return right ? 0 : 1;
}
