#include "picture.h"

#include "math/salience.h"
#include "math/stats.h"
#include "reduce.h"

namespace texvlm {

using at::Tensor;

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

Tensor luma_plane(const Tensor& image) {
  if (!image.defined()) return {};
  const int64_t height = image.size(2), width = image.size(3);
  Tensor out = new_tensor({image.size(0), height, width}, acc_dtype(image.scalar_type()), image.device());
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
    for_each_plane_reduced<EdgeThreshold, T>(edge.device(), batch, height, width, 1, pointer<const T>(edge),
                                             pointer<double>(threshold), height, width);
  });
  return threshold;
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
  Tensor out = new_tensor(image.sizes(), acc_dtype(image.scalar_type()), image.device());
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
  return gradient_of(previous, from.previous_luma, Tensor(), {-1, -1, -1}, from.previous_salience);
}

}  // namespace texvlm
