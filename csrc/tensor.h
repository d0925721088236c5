// Tensors to plain views, and scalar types to functor types.
#pragma once

#include <ATen/core/Tensor.h>

#include "check.h"
#include "math/texture.h"
#include "memory.h"

namespace texvlm {

template <class T>
struct Tag {
  using type = T;
};

// Calls body(Tag<T>{}) with the functor type of a texel dtype that check_texel_dtype has accepted.
template <class F>
auto dispatch_texel(at::ScalarType dtype, const F& body) {
  switch (dtype) {
    case at::kDouble:
      return body(Tag<double>{});
    case at::kHalf:
      return body(Tag<Half>{});
    case at::kBFloat16:
      return body(Tag<BFloat16>{});
    default:
      return body(Tag<float>{});
  }
}

// The same for planes in the arithmetic's dtype, float or double.
template <class F>
auto dispatch_plane(at::ScalarType dtype, const F& body) {
  return dtype == at::kDouble ? body(Tag<double>{}) : body(Tag<float>{});
}
template <class F>
auto dispatch_plane(const at::Tensor& plane, const F& body) {
  return dispatch_plane(plane.scalar_type(), body);
}

// The dtype of texels made from a picture: what was asked for, else the picture's own; float for bytes.
inline at::ScalarType texel_dtype(const at::Tensor& image, std::optional<at::ScalarType> dtype = std::nullopt) {
  return dtype.value_or(image.scalar_type() == at::kByte ? at::kFloat : image.scalar_type());
}

// The dtype that coordinates, weights and gradient accumulators have beside texels of this dtype.
inline at::ScalarType acc_dtype(at::ScalarType texel) { return texel == at::kDouble ? at::kDouble : at::kFloat; }

template <class T>
T* pointer(const at::Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

// data [B, T, C]; null where it is undefined.
template <class T>
Texels<T> texels(const at::Tensor& data) {
  if (!data.defined()) return {nullptr, 0, 1};
  return {pointer<T>(data), data.size(0) == 1 ? 0 : data.size(1) * data.size(2), data.size(2)};
}
template <class T>
TextureView<T> texture_view(const at::Tensor& data, const Levels& levels) {
  return {texels<T>(data), levels};
}

template <class T>
ImageView<T> image_view(const at::Tensor& image) {  // [B, C, H, W]
  return {pointer<T>(image), image.stride(0), image.stride(1), image.stride(2), image.stride(3)};
}

// A plane [B, H, W] of any strides as a picture of one channel; data is null where it is undefined.
template <class T>
ImageView<const T> plane_view(const at::Tensor& plane) {
  if (!plane.defined()) return {nullptr, 0, 0, 0, 0};
  return {pointer<const T>(plane), plane.stride(0), 0, plane.stride(1), plane.stride(2)};
}

}  // namespace texvlm
