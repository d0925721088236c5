// texvlm._C: build information, the memory cache and the OpenGL contexts. Everything that takes a tensor goes through
// torch.ops.texvlm.
#include <pybind11/pybind11.h>
#include <torch/version.h>

#include <vector>

#include "gl/worker.h"
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
      "gl_status",
      [](int cuda_device) {
        namespace py = pybind11;
        texvlm::gl::Status s;
        {
          const py::gil_scoped_release unlocked;
          s = texvlm::gl::status(cuda_device);
        }
        py::dict info;
        info["vendor"] = s.vendor, info["renderer"] = s.renderer, info["version"] = s.version, info["platform"] = s.platform;
        info["max_size"] = s.max_size, info["max_layers"] = s.max_layers;
        info["even_from_ours"] = s.filter.even_from_ours, info["odd_from_ours"] = s.filter.odd_from_ours;
        info["odd_from_bilinear"] = s.filter.odd_from_bilinear;
        return info;
      },
      "The OpenGL context for a CUDA device (-1: for host memory) and its filter. RuntimeError with one line where there is none.");
  m.def(
      "gl_statistics",
      [] {
        const texvlm::gl::Statistics s = texvlm::gl::statistics();
        pybind11::dict info;
        info["contexts"] = s.contexts, info["textures_made"] = s.textures_made, info["textures"] = s.textures;
        info["texture_bytes"] = s.texture_bytes, info["registered"] = s.registered, info["layered"] = s.layered;
        info["generated"] = s.generated;
        info["upload_seconds"] = s.upload_seconds, info["generate_seconds"] = s.generate_seconds;
        info["read_seconds"] = s.read_seconds;
        return info;
      },
      "What OpenGL has done in this process and holds now.");
  m.def("gl_profile", &texvlm::gl::profile, "Whether each step of the GL path is waited for and timed.");
  m.def("gl_close", &texvlm::gl::close, pybind11::call_guard<pybind11::gil_scoped_release>(), "Ends the OpenGL threads.");
  m.def("gl_simulate_loss", &texvlm::gl::simulate_loss, "For tests: the next checks find the OpenGL context lost.");
  m.def(
      "texture_cache_stats",
      [] {
        texvlm::TextureCacheStats s;
        {
          const pybind11::gil_scoped_release unlocked;  // another thread may hold the cache while it waits for the device
          s = texvlm::texture_cache_stats();
        }
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
  m.def("empty_texture_cache", &texvlm::empty_texture_cache, pybind11::call_guard<pybind11::gil_scoped_release>(),
        "Frees the kept texture arrays, but those that CUDA graphs hold.");
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
