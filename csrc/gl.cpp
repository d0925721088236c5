// Host code of the stem `gl`: the pyramid of a picture, halved by the graphics driver (csrc/gl: contexts, textures, threads).
//
// The way of a batch: picture -> level 0 of the packed buffer -> groups of four channels -> one texture array -> glGenerateMipmap
// -> groups -> the levels above. Level 0 does not come back from the driver: it holds the bits that went in.
#include "gl/worker.h"

#include "autograd.h"
#include "launch.h"
#include "math/gl.h"
#include "math/pyramid.h"
#include "tensor.h"

namespace texvlm {
namespace {

constexpr const char* kOp = "generate_mipmaps_gl";

// Where the memory is, not which kernels run on it (those of tests/shim run on the host's): the worker for host memory is -1.
int gl_device(c10::Device device) { return device.is_cpu() ? -1 : device.index(); }

template <class S, class T>
void generate(const Tensor& image, const Tensor& data, const Levels& table, gl::Job& job) {
  const int64_t batch = data.size(0), channels = data.size(2);
  const c10::Device device = data.device();
  const auto texture = texture_view<T>(data, table);
  const Rect all{batch, 0, table.height[0], 0, table.width[0]};
  for_each_texel<ImageToTexels<S>::template For, T>(device, all, channels, image_view<const S>(image), texture);
  if (table.count == 1) return;
  const auto point = [&](int level, T* texels, int64_t layer_texels) {
    job.level[level] = {texels, layer_texels * job.shape.texel_bytes()};
  };
  if (channels == 4) {  // a packed texel is an RGBA texel already
    for (int level = 0; level < table.count; ++level) point(level, texture.texel(0, level, 0, 0), table.texels);
    return gl::generate(gl_device(device), job);
  }
  const Tensor work = new_tensor({job.shape.layers * table.texels * 4}, data.scalar_type(), device);
  const GroupView<T> groups{pointer<T>(work), job.shape.layers / batch, job.shape.layers, table};
  for_each_texel<TexelsToGroups, T>(device, all, channels, texture_view<const T>(data, table), groups);
  for (int level = 0; level < table.count; ++level) point(level, groups.level(level), groups.texels_of(level));
  gl::generate(gl_device(device), job);
  const GroupView<const T> halved{groups.data, groups.groups, groups.layers, groups.levels};
  for (int level = 1; level < table.count; ++level) {
    for_each_texel<GroupsToTexels, T>(device, {batch, 0, table.height[level], 0, table.width[level]}, channels, halved, texture,
                                      level);
  }
}

Tensor generate_mipmaps_gl(const Tensor& image, int64_t levels, std::optional<at::ScalarType> dtype) {
  check_shape(kOp, "image", image, "[B, C, H, W]", {-1, -1, -1, -1});
  const bool bytes = image.scalar_type() == at::kByte;
  const at::ScalarType texel = dtype.value_or(bytes ? at::kFloat : image.scalar_type());
  TEXVLM_CHECK(bytes || image.scalar_type() == at::kFloat || image.scalar_type() == at::kHalf, kOp, "image",
               "float32, float16 or uint8 (OpenGL has no textures of other types; convert it)", image.scalar_type());
  TEXVLM_CHECK(texel == at::kFloat || texel == at::kHalf, kOp, "dtype", "float32 or float16", texel);
  const Levels table = check_levels(kOp, image.size(2), image.size(3), levels);
  const int64_t batch = image.size(0), channels = image.size(1);
  gl::Job job;
  job.shape = {table.width[0], table.height[0], batch * ((channels + 3) / 4), table.count, texel == at::kHalf};
  if (job.shape.layers > 0) {
    if (!image.is_cpu()) {
      job.on_cuda = true;
      job.stream = current_stream(image.device());
      TORCH_CHECK(!cuda::stream_is_capturing(job.stream), "texvlm::", kOp,
                  ": cannot be captured in a CUDA graph, because OpenGL takes part; use backend='native' there");
    }
    gl::reserve(gl_device(image.device()), job.shape);  // refuses before anything large is allocated
  }
  Tensor data = new_tensor({batch, table.texels, channels}, texel, image.device());
  if (job.shape.layers == 0) return data;
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    bytes ? generate<uint8_t, T>(image, data, table, job) : generate<T, T>(image.to(texel), data, table, job);
  };
  texel == at::kHalf ? run(Tag<Half>{}) : run(Tag<float>{});
  return data;
}

// ---- autograd: the adjoint of our own filter, so only where the driver's is the same ----

void check_gradient(const Tensor& image, int64_t levels) {
  if (!image.requires_grad() || image.dim() != 4) return;  // the op itself refuses another rank
  bool even = true;
  SymInt height = image.sym_size(2), width = image.sym_size(3);
  for (int64_t l = 1; l < std::min<int64_t>(levels, 63) && even; ++l) {  // the op itself refuses more than there are
    for (SymInt* side : {&height, &width}) {
      if (side->sym_le(1).guard_bool(__FILE__, __LINE__)) continue;
      even = even && (*side % 2).sym_eq(0).guard_bool(__FILE__, __LINE__);
      *side = *side / 2;
    }
  }
  constexpr double kSame = 1e-5;
  const gl::Filter filter = gl::status(gl_device(image.device())).filter;
  TORCH_CHECK(filter.even_from_ours <= kSame && (even || filter.odd_from_ours <= kSame), "texvlm::", kOp,
              ": no gradient of a picture of ", image.sym_size(2), " x ", image.sym_size(3), ": the driver's filter for ",
              filter.even_from_ours > kSame ? "even" : "odd", " sides is not ours (a weight differs by ",
              filter.even_from_ours > kSame ? filter.even_from_ours : filter.odd_from_ours,
              "); use backend='native', or detach the image");
}

}  // namespace

TEXVLM_OPS(ops) {
  ops.differentiable<generate_mipmaps_gl>(
      "generate_mipmaps_gl",
      GradientRule()
          .by("texvlm::generate_mipmaps_backward")
          .given("height", size_of("image", 2))
          .given("width", size_of("image", 3))
          .given("reducer", always(Names({"mean"})))
          .given("data", always(IValue()))
          .refused_by([](const Call& call) { check_gradient(call["image"].toTensor(), call["levels"].toInt()); }));
}

}  // namespace texvlm
