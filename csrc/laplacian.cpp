// Host code of the stem `laplacian`: bands of a pyramid, the pyramid of its bands, and the adjoints of both.
#include "math/laplacian.h"

#include "autograd.h"
#include "launch.h"
#include "tensor.h"

namespace texvlm {
namespace {

Rect whole(const Tensor& data, const Levels& levels, int level) {
  return {data.size(0), 0, levels.height[level], 0, levels.width[level]};
}

// Decomposing reads the levels as they are given; reconstructing goes from coarse to fine over levels that it
// has stored itself.
Tensor enlarge_and_add(const char* op, const Tensor& data, int64_t height, int64_t width, int64_t level_count, bool reconstruct) {
  const Levels levels = check_texture(op, data, height, width, level_count);
  Tensor out = new_tensor(data.sizes(), data.scalar_type(), data.device());
  const int64_t channels = data.size(2), last = levels.offset[levels.count - 1];
  out.narrow(1, last, levels.texels - last).copy_(data.narrow(1, last, levels.texels - last));
  dispatch_texel(data.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto in = texture_view<const T>(data, levels);
    const auto above = texels<const T>(reconstruct ? out : data);
    for (int level = levels.count - 2; level >= 0; --level) {
      for_each_texel<AddEnlarged, T>(data.device(), whole(data, levels, level), channels, in, above, texels<T>(out), level,
                                     reconstruct ? Acc<T>(1) : Acc<T>(-1));
    }
  });
  return out;
}

// The gradient in the accumulators' dtype.
Tensor enlarge_and_add_backward(const char* op, const Tensor& grad, int64_t height, int64_t width, int64_t level_count,
                                bool reconstruct) {
  const Tensor packed = grad.contiguous();
  const Levels levels = check_texture(op, packed, height, width, level_count);
  Tensor out = new_tensor(grad.sizes(), acc_dtype(grad.scalar_type()), grad.device());
  dispatch_texel(grad.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto in = texture_view<const T>(packed, levels);
    const auto result = texels<Acc<T>>(out);
    for_each_texel<CopyLevel, T>(grad.device(), whole(grad, levels, 0), grad.size(2), in, result, 0);
    for (int level = 1; level < levels.count; ++level) {
      for_each_texel<AddEnlargedAdjoint, T>(grad.device(), whole(grad, levels, level), grad.size(2), in, result, level,
                                            reconstruct ? Acc<T>(1) : Acc<T>(-1), reconstruct);
    }
  });
  return out;
}

Tensor laplacian_decompose(const Tensor& data, Size height, Size width, int64_t levels) {
  return enlarge_and_add("laplacian_decompose", data, height, width, levels, false);
}
Tensor laplacian_reconstruct(const Tensor& bands, Size height, Size width, int64_t levels) {
  return enlarge_and_add("laplacian_reconstruct", bands, height, width, levels, true);
}
Tensor laplacian_decompose_backward(const Tensor& grad, Size height, Size width, int64_t levels) {
  return enlarge_and_add_backward("laplacian_decompose_backward", grad, height, width, levels, false);
}
Tensor laplacian_reconstruct_backward(const Tensor& grad, Size height, Size width, int64_t levels) {
  return enlarge_and_add_backward("laplacian_reconstruct_backward", grad, height, width, levels, true);
}

}  // namespace

// Both maps are linear, so the derivative of the adjoint is the map itself.
TEXVLM_OPS(ops) {
  ops.differentiable<laplacian_decompose>("laplacian_decompose");
  ops.differentiable<laplacian_decompose_backward>("laplacian_decompose_backward",
                                                   GradientRule().by("texvlm::laplacian_decompose").packed());
  ops.differentiable<laplacian_reconstruct>("laplacian_reconstruct");
  ops.differentiable<laplacian_reconstruct_backward>("laplacian_reconstruct_backward",
                                                     GradientRule().by("texvlm::laplacian_reconstruct").packed());
}

}  // namespace texvlm
