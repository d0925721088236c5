// texvlm._C: build information and the memory cache. Everything that takes a tensor goes through torch.ops.texvlm.
#include <pybind11/pybind11.h>
#include <torch/version.h>

#include <vector>

#include "launch.h"
#include "memory.h"
#include "texture_cache.h"

#define TEXVLM_STRING_(x) #x
#define TEXVLM_STRING(x) TEXVLM_STRING_(x)

PYBIND11_MODULE(_C, m) {
  m.def(
      "build_info",
      [] {
        namespace py = pybind11;
        py::dict info;
#if defined(TEXVLM_WITH_CUDA)
        info["cuda"] = true;
        info["cuda_archs"] = TEXVLM_STRING(TEXVLM_CUDA_ARCHS);
        info["cuda_version"] = TEXVLM_STRING(TEXVLM_CUDA_VERSION);
#else
        info["cuda"] = false;
        info["cuda_archs"] = "";
        info["cuda_version"] = "";
#endif
        info["compiler"] = __VERSION__;
        info["torch"] = TORCH_VERSION;
        const texvlm::host::Isa isa = texvlm::host::isa();
        info["cpu"] = isa == texvlm::host::Isa::v4   ? "x86-64-v4 (AVX-512)"
                      : isa == texvlm::host::Isa::v3 ? "x86-64-v3 (AVX2)"
                                                     : "baseline";
        return info;
      },
      "What this extension was built with: cuda, cuda_archs, cuda_version, compiler, torch, and cpu, the instruction set in use.");
  m.def("cached_bytes", &texvlm::cached_bytes, "Bytes of freed CPU buffers kept for the next large tensor.");
  m.def("empty_cache", &texvlm::empty_cache, "Returns the kept CPU buffers to the system.");
  m.def(
      "texture_cache_stats",
      [] {
        const texvlm::TextureCacheStats s = texvlm::texture_cache_stats();
        pybind11::dict stats;
        stats["arrays"] = s.arrays;
        stats["bytes"] = s.bytes;
        stats["limit"] = s.limit;
        stats["held"] = s.held;
        stats["hits"] = s.hits;
        stats["fills"] = s.fills;
        stats["created"] = s.created;
        stats["evicted"] = s.evicted;
        return stats;
      },
      "The cache of texture arrays: arrays, bytes, limit, held (by CUDA graphs); hits, fills, created, evicted since the start.");
  m.def("empty_texture_cache", &texvlm::empty_texture_cache, "Frees the kept texture arrays, but those that CUDA graphs hold.");
#if defined(__SANITIZE_ADDRESS__)
  m.def(
      "overflow",
      [] {
        const std::vector<char> one(1);
        return static_cast<const volatile char*>(one.data())[1];
      },
      "Reads one byte too far: proves that this build is watched.");
#endif
}
