// Runs a functor over texels or queries: the one place that knows which device it is.
//
// A functor is a template <class T, int C> POD struct. C is the channel count when it is known at compile time (1, 3, 4), or 0.
//   texels:  operator()(b, y, x, c0, c1)             optionally row(b, y, x0, x1): the same for a run of texels, all channels;
//            or row(b, y, x0, x1, scratch) beside scratch_bytes(): the same with work memory of its own;
//            or instead of both pixels<N>(b, y, x, n): see scalar.h
//   queries: operator()(b, n, c0, c1)                 optionally block(b, n0, n1)
// The host calls it row by row with [0, C); CUDA gives each thread a slice of 4 channels. The host loops are compiled once per
// instruction set and chosen at run time, so a wheel built anywhere is fast everywhere.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/launch.h"
#include "export.h"
#include "math/scalar.h"

namespace texvlm {

// Whether the CUDA kernels run for tensors of this device. In builds with TEXVLM_EMULATE (see tests/shim) they can be asked to
// run on the host, for CPU tensors.
#if defined(TEXVLM_WITH_CUDA)
bool on_cuda(c10::Device device);
#else
inline bool on_cuda(c10::Device device) {
  if (device.is_cuda()) cuda::not_built();
  return false;  // known to the compiler: what would be launched is not linked
}
#endif

// The stream of PyTorch on this device, as a pointer that a torch-free .cu understands.
void* current_stream(c10::Device device);

// Texels of a rectangle: rows [y0, y1), columns [x0, x1) of `batch` pictures.
struct Rect {
  int64_t batch, y0, y1, x0, x1;
};

namespace host {

enum class Isa { base, v3, v4 };
TEXVLM_API Isa isa();  // of this processor, asked once

TEXVLM_HAS_MEMBER(HasRow, row);
TEXVLM_HAS_MEMBER(HasScratch, scratch_bytes);
TEXVLM_HAS_MEMBER(HasBlock, block);

template <int C, class F>
TEXVLM_HD void texel_rows(const F& f, const Rect& r, int64_t channels, int64_t begin, int64_t end) {
  const int64_t rows = r.y1 - r.y0;
  std::vector<int64_t> scratch;
  if constexpr (HasScratch<F>::value) scratch.resize((f.scratch_bytes() + 7) / 8);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t b = i / rows, y = r.y0 + i % rows;
    if constexpr (HasScratch<F>::value) {
      f.row(b, y, r.x0, r.x1, static_cast<void*>(scratch.data()));
    } else if constexpr (HasRow<F>::value) {
      f.row(b, y, r.x0, r.x1);
    } else if constexpr (HasPixels<F>::value) {
      for (int64_t x = r.x0; x < r.x1; x += kRun)
        f.template pixels<kRun>(b, y, x, static_cast<int>(minimum<int64_t>(kRun, r.x1 - x)));
    } else {
      for (int64_t x = r.x0; x < r.x1; ++x) f(b, y, x, int64_t{0}, C ? int64_t{C} : channels);
    }
  }
}

template <int C, class F>
TEXVLM_HD void query_range(const F& f, int64_t count, int64_t channels, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end;) {
    const int64_t b = i / count, n = i % count;
    const int64_t stop = minimum(count, n + end - i);
    if constexpr (HasBlock<F>::value) {
      f.block(b, n, stop);
    } else {
      for (int64_t q = n; q < stop; ++q) f(b, q, int64_t{0}, C ? int64_t{C} : channels);
    }
    i += stop - n;
  }
}

// The best instruction set that the loops of a type are compiled for, and the type with constant channel counts. Each copy costs
// compile time; double is there for checking gradients, and half types gain little from AVX-512.
template <class T>
constexpr Isa kBest = std::is_same_v<T, double>                                ? Isa::base
                      : std::is_same_v<T, Half> || std::is_same_v<T, BFloat16> ? Isa::v3
                                                                               : Isa::v4;
template <class T>
constexpr bool kConstantChannels = std::is_same_v<T, float>;

// One loop, compiled for x86-64-v4 (AVX-512), v3 (AVX2) and, without a constant channel count, the baseline. Where there is
// better, the baseline is there to be right, and compiled in a hurry.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(TEXVLM_NO_ISA_DISPATCH)
#define TEXVLM_DISPATCHES_ISA 1
#if defined(__clang__)
#define TEXVLM_IN_A_HURRY
#else
#define TEXVLM_IN_A_HURRY __attribute__((optimize("O1")))
#endif
#define TEXVLM_ISA_DISPATCH(name)                                                                   \
  template <int C, class... A>                                                                      \
  __attribute__((target("arch=x86-64-v4,prefer-vector-width=512"))) void name##_v4(const A&... a) { \
    name<C>(a...);                                                                                  \
  }                                                                                                 \
  template <int C, class... A>                                                                      \
  __attribute__((target("arch=x86-64-v3"))) void name##_v3(const A&... a) {                         \
    name<C>(a...);                                                                                  \
  }                                                                                                 \
  template <int C, class... A>                                                                      \
  TEXVLM_IN_A_HURRY void name##_base(const A&... a) {                                               \
    name<C>(a...);                                                                                  \
  }                                                                                                 \
  template <int C, Isa Best = Isa::v4, class... A>                                                  \
  void name##_any(const A&... a) {                                                                  \
    if constexpr (Best == Isa::base) {                                                              \
      name<C>(a...);                                                                                \
    } else {                                                                                        \
      if constexpr (Best == Isa::v4) {                                                              \
        if (isa() == Isa::v4) return name##_v4<C>(a...);                                            \
      }                                                                                             \
      if constexpr (C == 0) {                                                                       \
        if (isa() == Isa::base) return name##_base<C>(a...);                                        \
      } /* else see with_channels */                                                                \
      name##_v3<C>(a...);                                                                           \
    }                                                                                               \
  }
#else
#define TEXVLM_DISPATCHES_ISA 0
#define TEXVLM_IN_A_HURRY
#define TEXVLM_ISA_DISPATCH(name)                  \
  template <int C, Isa Best = Isa::v4, class... A> \
  void name##_any(const A&... a) {                 \
    name<C>(a...);                                 \
  }
#endif
TEXVLM_ISA_DISPATCH(texel_rows)
TEXVLM_ISA_DISPATCH(query_range)

constexpr int64_t kGrainElements = 32768;  // below this many values a second thread costs more than it brings

template <class Body>
void parallel(int64_t count, int64_t elements_each, const Body& body) {
  if (count <= 0) return;
  at::parallel_for(0, count, maximum<int64_t>(1, kGrainElements / maximum<int64_t>(1, elements_each)), body);
}

}  // namespace host

// body(std::integral_constant<int, C>) with the channel count as a constant where there is a specialised loop for it: not for
// the baseline of x86-64, which processors of the last ten years do not run.
template <class T, class Body>
void with_channels(int64_t channels, const Body& body) {
  if constexpr (host::kConstantChannels<T>) {
    if (TEXVLM_DISPATCHES_ISA && host::isa() == host::Isa::base) return body(std::integral_constant<int, 0>{});
    if (channels == 1) return body(std::integral_constant<int, 1>{});
    if (channels == 3) return body(std::integral_constant<int, 3>{});
    if (channels == 4) return body(std::integral_constant<int, 4>{});
  }
  body(std::integral_constant<int, 0>{});
}

template <template <class, int> class F, class T, class... A>
void for_each_row_on_host(const Rect& r, int64_t channels, const A&... args);

// f over every texel of the rectangle; F<T, C> is built from `args` (aggregate initialisation).
template <template <class, int> class F, class T, class... A>
void for_each_texel(c10::Device device, const Rect& r, int64_t channels, const A&... args) {
  if (r.batch <= 0 || r.y1 <= r.y0 || r.x1 <= r.x0 || channels <= 0) return;
  if (on_cuda(device)) {
    const c10::DeviceGuard guard(device);
    return cuda::launch_texels(F<T, 0>{args...}, r.batch, r.y0, r.y1, r.x0, r.x1, channels, current_stream(device));
  }
  for_each_row_on_host<F, T>(r, channels, args...);
}

// The same for functors that only the host has.
template <template <class, int> class F, class T, class... A>
void for_each_row_on_host(const Rect& r, int64_t channels, const A&... args) {
  if (r.batch <= 0 || r.y1 <= r.y0 || r.x1 <= r.x0 || channels <= 0) return;
  with_channels<T>(channels, [&](auto c) {
    constexpr int C = decltype(c)::value;
    const F<T, C> f{args...};
    host::parallel(r.batch * (r.y1 - r.y0), (r.x1 - r.x0) * channels,
                   [&](int64_t begin, int64_t end) { host::texel_rows_any<C, host::kBest<T>>(f, r, channels, begin, end); });
  });
}

// What a pixel stands for in for_each_pixel: channels, which CUDA shares out in slices of 4, and about how many values to
// compute.
struct Work {
  int64_t channels = 1, cost = 1;
};

// f over every pixel of the rectangle, for functors whose channels are not a dense run of texels: only C = 0 is compiled. On the
// host a row is one call; CUDA gives each thread a pixel and a slice of its channels.
template <template <class, int> class F, class T, class... A>
void for_each_pixel(c10::Device device, const Rect& r, const Work& work, const A&... args) {
  const int64_t channels = work.channels;
  if (r.batch <= 0 || r.y1 <= r.y0 || r.x1 <= r.x0 || channels <= 0) return;
  const F<T, 0> f{args...};
  if (on_cuda(device)) {
    const c10::DeviceGuard guard(device);
    return cuda::launch_texels(f, r.batch, r.y0, r.y1, r.x0, r.x1, channels, current_stream(device));
  }
  host::parallel(r.batch * (r.y1 - r.y0), (r.x1 - r.x0) * work.cost,
                 [&](int64_t begin, int64_t end) { host::texel_rows_any<0, host::kBest<T>>(f, r, channels, begin, end); });
}

// f over `count` items of each of `batch` pictures, each standing for about `cost` values: a column, a row, a cell, a score.
template <host::Isa Best, class F>
void for_each_item(c10::Device device, int64_t batch, int64_t count, int64_t cost, const F& f) {
  if (batch <= 0 || count <= 0) return;
  if (on_cuda(device)) {
    const c10::DeviceGuard guard(device);
    return cuda::launch_queries(f, batch, count, int64_t{1}, current_stream(device));
  }
  host::parallel(batch * count, cost,
                 [&](int64_t begin, int64_t end) { host::query_range_any<0, Best>(f, count, int64_t{1}, begin, end); });
}
template <template <class, int> class F, class T, class... A>
void for_each_item(c10::Device device, int64_t batch, int64_t count, int64_t cost, const A&... args) {
  for_each_item<host::kBest<T>>(device, batch, count, cost, F<T, 0>{args...});
}

// f over `count` queries (or groups of them) of each of `batch` pictures, each standing for about `cost` values, on the host.
// `serial`: one thread, for functors that scatter.
template <template <class, int> class F, class T, class... A>
void for_each_query_on_host(int64_t batch, int64_t count, int64_t cost, int64_t channels, bool serial, const A&... args) {
  if (batch <= 0 || count <= 0 || channels <= 0) return;
  with_channels<T>(channels, [&](auto c) {
    constexpr int C = decltype(c)::value;
    const F<T, C> f{args...};
    const auto body = [&](int64_t begin, int64_t end) {
      host::query_range_any<C, host::kBest<T>>(f, count, channels, begin, end);
    };
    serial ? body(0, batch * count) : host::parallel(batch * count, cost, body);
  });
}

// The same on any device, a query costing as much as four values a channel; CUDA gives each thread a query and a slice of 4
// channels.
template <template <class, int> class F, class T, class... A>
void for_each_query(c10::Device device, int64_t batch, int64_t count, int64_t channels, const A&... args) {
  if (batch <= 0 || count <= 0 || channels <= 0) return;
  if (on_cuda(device)) {
    const c10::DeviceGuard guard(device);
    return cuda::launch_queries(F<T, 0>{args...}, batch, count, channels, current_stream(device));
  }
  for_each_query_on_host<F, T>(batch, count, 4 * channels, channels, false, args...);
}

}  // namespace texvlm
