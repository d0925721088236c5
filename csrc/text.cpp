// Host code of the stem `text`: where a picture has writing.
#include "math/text.h"

#include "autograd.h"
#include "launch.h"
#include "picture.h"
#include "pyramid.h"
#include "tensor.h"

namespace texvlm {
namespace {

// Numbers that the network has.
int64_t text_weight_count() {
  int64_t count = 0;
  for (const TextLayerShape& layer : kTextNetwork) count += layer.weights() + layer.outputs;
  return count;
}

// Scores of the cells, [B, ceil(H / 16), ceil(W / 16)] in [0, 1], of a readable picture.
Tensor text_map(const Tensor& image, const Tensor& weights) {
  const int64_t batch = image.size(0), height = image.size(2), width = image.size(3);
  const int64_t rows = (height + kTextCell - 1) / kTextCell, columns = (width + kTextCell - 1) / kTextCell;
  const c10::Device device = image.device();
  const at::ScalarType dtype = acc_dtype(image.scalar_type());
  const int count = std::min(kTextLevels, level_count(height, width));
  const Levels levels = make_levels(height, width, count);
  const Tensor pyramid = new_tensor({batch, levels.texels, 1}, dtype, device);
  const Tensor statistics = new_tensor({batch, kTextStatistics + 1, rows, columns}, dtype, device);
  const Tensor parameters = weights.to(dtype).contiguous();
  Tensor value = statistics, map = new_tensor({batch, rows, columns}, dtype, device);
  dispatch_picture(image, [&](auto tag) {
    using S = typename decltype(tag)::type;
    using A = Acc<S>;
    for_each_pixel<TextLuma<S>::template For, A>(device, {batch, 0, height, 0, width}, Work{}, image_view<const S>(image),
                                                 texture_view<A>(pyramid, levels));
    build_mipmaps(pyramid, levels, check_reducers("text_regions", {"mean"}, 1));
    const Rect cells{batch, 0, rows, 0, columns};
    for_each_pixel<TextStatistics, A>(device, cells, Work{kTextLevels, kLevelStatistics << 8},
                                      texture_view<const A>(pyramid, levels), pointer<A>(statistics), rows, columns);
    const A* layer_weights = pointer<const A>(parameters);
    for (const TextLayerShape& shape : kTextNetwork) {
      TextLayer<A, 0> layer{pointer<const A>(value), layer_weights, nullptr, shape, value.size(1), rows, columns};
      if (shape.outputs == 1) {
        for_each_pixel<TextScore, A>(device, cells, Work{1, 16}, layer, pointer<const A>(statistics), pointer<A>(map), rows,
                                     columns);
        break;
      }
      const Tensor out = new_tensor({batch, shape.outputs, rows, columns}, dtype, device);
      layer.out = pointer<A>(out);
      for_each_pixel<TextLayer, A>(device, cells, Work{shape.outputs, shape.weights()}, layer);
      layer_weights += shape.weights() + shape.outputs;
      value = out;
    }
  });
  return map;
}

// The map as a functor reads it at the picture's pixels. Its height and width are those of the whole grid.
template <class A>
Enlarged<A> text_enlarged(const Tensor& map) {
  return {pointer<const A>(map), map.size(1), map.size(2), map.size(1) * kTextCell, map.size(2) * kTextCell};
}

Tensor text_regions(const Tensor& image, const Tensor& weights) {
  const char* op = "text_regions";
  check_picture(op, "image", image);
  check_shape(op, "weights", weights, "[N]", {-1});
  TEXVLM_CHECK(weights.size(0) == text_weight_count(), op, "weights",
               "the " + std::to_string(text_weight_count()) + " numbers of the network", weights.size(0));
  check_dtype(op, "weights", weights, at::kFloat, "");
  check_same_device(op, "weights", weights, image);
  const int64_t height = image.size(2), width = image.size(3);
  const at::ScalarType dtype = texel_dtype(image);
  const Tensor map = text_map(readable(image), weights);
  Tensor out = new_tensor({image.size(0), height, width}, dtype, image.device());
  dispatch_texel(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_pixel<TextPixels, T>(image.device(), {image.size(0), 0, height, 0, width}, Work{}, text_enlarged<Acc<T>>(map),
                                  pointer<T>(out), height, width);
  });
  return out;
}

}  // namespace

TEXVLM_OPS(ops) { ops.op<text_regions>("text_regions"); }

}  // namespace texvlm
