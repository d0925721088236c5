// Host code of the stem `salience`: the saliency of a picture, and the planes of luma, edge and motion under it.
#include "salience.h"

#include <ATen/ops/zeros.h>

#include "autograd.h"
#include "mips.h"

namespace texvlm {

void check_picture(const char* op, const char* argument, const Tensor& image) {
  check_shape(op, argument, image, "[B, 3, H, W]", {-1, 3, -1, -1});
  if (image.scalar_type() != at::kByte) check_texel_dtype(op, argument, image.scalar_type());
  check_levels(op, image.size(2), image.size(3), 1);
}

void check_previous(const char* op, const std::optional<Tensor>& previous, const Tensor& image) {
  if (!previous || !previous->defined()) return;
  TEXVLM_CHECK(previous->sizes() == image.sizes(), op, "previous", "of the shape of image, " + shape_of(image),
               shape_of(*previous));
  check_dtype(op, "previous", *previous, image.scalar_type(), " (as the image)");
  check_same_device(op, "previous", *previous, image);
}

Tensor readable(const Tensor& image) {
  const bool half = image.defined() && (image.scalar_type() == at::kHalf || image.scalar_type() == at::kBFloat16);
  return half ? image.to(at::kFloat) : image;
}

namespace {

at::ScalarType arithmetic(const Tensor& image) { return image.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

int64_t full_levels(int64_t height, int64_t width) {
  int64_t count = 1;
  while ((std::max(height, width) >> count) > 0) ++count;
  return count;
}

// Reducers of the five channels of the pyramid.
const std::vector<std::string>& feature_reducers() {
  static const std::vector<std::string> names = {"mean", "mean", "mean", "max", "max"};
  return names;
}

template <class F>
auto dispatch_plane(const Tensor& plane, const F& body) {
  return plane.scalar_type() == at::kDouble ? body(Tag<double>{}) : body(Tag<float>{});
}

// A plane [B, H, W] of any strides as a picture of one channel.
template <class T>
ImageView<const T> plane_view(const Tensor& plane) {
  return {pointer<const T>(plane), plane.stride(0), 0, plane.stride(1), plane.stride(2)};
}

// Per map of planes [B, maps, h, w]: sum (of the products with `other` [B, h, w], if it is defined), maximum and where.
template <class T>
Tensor map_stats(const Tensor& planes, const Tensor& other, int64_t batch, int64_t maps, int64_t h, int64_t w) {
  const auto bytes = static_cast<int64_t>(sizeof(MapStats<T>));
  const Tensor rows = new_tensor({batch, maps * h, bytes}, at::kByte, planes.device());
  Tensor stats = new_tensor({batch, maps, bytes}, at::kByte, planes.device());
  const T* const p = pointer<const T>(planes);
  const T* const q = other.defined() ? pointer<const T>(other) : nullptr;
  MapStats<T>* const r = pointer<MapStats<T>>(rows);
  const MapStats<T>* const read = r;
  for_each_item<RowStats, T>(planes.device(), batch, maps * h, w, p, q, h, r, maps * h, w);
  for_each_item<PlaneStats, T>(planes.device(), batch, maps, h, read, pointer<MapStats<T>>(stats), maps, h, w);
  return stats;
}

// What the map is made from and through. `levels`: of the pyramid, level 1 of the picture being its level 0.
struct Stages {
  Levels levels{};
  int slots = 0;
  int64_t h = 0, w = 0;   // of the base level
  Tensor pyramid;         // [B, T, 5], Lab from the base level on
  Tensor maps, stats;     // [B, 4, h, w]
  Tensor sum, sum_stats;  // [B, h, w], over its maximum
};

Stages stages(const Picture& picture) {
  const int64_t batch = picture.batch(), height = picture.height(), width = picture.width();
  const int64_t full = full_levels(height, width), base = std::min<int64_t>(kBase, full - 1);
  Stages s;
  s.h = std::max<int64_t>(1, height >> base);
  s.w = std::max<int64_t>(1, width >> base);
  const at::ScalarType dtype = arithmetic(picture.image);
  const c10::Device device = picture.image.device();
  if (full <= kBase + 1) {  // centre and surround are the same level: nothing stands out
    s.sum = at::zeros({batch, s.h, s.w}, at::TensorOptions().dtype(dtype).device(device));
    return s;
  }
  const int count = static_cast<int>(std::min<int64_t>(full, kBase + kSalienceLevels)) - 1;
  s.levels = make_levels(std::max<int64_t>(1, height / 2), std::max<int64_t>(1, width / 2), count);
  s.slots = count - (kBase - 1);
  s.pyramid = new_tensor({batch, s.levels.texels, kFeatures}, dtype, device);
  s.maps = new_tensor({batch, kMaps, s.h, s.w}, dtype, device);
  s.sum = new_tensor({batch, s.h, s.w}, dtype, device);
  const Reducers reducers = check_reducers("saliency", feature_reducers(), kFeatures);
  dispatch_picture(picture.image, [&](auto tag) {
    using S = typename decltype(tag)::type;
    using A = Acc<S>;
    const auto texture = texture_view<A>(s.pyramid, s.levels);
    for_each_pixel<SalienceLevel1<S>::template For, A>(device, {batch, 0, s.levels.height[0], 0, s.levels.width[0]}, Work{},
                                                       picture_view<S>(picture.image), picture_view<S>(picture.previous),
                                                       pointer<const A>(picture.luma), pointer<const A>(picture.edge), height,
                                                       width, texture);
  });
  build_mipmaps(s.pyramid, s.levels, reducers);
  dispatch_plane(s.sum, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int level = kBase - 1; level < count; ++level) {
      for_each_pixel<LabTexels, T>(device, {batch, 0, s.levels.height[level], 0, s.levels.width[level]}, Work{},
                                   texture_view<T>(s.pyramid, s.levels), level);
    }
    const Rect all{batch, 0, s.h, 0, s.w};
    for_each_pixel<SalienceMaps, T>(device, all, Work{}, texture_view<const T>(s.pyramid, s.levels), s.slots, pointer<T>(s.maps));
    s.stats = map_stats<T>(s.maps, Tensor(), batch, kMaps, s.h, s.w);
    for_each_pixel<SalienceSum, T>(device, all, Work{}, pointer<const T>(s.maps), pointer<const MapStats<T>>(s.stats),
                                   pointer<T>(s.sum), s.h, s.w);
    s.sum_stats = map_stats<T>(s.sum, Tensor(), batch, 1, s.h, s.w);
    for_each_pixel<OverMaximum, T>(device, all, Work{}, pointer<T>(s.sum), pointer<const MapStats<T>>(s.sum_stats), s.h, s.w);
  });
  return s;
}

}  // namespace

Tensor luma_plane(const Tensor& image) {
  if (!image.defined()) return {};
  const int64_t height = image.size(2), width = image.size(3);
  Tensor out = new_tensor({image.size(0), height, width}, arithmetic(image), image.device());
  dispatch_picture(image, [&](auto tag) {
    using S = typename decltype(tag)::type;
    for_each_pixel<LumaPlane<S>::template For, Acc<S>>(image.device(), {image.size(0), 0, height, 0, width}, Work{},
                                                       image_view<const S>(image), pointer<Acc<S>>(out), height, width);
  });
  return out;
}

Tensor edge_plane(const Tensor& luma) {
  Tensor out = new_tensor(luma.sizes(), luma.scalar_type(), luma.device());
  dispatch_plane(luma, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_pixel<EdgePlane, T>(luma.device(), {luma.size(0), 0, luma.size(1), 0, luma.size(2)}, Work{}, pointer<const T>(luma),
                                 pointer<T>(out), luma.size(1), luma.size(2));
  });
  return out;
}

Tensor edge_threshold(const Tensor& edge) {
  const int64_t batch = edge.size(0), height = edge.size(1), width = edge.size(2);
  Tensor threshold = new_tensor({batch}, at::kDouble, edge.device());
  dispatch_plane(edge, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Tensor rows = new_tensor({batch, height, static_cast<int64_t>(sizeof(MapStats<T>))}, at::kByte, edge.device());
    const T* const nothing = nullptr;
    for_each_item<RowStats, T>(edge.device(), batch, height, width, pointer<const T>(edge), nothing, int64_t{1},
                               pointer<MapStats<T>>(rows), height, width);
    for_each_item<EdgeThreshold, T>(edge.device(), batch, int64_t{1}, height, pointer<const MapStats<T>>(rows),
                                    pointer<double>(threshold), height, width);
  });
  return threshold;
}

Tensor salience_map(const Picture& picture) { return stages(picture).sum; }

Tensor salience_map_backward(const Tensor& grad, const Picture& picture) {
  const Stages s = stages(picture);
  if (s.slots == 0) return {};
  const int64_t batch = picture.batch(), height = picture.height(), width = picture.width();
  const c10::Device device = grad.device();
  const at::ScalarType dtype = arithmetic(picture.image);
  const Tensor incoming = grad.contiguous();
  const Rect base{batch, 0, s.h, 0, s.w};
  const int64_t levels = s.levels.count + 1;
  const Levels table = make_levels(height, width, static_cast<int>(levels));
  const Tensor planes = new_tensor({batch, kFeatures, height, width}, dtype, device);
  dispatch_picture(picture.image, [&](auto tag) {
    using S = typename decltype(tag)::type;
    using A = Acc<S>;
    const typename SalienceLevel1<S>::template For<A, 0> from{picture_view<S>(picture.image),
                                                              picture_view<S>(picture.previous),
                                                              pointer<const A>(picture.luma),
                                                              pointer<const A>(picture.edge),
                                                              height,
                                                              width,
                                                              {}};
    for_each_pixel<SaliencePlanes<S>::template For, A>(device, picture.all(), Work{}, from, pointer<A>(planes));
  });
  static const auto generate =
      op_handle<Tensor(const Tensor&, Names, int64_t, std::optional<at::ScalarType>)>("texvlm::generate_mipmaps");
  static const auto backward = op_handle<Tensor(const Tensor&, SymInt, SymInt, Names, int64_t, const std::optional<Tensor>&)>(
      "texvlm::generate_mipmaps_backward");
  const Names reducer(feature_reducers());
  const Tensor rgb = generate.call(planes, reducer, levels, std::nullopt);
  const Tensor to_pyramid = at::zeros_like(rgb);
  dispatch_plane(planes, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Stats = const MapStats<T>;
    const Tensor to_sum = new_tensor({batch, s.h, s.w}, dtype, device),
                 to_maps = new_tensor({batch, kMaps, s.h, s.w}, dtype, device);
    for_each_pixel<EnlargePlaneAdjoint, T>(
        device, base, Work{1, 16}, EnlargeAdjoint<T>{pointer<const T>(incoming), 1, height, width, s.h, s.w}, pointer<T>(to_sum));
    const Tensor top = map_stats<T>(s.sum, to_sum, batch, 1, s.h, s.w);
    for_each_pixel<OverMaximumAdjoint, T>(device, base, Work{}, pointer<T>(to_sum), pointer<Stats>(s.sum_stats),
                                          pointer<Stats>(top), s.h, s.w);
    const Tensor dots = map_stats<T>(s.maps, to_sum, batch, kMaps, s.h, s.w);
    const SalienceSum<T, 0> sum{pointer<const T>(s.maps), pointer<Stats>(s.stats), nullptr, s.h, s.w};
    for_each_pixel<SalienceSumAdjoint, T>(device, base, Work{}, sum, pointer<const T>(to_sum), pointer<Stats>(dots),
                                          pointer<T>(to_maps));
    const Tensor to_features = new_tensor({s.slots, batch, s.h, s.w, kFeatures}, dtype, device);
    const SalienceMaps<T, 0> forward{texture_view<const T>(s.pyramid, s.levels), s.slots, nullptr};
    for_each_pixel<SalienceMapsAdjoint, T>(device, base, Work{}, forward, pointer<const T>(to_maps), pointer<T>(to_features),
                                           batch);
    for (int slot = 0; slot < s.slots; ++slot) {
      const int level = kBase + slot;
      const int64_t h = table.height[level], w = table.width[level];
      const EnlargeAdjoint<T> enlarge{
          pointer<const T>(to_features) + slot * batch * s.h * s.w * kFeatures, kFeatures, s.h, s.w, h, w};
      for_each_pixel<SalienceTexelAdjoint, T>(device, {batch, 0, h, 0, w}, Work{1, 64}, enlarge,
                                              texture_view<const T>(rgb, table), texture_view<T>(to_pyramid, table), level);
    }
  });
  return backward.call(to_pyramid, height, width, reducer, levels, rgb);
}

void add_sobel_adjoint(const Tensor& plane, const Tensor& grad, double scale, bool clip, const Tensor& out) {
  const int64_t height = plane.size(1), width = plane.size(2);
  const Rect all{plane.size(0), 0, height, 0, width};
  const Tensor x = new_tensor(plane.sizes(), plane.scalar_type(), plane.device()),
               y = new_tensor(plane.sizes(), plane.scalar_type(), plane.device());
  dispatch_plane(plane, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_pixel<SobelAdjointSeed, T>(plane.device(), all, Work{}, pointer<const T>(plane), plane_view<T>(grad), pointer<T>(x),
                                        pointer<T>(y), height, width, static_cast<T>(scale), clip);
    for_each_pixel<SobelAdjoint, T>(plane.device(), all, Work{}, pointer<const T>(x), pointer<const T>(y), pointer<T>(out),
                                    height, width);
  });
}

void add_motion_adjoint(const Picture& picture, const Tensor& grad, const PlaneGradients& to) {
  const Tensor previous = luma_plane(picture.previous);
  dispatch_plane(previous, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_pixel<MotionAdjoint, T>(previous.device(), picture.all(), Work{}, pointer<const T>(picture.luma),
                                     pointer<const T>(previous), plane_view<T>(grad), pointer<T>(to.luma),
                                     pointer<T>(to.previous_luma), picture.height(), picture.width());
  });
}

namespace {

Tensor gradient_of(const Tensor& image, const Tensor& luma, const Tensor& rgb, const int64_t (&at)[3], const Tensor& salience) {
  TORCH_CHECK(image.scalar_type() != at::kByte, "texvlm: a uint8 picture has no gradient");
  Tensor out = new_tensor(image.sizes(), arithmetic(image), image.device());
  dispatch_plane(image, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using F = typename PictureAdjoint<T>::template For<T, 0>;
    F f{image_view<const T>(image),
        luma.defined() ? pointer<const T>(luma) : nullptr,
        picture_view<T>(rgb),
        picture_view<T>(salience),
        {at[0], at[1], at[2]},
        image_view<T>(out),
        image.size(2),
        image.size(3)};
    for_each_pixel<PictureAdjoint<T>::template For, T>(image.device(), {image.size(0), 0, image.size(2), 0, image.size(3)},
                                                       Work{1, 3}, f);
  });
  return out;
}

}  // namespace

Tensor picture_gradient(const Tensor& image, const PlaneGradients& from) {
  return gradient_of(image, from.luma, from.rgb, from.at, from.salience);
}

Tensor previous_gradient(const Tensor& previous, const PlaneGradients& from) {
  return gradient_of(previous, from.previous_luma, Tensor(), {-1, -1, -1}, Tensor());
}

// ---- the op ----

namespace {

using Maybe = const std::optional<Tensor>&;

Picture picture_of(const char* op, const Tensor& image, Maybe previous) {
  check_picture(op, "image", image);
  check_previous(op, previous, image);
  Picture picture{readable(image), readable(previous.value_or(Tensor())), {}, {}};
  picture.luma = luma_plane(picture.image);
  picture.edge = edge_plane(picture.luma);
  return picture;
}

Tensor saliency(const Tensor& image, Maybe previous) {
  const Picture picture = picture_of("saliency", image, previous);
  const Tensor map = salience_map(picture);
  const at::ScalarType dtype = image.scalar_type() == at::kByte ? at::kFloat : image.scalar_type();
  Tensor out = new_tensor({picture.batch(), picture.height(), picture.width()}, dtype, image.device());
  dispatch_texel(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_pixel<EnlargePlane, T>(image.device(), picture.all(), Work{},
                                    enlarged<Acc<T>>(map, picture.height(), picture.width()), pointer<T>(out));
  });
  return out;
}

std::tuple<Tensor, Tensor> saliency_backward(const Tensor& grad, const Tensor& image, std::array<bool, 2> mask, Maybe previous) {
  const char* op = "saliency_backward";
  const Picture picture = picture_of(op, image, previous);
  check_shape(op, "grad", grad, "[B, H, W]", {picture.batch(), picture.height(), picture.width()});
  check_same_device(op, "grad", grad, image);
  PlaneGradients to;
  to.luma = at::zeros_like(picture.luma);
  const bool moves = picture.previous.defined();
  if (moves) to.previous_luma = at::zeros_like(picture.luma);
  to.salience = salience_map_backward(grad.to(picture.luma.scalar_type()), picture);
  if (to.salience.defined()) {
    add_sobel_adjoint(picture.luma, to.salience.select(1, 3), kEdgeScale, false, to.luma);
    if (moves) add_motion_adjoint(picture, to.salience.select(1, 4), to);
  }
  return {mask[0] ? picture_gradient(picture.image, to) : Tensor(),
          mask[1] && moves ? previous_gradient(picture.previous, to) : Tensor()};
}

// ---- autograd ----

Tensor call_saliency(const Tensor& image, Maybe previous) {
  static const auto op = op_handle<Tensor(const Tensor&, Maybe)>("texvlm::saliency");
  return op.call(image, previous);
}

std::tuple<Tensor, Tensor> call_backward(const Tensor& grad, const Tensor& image, std::array<bool, 2> mask, Maybe previous) {
  static const auto op = op_handle<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, std::array<bool, 2>, Maybe)>(
      "texvlm::saliency_backward");
  return op.call(grad, image, mask, previous);
}

struct Saliency : torch::autograd::Function<Saliency> {
  static Tensor forward(AutogradContext* ctx, const Tensor& image, Maybe previous) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({image, previous.value_or(Tensor())});
    return call_saliency(image, previous);
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const bool moves = saved[1].defined();
    const auto [image, previous] =
        call_backward(grads[0], saved[0], {ctx->needs_input_grad(0), moves && ctx->needs_input_grad(1)},
                      moves ? std::optional<Tensor>(saved[1]) : std::nullopt);
    const auto cast = [](const Tensor& g, const Tensor& like) { return g.defined() ? g.to(like.scalar_type()) : g; };
    return {cast(image, saved[0]), cast(previous, saved[1])};
  }
};

Tensor saliency_autograd(const Tensor& image, Maybe previous) {
  const Tensor other = previous.value_or(Tensor());
  if (records({&image, &other})) return Saliency::apply(image, previous);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_saliency(image, previous);
}

}  // namespace

#define TEXVLM_SALIENCE_KERNELS \
  m.impl("saliency", saliency); \
  m.impl("saliency_backward", saliency_backward)
TORCH_LIBRARY_IMPL(texvlm, CPU, m) { TEXVLM_SALIENCE_KERNELS; }
TORCH_LIBRARY_IMPL(texvlm, CUDA, m) { TEXVLM_SALIENCE_KERNELS; }
TORCH_LIBRARY_IMPL(texvlm, Autograd, m) {
  m.impl("saliency", saliency_autograd);
  m.impl("saliency_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace texvlm
