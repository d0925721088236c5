// Host code of the stem `hardware`: sampling through texture units on CUDA, through their emulation on the CPU. Gradients are
// those of the exact interpolant, by the backward ops of sample and footprint.
#include "math/hardware.h"

#include <c10/core/DeviceGuard.h>
#include <torch/custom_class.h>

#include <array>
#include <mutex>

#include "cuda/hardware.h"
#include "launch.h"
#include "queries.h"
#include "texture_cache.h"

namespace texvlm {
namespace {

constexpr int64_t kMaxHardwareAnisotropy = 16;

// dispatch_texel for the types that hardware stores.
template <class F>
void dispatch_hardware(at::ScalarType dtype, const F& body) {
  if (dtype == at::kHalf) return body(Tag<Half>{});
  if (dtype == at::kBFloat16) return body(Tag<BFloat16>{});
  body(Tag<float>{});
}

// The emulation over all queries. (for_each_query would ask for a CUDA kernel of it.)
template <template <class, int> class F, class T, class... A>
void emulate(const Tensor& out, const A&... args) {
  const int64_t count = out.size(1), channels = out.size(2);
  const F<T, 0> f{args...};
  host::parallel(out.size(0) * count, channels * 16,
                 [&](int64_t begin, int64_t end) { host::query_range_any<0>(f, count, channels, begin, end); });
}

#if defined(TEXVLM_WITH_CUDA)

template <class T>
cuda::Fetch<T> fetch_into(const Tensor& out, int64_t pictures, const SampleInputs& in) {
  return {pointer<T>(out), out.size(0), out.size(1), out.size(2), pictures, in.table, in.reducers, in.address};
}

void fetch_lod(cuda::MipArray& array, const Tensor& out, int64_t pictures, const Tensor& uv, const Tensor& lod,
               const SampleInputs& in, const cuda::Stream& stream) {
  dispatch_hardware(out.scalar_type(), [&](auto tag) {
    array.sample_lod(fetch_into<typename decltype(tag)::type>(out, pictures, in), query_view<float>(uv, lod), in.filter, stream);
  });
}

void fetch_grad(cuda::MipArray& array, const Tensor& out, int64_t pictures, const Tensor& uv, const Tensor& ddx,
                const Tensor& ddy, int64_t max_anisotropy, const SampleInputs& in, const cuda::Stream& stream) {
  dispatch_hardware(out.scalar_type(), [&](auto tag) {
    array.sample_grad(fetch_into<typename decltype(tag)::type>(out, pictures, in), footprint_view<float>(uv, ddx, ddy),
                      static_cast<int>(max_anisotropy), stream);
  });
}

std::vector<cuda::SamplerState> lod_samplers(const SampleInputs& in) {
  return cuda::samplers_for(in.filter, in.address, 1, in.reducers);
}
std::vector<cuda::SamplerState> grad_samplers(const SampleInputs& in, int64_t max_anisotropy) {
  return cuda::samplers_for(Filter::trilinear, in.address, static_cast<int>(max_anisotropy), in.reducers);
}

#endif

Tensor sample_lod_hardware(const Tensor& data, const Tensor& uv, const Tensor& lod, const TextureArgs& of,
                           c10::string_view filter, c10::string_view address) {
  const char* op = "sample_lod_hardware";
  check_hardware_dtype(op, data);
  const SampleInputs in = check_lod_queries(op, data, uv, lod, of, filter, address);
  Tensor out = new_tensor({uv.size(0), uv.size(1), data.size(2)}, data.scalar_type(), data.device());
  if (out.numel() == 0) return out;
#if defined(TEXVLM_WITH_CUDA)
  if (on_cuda(data.device())) {
    with_array(op, data, in.table, lod_samplers(in), [&](cuda::MipArray& array, const cuda::Stream& stream) {
      fetch_lod(array, out, data.size(0), uv, lod, in, stream);
    });
    return out;
  }
#endif
  dispatch_hardware(data.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    emulate<SampleLodHardware, T>(out, texture_view<const T>(data, in.table), query_view<float>(uv, lod), pointer<T>(out),
                                  out.size(1), in.reducers, in.filter, in.address);
  });
  return out;
}

Tensor sample_grad_hardware(const Tensor& data, const Tensor& uv, const Tensor& ddx, const Tensor& ddy, const TextureArgs& of,
                            int64_t max_anisotropy, c10::string_view address) {
  const char* op = "sample_grad_hardware";
  check_hardware_dtype(op, data);
  const SampleInputs in = check_grad_queries(op, data, uv, ddx, ddy, of, max_anisotropy, address, kMaxHardwareAnisotropy);
  Tensor out = new_tensor({uv.size(0), uv.size(1), data.size(2)}, data.scalar_type(), data.device());
  if (out.numel() == 0) return out;
#if defined(TEXVLM_WITH_CUDA)
  if (on_cuda(data.device())) {
    with_array(op, data, in.table, grad_samplers(in, max_anisotropy), [&](cuda::MipArray& array, const cuda::Stream& stream) {
      fetch_grad(array, out, data.size(0), uv, ddx, ddy, max_anisotropy, in, stream);
    });
    return out;
  }
#endif
  dispatch_hardware(data.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    emulate<SampleGradHardware, T>(out, texture_view<const T>(data, in.table), footprint_view<float>(uv, ddx, ddy),
                                   pointer<T>(out), out.size(1), in.reducers, static_cast<int>(max_anisotropy), in.address);
  });
  return out;
}

// ---- a handle of one's own ----

// Texels in texture hardware, filled when told. No gradients, no emulation, no cache.
class HardwareTexture : public torch::CustomClassHolder {
 public:
  HardwareTexture(const Tensor& data, int64_t height, int64_t width, const std::vector<std::string>& reducer, int64_t levels,
                  int64_t layer_channels)
      : height_(height), width_(width) {
    check_hardware_dtype(kName, data);
    table_ = check_texture(kName, data, height, width, levels);
    reducers_ = check_reducers(kName, reducer, data.size(2));
    like_ = data.new_empty({data.size(0), 0, data.size(2)});
    TEXVLM_CHECK(layer_channels == 4 || layer_channels == 1, kName, "layer_channels", "4 or 1", layer_channels);
    TEXVLM_CHECK(data.numel() > 0, kName, "data", "not empty", shape_of(data));
    TEXVLM_CHECK(on_cuda(data.device()), kName, "data", "on a CUDA device (on the CPU the ops sample_*_hardware emulate one)",
                 data.device());
#if defined(TEXVLM_WITH_CUDA)
    const c10::DeviceGuard guard(data.device());
    array_ = new_array(array_shape(kName, data, table_, static_cast<int>(layer_channels)), empty_texture_cache);
#endif
    update(data);
  }

  int64_t levels() const { return table_.count; }

#if defined(TEXVLM_WITH_CUDA)
  ~HardwareTexture() override { retire(std::move(array_)); }

  int64_t bytes() const { return array_->shape().bytes(); }
  int64_t layers() const { return array_->shape().layers; }

  void update(const Tensor& data) {
    check_no_gradient(data);
    TEXVLM_CHECK(data.scalar_type() == like_.scalar_type() && data.device() == like_.device() && data.dim() == 3 &&
                     data.size(0) == like_.size(0) && data.size(2) == like_.size(2),
                 kName, "data", "of the shape, dtype and device that the texture was made with", shape_of(data), ' ',
                 at::toString(data.scalar_type()), " on ", data.device());
    check_texture(kName, data, height_, width_, table_.count);
    in_turn({}, [&](const cuda::Stream& stream) { fill_array(*array_, data, table_, stream); });
  }

  Tensor sample_lod(const Tensor& uv, const Tensor& lod, const std::string& filter, const std::string& address) {
    check_no_gradient(uv, lod);
    check_lod_coordinates(kName, like_, uv, lod);
    const SampleInputs in{table_, reducers_, parse_filter(kName, filter), parse_address(kName, address)};
    Tensor out = new_tensor({uv.size(0), uv.size(1), like_.size(2)}, like_.scalar_type(), like_.device());
    if (out.numel() == 0) return out;
    in_turn(lod_samplers(in), [&](const cuda::Stream& stream) { fetch_lod(*array_, out, like_.size(0), uv, lod, in, stream); });
    return out;
  }

  Tensor sample_grad(const Tensor& uv, const Tensor& ddx, const Tensor& ddy, int64_t max_anisotropy, const std::string& address) {
    check_no_gradient(uv, ddx, ddy);
    check_grad_coordinates(kName, like_, uv, ddx, ddy, max_anisotropy, kMaxHardwareAnisotropy);
    const SampleInputs in{table_, reducers_, Filter::trilinear, parse_address(kName, address)};
    Tensor out = new_tensor({uv.size(0), uv.size(1), like_.size(2)}, like_.scalar_type(), like_.device());
    if (out.numel() == 0) return out;
    in_turn(grad_samplers(in, max_anisotropy), [&](const cuda::Stream& stream) {
      fetch_grad(*array_, out, like_.size(0), uv, ddx, ddy, max_anisotropy, in, stream);
    });
    return out;
  }

 private:
  template <class... Tensors>
  static void check_no_gradient(const Tensors&... inputs) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !any_records(inputs...),
        "texvlm::HardwareTexture: a handle has no gradients; use the ops sample_*_hardware, or torch.no_grad()");
  }

  template <class Body>
  void in_turn(const std::vector<cuda::SamplerState>& samplers, const Body& body) {
    const c10::DeviceGuard guard(like_.device());
    const cuda::Stream stream = cuda::stream_of(current_stream(like_.device()));
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stream.capture) {
      TORCH_CHECK(
          array_->has(samplers),
          "texvlm::HardwareTexture: this sampler does not exist yet, and none can be created while a CUDA graph is captured; "
          "make the same call once before the capture");
      array_->hold(stream);
    } else {
      array_->create(samplers);
    }
    body(stream);
  }

  std::unique_ptr<cuda::MipArray> array_;
  std::mutex mutex_;
#else
  int64_t bytes() const { cuda::not_built(); }
  int64_t layers() const { cuda::not_built(); }
  void update(const Tensor&) { cuda::not_built(); }
  Tensor sample_lod(const Tensor&, const Tensor&, const std::string&, const std::string&) { cuda::not_built(); }
  Tensor sample_grad(const Tensor&, const Tensor&, const Tensor&, int64_t, const std::string&) { cuda::not_built(); }

 private:
#endif
  static constexpr const char* kName = "HardwareTexture";
  int64_t height_, width_;
  Levels table_;
  Reducers reducers_;
  Tensor like_;  // dtype, device, batch and channels of the texels, without any
};

}  // namespace

TEXVLM_OPS(ops) {
  ops.differentiable<sample_lod_hardware>("sample_lod_hardware", GradientRule().by("texvlm::sample_lod_backward"));
  ops.differentiable<sample_grad_hardware>("sample_grad_hardware", GradientRule().by("texvlm::sample_grad_backward"));
  ops.promotes("sample_lod_hardware", {"uv", "lod"});
  ops.promotes("sample_grad_hardware", {"uv", "ddx", "ddy"});
}

TORCH_LIBRARY_FRAGMENT(texvlm, m) {
  m.class_<HardwareTexture>("HardwareTexture")
      .def(torch::init<const Tensor&, int64_t, int64_t, const std::vector<std::string>&, int64_t, int64_t>(), "",
           {torch::arg("data"), torch::arg("height"), torch::arg("width"), torch::arg("reducer"), torch::arg("levels"),
            torch::arg("layer_channels") = 4})
      .def("update", &HardwareTexture::update)
      .def("sample_lod", &HardwareTexture::sample_lod, "",
           {torch::arg("uv"), torch::arg("lod"), torch::arg("filter") = "trilinear", torch::arg("address") = "clamp"})
      .def("sample_grad", &HardwareTexture::sample_grad, "",
           {torch::arg("uv"), torch::arg("ddx"), torch::arg("ddy"), torch::arg("max_anisotropy") = 16,
            torch::arg("address") = "clamp"})
      .def("bytes", &HardwareTexture::bytes)
      .def("layers", &HardwareTexture::layers)
      .def("levels", &HardwareTexture::levels);
}

}  // namespace texvlm
