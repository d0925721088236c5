// Regions: the texels that depend on dirty tiles, level by level, and functors over them.
//
// On the CPU a region is a list of disjoint boxes, so that each texel is touched once however many tiles or rectangles it depends
// on, and threads share out texels. On CUDA it is the masks themselves, which are read by the kernels alone: a launch covers the
// level, and a thread whose texel depends on no dirty tile leaves (math/support.h).
#pragma once

#include <algorithm>
#include <vector>

#include "launch.h"
#include "math/support.h"
#include "tensor.h"

namespace texvlm {

// Rows [y0, y1), columns [x0, x1) of picture b.
struct Box {
  int64_t b, y0, y1, x0, x1;
  int64_t texels() const { return (y1 - y0) * (x1 - x0); }
};

struct Region {
  int64_t batch = 0, planes = 1;  // a box of picture b is for pictures b * planes to b * planes + planes - 1 of `batch`
  int64_t height = 0, width = 0;  // of the level
  bool on_device = false;         // whether it is `view`, else `boxes`
  RegionView view{};
  std::vector<Box> boxes;       // disjoint, by picture and row
  std::vector<int64_t> starts;  // texels before each box, and of all

  // Whether it is the level, and whether loops over the level are as fast: false where only the device knows.
  bool whole() const;
  bool most() const;
  int64_t texels() const { return starts.empty() ? 0 : starts.back(); }
};

// Checks the side of the tiles and a mask of them: bool [B, ceil(H / tile), ceil(W / tile)], contiguous, on the device of `data`.
void check_tiles(const char* op, const char* argument, const at::Tensor& mask, const at::Tensor& data, int64_t batch,
                 int64_t height, int64_t width, int64_t tile);

// The pixels at most `halo` away, along each axis, from a tile that is set in `mask`, which must stay alive as long as the
// region.
Region region_of(const at::Tensor& mask, int64_t tile, int64_t height, int64_t width, int64_t halo);
// What is in any of these boxes, in each of `batch` pictures.
Region region_of(const std::vector<Box>& boxes, int64_t batch, int64_t height, int64_t width);
// Both; on CUDA at most kMostMasks of them.
Region united(const Region& a, const Region& b);
// What is at most `reach` texels away.
Region widened(const Region& region, int64_t reach);
// The texels of the next level that read one of these.
Region above(const Region& region);
// The same for textures that hold `planes` planes a picture, one after another, as pictures of their own.
Region of_planes(Region region, int64_t planes);

namespace host {

// The rows of boxes whose first texel is one of [begin, end), all pictures of a box counted: by the loop that for_each_texel has.
template <int C, Isa Best, class F>
void texel_boxes(const F& f, const Region& region, int64_t channels, int64_t begin, int64_t end) {
  const int64_t planes = region.planes;
  auto start = std::upper_bound(region.starts.begin(), region.starts.end(), begin / planes) - 1;
  for (size_t i = start - region.starts.begin(); i < region.boxes.size() && region.starts[i] * planes < end; ++i) {
    const Box& box = region.boxes[i];
    const int64_t rows = box.y1 - box.y0, width = box.x1 - box.x0, first = region.starts[i] * planes;
    const int64_t from = maximum<int64_t>(0, (begin - first + width - 1) / width);
    const int64_t to = minimum(rows * planes, (end - first + width - 1) / width);
    const int64_t base = box.b * planes * rows;
    const Rect all{region.batch, box.y0, box.y1, box.x0, box.x1};
    if (from < to) texel_rows_any<C, Best>(f, all, channels, base + from, base + to);
  }
}

}  // namespace host

// CUDA's half: the boxes one by one, or the level with the mask asked.
template <class F>
void launch_region(c10::Device device, const Region& r, int64_t channels, const F& f) {
  const c10::DeviceGuard guard(device);
  void* const stream = current_stream(device);
  if (r.on_device) return cuda::launch_texels(Within<F>{f, r.view}, r.batch, 0, r.height, 0, r.width, channels, stream);
  TORCH_INTERNAL_ASSERT(r.batch == r.planes);  // boxes for every picture
  for (const Box& box : r.boxes) cuda::launch_texels(f, r.batch, box.y0, box.y1, box.x0, box.x1, channels, stream);
}

// As for_each_texel, over a region.
template <template <class, int> class F, class T, class... A>
void for_each_texel_of(c10::Device device, const Region& region, int64_t channels, const A&... args) {
  if (region.batch <= 0 || channels <= 0) return;
  if (on_cuda(device)) return launch_region(device, region, channels, F<T, 0>{args...});
  with_channels<T>(channels, [&](auto c) {
    constexpr int C = decltype(c)::value;
    const F<T, C> f{args...};
    host::parallel(region.texels() * region.planes, channels,
                   [&](int64_t begin, int64_t end) { host::texel_boxes<C, host::kBest<T>>(f, region, channels, begin, end); });
  });
}

// As for_each_pixel, over a region.
template <template <class, int> class F, class T, class... A>
void for_each_pixel_of(c10::Device device, const Region& region, const Work& work, const A&... args) {
  if (region.batch <= 0 || work.channels <= 0) return;
  const F<T, 0> f{args...};
  if (on_cuda(device)) return launch_region(device, region, work.channels, f);
  host::parallel(region.texels() * region.planes, work.cost,
                 [&](int64_t begin, int64_t end) { host::texel_boxes<0, host::kBest<T>>(f, region, work.channels, begin, end); });
}

}  // namespace texvlm
