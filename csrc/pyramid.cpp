// Host code of the stem `pyramid`: mipmaps of a picture, their adjoint, and the update in place.
#include "math/pyramid.h"

#include <algorithm>

#include "autograd.h"
#include "cuda/pyramid.h"
#include "launch.h"
#include "pyramid.h"
#include "tensor.h"

namespace texvlm {
namespace {

// Levels `first`.. from the level before, or only what depends on the rectangle r of that level.
template <class T>
void build_levels(c10::Device device, const TextureView<T>& texture, const Reducers& reducers, Rect r, int first = 1) {
  const auto parents = [](int64_t& lo, int64_t& hi, int64_t n) {  // the range of destination texels that read [lo, hi) of n
    if (n == 1) return;
    lo = n % 2 ? std::max<int64_t>(0, (lo - 1) / 2) : lo / 2;
    hi = std::min<int64_t>(n / 2, (hi + 1) / 2);
  };
  for (int level = first; level < texture.levels.count; ++level) {
    parents(r.y0, r.y1, texture.levels.height[level - 1]);
    parents(r.x0, r.x1, texture.levels.width[level - 1]);
    for_each_texel<MipDown, T>(device, r, texture.channels, texture, level, reducers);
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
  build_levels(data.device(), texture, reducers, {batch, 0, table.height[k], 0, table.width[k]}, k + 1);
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

Tensor generate_mipmaps_backward(const Tensor& grad, int64_t height, int64_t width, Names reducer, int64_t levels, Maybe data) {
  const char* op = "generate_mipmaps_backward";
  const Tensor packed = grad.contiguous();
  const Levels table = check_texture(op, packed, height, width, levels);
  const Reducers reducers = check_reducers(op, strings(reducer), grad.size(2));
  const int64_t batch = grad.size(0), channels = grad.size(2);
  const bool needs_data = reducers.any_extremum;
  TORCH_CHECK_VALUE(!needs_data || (data && data->defined()), "texvlm::", op,
                    ": data (the pyramid) is needed for the reducers max and min");
  if (needs_data) {
    check_texture(op, *data, height, width, levels);
    check_dtype(op, "data", *data, grad.scalar_type(), " (as the gradient)");
    check_same_device(op, "data", *data, grad);
  }
  const at::ScalarType acc = acc_dtype(grad.scalar_type());
  Tensor image = new_tensor({batch, channels, height, width}, acc, grad.device());
  const Levels upper = table.count > 1 ? make_levels(table.height[1], table.width[1], table.count - 1) : Levels{};
  const Tensor work = new_tensor({batch, upper.texels, channels}, acc, grad.device());
  dispatch_texel(grad.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto incoming = texture_view<const T>(packed, table);
    const auto pyramid = texture_view<const T>(needs_data ? *data : packed, table);
    const auto accumulated = texture_view<Acc<T>>(work, upper);
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

void update_mipmaps(const Tensor& data, int64_t height, int64_t width, Names reducer, int64_t levels, Maybe rects) {
  const char* op = "update_mipmaps";
  const Levels table = check_texture(op, data, height, width, levels);
  const Reducers reducers = check_reducers(op, strings(reducer), data.size(2));
  std::vector<Rect> todo;
  const bool whole = !rects || !rects->defined();
  if (!whole) {
    check_shape(op, "rects", *rects, "[R, 4] (y0, x0, y1, x1)", {-1, 4});
    check_dtype(op, "rects", *rects, at::kLong, "");
    TEXVLM_CHECK(rects->is_cpu(), op, "rects", "on the CPU (they steer the launches)", rects->device().str());
    const Tensor list = rects->contiguous();
    const int64_t* p = list.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < list.size(0); ++i, p += 4) {
      TEXVLM_CHECK(p[0] >= 0 && p[1] >= 0 && p[0] <= p[2] && p[1] <= p[3] && p[2] <= height && p[3] <= width, op, "rects",
                   "inside " + std::to_string(height) + " x " + std::to_string(width) + " with y0 <= y1 and x0 <= x1", "row ", i,
                   " = (", p[0], ", ", p[1], ", ", p[2], ", ", p[3], ")");
      if (p[0] < p[2] && p[1] < p[3]) todo.push_back({data.size(0), p[0], p[2], p[1], p[3]});
    }
  }
  if (whole) return build_mipmaps(data, table, reducers);
  dispatch_texel(data.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (const Rect& r : todo) build_levels(data.device(), texture_view<T>(data, table), reducers, r);
  });
}

// ---- autograd ----

using GenerateSignature = Tensor(const Tensor&, Names, int64_t, std::optional<at::ScalarType>);
using BackwardSignature = Tensor(const Tensor&, SymInt, SymInt, Names, int64_t, Maybe);

Tensor call_generate(const Tensor& image, const Names& reducer, int64_t levels, std::optional<at::ScalarType> dtype) {
  static const auto op = op_handle<GenerateSignature>("texvlm::generate_mipmaps");
  return op.call(image, reducer, levels, dtype);
}

Tensor call_backward(const Tensor& grad, const SymInt& height, const SymInt& width, const Names& reducer, int64_t levels,
                     Maybe data) {
  static const auto op = op_handle<BackwardSignature>("texvlm::generate_mipmaps_backward");
  return op.call(grad, height, width, reducer, levels, data);
}

bool any_named(const Names& reducer, std::initializer_list<const char*> names) {
  for (const std::string& r : strings(reducer))
    for (const char* name : names)
      if (r == name) return true;
  return false;
}

struct GenerateMipmaps : torch::autograd::Function<GenerateMipmaps> {
  static Tensor forward(AutogradContext* ctx, const Tensor& image, const Names& reducer, int64_t levels,
                        std::optional<at::ScalarType> dtype) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    Tensor data = call_generate(image, reducer, levels, dtype);
    ctx->save_for_backward({any_named(reducer, {"max", "min"}) ? data : Tensor()});
    ctx->saved_data["height"] = image.sym_size(2);
    ctx->saved_data["width"] = image.sym_size(3);
    ctx->saved_data["reducer"] = reducer;
    ctx->saved_data["levels"] = levels;
    ctx->saved_data["dtype"] = static_cast<int64_t>(image.scalar_type());
    return data;
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor image =
        call_backward(grads[0], ctx->saved_data["height"].toSymInt(), ctx->saved_data["width"].toSymInt(),
                      ctx->saved_data["reducer"].to<Names>(), ctx->saved_data["levels"].toInt(), maybe(saved[0]));
    return {image.to(static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt())), Tensor(), Tensor(), Tensor()};
  }
};

Tensor generate_mipmaps_autograd(const Tensor& image, Names reducer, int64_t levels, std::optional<at::ScalarType> dtype) {
  if (records({&image})) return GenerateMipmaps::apply(image, reducer, levels, dtype);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_generate(image, reducer, levels, dtype);
}

// The adjoint of the mean chain is linear in `grad`, so its own derivative is the chain itself.
struct GenerateMipmapsBackward : torch::autograd::Function<GenerateMipmapsBackward> {
  static Tensor forward(AutogradContext* ctx, const Tensor& grad, const SymInt& height, const SymInt& width, const Names& reducer,
                        int64_t levels, Maybe data) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["reducer"] = reducer;
    ctx->saved_data["levels"] = levels;
    ctx->saved_data["dtype"] = static_cast<int64_t>(grad.scalar_type());
    return call_backward(grad, height, width, reducer, levels, data);
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto reducer = ctx->saved_data["reducer"].to<Names>();
    TORCH_CHECK_NOT_IMPLEMENTED(!any_named(reducer, {"max", "min", "mode"}),
                                "texvlm::generate_mipmaps: second derivatives exist for the reducer mean only");
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    return {call_generate(grads[0], reducer, ctx->saved_data["levels"].toInt(), dtype),
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

Tensor generate_mipmaps_backward_autograd(const Tensor& grad, SymInt height, SymInt width, Names reducer, int64_t levels,
                                          Maybe data) {
  if (records({&grad})) return GenerateMipmapsBackward::apply(grad, height, width, reducer, levels, data);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_backward(grad, height, width, reducer, levels, data);
}

void call_update(const Tensor& data, const SymInt& height, const SymInt& width, const Names& reducer, int64_t levels,
                 Maybe rects) {
  using Signature = void(const Tensor&, SymInt, SymInt, Names, int64_t, Maybe);
  static const auto op = op_handle<Signature>("texvlm::update_mipmaps");
  op.call(data, height, width, reducer, levels, rects);
}

void update_mipmaps_autograd(const Tensor& data, SymInt height, SymInt width, Names reducer, int64_t levels, Maybe rects) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !(c10::GradMode::is_enabled() && data.requires_grad()) && !data._fw_grad(0).defined(),
      "texvlm::update_mipmaps: works in place and is not differentiable; call it under torch.no_grad() or on "
      "data.detach()");
  const at::AutoDispatchBelowAutograd guard;
  call_update(data, height, width, reducer, levels, rects);
}

// Counts the write, so that autograd sees a saved tensor change, and the cache of texture arrays its texels. (PyTorch's fallbacks
// count what an op returns, and this one returns nothing.)
void update_mipmaps_in_place(const Tensor& data, SymInt height, SymInt width, Names reducer, int64_t levels, Maybe rects) {
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    call_update(data, height, width, reducer, levels, rects);
  }
  torch::autograd::impl::bump_version(data);
}

}  // namespace

void build_mipmaps(const Tensor& data, const Levels& levels, const Reducers& reducers) {
  dispatch_texel(data.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    build_pyramid<T, T>(Tensor(), data, levels, reducers);
  });
}

TEXVLM_KERNELS(m) {
  m.impl("generate_mipmaps", generate_mipmaps);
  m.impl("generate_mipmaps_backward", generate_mipmaps_backward);
  m.impl("update_mipmaps", update_mipmaps);
}
TORCH_LIBRARY_IMPL(texvlm, Autograd, m) {
  m.impl("generate_mipmaps", generate_mipmaps_autograd);
  m.impl("generate_mipmaps_backward", generate_mipmaps_backward_autograd);
  m.impl("update_mipmaps", update_mipmaps_autograd);
}
TORCH_LIBRARY_IMPL(texvlm, ADInplaceOrView, m) { m.impl("update_mipmaps", update_mipmaps_in_place); }

}  // namespace texvlm
