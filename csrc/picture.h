// A picture [B, 3, H, W] as an argument, its planes of luma and edges, and the way of their gradients back to it: for every stem
// that reads pictures.
#pragma once

#include <optional>

#include "launch.h"
#include "math/luma.h"
#include "tensor.h"

namespace texvlm {

// Checks a picture [B, 3, H, W] (float or uint8), and another of the same shape, dtype and device.
void check_picture(const char* op, const char* argument, const at::Tensor& image);
void check_previous(const char* op, const std::optional<at::Tensor>& previous, const at::Tensor& image);

// The picture as the functors read it: uint8, float32 and float64 as they are, half types converted.
at::Tensor readable(const at::Tensor& image);

// Calls body(Tag<S>{}) with the functor type of a readable picture; its arithmetic is in Acc<S>.
template <class F>
auto dispatch_picture(const at::Tensor& image, const F& body) {
  switch (image.scalar_type()) {
    case at::kByte:
      return body(Tag<uint8_t>{});
    case at::kDouble:
      return body(Tag<double>{});
    default:
      return body(Tag<float>{});
  }
}

// View of a picture that may be missing: data is null then.
template <class S>
ImageView<const S> picture_view(const at::Tensor& image) {
  return image.defined() ? image_view<const S>(image) : ImageView<const S>{nullptr, 0, 0, 0, 0};
}

// Readable [B, 3, H, W] -> [B, H, W] in the arithmetic's dtype; undefined stays undefined.
at::Tensor luma_plane(const at::Tensor& image);
at::Tensor edge_plane(const at::Tensor& luma);
// What an edge must be above to count, relative to the picture's own edges: double [B]. The same for every channel that asks.
at::Tensor edge_threshold(const at::Tensor& edge);

// A picture in all the forms that the functors need. `previous` may be undefined.
struct Picture {
  at::Tensor image, previous, luma, edge;
  int64_t batch() const { return image.size(0); }
  int64_t height() const { return image.size(2); }
  int64_t width() const { return image.size(3); }
  Rect all() const { return {batch(), 0, height(), 0, width()}; }
};

// Gradients of the planes to gradients of the pictures.
struct PlaneGradients {
  at::Tensor luma, previous_luma;  // [B, H, W], zero-filled
  at::Tensor rgb;                  // [B, C, H, W] whose channels `at` are red, green and blue (-1: none), or undefined
  int64_t at[3] = {-1, -1, -1};
  at::Tensor salience, previous_salience;  // [B, 3, H, W], or undefined
};
// Adds the adjoint of |Sobel plane| / scale; grad [B, H, W] of any strides. With `clip` the values were cut off at 1.
void add_sobel_adjoint(const at::Tensor& plane, const at::Tensor& grad, double scale, bool clip, const at::Tensor& out);
void add_motion_adjoint(const Picture& picture, const at::Tensor& grad, const PlaneGradients& to);
at::Tensor picture_gradient(const at::Tensor& image, const PlaneGradients& from);
at::Tensor previous_gradient(const at::Tensor& previous, const PlaneGradients& from);

}  // namespace texvlm
