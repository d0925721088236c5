// Host code of the stem `pyramid`: mipmaps of a picture, their adjoint, and the update in place.
#include "math/pyramid.h"

#include <algorithm>

#include "autograd.h"
#include "cuda/pyramid.h"
#include "launch.h"
#include "pyramid.h"
#include "queries.h"
#include "tensor.h"

namespace texvlm {
namespace {

// Levels `first`.. from the level before.
template <class T>
void build_levels(c10::Device device, int64_t batch, const TextureView<T>& texture, const Reducers& reducers, int first = 1) {
  for (int level = first; level < texture.levels.count; ++level) {
    const Rect all{batch, 0, texture.levels.height[level], 0, texture.levels.width[level]};
    for_each_texel<MipDown, T>(device, all, texture.channels, texture, level, reducers);
  }
}

// How many levels one band of rows builds while it stays in the second-level cache; 0 where the first height is odd already.
template <class T>
int band_levels(const TextureView<T>& texture) {
  constexpr int64_t kCacheBytes = 768 << 10;
  const int64_t row = texture.levels.width[0] * texture.channels * static_cast<int64_t>(sizeof(T));
  int k = 0;
  while (k + 1 < texture.levels.count && texture.levels.height[k] % 2 == 0 && row << (k + 1) <= kCacheBytes) ++k;
  return k;
}

// The whole pyramid: of `image`, or where it is undefined, above the level 0 that is in the buffer.
template <class S, class T>
void build_pyramid(const at::Tensor& image, const at::Tensor& data, const Levels& table, const Reducers& reducers) {
  const auto texture = texture_view<T>(data, table);
  const int64_t batch = data.size(0), height = table.height[0], width = table.width[0];
  const Rect all{batch, 0, height, 0, width};
  const ImageView<const S> picture = image.defined() ? image_view<const S>(image) : ImageView<const S>{};
  if (on_cuda(data.device())) {
    if (data.numel() == 0) return;
    const c10::DeviceGuard guard(data.device());
    const Tensor counters = new_zeros({cuda::mip_counters<T>(table, reducers, batch, texture.channels)}, at::kInt, data.device());
    return cuda::mip_chain(picture, texture, reducers, batch, pointer<unsigned>(counters), current_stream(data.device()));
  }
  const int k = band_levels(texture);
  if (k > 0) {
    const Rect bands{batch, 0, height >> k, 0, width << k};
    for_each_row_on_host<MipBand<S>::template For, T>(bands, data.size(2), picture, texture, k, reducers);
  } else if (image.defined()) {
    for_each_row_on_host<ImageToTexels<S>::template For, T>(all, data.size(2), picture, texture);
  }
  build_levels(data.device(), batch, texture, reducers, k + 1);
}

Tensor generate_mipmaps(const Tensor& image, Names reducer, int64_t levels, std::optional<at::ScalarType> dtype) {
  const char* op = "generate_mipmaps";
  check_shape(op, "image", image, "[B, C, H, W]", {-1, -1, -1, -1});
  if (image.scalar_type() != at::kByte) check_texel_dtype(op, "image", image.scalar_type());
  const at::ScalarType texel = texel_dtype(image, dtype);
  check_texel_dtype(op, "dtype", texel);
  const Levels table = check_levels(op, image.size(2), image.size(3), levels);
  const Reducers reducers = check_reducers(op, strings(reducer), image.size(1));
  Tensor data = new_tensor({image.size(0), table.texels, image.size(1)}, texel, image.device());
  dispatch_texel(texel, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (image.scalar_type() == at::kByte) {
      build_pyramid<uint8_t, T>(image, data, table, reducers);
    } else {  // a float picture into a texture of another float type is the rare case: one converted copy
      build_pyramid<T, T>(image.to(texel), data, table, reducers);
    }
  });
  return data;
}

Tensor generate_mipmaps_backward(const Tensor& grad, const TextureArgs& of, Maybe data) {
  const char* op = "generate_mipmaps_backward";
  const Tensor packed = grad.contiguous();
  const auto [table, reducers] = check_texture(op, packed, of);
  const int64_t height = of.height, width = of.width;
  const int64_t batch = grad.size(0), channels = grad.size(2);
  const bool needs_data = reducers.any_extremum;
  TORCH_CHECK_VALUE(!needs_data || (data && data->defined()), "texvlm::", op,
                    ": data (the pyramid) is needed for the reducers max and min");
  if (needs_data) {
    check_texture(op, *data, of);
    check_dtype(op, "data", *data, grad.scalar_type(), " (as the gradient)");
    check_same_device(op, "data", *data, grad);
    TEXVLM_CHECK(data->sizes() == grad.sizes(), op, "data", "of the shape of grad, " + shape_of(grad), shape_of(*data));
  }
  const at::ScalarType acc = acc_dtype(grad.scalar_type());
  Tensor image = new_tensor({batch, channels, height, width}, acc, grad.device());
  const int64_t fine = height * width;  // texels of level 0, which the work memory has not
  const Tensor work = new_tensor({batch, table.texels - fine, channels}, acc, grad.device());
  dispatch_texel(grad.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto incoming = texture_view<const T>(packed, table);
    const auto pyramid = texels<const T>(needs_data ? *data : packed);
    auto accumulated = texels<Acc<T>>(work);
    if (table.count > 1) accumulated.data -= fine * channels;
    const auto out = image_view<Acc<T>>(image);
    const int last = table.count - 1;
    for_each_texel<MipAdjointSeed, T>(grad.device(), {batch, 0, table.height[last], 0, table.width[last]}, channels, incoming,
                                      accumulated, out);
    for (int level = last; level >= 1; --level) {
      for_each_texel<MipDownAdjoint, T>(grad.device(), {batch, 0, table.height[level - 1], 0, table.width[level - 1]}, channels,
                                        incoming, pyramid, accumulated, out, level, reducers);
    }
  });
  return image;
}

// Rectangles int64 [R, 4] on the CPU as boxes.
std::vector<Box> boxes_of(const char* op, const Tensor& rects, int64_t height, int64_t width) {
  check_shape(op, "rects", rects, "[R, 4] (y0, x0, y1, x1)", {-1, 4});
  check_dtype(op, "rects", rects, at::kLong, "");
  TEXVLM_CHECK(rects.is_cpu(), op, "rects", "on the CPU (they steer the launches)", rects.device().str());
  std::vector<Box> boxes;
  const Tensor list = rects.contiguous();
  const int64_t* p = list.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < list.size(0); ++i, p += 4) {
    TEXVLM_CHECK(p[0] >= 0 && p[1] >= 0 && p[0] <= p[2] && p[1] <= p[3] && p[2] <= height && p[3] <= width, op, "rects",
                 "inside " + std::to_string(height) + " x " + std::to_string(width) + " with y0 <= y1 and x0 <= x1", "row ", i,
                 " = (", p[0], ", ", p[1], ", ", p[2], ", ", p[3], ")");
    if (p[0] < p[2] && p[1] < p[3]) boxes.push_back({0, p[0], p[2], p[1], p[3]});
  }
  return boxes;
}

void update_mipmaps(const Tensor& data, const TextureArgs& of, Maybe rects, Maybe tiles, int64_t tile) {
  const char* op = "update_mipmaps";
  const auto [table, reducers] = check_texture(op, data, of);
  const int64_t batch = data.size(0), height = of.height, width = of.width;
  const bool by_rects = rects && rects->defined(), by_tiles = tiles && tiles->defined();
  TORCH_CHECK_VALUE(!by_rects || !by_tiles, "texvlm::", op, ": give rects or tiles, not both");
  if (by_rects) return update_levels(data, table, reducers, region_of(boxes_of(op, *rects, height, width), batch, height, width));
  if (!by_tiles) return build_mipmaps(data, table, reducers);
  check_tiles(op, "tiles", *tiles, data, batch, height, width, tile);
  update_levels(data, table, reducers, region_of(*tiles, tile, height, width, 0));
}

// ---- autograd ----

bool any_named(const IValue& reducer, std::initializer_list<const char*> names) {
  for (const std::string& r : strings(reducer.to<Names>()))
    for (const char* name : names)
      if (r == name) return true;
  return false;
}

// What the adjoint needs of the pyramid: all of it, to find the extrema, or nothing.
IValue pyramid_for_adjoint(const Call& call) { return any_named(call["reducer"], {"max", "min"}) ? call.result(0) : IValue(); }

void check_linear(const Call& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(!any_named(call["reducer"], {"max", "min", "mode"}),
                              "texvlm::generate_mipmaps: second derivatives exist for the reducer mean only");
}

IValue dtype_of_grad(const Call& call) { return static_cast<int64_t>(call["grad"].toTensor().scalar_type()); }

}  // namespace

void build_mipmaps(const Tensor& data, const Levels& levels, const Reducers& reducers) {
  dispatch_texel(data.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    build_pyramid<T, T>(Tensor(), data, levels, reducers);
  });
}

void update_levels(const Tensor& data, const Levels& levels, const Reducers& reducers, Region region) {
  if (region.whole()) return build_mipmaps(data, levels, reducers);
  dispatch_texel(data.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto texture = texture_view<T>(data, levels);
    for (int level = 1; level < levels.count; ++level) {
      region = above(region);
      for_each_texel_of<MipDown, T>(data.device(), region, texture.channels, texture, level, reducers);
    }
  });
}

TEXVLM_OPS(ops) {
  ops.differentiable<generate_mipmaps>(
      "generate_mipmaps",
      GradientRule().given("height", size_of("image", 2)).given("width", size_of("image", 3)).given("data", pyramid_for_adjoint));
  // The adjoint of the mean chain is linear in `grad`, so its own derivative is the chain itself.
  ops.differentiable<generate_mipmaps_backward>(
      "generate_mipmaps_backward",
      GradientRule().by("texvlm::generate_mipmaps").given("dtype", dtype_of_grad).backward_refused_by(check_linear));
  ops.in_place<update_mipmaps>("update_mipmaps");
}

}  // namespace texvlm
