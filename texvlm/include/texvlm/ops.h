// texvlm for C++ programs: the ops as functions over torch::Tensor, gradients included. Link to the CMake target texvlm::texvlm
// (find_package(texvlm); its directory is what `python -c "import texvlm; print(texvlm.cmake_prefix_path)"` prints).
//
// Each function calls the op of its name through PyTorch's dispatcher, so device, autograd and autocast work as in Python. What
// the arguments mean is written once, at the schemas and in the Python documentation; shapes are repeated here. Example:
//
//   texvlm::Texture texture = texvlm::generate_mipmaps(image);                       // image [B, C, H, W]
//   torch::Tensor seen = texvlm::sample_lod(texture, uv, lod);                       // uv [B, N, 2], lod [B, N] -> [B, N, C]
//   seen.square().mean().backward();                                                 // reaches image, uv and lod
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace texvlm {

using torch::Tensor;

namespace detail {

// The op of this name; the look-up is paid once per function.
template <class Signature>
c10::TypedOperatorHandle<Signature> op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
}

inline c10::List<std::string> names(const std::vector<std::string>& list) { return c10::List<std::string>(list); }

}  // namespace detail

// All levels of a pyramid in one buffer [B, T, C], and what is needed to read it.
struct Texture {
  Tensor data;
  int64_t height = 0, width = 0, levels = 1;
  std::vector<std::string> reducer = {"mean"};  // one name, or one per channel: mean, max, min, mode
};

// 1 + floor(log2(max(height, width))): the levels of a whole pyramid.
inline int64_t level_count(int64_t height, int64_t width) {
  int64_t levels = 1;
  for (int64_t side = height > width ? height : width; side > 1; side >>= 1) ++levels;
  return levels;
}

// ---- tiles ----

// Tiles of frame [B, C, H, W] that differ from reference, which gets their values: dirty bool [B, rows, columns], tiles int64
// [B, rows * columns], then -1, count [B]. measure largest, or mean (of blocks of 8 x 8). In place, no gradient.
inline std::tuple<Tensor, Tensor, Tensor> dirty_tiles(const Tensor& frame, const Tensor& reference, int64_t tile = 32,
                                                      double threshold = 0.0, std::string_view measure = "largest") {
  using Signature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, int64_t, double, c10::string_view);
  static const auto op = detail::op<Signature>("texvlm::dirty_tiles");
  return op.call(frame, reference, tile, threshold, measure);
}

// ---- pyramid ----

// image [B, C, H, W], floating point or uint8 (divided by 255). levels 0: all. Differentiable in image.
inline Texture generate_mipmaps(const Tensor& image, std::vector<std::string> reducer = {"mean"}, int64_t levels = 0,
                                std::optional<at::ScalarType> dtype = std::nullopt) {
  using Signature = Tensor(const Tensor&, c10::List<std::string>, int64_t, std::optional<at::ScalarType>);
  static const auto op = detail::op<Signature>("texvlm::generate_mipmaps");
  TORCH_CHECK_VALUE(image.dim() == 4, "texvlm::generate_mipmaps: image must be [B, C, H, W], got ", image.sizes());
  const int64_t height = image.size(2), width = image.size(3);
  if (levels == 0) levels = level_count(height, width);
  Tensor data = op.call(image, detail::names(reducer), levels, dtype);
  return {std::move(data), height, width, levels, std::move(reducer)};
}

// Builds the levels above the level 0 that is in the buffer: whole, inside rects int64 [R, 4] (y0, x0, y1, x1) on the CPU, or
// inside tiles bool [B, ceil(H / tile), ceil(W / tile)]. In place, no gradient.
inline void update_mipmaps(const Texture& t, const std::optional<Tensor>& rects = std::nullopt,
                           const std::optional<Tensor>& tiles = std::nullopt, int64_t tile = 32) {
  using Signature = void(const Tensor&, c10::SymInt, c10::SymInt, c10::List<std::string>, int64_t, const std::optional<Tensor>&,
                         const std::optional<Tensor>&, int64_t);
  static const auto op = detail::op<Signature>("texvlm::update_mipmaps");
  op.call(t.data, t.height, t.width, detail::names(t.reducer), t.levels, rects, tiles, tile);
}

// The same by the graphics driver (OpenGL): float32, float16 or uint8, reducer mean. Differentiable where the driver's filter is
// ours.
inline Texture generate_mipmaps_gl(const Tensor& image, int64_t levels = 0, std::optional<at::ScalarType> dtype = std::nullopt) {
  using Signature = Tensor(const Tensor&, int64_t, std::optional<at::ScalarType>);
  static const auto op = detail::op<Signature>("texvlm::generate_mipmaps_gl");
  TORCH_CHECK_VALUE(image.dim() == 4, "texvlm::generate_mipmaps_gl: image must be [B, C, H, W], got ", image.sizes());
  const int64_t height = image.size(2), width = image.size(3);
  if (levels == 0) levels = level_count(height, width);
  return {op.call(image, levels, dtype), height, width, levels, {"mean"}};
}

// ---- laplacian ----

// Band l is level l minus the enlarged level l + 1: data [B, T, C] -> bands [B, T, C]. Differentiable.
inline Tensor laplacian_decompose(const Texture& t) {
  using Signature = Tensor(const Tensor&, c10::SymInt, c10::SymInt, int64_t);
  static const auto op = detail::op<Signature>("texvlm::laplacian_decompose");
  return op.call(t.data, t.height, t.width, t.levels);
}

// The pyramid of these bands; inverts laplacian_decompose. Differentiable.
inline Tensor laplacian_reconstruct(const Tensor& bands, int64_t height, int64_t width, int64_t levels) {
  using Signature = Tensor(const Tensor&, c10::SymInt, c10::SymInt, int64_t);
  static const auto op = detail::op<Signature>("texvlm::laplacian_reconstruct");
  return op.call(bands, height, width, levels);
}

// ---- sample, footprint, patches ----

// uv [B, N, 2] in [0, 1], lod [B, N] -> [B, N, C]. filter nearest, bilinear, trilinear; address clamp, wrap, mirror, border.
// Differentiable in data, uv and lod.
inline Tensor sample_lod(const Texture& t, const Tensor& uv, const Tensor& lod, std::string_view filter = "trilinear",
                         std::string_view address = "clamp") {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, c10::List<std::string>, int64_t,
                           c10::string_view, c10::string_view);
  static const auto op = detail::op<Signature>("texvlm::sample_lod");
  return op.call(t.data, uv, lod, t.height, t.width, detail::names(t.reducer), t.levels, filter, address);
}

// Anisotropic: uv, ddx, ddy [B, N, 2], the footprint in uv units per pixel -> [B, N, C]. Differentiable in data, uv, ddx and ddy.
inline Tensor sample_grad(const Texture& t, const Tensor& uv, const Tensor& ddx, const Tensor& ddy, int64_t max_anisotropy = 16,
                          std::string_view address = "clamp") {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
                           c10::List<std::string>, int64_t, int64_t, c10::string_view);
  static const auto op = detail::op<Signature>("texvlm::sample_grad");
  return op.call(t.data, uv, ddx, ddy, t.height, t.width, detail::names(t.reducer), t.levels, max_anisotropy, address);
}

// The same two through the texture units of a GPU (emulated on the CPU): weights of 8 bits, float32, float16 or bfloat16 texels,
// max_anisotropy up to 16. Gradients are those of sample_lod and sample_grad.
inline Tensor sample_lod_hardware(const Texture& t, const Tensor& uv, const Tensor& lod, std::string_view filter = "trilinear",
                                  std::string_view address = "clamp") {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, c10::List<std::string>, int64_t,
                           c10::string_view, c10::string_view);
  static const auto op = detail::op<Signature>("texvlm::sample_lod_hardware");
  return op.call(t.data, uv, lod, t.height, t.width, detail::names(t.reducer), t.levels, filter, address);
}
inline Tensor sample_grad_hardware(const Texture& t, const Tensor& uv, const Tensor& ddx, const Tensor& ddy,
                                   int64_t max_anisotropy = 16, std::string_view address = "clamp") {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
                           c10::List<std::string>, int64_t, int64_t, c10::string_view);
  static const auto op = detail::op<Signature>("texvlm::sample_grad_hardware");
  return op.call(t.data, uv, ddx, ddy, t.height, t.width, detail::names(t.reducer), t.levels, max_anisotropy, address);
}

// center [B, N, 2] uv, lod [B, N], axes [B, N, 2, 2] -> [B, N, C, size, size], samples 2^lod level-0 texels apart. Differentiable
// in data, center, lod and axes.
inline Tensor extract_patches(const Texture& t, const Tensor& center, const Tensor& lod, int64_t size = 16,
                              std::string_view address = "clamp", const std::optional<Tensor>& axes = std::nullopt) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, c10::List<std::string>, int64_t,
                           int64_t, c10::string_view, const std::optional<Tensor>&);
  static const auto op = detail::op<Signature>("texvlm::extract_patches");
  return op.call(t.data, center, lod, t.height, t.width, detail::names(t.reducer), t.levels, size, address, axes);
}

// ---- fovea ----

// fixation [B, F, 2] uv, offsets [N, 2] and m0, e0 in level-0 pixels -> uv [B, F, N, 2], lod [B, F, N]. Differentiable in all
// four.
inline std::tuple<Tensor, Tensor> fovea_tokens(const Tensor& fixation, const Tensor& offsets, const Tensor& m0, const Tensor& e0,
                                               int64_t height, int64_t width, int64_t levels) {
  using Signature =
      std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, int64_t);
  static const auto op = detail::op<Signature>("texvlm::fovea_tokens");
  return op.call(fixation, offsets, m0, e0, height, width, levels);
}

// ---- distance, salience, flow, warping, history, superpixel, text, channels ----

// mask bool [B, H, W] -> squared distance to the nearest true pixel, int64, and its row-major index (none: H^2 + W^2, -1).
// method exact, or jfa (jump flooding, approximate).
inline std::tuple<Tensor, Tensor> distance_transform(const Tensor& mask, std::string_view method = "exact") {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, c10::string_view);
  static const auto op = detail::op<Signature>("texvlm::distance_transform");
  return op.call(mask, method);
}

// image, previous [B, 3, H, W] in [0, 1] -> [B, H, W] in [0, 1]. Differentiable in both.
inline Tensor saliency(const Tensor& image, const std::optional<Tensor>& previous = std::nullopt) {
  using Signature = Tensor(const Tensor&, const std::optional<Tensor>&);
  static const auto op = detail::op<Signature>("texvlm::saliency");
  return op.call(image, previous);
}

// The map of saliency [B, h, w] of the next picture, whose colours [3 B, T, 1] and features [7 B, T', 1] are brought up to date
// in place where dirty, bool [B, ceil(H / tile), ceil(W / tile)], says that it changed, and before, that the one before had;
// first: from nothing. No gradient.
inline Tensor update_saliency(const Tensor& image, const Tensor& colours, const Tensor& features, const Tensor& dirty,
                              const Tensor& before, int64_t tile = 32, bool first = false) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, bool);
  static const auto op = detail::op<Signature>("texvlm::update_saliency");
  return op.call(image, colours, features, dirty, before, tile, first);
}

// previous, current [B, 3, H, W] -> flow from current to previous [B, 2, H, W] in pixels, occlusion bool [B, H, W]; the search
// begins at initial [B, 2, h, w], in pixels of its own grid. No gradient.
inline std::tuple<Tensor, Tensor> optical_flow(const Tensor& previous, const Tensor& current,
                                               std::optional<int64_t> finest = std::nullopt,
                                               const std::optional<Tensor>& initial = std::nullopt) {
  using Signature =
      std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, std::optional<int64_t>, const std::optional<Tensor>&);
  static const auto op = detail::op<Signature>("texvlm::optical_flow");
  return op.call(previous, current, finest, initial);
}

// planes [B, C, H, W] as they lie now: out(p) = planes(p + flow(p)); flow [B, 2, h, w]. What is occluded is filled, or
// without a fill stays where it is. Differentiable in planes and flow.
inline Tensor warp(const Tensor& planes, const Tensor& flow, std::optional<double> fill = 0,
                   const std::optional<Tensor>& occlusion = std::nullopt) {
  using Signature = Tensor(const Tensor&, const Tensor&, std::optional<double>, const std::optional<Tensor>&);
  static const auto op = detail::op<Signature>("texvlm::warp");
  return op.call(planes, flow, fill, occlusion);
}

// |luma - luma of previous, moved by flow| [B, H, W] of pictures [B, 3, H, W]. Differentiable in the pictures and in flow.
inline Tensor motion(const Tensor& image, const Tensor& previous, const std::optional<Tensor>& flow = std::nullopt,
                     const std::optional<Tensor>& occlusion = std::nullopt) {
  using Signature = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, const std::optional<Tensor>&);
  static const auto op = detail::op<Signature>("texvlm::motion");
  return op.call(image, previous, flow, occlusion);
}

// Which cell's value each cell takes over from the frame before: appearance now, before and when the values were computed [B, A,
// rows, columns], offset [B, 2, rows, columns] of the values in cells, still bool [B, rows, columns], flow [B, 2, h, w] -> source
// int64 [B, rows, columns], offset, held appearance, residual [2, B, rows, columns]. No gradient.
inline std::tuple<Tensor, Tensor, Tensor, Tensor> carry(const Tensor& now, const Tensor& before, const Tensor& held,
                                                        const Tensor& offset, const Tensor& still,
                                                        const std::optional<Tensor>& flow = std::nullopt,
                                                        const std::optional<Tensor>& occlusion = std::nullopt,
                                                        double floor = 4. / 255, double quiet = 1. / 64, double occluded = 0.5) {
  using Signature = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                               const Tensor&, const std::optional<Tensor>&,
                                                               const std::optional<Tensor>&, double, double, double);
  static const auto op = detail::op<Signature>("texvlm::carry");
  return op.call(now, before, held, offset, still, flow, occlusion, floor, quiet, occluded);
}

// min(1, keep base + sum of Gaussians): points [B, P, 2] uv, weights [B, P], sigma of the longer side, base [B, H, W] -> [B, H,
// W]. Differentiable in points, weights and base.
inline Tensor gaussian_splat(const Tensor& points, const Tensor& weights, double sigma, int64_t height, int64_t width,
                             double keep = 1, const std::optional<Tensor>& base = std::nullopt) {
  using Signature = Tensor(const Tensor&, const Tensor&, double, c10::SymInt, c10::SymInt, double, const std::optional<Tensor>&);
  static const auto op = detail::op<Signature>("texvlm::gaussian_splat");
  return op.call(points, weights, sigma, height, width, keep, base);
}

// planes [B, h, w], read bilinearly at the pixels of height x width. Differentiable.
inline Tensor enlarge(const Tensor& planes, int64_t height, int64_t width) {
  using Signature = Tensor(const Tensor&, c10::SymInt, c10::SymInt);
  static const auto op = detail::op<Signature>("texvlm::enlarge");
  return op.call(planes, height, width);
}

// image [B, 3, H, W] -> labels int64 [B, H, W] in 0 .. count - 1, each one connected piece, and count int64 [B].
inline std::tuple<Tensor, Tensor> superpixels(const Tensor& image, int64_t n = 50) {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, int64_t);
  static const auto op = detail::op<Signature>("texvlm::superpixels");
  return op.call(image, n);
}

// labels int64 [B, H, W] below n -> float32 [B, 3, H, W]: label, distance from its centre over its radius, share of the picture.
inline Tensor superpixel_channels(const Tensor& labels, int64_t n) {
  using Signature = Tensor(const Tensor&, c10::SymInt);
  static const auto op = detail::op<Signature>("texvlm::superpixel_channels");
  return op.call(labels, n);
}

// image [B, 3, H, W], labels int64 [B, H, W] -> float32 [B, H, W]: 1 where labels change and there is an edge.
inline Tensor boundaries(const Tensor& image, const Tensor& labels) {
  using Signature = Tensor(const Tensor&, const Tensor&);
  static const auto op = detail::op<Signature>("texvlm::boundaries");
  return op.call(image, labels);
}

// image [B, 3, H, W], the network's weights (texvlm/text_weights.f16 as float32) -> [B, H, W] in [0, 1].
inline Tensor text_regions(const Tensor& image, const Tensor& weights) {
  using Signature = Tensor(const Tensor&, const Tensor&);
  static const auto op = detail::op<Signature>("texvlm::text_regions");
  return op.call(image, weights);
}

// Channels of CHANNELS (by index) of a picture [B, 3, H, W], each with its own reducer; planes [B, n, h, w] that are given
// replace the formula of the channels given_channels. Differentiable in image, previous, fixation and given.
inline Tensor build_channels(const Tensor& image, at::IntArrayRef channels, int64_t levels = 0, at::TensorList given = {},
                             at::IntArrayRef given_channels = {}, std::optional<at::ScalarType> dtype = std::nullopt,
                             const std::optional<Tensor>& previous = std::nullopt,
                             const std::optional<Tensor>& fixation = std::nullopt) {
  using Signature = Tensor(const Tensor&, at::IntArrayRef, int64_t, at::TensorList, at::IntArrayRef,
                           std::optional<at::ScalarType>, const std::optional<Tensor>&, const std::optional<Tensor>&);
  static const auto op = detail::op<Signature>("texvlm::build_channels");
  if (levels == 0 && image.dim() == 4) levels = level_count(image.size(2), image.size(3));
  return op.call(image, channels, levels, given, given_channels, dtype, previous, fixation);
}

// Brings data [B, T, len(channels)] of local channels (0 to 7, 9 to 11) and planes [4, B, H, W], luma, edge, contrast-normalised
// luma and motion, up to the next picture, in place, where dirty, bool [B, ceil(H / tile), ceil(W / tile)], says that it changed,
// and before, that the one before had; first: from nothing. No gradient.
inline void update_channels(const Tensor& data, const Tensor& planes, const Tensor& image, const Tensor& dirty,
                            const Tensor& before, at::IntArrayRef channels, int64_t levels, int64_t tile = 32,
                            const std::optional<Tensor>& fixation = std::nullopt, bool first = false) {
  using Signature = void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, at::IntArrayRef, int64_t,
                         int64_t, const std::optional<Tensor>&, bool);
  static const auto op = detail::op<Signature>("texvlm::update_channels");
  op.call(data, planes, image, dirty, before, channels, levels, tile, fixation, first);
}

// ---- soft selection ----

// scores [B, N] -> weights [B, N] in [0, 1] that sum to k, link((score - threshold) / temperature), and float64 threshold [B].
// link: logistic, or gumbel: 1 - exp(-exp(z)). -inf and NaN have weight 0. Differentiable.
inline std::tuple<Tensor, Tensor> soft_topk(const Tensor& scores, int64_t k, double temperature,
                                            c10::string_view link = "logistic") {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, c10::SymInt, double, c10::string_view);
  static const auto op = detail::op<Signature>("texvlm::soft_topk");
  return op.call(scores, k, temperature, link);
}

// ---- cascade ----

// scores [B, N] -> the k best: values and int64 indices [B, min(k, N)], best first, ties to the lowest index, NaN last.
inline std::tuple<Tensor, Tensor> select_topk(const Tensor& scores, int64_t k) {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, c10::SymInt);
  static const auto op = detail::op<Signature>("texvlm::select_topk");
  return op.call(scores, k);
}

// scores [B, N] -> what cells int64 [B, N] hold at the places of the k best, or these places, in the order of the places: int64
// [B, min(k, N)].
inline Tensor keep_topk(const Tensor& scores, int64_t k, const std::optional<Tensor>& cells = std::nullopt) {
  using Signature = Tensor(const Tensor&, c10::SymInt, const std::optional<Tensor>&);
  static const auto op = detail::op<Signature>("texvlm::keep_topk");
  return op.call(scores, k, cells);
}

// mask bool [B, N] -> int64 indices [B, N] of what is set, in order, -1 beyond, and int64 counts [B].
inline std::tuple<Tensor, Tensor> compact(const Tensor& mask) {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&);
  static const auto op = detail::op<Signature>("texvlm::compact");
  return op.call(mask);
}

// The best k of `samples` noisy copies of scores [B, N]: gate [B, samples, k], 1 / samples, whose gradient is that of the mean
// over the noise, and int64 indices [B, samples, k], ascending.
inline std::tuple<Tensor, Tensor> perturbed_topk(const Tensor& scores, int64_t k, int64_t samples = 100, double sigma = 0.05,
                                                 int64_t seed = 0) {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, c10::SymInt, int64_t, double, int64_t);
  static const auto op = detail::op<Signature>("texvlm::perturbed_topk");
  return op.call(scores, k, samples, sigma, seed);
}

// Features [B, n, terms] of cells int64 [B, n] of `cell` pixels, from samples x samples places each. terms: mean, max, min,
// variance, rms, cosine (with query [B or 1, D]), entropy, residual; channels: the first channel of each; lights: red, green,
// blue, for the last two. With weights, one for each term: their weighted sum [B, n]. Differentiable.
inline Tensor cell_features(const Texture& t, const Tensor& cells, int64_t cell, int64_t samples,
                            const std::vector<std::string>& terms, at::IntArrayRef channels,
                            const std::optional<Tensor>& query = std::nullopt, at::IntArrayRef lights = {0, 1, 2},
                            at::ArrayRef<double> weights = {}) {
  using Signature =
      Tensor(const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, c10::List<std::string>, int64_t, int64_t, int64_t,
             c10::List<std::string>, at::IntArrayRef, const std::optional<Tensor>&, at::IntArrayRef, at::ArrayRef<double>);
  static const auto op = detail::op<Signature>("texvlm::cell_features");
  return op.call(t.data, cells, t.height, t.width, detail::names(t.reducer), t.levels, cell, samples, detail::names(terms),
                 channels, query, lights, weights);
}

// The best k disjoint nodes of a quadtree over rows x columns cells, values [B, nodes] -> taken bool [B, nodes], bound [B],
// price [B].
inline std::tuple<Tensor, Tensor, Tensor> quadtree_cut(const Tensor& values, int64_t rows, int64_t columns, int64_t levels,
                                                       int64_t k) {
  using Signature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, c10::SymInt, c10::SymInt, int64_t, int64_t);
  static const auto op = detail::op<Signature>("texvlm::quadtree_cut");
  return op.call(values, rows, columns, levels, k);
}

// image [B, C, H, W], floating point or uint8 -> int64 [B, cells]: the cell that each cell of `cell` pixels is put back as, its
// own where it is kept; they differ by at most `bound` in every value (of uint8, divided by 255).
inline Tensor predict_cells(const Tensor& image, int64_t cell = 16, double bound = 0) {
  using Signature = Tensor(const Tensor&, int64_t, double);
  static const auto op = detail::op<Signature>("texvlm::predict_cells");
  return op.call(image, cell, bound);
}

// Cells of patch * merge pixels of image [B, C, H, W], resized to height x width: int64 [B, K], row-major, or [B, K, 3] (level,
// row, column), negative: none -> the rows of Qwen-VL's vision towers [B, K merge^2, C temporal patch^2], (x * scale - mean) /
// std. Differentiable in the picture.
inline Tensor pack_cells(const Tensor& image, const Tensor& cells, int64_t height, int64_t width, int64_t patch = 16,
                         int64_t merge = 2, int64_t temporal = 2, at::ArrayRef<double> mean = {0.5},
                         at::ArrayRef<double> std = {0.5}, double scale = 1) {
  using Signature = Tensor(const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, int64_t, int64_t, int64_t,
                           at::ArrayRef<double>, at::ArrayRef<double>, double);
  static const auto op = detail::op<Signature>("texvlm::pack_cells");
  return op.call(image, cells, height, width, patch, merge, temporal, mean, std, scale);
}

// Keys and values [B, heads, N, D] of the places of a grid, log_weight [B, N], of its cells on coarse `levels`: keys, values
// [B, heads, M, D], log_count [B, M], spread [B, heads, M, 2], low, high [B, heads, M, D]. The first three are differentiable.
inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_pack(
    const Tensor& k, const Tensor& v, int64_t height, int64_t width, at::IntArrayRef levels,
    const std::optional<Tensor>& log_weight = std::nullopt) {
  using Signature = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, at::IntArrayRef, const std::optional<Tensor>&);
  static const auto op = detail::op<Signature>("texvlm::attention_pack");
  return op.call(k, v, height, width, levels, log_weight);
}

// Attention of q [B, H, Nq, D] over what attention_pack packed: out [B, H, Nq, D], lse [B, H, Nq], chosen int32
// [B, H, tiles, sum(counts)], mass [B, H, N]. Differentiable, the choice being constant.
inline std::tuple<Tensor, Tensor, Tensor, Tensor> hierarchical_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>& packed,
    int64_t height, int64_t width, at::IntArrayRef levels, at::IntArrayRef counts, double scale, at::IntArrayRef query_tile,
    std::string_view importance = "spread", bool with_mass = false, const std::optional<Tensor>& log_weight = std::nullopt,
    const std::optional<Tensor>& prefix_k = std::nullopt, const std::optional<Tensor>& prefix_v = std::nullopt,
    const std::optional<Tensor>& choice = std::nullopt) {
  using Signature = std::tuple<Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
      const Tensor&, c10::SymInt, c10::SymInt, at::IntArrayRef, at::IntArrayRef, double, at::IntArrayRef, c10::string_view, bool,
      const std::optional<Tensor>&, const std::optional<Tensor>&, const std::optional<Tensor>&, const std::optional<Tensor>&);
  static const auto op = detail::op<Signature>("texvlm::hierarchical_attention");
  const auto& [keys, values, log_count, spread, low, high] = packed;
  return op.call(q, k, v, keys, values, log_count, spread, low, high, height, width, levels, counts, scale, query_tile,
                 importance, with_mass, log_weight, prefix_k, prefix_v, choice);
}

}  // namespace texvlm
