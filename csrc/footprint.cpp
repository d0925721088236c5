// Host code of the stem `footprint`: anisotropic sampling under pixel footprints, and its adjoint.
#include "math/footprint.h"

#include <array>

#include "autograd.h"
#include "cuda/footprint.h"
#include "fixed.h"
#include "launch.h"
#include "queries.h"
#include "scatter.h"

namespace texvlm {
namespace {

constexpr int64_t kTapsExpected = 4;  // of a footprint, to say what is worth a second thread

Tensor sample_grad(const Tensor& data, const Tensor& uv, const Tensor& ddx, const Tensor& ddy, const TextureArgs& of,
                   int64_t max_anisotropy, c10::string_view address) {
  const SampleInputs in = check_grad_queries("sample_grad", data, uv, ddx, ddy, of, max_anisotropy, address);
  const int64_t batch = uv.size(0), count = uv.size(1), channels = data.size(2);
  Tensor out = new_tensor({batch, count, channels}, data.scalar_type(), data.device());
  dispatch_texel(data.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_query<SampleGrad, T>(data.device(), batch, count, channels, texture_view<const T>(data, in.table),
                                  footprint_view<Acc<T>>(uv, ddx, ddy), pointer<T>(out), count, in.reducers,
                                  static_cast<int>(max_anisotropy), in.address);
  });
  return out;
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Gradients sample_grad_backward(const Tensor& grad, const Tensor& data, const Tensor& uv, const Tensor& ddx, const Tensor& ddy,
                               const TextureArgs& of, int64_t max_anisotropy, c10::string_view address,
                               std::array<bool, 4> mask) {
  const char* op = "sample_grad_backward";
  const SampleInputs in = check_grad_queries(op, data, uv, ddx, ddy, of, max_anisotropy, address);
  const int64_t batch = uv.size(0), count = uv.size(1), channels = data.size(2);
  check_shape(op, "grad", grad, "[B, N, C]", {batch, count, channels});
  check_dtype(op, "grad", grad, data.scalar_type(), " (as the texels)");
  check_same_device(op, "grad", grad, data);
  const at::Device device = data.device();
  const at::ScalarType acc = acc_dtype(data.scalar_type());
  const int64_t pictures = data.size(0), queries = batch * count;
  const bool banded = !on_cuda(device) && host::worth_banding(queries, kTapsExpected, pictures);
  Tensor grads[4];
  const bool fill = banded && host::worth_filling(queries * kTapsExpected, pictures * data.size(1),
                                                  data.numel() * static_cast<int64_t>(c10::elementSize(acc)));
  if (mask[0]) grads[0] = fill ? new_tensor(data.sizes(), acc, device) : new_zeros(data.sizes(), acc, device);
  for (int i = 1; i < 4; ++i)
    if (mask[i]) grads[i] = new_zeros({batch, count, 2}, acc, device);
  dispatch_texel(data.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Acc<T>;
    A* to[4];
    for (int i = 0; i < 4; ++i) to[i] = mask[i] ? pointer<A>(grads[i]) : nullptr;
    const auto texture = texture_view<const T>(data, in.table);
    const auto view = footprint_view<A>(uv, ddx, ddy);
    const GradView<T> incoming{pointer<const T>(grad), grad.stride(0), grad.stride(1), grad.stride(2)};
    const int most = static_cast<int>(max_anisotropy);
    if (on_cuda(device)) {
      const c10::DeviceGuard guard(device);
      const FixedSums fixed(grad, grads[0], queries);
      const SampleGradAdjoint<T, 0> f{.texture = texture,
                                      .queries = view,
                                      .grad = incoming,
                                      .grad_data = to[0],
                                      .grad_uv = to[1],
                                      .grad_ddx = to[2],
                                      .grad_ddy = to[3],
                                      .count = count,
                                      .reducers = in.reducers,
                                      .max_anisotropy = most,
                                      .address = in.address,
                                      .lines = nullptr};
      cuda::sample_grad_adjoint(f, batch, fixed.view, current_stream(device));
      return fixed.template add_to<A>(grads[0]);
    }
    if (to[1] || to[2] || to[3])
      for_each_query_on_host<SampleGradAdjoint, T>(batch, count, kTapsExpected * 8 * channels, channels, false, texture, view,
                                                   incoming, static_cast<A*>(nullptr), to[1], to[2], to[3], count, in.reducers,
                                                   most, in.address, static_cast<const TapLine<A>*>(nullptr));
    if (!to[0] || channels == 0) return;
    const std::unique_ptr<TapLine<A>[]> lines(new TapLine<A>[queries]);
    const FootprintKeys<A> find{view, in.table, pictures > 1, count, most, in.address, lines.get()};
    const auto lists = banded ? host::list_by_bands(in.table, pictures, queries, channels * static_cast<int64_t>(sizeof(A)),
                                                    FootprintKeys<A>::kPairs, find, fill)
                              : host::one_list(queries);
    for (int64_t q = 0; q < queries && !banded; ++q) find.line(q);
    host::scatter_by_bands<SampleGradAdjoint, T>(
        lists, in.table, channels, to[0], texture, view, incoming, to[0], static_cast<A*>(nullptr), static_cast<A*>(nullptr),
        static_cast<A*>(nullptr), count, in.reducers, most, in.address, static_cast<const TapLine<A>*>(lines.get()));
  });
  if (mask[0]) grads[0] = grads[0].to(data.scalar_type());
  return {grads[0], grads[1], grads[2], grads[3]};
}

}  // namespace

TEXVLM_OPS(ops) {
  ops.differentiable<sample_grad>("sample_grad");
  ops.op<sample_grad_backward>("sample_grad_backward");
  ops.promotes("sample_grad", {"uv", "ddx", "ddy"});
}

}  // namespace texvlm
