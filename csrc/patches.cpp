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

  Patches(const char* op, const Tensor& data, const Tensor& center_, const Tensor& lod_, const TextureArgs& of, int64_t size_,
          std::string_view address_, Maybe axes_) {
    const TextureInputs texture = check_texture(op, data, of);
    levels = texture.table, reducers = texture.reducers;
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

Tensor extract_patches(const Tensor& data, const Tensor& center, const Tensor& lod, const TextureArgs& of, int64_t size,
                       c10::string_view address, Maybe axes) {
  const Patches p("extract_patches", data, center, lod, of, size, address, axes);
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
                                                                    const Tensor& lod, const TextureArgs& of, int64_t size,
                                                                    c10::string_view address, Maybe axes,
                                                                    std::array<bool, 4> mask) {
  const char* op = "extract_patches_backward";
  const Patches p(op, data, center, lod, of, size, address, axes);
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
    const Texels<A> target = texvlm::texels<A>(texels);
    const auto texture = texture_view<const T>(data, p.levels);
    if (on_cuda(data.device())) {
      const c10::DeviceGuard guard(data.device());
      const FixedSums fixed(grad, texels, p.batch * p.count * size * size);
      const ExtractPatchesAdjoint<T, 0> f{texture, p.grid<A>(),        p.reducers,      incoming,
                                          target,  maybe(grad_center), maybe(grad_lod), maybe(grad_axes)};
      cuda::patches_adjoint(f, p.batch, fixed.view, current_stream(data.device()));
      return fixed.template add_to<A>(texels);
    }
    const Texels<A> none = texvlm::texels<A>(Tensor());
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

}  // namespace

TEXVLM_OPS(ops) {
  ops.differentiable<extract_patches>("extract_patches");
  ops.op<extract_patches_backward>("extract_patches_backward");
  ops.promotes("extract_patches", {"center", "lod", "axes"});
}

}  // namespace texvlm
