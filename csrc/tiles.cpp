// Host code of the stem `tiles`: which tiles of a frame differ from what is stored, and their values into the store.
#include "math/tiles.h"

#include <ATen/MemoryOverlap.h>

#include "autograd.h"
#include "compact.h"
#include "cuda/tiles.h"
#include "launch.h"
#include "tensor.h"

namespace texvlm {
namespace host {

template <int C, class T, class Measure>
TEXVLM_HD void compare_rows(const CompareTiles<T, Measure>& compare, typename Measure::Noted* noted, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) compare.row(i / compare.f.rows, i % compare.f.rows, noted);
}
TEXVLM_ISA_DISPATCH(compare_rows)

template <class Measure, class T>
void compare_tiles(const TiledFrames<T>& frames, int64_t batch, bool* dirty) {
  const CompareTiles<T, Measure> compare{frames, dirty};
  parallel(batch * frames.rows, frames.channels * frames.tile * frames.width, [&](int64_t begin, int64_t end) {
    std::vector<typename Measure::Noted> noted(2 * frames.width * frames.interleaved());
    compare_rows_any<0, kBest<T>>(compare, noted.data(), begin, end);
  });
}

}  // namespace host

namespace {

template <class F>
void dispatch_frame(const Tensor& frame, const F& body) {
  frame.scalar_type() == at::kByte ? body(Tag<uint8_t>{}) : dispatch_texel(frame.scalar_type(), body);
}

void check_frames(const char* op, const Tensor& frame, const Tensor& reference) {
  check_shape(op, "frame", frame, "[B, C, H, W]", {-1, -1, -1, -1});
  if (frame.scalar_type() != at::kByte) check_texel_dtype(op, "frame", frame.scalar_type());
  check_levels(op, frame.size(2), frame.size(3), 1);
  check_shape(op, "reference", reference, "as large as the frame: [B, C, H, W]",
              {frame.size(0), frame.size(1), frame.size(2), frame.size(3)});
  check_dtype(op, "reference", reference, frame.scalar_type(), " (as the frame)");
  check_same_device(op, "reference", reference, frame);
  TEXVLM_CHECK(at::has_internal_overlap(reference) != at::MemOverlap::Yes, op, "reference", "written once for each value",
               "one whose values share memory (an expanded tensor)");
  TEXVLM_CHECK(at::get_overlap_status(frame, reference) != at::MemOverlapStatus::Partial, op, "reference", "in memory of its own",
               "one that shares part of the frame's");
}

std::tuple<Tensor, Tensor, Tensor> dirty_tiles(const Tensor& frame, const Tensor& reference, int64_t tile, double threshold,
                                               c10::string_view measure) {
  const char* op = "dirty_tiles";
  check_frames(op, frame, reference);
  TEXVLM_CHECK(tile >= kMeanBlock, op, "tile", "at least 8 pixels", tile);
  TEXVLM_CHECK(std::isfinite(threshold) && threshold >= 0, op, "threshold", "finite and at least 0", threshold);
  const bool by_means = measure == "mean";
  TEXVLM_CHECK(by_means || measure == "largest", op, "measure", "largest or mean", "'", measure, "'");
  const int64_t batch = frame.size(0), height = frame.size(2), width = frame.size(3);
  const int64_t side = std::min(tile, std::max(height, width));  // a larger tile is as good
  const int64_t rows = (height - 1) / side + 1, columns = (width - 1) / side + 1;
  const Tensor dirty = new_tensor({batch, rows, columns}, at::kBool, frame.device());
  dispatch_frame(frame, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const TiledFrames<T> frames{
        image_view<const T>(frame),  image_view<T>(reference), frame.size(1), height, width, side, rows, columns,
        Limits<T>::within(threshold)};
    if (on_cuda(frame.device())) {
      const c10::DeviceGuard guard(frame.device());
      if (batch > 0) cuda::dirty_tiles(frames, by_means, batch, pointer<bool>(dirty), current_stream(frame.device()));
    } else if (by_means) {
      host::compare_tiles<MeanDifference<T>>(frames, batch, pointer<bool>(dirty));
    } else {
      host::compare_tiles<LargestDifference<T>>(frames, batch, pointer<bool>(dirty));
    }
  });
  const auto [tiles, count] = compacted(dirty.view({batch, rows * columns}));
  return {dirty, tiles, count};
}

}  // namespace

TEXVLM_OPS(ops) { ops.in_place<dirty_tiles>("dirty_tiles"); }

}  // namespace texvlm
