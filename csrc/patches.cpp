// Host code of the stem `patches`: square patches of a texture, any centre, LOD and axes.
#include "math/patches_adjoint.h"

#include "autograd.h"
#include "cuda/patches.h"
#include "fixed.h"
#include "launch.h"
#include "queries.h"
#include "scatter.h"
#include "tensor.h"

namespace texvlm {
namespace {

constexpr int64_t kMaxPatch = 16384;

// Everything that forward and backward check and prepare alike. Coordinates are small: they may be copied.
struct Patches {
  Levels levels;
  Reducers reducers;
  Address address;
  Tensor center, lod, axes;
  int64_t batch, count, channels, size;

  Patches(const char* op, const Tensor& data, const Tensor& center_, const Tensor& lod_, int64_t height, int64_t width,
          const Names& reducer, int64_t level_count, int64_t size_, std::string_view address_, Maybe axes_) {
    levels = check_texture(op, data, height, width, level_count);
    reducers = check_reducers(op, strings(reducer), data.size(2));
    address = parse_address(op, address_);
    check_coordinates(op, "center", center_, data, "[B, N, 2]", {-1, -1, 2});
    batch = center_.size(0), count = center_.size(1), channels = data.size(2), size = size_;
    check_coordinates(op, "lod", lod_, data, "[B, N]", {batch, count});
    if (axes_ && axes_->defined()) {
      check_coordinates(op, "axes", *axes_, data, "[B, N, 2, 2]", {batch, count, 2, 2});
      axes = axes_->contiguous();
    }
    TEXVLM_CHECK(size >= 1 && size <= kMaxPatch, op, "size", "from 1 to " + std::to_string(kMaxPatch), size);
    center = center_.contiguous();
    lod = lod_.contiguous();
  }

  template <class A>
  PatchGrid<A> grid() const {
    return {pointer<A>(center),
            pointer<A>(lod),
            axes.defined() ? pointer<A>(axes) : nullptr,
            count,
            static_cast<int>(size),
            levels.count,
            address,
            A(1) / static_cast<A>(levels.width[0]),
            A(1) / static_cast<A>(levels.height[0])};
  }
};

Tensor extract_patches(const Tensor& data, const Tensor& center, const Tensor& lod, int64_t height, int64_t width, Names reducer,
                       int64_t levels, int64_t size, c10::string_view address, Maybe axes) {
  const Patches p("extract_patches", data, center, lod, height, width, reducer, levels, size, address, axes);
  Tensor out = new_tensor({p.batch, p.count, p.channels, size, size}, data.scalar_type(), data.device());
  dispatch_texel(data.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto texture = texture_view<const T>(data, p.levels);
    const auto grid = p.grid<Acc<T>>();
    if (on_cuda(data.device())) {
      const c10::DeviceGuard guard(data.device());
      return cuda::patches(ExtractPatches<T, 0>{texture, grid, p.reducers, pointer<T>(out)}, p.batch,
                           current_stream(data.device()));
    }
    for_each_query_on_host<ExtractPatches, T>(p.batch, p.count, size * size * p.channels, p.channels, false, texture, grid,
                                              p.reducers, pointer<T>(out));
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> extract_patches_backward(const Tensor& grad, const Tensor& data, const Tensor& center,
                                                                    const Tensor& lod, int64_t height, int64_t width,
                                                                    Names reducer, int64_t levels, int64_t size,
                                                                    c10::string_view address, std::array<bool, 4> mask,
                                                                    Maybe axes) {
  const char* op = "extract_patches_backward";
  const Patches p(op, data, center, lod, height, width, reducer, levels, size, address, axes);
  check_shape(op, "grad", grad, "[B, N, C, size, size]", {p.batch, p.count, p.channels, size, size});
  check_dtype(op, "grad", grad, data.scalar_type(), " (as data)");
  check_same_device(op, "grad", grad, data);
  const at::ScalarType acc = acc_dtype(data.scalar_type());
  const auto zeros = [&](bool wanted, at::IntArrayRef sizes) { return wanted ? new_zeros(sizes, acc, data.device()) : Tensor(); };
  const int64_t pictures = data.size(0), queries = p.batch * p.count;
  const bool banded = mask[0] && !on_cuda(data.device()) && host::worth_banding(queries, size * size, pictures);
  const bool fill = banded && host::worth_filling(queries * size * size, pictures * data.size(1),
                                                  data.numel() * static_cast<int64_t>(c10::elementSize(acc)));
  Tensor texels = fill ? new_tensor(data.sizes(), acc, data.device()) : zeros(mask[0], data.sizes()),
         grad_center = zeros(mask[1], p.center.sizes()), grad_lod = zeros(mask[2], p.lod.sizes());
  Tensor grad_axes = zeros(mask[3] && p.axes.defined(), {p.batch, p.count, 2, 2});
  dispatch_texel(data.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Acc<T>;
    const auto maybe = [](const Tensor& t) { return t.defined() ? pointer<A>(t) : nullptr; };
    PatchGradView<T> incoming{pointer<T>(grad), {}};
    for (int d = 0; d < 5; ++d) incoming.stride[d] = grad.stride(d);
    const TextureView<A> target{maybe(texels), data.size(0) == 1 ? 0 : data.size(1) * data.size(2), data.size(2), p.levels};
    const auto texture = texture_view<const T>(data, p.levels);
    if (on_cuda(data.device())) {
      const c10::DeviceGuard guard(data.device());
      const FixedSums fixed(grad, texels, p.batch * p.count * size * size);
      const ExtractPatchesAdjoint<T, 0> f{texture, p.grid<A>(),        p.reducers,      incoming,
                                          target,  maybe(grad_center), maybe(grad_lod), maybe(grad_axes)};
      cuda::patches_adjoint(f, p.batch, fixed.view, current_stream(data.device()));
      return fixed.template add_to<A>(texels);
    }
    const TextureView<A> none{nullptr, 0, 0, p.levels};
    if (grad_center.defined() || grad_lod.defined() || grad_axes.defined())
      for_each_query_on_host<ExtractPatchesAdjoint, T>(p.batch, p.count, size * size * p.channels, p.channels, false, texture,
                                                       p.grid<A>(), p.reducers, incoming, none, maybe(grad_center),
                                                       maybe(grad_lod), maybe(grad_axes));
    if (!mask[0] || p.channels == 0) return;
    const PatchKeys<A> find{p.grid<A>(), p.levels, pictures > 1};
    const auto lists = banded ? host::list_by_bands(p.levels, pictures, queries, p.channels * static_cast<int64_t>(sizeof(A)),
                                                    PatchKeys<A>::kPairs, find, fill)
                              : host::one_list(queries);
    A* const no = nullptr;
    host::scatter_by_bands<ExtractPatchesAdjoint, T>(lists, p.levels, p.channels, maybe(texels), texture, p.grid<A>(), p.reducers,
                                                     incoming, target, no, no, no);
  });
  if (texels.defined()) texels = texels.to(data.scalar_type());
  return {texels, grad_center, grad_lod, grad_axes};
}

// ---- autograd ----

using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, SymInt, SymInt, Names, int64_t, int64_t, c10::string_view,
                         Maybe);
using BackwardSignature = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                                     SymInt, SymInt, Names, int64_t, int64_t, c10::string_view,
                                                                     std::array<bool, 4>, Maybe);

Tensor call(const Tensor& data, const Tensor& center, const Tensor& lod, const SymInt& height, const SymInt& width,
            const Names& reducer, int64_t levels, int64_t size, c10::string_view address, Maybe axes) {
  static const auto op = op_handle<Signature>("texvlm::extract_patches");
  return op.call(data, center, lod, height, width, reducer, levels, size, address, axes);
}

struct ExtractPatchesFunction : torch::autograd::Function<ExtractPatchesFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& data, const Tensor& center, const Tensor& lod, const SymInt& height,
                        const SymInt& width, const Names& reducer, int64_t levels, int64_t size, c10::string_view address,
                        Maybe axes) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({data, center, lod, axes.value_or(Tensor())});
    ctx->saved_data["height"] = height;
    ctx->saved_data["width"] = width;
    ctx->saved_data["reducer"] = reducer;
    ctx->saved_data["levels"] = levels;
    ctx->saved_data["size"] = size;
    ctx->saved_data["address"] = std::string(address);
    return call(data, center, lod, height, width, reducer, levels, size, address, axes);
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    static const auto op = op_handle<BackwardSignature>("texvlm::extract_patches_backward");
    const auto saved = ctx->get_saved_variables();
    const bool has_axes = saved[3].defined();
    const std::array<bool, 4> mask{ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2),
                                   has_axes && ctx->needs_input_grad(3)};
    const std::string address = ctx->saved_data["address"].toStringRef();
    const auto [data, center, lod, axes] =
        op.call(grads[0], saved[0], saved[1], saved[2], ctx->saved_data["height"].toSymInt(), ctx->saved_data["width"].toSymInt(),
                ctx->saved_data["reducer"].to<Names>(), ctx->saved_data["levels"].toInt(), ctx->saved_data["size"].toInt(),
                address, mask, maybe(saved[3]));
    return {data, center, lod, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), axes};
  }
};

Tensor extract_patches_autograd(const Tensor& data, const Tensor& center, const Tensor& lod, SymInt height, SymInt width,
                                Names reducer, int64_t levels, int64_t size, c10::string_view address, Maybe axes) {
  const Tensor none;
  if (records({&data, &center, &lod, axes ? &*axes : &none}))
    return ExtractPatchesFunction::apply(data, center, lod, height, width, reducer, levels, size, address, axes);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call(data, center, lod, height, width, reducer, levels, size, address, axes);
}

Tensor extract_patches_autocast(const Tensor& data, const Tensor& center, const Tensor& lod, SymInt height, SymInt width,
                                Names reducer, int64_t levels, int64_t size, c10::string_view address, Maybe axes) {
  const NoAutocast guard;
  return call(data, promoted(center), promoted(lod), height, width, reducer, levels, size, address, promoted(axes));
}

}  // namespace

TEXVLM_KERNELS(m) {
  m.impl("extract_patches", extract_patches);
  m.impl("extract_patches_backward", extract_patches_backward);
}
TORCH_LIBRARY_IMPL(texvlm, Autograd, m) {
  m.impl("extract_patches", extract_patches_autograd);
  m.impl("extract_patches_backward", torch::autograd::autogradNotImplementedFallback());
}
TEXVLM_AUTOCAST(m) { m.impl("extract_patches", extract_patches_autocast); }

}  // namespace texvlm
