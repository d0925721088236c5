// Host code of the stem `sample`: sampling at an explicit level of detail, and its adjoint.
#include "math/sample_adjoint.h"

#include <array>

#include "autograd.h"
#include "cuda/sample.h"
#include "fixed.h"
#include "launch.h"
#include "queries.h"
#include "scatter.h"

namespace texvlm {
namespace {

Tensor sample_lod(const Tensor& data, const Tensor& uv, const Tensor& lod, const TextureArgs& of, c10::string_view filter,
                  c10::string_view address) {
  const SampleInputs in = check_lod_queries("sample_lod", data, uv, lod, of, filter, address);
  const int64_t batch = uv.size(0), count = uv.size(1), channels = data.size(2);
  Tensor out = new_tensor({batch, count, channels}, data.scalar_type(), data.device());
  dispatch_texel(data.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto texture = texture_view<const T>(data, in.table);
    const auto queries = query_view<Acc<T>>(uv, lod);
    if (on_cuda(data.device())) {
      const c10::DeviceGuard guard(data.device());
      const SampleLod<T, 0> f{texture, queries, pointer<T>(out), count, in.reducers, in.filter, in.address, data.numel()};
      return cuda::sample(f, batch, current_stream(data.device()));
    }
    for_each_query_on_host<SampleLod, T>(batch, count, 4 * channels, channels, false, texture, queries, pointer<T>(out), count,
                                         in.reducers, in.filter, in.address, data.numel());
  });
  return out;
}

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

Gradients sample_lod_backward(const Tensor& grad, const Tensor& data, const Tensor& uv, const Tensor& lod, const TextureArgs& of,
                              c10::string_view filter, c10::string_view address, std::array<bool, 3> mask) {
  const char* op = "sample_lod_backward";
  const SampleInputs in = check_lod_queries(op, data, uv, lod, of, filter, address);
  const int64_t pictures = data.size(0), batch = uv.size(0), count = uv.size(1), channels = data.size(2), queries = batch * count;
  check_shape(op, "grad", grad, "[B, N, C]", {batch, count, channels});
  check_dtype(op, "grad", grad, data.scalar_type(), " (as the texels)");
  check_same_device(op, "grad", grad, data);
  const at::Device device = data.device();
  const at::ScalarType acc = acc_dtype(data.scalar_type());

  const bool banded = mask[0] && !on_cuda(device) && channels > 0 && host::worth_banding(queries, 1, pictures);
  Tensor grad_data, grad_uv, grad_lod;
  if (mask[0]) {
    grad_data = banded ? new_tensor(data.sizes(), acc, device) : new_zeros(data.sizes(), acc, device);
  }
  if (mask[1]) grad_uv = new_zeros({batch, count, 2}, acc, device);
  if (mask[2]) grad_lod = new_zeros({batch, count}, acc, device);
  dispatch_texel(data.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Acc<T>;
    const auto texture = texture_view<const T>(data, in.table);
    const auto view = query_view<A>(uv, lod);
    const GradView<T> incoming{pointer<const T>(grad), grad.stride(0), grad.stride(1), grad.stride(2)};
    A* const to_data = mask[0] ? pointer<A>(grad_data) : nullptr;
    A* const to_uv = mask[1] && in.filter != Filter::nearest ? pointer<A>(grad_uv) : nullptr;
    A* const to_lod = mask[2] && in.filter == Filter::trilinear && in.table.count > 1 ? pointer<A>(grad_lod) : nullptr;
    if (!to_data && !to_uv && !to_lod) return;
    if (on_cuda(device)) {
      const c10::DeviceGuard guard(device);
      const FixedSums fixed(grad, grad_data, queries);
      const SampleLodAdjoint<T, 0> f{.texture = texture,
                                     .queries = view,
                                     .grad = incoming,
                                     .grad_data = to_data,
                                     .grad_uv = to_uv,
                                     .grad_lod = to_lod,
                                     .count = count,
                                     .reducers = in.reducers,
                                     .filter = in.filter,
                                     .address = in.address};
      cuda::sample_adjoint(f, batch, fixed.view, current_stream(device));
      if (to_data) fixed.template add_to<A>(grad_data);
    } else if (banded) {
      const SampleKeys<A> find{view, in.table, pictures > 1, count, in.filter, in.address};
      const auto lists =
          host::list_by_bands(in.table, pictures, queries, channels * static_cast<int64_t>(sizeof(A)), find.pairs(), find);
      host::scatter_by_bands<SampleLodAdjoint, T>(lists, in.table, channels, to_data, texture, view, incoming, to_data, to_uv,
                                                  to_lod, count, in.reducers, in.filter, in.address);
    } else {
      for_each_query_on_host<SampleLodAdjoint, T>(batch, count, 4 * channels, channels, mask[0], texture, view, incoming, to_data,
                                                  to_uv, to_lod, count, in.reducers, in.filter, in.address);
    }
  });
  if (mask[0]) grad_data = grad_data.to(data.scalar_type());
  return {grad_data, grad_uv, grad_lod};
}

}  // namespace

TEXVLM_OPS(ops) {
  ops.differentiable<sample_lod>("sample_lod");
  ops.op<sample_lod_backward>("sample_lod_backward");
  ops.promotes("sample_lod", {"uv", "lod"});
}

}  // namespace texvlm
