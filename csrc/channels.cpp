// Host code of the stem `channels`: a texture of named channels from a picture.
//
// Forward: luma, then the planes that the asked channels need (edge, contrast, distance, the map of saliency), then every texel
// once with all its channels, then the mips. Backward: the pyramid's own adjoint, then each channel's into luma, then luma's into
// the pictures. In place: the same steps, each over the texels that depend on dirty tiles.
#include "math/channels.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include "autograd.h"
#include "distance.h"
#include "enlarge.h"
#include "pyramid.h"
#include "reduce.h"
#include "salience.h"

namespace texvlm {
namespace {

// Reducers as CHANNELS (texvlm/channels.py) has them: a test compares the two.
std::vector<std::string> reducers_of(at::IntArrayRef channels) {
  std::vector<std::string> names;
  for (const int64_t c : channels) {
    const bool max =
        c == kEdge || c == kContrastEdge || c == kMotion || c == kFixationHistory || (c >= kGazeHistory && c <= kText);
    names.emplace_back(max ? "max" : c == kEdgeDistance ? "min" : c == kCluster ? "mode" : "mean");
  }
  return names;
}

int64_t place_of(at::IntArrayRef channels, int64_t id) {
  for (size_t i = 0; i < channels.size(); ++i)
    if (channels[i] == id) return static_cast<int64_t>(i);
  return -1;
}
bool wants(at::IntArrayRef channels, std::initializer_list<int64_t> ids) {
  for (const int64_t id : ids)
    if (place_of(channels, id) >= 0) return true;
  return false;
}

struct ChannelInputs {
  Picture picture;
  Tensor contrast, fixation;
  Levels levels;
  Reducers reducers;
  ChannelList list;
  std::vector<int64_t> formulas;  // the channels that are not handed in
  std::vector<Tensor> given;      // contiguous, in the arithmetic's dtype
};

// The planes that are handed in: [B, n, H or less, W or less] each, n channels of `ids` in turn.
std::vector<Tensor> check_given(const char* op, const Tensor& image, at::TensorList given, at::IntArrayRef ids) {
  std::vector<Tensor> out;
  size_t count = 0;
  for (size_t i = 0; i < given.size(); ++i) {
    const Tensor& plane = given[i];
    const std::string name = "given[" + std::to_string(i) + "]";
    check_shape(op, name.c_str(), plane, "[B, n, h, w]", {image.size(0), -1, -1, -1});
    check_texel_dtype(op, name.c_str(), plane.scalar_type());
    check_same_device(op, name.c_str(), plane, image);
    TEXVLM_CHECK(plane.size(2) >= 1 && plane.size(3) >= 1 && plane.size(2) <= image.size(2) && plane.size(3) <= image.size(3), op,
                 name, "at least 1 x 1 and at most as large as the picture, " + shape_of(image), shape_of(plane));
    count += static_cast<size_t>(plane.size(1));
    out.push_back(plane.to(acc_dtype(image.scalar_type())).contiguous());
  }
  TEXVLM_CHECK(ids.size() == count, op, "given_channels", "one index per given plane, " + std::to_string(count), ids.size());
  for (size_t i = 0; i < ids.size(); ++i)
    TEXVLM_CHECK(ids[i] >= 0 && ids[i] < kChannels && place_of(ids, ids[i]) == static_cast<int64_t>(i), op, "given_channels",
                 "distinct indices from 0 to " + std::to_string(kChannels - 1), ids);
  return out;
}

ChannelList check_channels(const char* op, at::IntArrayRef channels) {
  ChannelList list{};
  TEXVLM_CHECK(!channels.empty() && channels.size() <= kMaxChannels, op, "channels",
               "1 to " + std::to_string(kMaxChannels) + " indices", channels.size());
  for (size_t i = 0; i < channels.size(); ++i) {
    TEXVLM_CHECK(channels[i] >= 0 && channels[i] < kChannels && place_of(channels, channels[i]) == static_cast<int64_t>(i), op,
                 "channels", "distinct indices from 0 to " + std::to_string(kChannels - 1), channels);
    list.id[i] = static_cast<int8_t>(channels[i]);
  }
  list.count = static_cast<int>(channels.size());
  return list;
}

// Contiguous; undefined where it is not given.
Tensor check_fixation(const char* op, Maybe fixation, const Tensor& image) {
  if (!fixation || !fixation->defined()) return {};
  const bool wide = image.scalar_type() == at::kDouble;
  check_shape(op, "fixation", *fixation, "[B, 2]", {image.size(0), 2});
  check_dtype(op, "fixation", *fixation, wide ? at::kDouble : at::kFloat,
              wide ? " (beside a Double image)" : " (beside an image other than Double)");
  check_same_device(op, "fixation", *fixation, image);
  return fixation->contiguous();
}

void check_stored(const char* op, const char* argument, at::ScalarType texel, at::IntArrayRef channels) {
  check_texel_dtype(op, argument, texel);
  TEXVLM_CHECK(texel != at::kBFloat16 || !wants(channels, {kX, kY, kCluster}), op, argument,
               "float32, float64 or float16 for the channels x, y and cluster (8 bits do not tell their values apart)",
               "BFloat16");
}

// Checks the arguments, and computes the planes of luma and edges that the formulas ask for.
ChannelInputs compute_inputs(const char* op, const Tensor& image, at::IntArrayRef channels, int64_t levels, Maybe previous,
                             Maybe fixation, at::TensorList given, at::IntArrayRef given_channels) {
  check_picture(op, "image", image);
  check_previous(op, previous, image);
  ChannelInputs r{};
  r.levels = check_levels(op, image.size(2), image.size(3), levels);
  r.list = check_channels(op, channels);
  r.reducers = check_reducers(op, reducers_of(channels), static_cast<int64_t>(channels.size()));
  r.picture.image = readable(image);
  r.picture.previous = readable(previous.value_or(Tensor()));
  r.fixation = check_fixation(op, fixation, image);
  r.given = check_given(op, image, given, given_channels);
  for (const int64_t c : channels)
    if (place_of(given_channels, c) < 0) r.formulas.push_back(c);
  if (place_of(given_channels, kCluster) < 0) std::erase(r.formulas, kBoundary);  // which is that of these labels
  if (wants(r.formulas, {kEdge, kContrastEdge, kHighPass, kLowPass, kMotion, kEdgeDistance, kBoundary}))
    r.picture.luma = luma_plane(r.picture.image);
  const bool edge = wants(r.formulas, {kEdge, kEdgeDistance, kBoundary}), contrast = wants(r.formulas, {kContrastEdge});
  if (edge || contrast) {
    const Tensor& luma = r.picture.luma;
    if (edge) r.picture.edge = new_tensor(luma.sizes(), luma.scalar_type(), luma.device());
    if (contrast) r.contrast = new_tensor(luma.sizes(), luma.scalar_type(), luma.device());
    dispatch_plane(luma, [&](auto tag) {
      using A = typename decltype(tag)::type;
      const auto out = [](const Tensor& plane) -> A* { return plane.defined() ? pointer<A>(plane) : nullptr; };
      const int64_t height = r.picture.height(), width = r.picture.width();
      for_each_pixel<EdgeAndContrast, A>(luma.device(), r.picture.all(), Work{},
                                         EdgePlane<A, 0>{pointer<const A>(luma), out(r.picture.edge), height, width},
                                         ContrastPlane<A, 0>{pointer<const A>(luma), out(r.contrast), height, width});
    });
  }
  return r;
}

// Distance to the pixels whose edge is above the threshold, over the diagonal.
template <class A>
Tensor distance_plane(const Picture& picture, const Tensor& threshold) {
  const int64_t batch = picture.batch(), height = picture.height(), width = picture.width();
  const c10::Device device = picture.edge.device();
  Tensor out = new_tensor({batch, height, width}, picture.edge.scalar_type(), device);
  run_distance(device, batch, height, width,
               AboveMask<A>{pointer<const A>(picture.edge), pointer<const double>(threshold), height, width},
               DiagonalSink<A>{pointer<A>(out), height, width});
  return out;
}

// run(level 0 of `data` from a picture of type S, Tag of its texels). Few want a picture in double as narrower texels, so that
// loop is not compiled: texels in double are written beside, and rounded.
template <class S, class Run>
void write_level0(const Tensor& data, int64_t texels, const Run& run) {
  dispatch_texel(data.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<S, double> && !std::is_same_v<T, double>) {
      const Tensor level0 = data.narrow(1, 0, texels), wide = level0.to(at::kDouble);
      run(wide, Tag<double>{});
      level0.copy_(wide);
    } else {
      run(data, tag);
    }
  });
}

Tensor build_channels(const Tensor& image, at::IntArrayRef channels, int64_t levels, at::TensorList given,
                      at::IntArrayRef given_channels, std::optional<at::ScalarType> dtype, Maybe previous, Maybe fixation) {
  const char* op = "build_channels";
  const at::ScalarType texel = texel_dtype(image, dtype);
  const ChannelInputs r = compute_inputs(op, image, channels, levels, previous, fixation, given, given_channels);
  check_stored(op, "dtype", texel, channels);
  const Picture& picture = r.picture;
  const int64_t height = picture.height(), width = picture.width();
  Tensor data = new_tensor({picture.batch(), r.levels.texels, r.list.count}, texel, image.device());
  dispatch_picture(picture.image, [&](auto picture_tag) {
    using S = typename decltype(picture_tag)::type;
    using A = Acc<S>;
    const auto view = [](const Tensor& plane) -> const A* { return plane.defined() ? pointer<const A>(plane) : nullptr; };
    Tensor distance, map, threshold;
    if (wants(r.formulas, {kSaliency})) map = salience_map(picture);
    if (wants(r.formulas, {kEdgeDistance, kBoundary})) threshold = edge_threshold(picture.edge);
    if (wants(r.formulas, {kEdgeDistance})) distance = distance_plane<A>(picture, threshold);
    ChannelPlanes<A> planes{view(picture.luma),
                            view(picture.edge),
                            view(r.contrast),
                            view(distance),
                            map.defined() ? enlarged<A>(map, height, width) : Enlarged<A>{},
                            view(r.fixation),
                            {},
                            threshold.defined() ? pointer<const double>(threshold) : nullptr};
    size_t at = 0;
    for (const Tensor& tensor : r.given) {
      const int64_t h = tensor.size(2), w = tensor.size(3);
      for (int64_t i = 0; i < tensor.size(1); ++i, ++at)
        planes.given[given_channels[at]] = {view(tensor) + i * h * w, tensor.size(1) * h * w, h, w,
                                            given_channels[at] == kCluster};
    }
    write_level0<S>(data, height * width, [&](const Tensor& to, auto tag) {
      using T = typename decltype(tag)::type;
      for_each_pixel<ChannelTexels<S>::template For, T>(image.device(), picture.all(), Work{data.size(2), data.size(2)},
                                                        image_view<const S>(picture.image), picture_view<S>(picture.previous),
                                                        planes, r.list, texture_view<T>(to, r.levels));
    });
  });
  build_mipmaps(data, r.levels, r.reducers);
  return data;
}

// The gradient of one given tensor, from that of level 0 [B, C, H, W]; `first`: where its channels begin in given_channels.
Tensor given_gradient(const Tensor& level0, const Tensor& given, at::IntArrayRef channels, at::IntArrayRef given_channels,
                      size_t first) {
  const int64_t count = given.size(1);
  Tensor out = new_tensor(given.sizes(), given.scalar_type(), given.device());
  Places place{};
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = given_channels[first + i];
    place.at[i] = static_cast<int8_t>(id == kCluster ? -1 : place_of(channels, id));
  }
  const auto run = [&](auto tag) {
    using A = typename decltype(tag)::type;
    const EnlargeAdjoint<A> from{pointer<const A>(level0), level0.size(2), level0.size(3), given.size(2), given.size(3)};
    for_each_gathered<GivenAdjoint>(given.device(), given.size(0) * count, from, level0.size(1), count, pointer<const A>(given),
                                    pointer<A>(out), place);
  };
  dispatch_plane(given, run);
  return out;
}

// The gradient of contrast_edge into luma.
template <class A>
void add_contrast_adjoint(const Picture& picture, const Tensor& contrast, const Tensor& grad, const Tensor& to_luma) {
  const int64_t height = picture.height(), width = picture.width();
  const c10::Device device = grad.device();
  const Tensor to_contrast = at::zeros_like(picture.luma);
  add_sobel_adjoint(contrast, grad, kContrastScale, true, to_contrast);
  const auto plane = [&] { return new_tensor(picture.luma.sizes(), picture.luma.scalar_type(), device); };
  const Tensor mean = plane(), to_mean = plane(), to_variance = plane();
  for_each_pixel<ContrastAdjointSeed, A>(device, picture.all(), Work{1, 16}, pointer<const A>(picture.luma),
                                         pointer<const A>(to_contrast), pointer<A>(mean), pointer<A>(to_mean),
                                         pointer<A>(to_variance), pointer<A>(to_luma), height, width);
  for_each_pixel<ContrastAdjoint, A>(device, picture.all(), Work{1, 16}, pointer<const A>(picture.luma), pointer<const A>(mean),
                                     pointer<const A>(to_mean), pointer<const A>(to_variance), pointer<A>(to_luma), height,
                                     width);
}

template <class A>
Tensor fixation_gradient(const Tensor& grad, const Tensor& fixation) {  // grad [B, H, W]
  const int64_t batch = grad.size(0), height = grad.size(1), width = grad.size(2);
  Tensor out = new_tensor({batch, 2}, fixation.scalar_type(), grad.device());
  for_each_plane_reduced<FixationAdjoint, A>(grad.device(), batch, height, width, 8, plane_view<A>(grad),
                                             pointer<const A>(fixation), pointer<A>(out), height, width);
  return out;
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>>;

// Gradients of image, previous, fixation and each given tensor, by the mask in this order; a given tensor's is empty where it is
// not wanted (a list holds no undefined tensors in schemas).
Gradients build_channels_backward(const Tensor& grad, const Tensor& data, const Tensor& image, at::IntArrayRef channels,
                                  int64_t levels, at::TensorList given, at::IntArrayRef given_channels, Maybe previous,
                                  Maybe fixation, c10::List<bool> mask) {
  const char* op = "build_channels_backward";
  const ChannelInputs r = compute_inputs(op, image, channels, levels, previous, fixation, given, given_channels);
  TEXVLM_CHECK(mask.size() == 3 + given.size(), op, "mask", "3 flags and one per given tensor", mask.size());
  const Picture& picture = r.picture;
  const int64_t height = picture.height(), width = picture.width();
  check_shape(op, "grad", grad, "[B, T, C]", {picture.batch(), r.levels.texels, r.list.count});
  check_same_device(op, "grad", grad, image);
  static const auto mips =
      op_handle<Tensor(const Tensor&, SymInt, SymInt, Names, int64_t, Maybe)>("texvlm::generate_mipmaps_backward");
  const Tensor level0 =
      mips.call(grad, height, width, Names(reducers_of(channels)), levels, data).to(acc_dtype(picture.image.scalar_type()));
  const auto incoming = [&](int64_t id) {  // [B, H, W], or undefined where the channel was not asked for
    const int64_t at = place_of(channels, id);
    return at < 0 || place_of(r.formulas, id) < 0 ? Tensor() : level0.select(1, at);
  };
  const bool moves = picture.previous.defined() && wants(r.formulas, {kMotion, kSaliency});
  PlaneGradients to;
  if (picture.luma.defined()) to.luma = at::zeros_like(picture.luma);
  if (moves && wants(r.formulas, {kMotion})) to.previous_luma = at::zeros_like(picture.luma);
  if (mask[0] || (mask[1] && moves)) {
    dispatch_picture(picture.image, [&](auto tag) {
      using A = Acc<typename decltype(tag)::type>;
      if (wants(r.formulas, {kRed, kGreen, kBlue})) {
        to.rgb = level0;
        for (int64_t c = 0; c < 3; ++c) to.at[c] = place_of(r.formulas, c) < 0 ? -1 : place_of(channels, c);
      }
      if (wants(r.formulas, {kEdge})) add_sobel_adjoint(picture.luma, incoming(kEdge), kEdgeScale, false, to.luma);
      if (wants(r.formulas, {kContrastEdge})) add_contrast_adjoint<A>(picture, r.contrast, incoming(kContrastEdge), to.luma);
      if (wants(r.formulas, {kHighPass, kLowPass})) {
        for_each_pixel<PassAdjoint, A>(image.device(), picture.all(), Work{1, 8}, plane_view<A>(incoming(kHighPass)),
                                       plane_view<A>(incoming(kLowPass)), pointer<A>(to.luma), height, width);
      }
      if (moves && wants(r.formulas, {kMotion})) add_motion_adjoint(picture, incoming(kMotion), to);
      if (wants(r.formulas, {kSaliency}))
        std::tie(to.salience, to.previous_salience) = salience_map_backward(incoming(kSaliency), picture);
    });
  }
  Tensor to_image, to_previous, to_fixation;
  if (mask[0]) to_image = picture_gradient(picture.image, to);
  if (mask[1] && picture.previous.defined())
    to_previous = moves ? previous_gradient(picture.previous, to) : at::zeros_like(picture.previous);
  if (mask[2] && r.fixation.defined()) {
    to_fixation = at::zeros_like(r.fixation);
    if (wants(r.formulas, {kEccentricity})) {
      to_fixation = r.fixation.scalar_type() == at::kDouble ? fixation_gradient<double>(incoming(kEccentricity), r.fixation)
                                                            : fixation_gradient<float>(incoming(kEccentricity), r.fixation);
    }
  }
  std::vector<Tensor> to_given;
  size_t first = 0;
  for (size_t i = 0; i < r.given.size(); first += static_cast<size_t>(r.given[i].size(1)), ++i)
    to_given.push_back(mask[3 + i] ? given_gradient(level0, r.given[i], channels, given_channels, first)
                                   : at::empty({0}, image.options().dtype(at::kFloat)));
  return {to_image, to_previous, to_fixation, to_given};
}

// ---- in place ----

// How far away a pixel may be that a texel of level 0 depends on, -1: anywhere. As CHANNELS (texvlm/channels.py) has it: a test
// compares the two.
int64_t halo_of(int64_t channel) {
  switch (channel) {
    case kRed:
    case kGreen:
    case kBlue:
    case kMotion:
    case kX:
    case kY:
    case kEccentricity:
      return 0;
    case kEdge:
      return 1;
    case kHighPass:
    case kLowPass:
      return 2;
    case kContrastEdge:
      return kRadius + 1;
    default:
      return -1;
  }
}

// The planes that are kept for the channels, each [B, H, W]; undefined where no channel needs one.
struct LocalPlanes {
  Tensor luma, edge, contrast, motion;

  LocalPlanes(const Tensor& planes, at::IntArrayRef channels) {
    if (wants(channels, {kEdge, kContrastEdge, kHighPass, kLowPass, kMotion})) luma = planes.select(0, 0);
    if (wants(channels, {kEdge})) edge = planes.select(0, 1);
    if (wants(channels, {kContrastEdge})) contrast = planes.select(0, 2);
    if (wants(channels, {kMotion})) motion = planes.select(0, 3);
  }
};

// What depends on what is dirty: on the pixels themselves, on those around them, or, of motion, on those that were dirty. Texels
// are made anew with all their channels as far as the channel that reaches farthest: a rim of one channel is as many cache lines.
struct LocalRegions {
  Region still, changed, edge, contrast, texels;

  LocalRegions(const Tensor& dirty, const Tensor& before, int64_t tile, int64_t height, int64_t width, at::IntArrayRef channels,
               bool first) {
    int64_t halo = 0;
    for (const int64_t c : channels) halo = std::max(halo, halo_of(c));
    const auto within = [&](int64_t reach) { return region_of(dirty, tile, height, width, reach); };
    texels = within(halo);
    if (wants(channels, {kMotion})) {
      still = region_of(before, tile, height, width, 0);
      texels = united(texels, still);
    }
    if (first || texels.most()) {
      changed = edge = contrast = texels = region_of({{0, 0, height, 0, width}}, dirty.size(0), height, width);
      still = Region();
      return;
    }
    changed = within(0);
    edge = within(1);
    contrast = within(kRadius);
  }
};

void update_channels(const Tensor& data, const Tensor& planes, const Tensor& image, const Tensor& dirty, const Tensor& before,
                     at::IntArrayRef channels, int64_t level_count, int64_t tile, Maybe fixation, bool first) {
  const char* op = "update_channels";
  check_picture(op, "image", image);
  const int64_t batch = image.size(0), height = image.size(2), width = image.size(3);
  const ChannelList list = check_channels(op, channels);
  for (const int64_t c : channels)
    TEXVLM_CHECK(halo_of(c) >= 0, op, "channels", "of those that pixels nearby decide: 0 to 7 and 9 to 11", channels);
  check_stored(op, "data", data.scalar_type(), channels);
  const Levels levels = check_texture(op, data, height, width, level_count);
  check_shape(op, "data", data, "[B, T, len(channels)]", {batch, levels.texels, list.count});
  check_same_device(op, "data", data, image);
  check_shape(op, "planes", planes, "[4, B, H, W]", {4, batch, height, width});
  check_dtype(op, "planes", planes, acc_dtype(image.scalar_type()), " (the arithmetic's)");
  check_same_device(op, "planes", planes, image);
  TEXVLM_CHECK(planes.is_contiguous(), op, "planes", "contiguous", "strides ", planes.strides());
  check_tiles(op, "dirty", dirty, image, batch, height, width, tile);
  check_tiles(op, "before", before, image, batch, height, width, tile);
  const Tensor gaze = check_fixation(op, fixation, image), picture = readable(image);
  const Reducers reducers = check_reducers(op, reducers_of(channels), list.count);

  const LocalPlanes of(planes, channels);
  const LocalRegions region(dirty, before, tile, height, width, channels, first);
  const c10::Device device = image.device();
  dispatch_picture(picture, [&](auto picture_tag) {
    using S = typename decltype(picture_tag)::type;
    using A = Acc<S>;
    const auto view = [](const Tensor& plane) { return plane.defined() ? pointer<A>(plane) : nullptr; };
    if (of.motion.defined()) {
      if (first) of.motion.zero_();
      for_each_pixel_of<NoMotion, A>(device, region.still, Work{}, view(of.motion), height, width);
    }
    if (of.luma.defined())
      for_each_pixel_of<LumaChange<S>::template For, A>(device, region.changed, Work{}, image_view<const S>(picture),
                                                        view(of.luma), first ? nullptr : view(of.motion), height, width);
    const A* const luma = view(of.luma);
    if (of.edge.defined()) for_each_pixel_of<EdgePlane, A>(device, region.edge, Work{}, luma, view(of.edge), height, width);
    if (of.contrast.defined())
      for_each_pixel_of<ContrastPlane, A>(device, region.contrast, Work{}, luma, view(of.contrast), height, width);
    ChannelPlanes<A> sources{
        luma, view(of.edge), view(of.contrast), nullptr, {}, gaze.defined() ? pointer<const A>(gaze) : nullptr, {}};
    if (of.motion.defined()) sources.given[kMotion] = {view(of.motion), height * width, height, width, false};
    write_level0<S>(data, height * width, [&](const Tensor& to, auto tag) {
      using T = typename decltype(tag)::type;
      for_each_pixel_of<ChannelTexels<S>::template For, T>(device, region.texels, Work{list.count, list.count},
                                                           image_view<const S>(picture), ImageView<const S>{}, sources, list,
                                                           texture_view<T>(to, levels));
    });
  });
  update_levels(data, levels, reducers, region.texels);
}

}  // namespace

TEXVLM_OPS(ops) {
  ops.differentiable<build_channels>("build_channels", GradientRule().given("data", result(0)));
  ops.op<build_channels_backward>("build_channels_backward");
  ops.promotes("build_channels", {"fixation"});
  ops.in_place<update_channels>("update_channels");
  ops.promotes("update_channels", {"fixation"});
}

}  // namespace texvlm
