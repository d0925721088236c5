// Host code of the stem `salience`: where a picture, or what moves in it, stands out.
#include "salience.h"

#include "autograd.h"
#include "enlarge.h"
#include "math/rarity.h"
#include "pyramid.h"
#include "reduce.h"

namespace texvlm {

namespace {

// Per plane of [B, h, w]: sum (of the products with `other`, if it is defined), maximum and where.
template <class T>
Tensor map_stats(const Tensor& planes, const Tensor& other) {
  const int64_t batch = planes.size(0), h = planes.size(1), w = planes.size(2);
  Tensor stats = new_tensor({batch, static_cast<int64_t>(sizeof(MapStats<T>))}, at::kByte, planes.device());
  for_each_plane_reduced<PlaneStats, T>(planes.device(), batch, h, w, 1, pointer<const T>(planes),
                                        other.defined() ? pointer<const T>(other) : nullptr, pointer<MapStats<T>>(stats), h, w);
  return stats;
}

const std::vector<std::string> kMean = {"mean"};

// What the map is made from and through. Colours are levels `fine` and above of the pictures, from which the gradient is taken;
// the features are reduced from there to level `base`, the places of the map.
struct Stages {
  int fine = 0, base = 0;
  Levels colour_levels{}, feature_levels{};
  int colour_level = 0;                // level `fine` of the picture in colour_levels
  int64_t h = 0, w = 0;                // of the base level
  Tensor colours, previous, features;  // textures of 3 B, 3 B and kFeatures B planes of one channel
  Tensor steps[kScales + 1];           // [B, kFeatures, h, w]
  Tensor whitening;                    // [kPairs, B] of Whitening
  Tensor length, stats, map;           // [B, h, w]; the map is the length over its maximum

  int feature_level() const { return base - fine; }
  Rect places() const { return {length.size(0), 0, h, 0, w}; }
  template <class T>
  PairView<T> pair(int p) const {
    return {pointer<const T>(steps[centre_of(p)]), pointer<const T>(steps[surround_of(p)]), h, w};
  }
  template <class T>
  Pairs<T> pairs() const {
    Pairs<T> all{{}, pointer<Whitening>(whitening), length.size(0)};
    for (int p = 0; p < kPairs; ++p) all.pair[p] = pair<T>(p);
    return all;
  }
};

Tensor colours_of(const Tensor& image, const Stages& s) {
  const int64_t planes = 3 * image.size(0);
  const Tensor out = new_tensor({planes, s.colour_levels.texels, 1}, acc_dtype(image.scalar_type()), image.device());
  dispatch_picture(image, [&](auto tag) {
    using S = typename decltype(tag)::type;
    using A = Acc<S>;
    for_each_pixel<SalienceColours<S>::template For, A>(
        image.device(), {planes, 0, s.colour_levels.height[0], 0, s.colour_levels.width[0]}, Work{1, 4},
        image_view<const S>(image), image.size(2), image.size(3), s.fine > 0, texture_view<A>(out, s.colour_levels));
  });
  build_mipmaps(out, s.colour_levels, check_reducers("saliency", kMean, 1));
  return out;
}

// Levels and places, for pictures of this size; nothing is computed yet.
Stages plan(int64_t height, int64_t width) {
  const int top = level_count(height, width) - 1;
  Stages s;
  s.base = std::max(0, top - kTopSide);
  s.fine = std::max(0, s.base - kBase);
  s.h = std::max<int64_t>(1, height >> s.base);
  s.w = std::max<int64_t>(1, width >> s.base);
  s.colour_level = std::max(0, s.fine - 1);
  s.colour_levels = s.fine > 0 ? make_levels(std::max<int64_t>(1, height / 2), std::max<int64_t>(1, width / 2), s.fine)
                               : make_levels(height, width, 1);
  s.feature_levels =
      make_levels(s.colour_levels.height[s.colour_level], s.colour_levels.width[s.colour_level], s.feature_level() + 1);
  return s;
}

// The map, from the features.
void make_map(Stages& s, int64_t batch, at::ScalarType dtype, c10::Device device) {
  for (Tensor& step : s.steps) step = new_tensor({batch, kFeatures, s.h, s.w}, dtype, device);
  s.length = new_tensor({batch, s.h, s.w}, dtype, device);
  dispatch_plane(s.length, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_pixel<SaliencePlanes, T>(device, s.places(), Work{1, 32}, texture_view<const T>(s.features, s.feature_levels),
                                      s.feature_level(), pointer<T>(s.steps[0]));
    const Rect planes{batch * kFeatures, 0, s.h, 0, s.w};
    for (int k = 1; k <= kScales; ++k)
      for_each_pixel<Atrous, T>(device, planes, Work{1, 8}, pointer<const T>(s.steps[k - 1]), pointer<T>(s.steps[k]), s.h, s.w,
                                int64_t{1} << (k - 1));
    s.whitening = new_tensor({kPairs, batch, static_cast<int64_t>(sizeof(Whitening))}, at::kByte, device);
    for_each_plane_reduced<WhitenPicture, T>(device, kPairs * batch, s.h, s.w, kMoments, s.pairs<T>());
    for_each_pixel<SalienceRarity, T>(device, s.places(), Work{1, kMoments}, s.pairs<T>(), pointer<T>(s.length));
    s.stats = map_stats<T>(s.length, Tensor());
    s.map = new_tensor(s.length.sizes(), dtype, device);
    for_each_pixel<OverMaximum, T>(device, s.places(), Work{}, pointer<const T>(s.length), pointer<const MapStats<T>>(s.stats),
                                   pointer<T>(s.map), s.h, s.w);
  });
}

Stages compute_stages(const Picture& picture) {
  const int64_t batch = picture.batch();
  const c10::Device device = picture.image.device();
  const at::ScalarType dtype = acc_dtype(picture.image.scalar_type());
  Stages s = plan(picture.height(), picture.width());
  s.colours = colours_of(picture.image, s);
  if (picture.previous.defined()) s.previous = colours_of(picture.previous, s);
  s.features = new_tensor({batch * kFeatures, s.feature_levels.texels, 1}, dtype, device);
  dispatch_plane(s.features, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_pixel<SalienceFeatures, T>(device, {batch, 0, s.feature_levels.height[0], 0, s.feature_levels.width[0]}, Work{1, 32},
                                        texture_view<const T>(s.colours, s.colour_levels), texels<const T>(s.previous),
                                        s.colour_level, texture_view<T>(s.features, s.feature_levels));
  });
  build_mipmaps(s.features, s.feature_levels, check_reducers("saliency", kMean, 1));
  make_map(s, batch, dtype, device);
  return s;
}

}  // namespace

Tensor salience_map(const Picture& picture) { return compute_stages(picture).map; }

std::tuple<Tensor, Tensor> salience_map_backward(const Tensor& grad, const Picture& picture) {
  const Stages s = compute_stages(picture);
  const int64_t batch = picture.batch(), height = picture.height(), width = picture.width();
  const c10::Device device = grad.device();
  const at::ScalarType dtype = acc_dtype(picture.image.scalar_type());
  const Tensor incoming = grad.contiguous();
  const int64_t fine_h = s.feature_levels.height[0], fine_w = s.feature_levels.width[0];
  static const auto mips_backward =
      op_handle<Tensor(const Tensor&, SymInt, SymInt, Names, int64_t, Maybe)>("texvlm::generate_mipmaps_backward");
  const Names mean(kMean);
  Tensor to_colours = new_zeros({batch, 3, fine_h, fine_w}, dtype, device), to_previous;
  if (s.previous.defined()) to_previous = new_zeros({batch, 3, fine_h, fine_w}, dtype, device);
  dispatch_plane(s.length, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Stats = const MapStats<T>;
    const Tensor to_length = new_tensor({batch, s.h, s.w}, dtype, device);
    for_each_gathered<EnlargePlaneAdjoint>(device, batch, EnlargeAdjoint<T>{pointer<const T>(incoming), height, width, s.h, s.w},
                                           pointer<T>(to_length));
    const Tensor top = map_stats<T>(s.map, to_length);
    for_each_pixel<OverMaximumAdjoint, T>(device, s.places(), Work{}, pointer<T>(to_length), pointer<Stats>(s.stats),
                                          pointer<Stats>(top), s.h, s.w);
    Tensor to_steps[kScales + 1];
    for (Tensor& step : to_steps) step = new_zeros(s.steps[0].sizes(), dtype, device);
    for (int p = 0; p < kPairs; ++p) {
      const Tensor sums = new_tensor({batch, static_cast<int64_t>(sizeof(Moments<1>))}, at::kByte, device);
      const RarityMoments<T, 0> moments{s.pair<T>(p), pointer<const Whitening>(s.whitening) + p * batch,
                                        pointer<const T>(to_length), pointer<const T>(s.length), pointer<Moments<1>>(sums)};
      for_each_plane_reduced<RarityMoments, T>(device, batch, s.h, s.w, kMoments, moments);
      for_each_pixel<SalienceRarityAdjoint, T>(device, s.places(), Work{1, 2 * kMoments}, moments,
                                               pointer<T>(to_steps[centre_of(p)]), pointer<T>(to_steps[surround_of(p)]));
    }
    for (int k = kScales; k > 0; --k) {
      const int64_t gap = int64_t{1} << (k - 1);
      const Tensor half = new_zeros(s.steps[0].sizes(), dtype, device);
      const Rect planes{batch * kFeatures, 0, s.h, 0, s.w};
      for_each_pixel<AtrousAdjoint, T>(device, planes, Work{1, 16}, pointer<const T>(to_steps[k]), pointer<T>(half), s.h, s.w,
                                       gap, true);
      for_each_pixel<AtrousAdjoint, T>(device, planes, Work{1, 16}, pointer<const T>(half), pointer<T>(to_steps[k - 1]), s.h, s.w,
                                       gap, false);
    }
    const Tensor to_texture = new_zeros(s.features.sizes(), dtype, device);
    const SaliencePlanes<T, 0> planes{texture_view<const T>(s.features, s.feature_levels), s.feature_level(), nullptr};
    for_each_pixel<SaliencePlanesAdjoint, T>(device, s.places(), Work{1, 64}, planes, pointer<const T>(to_steps[0]),
                                             texels<T>(to_texture));
    const Tensor to_features =  // [kFeatures B, 1, h, w]
        mips_backward.call(to_texture, fine_h, fine_w, mean, s.feature_levels.count, std::nullopt).contiguous();
    const Tensor to_x = new_tensor(to_colours.sizes(), dtype, device), to_y = new_tensor(to_colours.sizes(), dtype, device);
    const SalienceFeatures<T, 0> forward{
        texture_view<const T>(s.colours, s.colour_levels), texels<const T>(s.previous), s.colour_level, {}};
    for_each_pixel<SalienceFeaturesAdjoint, T>(
        device, {batch, 0, fine_h, 0, fine_w}, Work{1, 32}, forward, pointer<const T>(to_features), pointer<T>(to_x),
        pointer<T>(to_y), pointer<T>(to_colours), to_previous.defined() ? pointer<T>(to_previous) : static_cast<T*>(nullptr));
    for_each_pixel<SobelAdjoint, T>(device, {3 * batch, 0, fine_h, 0, fine_w}, Work{}, pointer<const T>(to_x),
                                    pointer<const T>(to_y), pointer<T>(to_colours), fine_h, fine_w);
  });
  // Level `fine` of a pyramid whose other levels receive nothing.
  const auto to_picture = [&](const Tensor& g) {
    if (!g.defined() || s.fine == 0) return g;
    const Levels levels = make_levels(height, width, s.fine + 1);
    const Tensor data = new_zeros({3 * batch, levels.texels, 1}, dtype, device);
    data.narrow(1, levels.offset[s.fine], fine_h * fine_w).copy_(g.view({3 * batch, fine_h * fine_w, 1}));
    return mips_backward.call(data, height, width, mean, levels.count, std::nullopt).reshape({batch, 3, height, width});
  };
  return {to_picture(to_colours), to_picture(to_previous)};
}

// ---- the op ----

namespace {

Picture picture_of(const char* op, const Tensor& image, Maybe previous) {
  check_picture(op, "image", image);
  check_previous(op, previous, image);
  return {readable(image), readable(given(previous)), {}, {}};
}

Tensor saliency(const Tensor& image, Maybe previous) {
  const Picture picture = picture_of("saliency", image, previous);
  const Tensor map = salience_map(picture);
  const at::ScalarType dtype = texel_dtype(image);
  Tensor out = new_tensor({picture.batch(), picture.height(), picture.width()}, dtype, image.device());
  dispatch_texel(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_pixel<EnlargePlane, T>(image.device(), picture.all(), Work{},
                                    enlarged<Acc<T>>(map, picture.height(), picture.width()), pointer<T>(out));
  });
  return out;
}

std::tuple<Tensor, Tensor> saliency_backward(const Tensor& grad, const Tensor& image, Maybe previous, std::array<bool, 2> mask) {
  const char* op = "saliency_backward";
  const Picture picture = picture_of(op, image, previous);
  check_shape(op, "grad", grad, "[B, H, W]", {picture.batch(), picture.height(), picture.width()});
  check_same_device(op, "grad", grad, image);
  PlaneGradients to;
  std::tie(to.salience, to.previous_salience) = salience_map_backward(grad.to(acc_dtype(image.scalar_type())), picture);
  return {mask[0] ? picture_gradient(picture.image, to) : Tensor(),
          mask[1] && picture.previous.defined() ? previous_gradient(picture.previous, to) : Tensor()};
}

// ---- in place ----

// Level 0 of the colours where the pictures changed, and the levels above it.
void update_colours(const Tensor& image, const Stages& s, const Region& changed) {
  const Region planes = of_planes(s.fine > 0 ? above(changed) : changed, 3);
  dispatch_picture(image, [&](auto tag) {
    using S = typename decltype(tag)::type;
    using A = Acc<S>;
    for_each_pixel_of<SalienceColours<S>::template For, A>(image.device(), planes, Work{1, 4}, image_view<const S>(image),
                                                           image.size(2), image.size(3), s.fine > 0,
                                                           texture_view<A>(s.colours, s.colour_levels));
  });
  update_levels(s.colours, s.colour_levels, check_reducers("update_saliency", kMean, 1), planes);
}

// The features that depend on a region of their level 0; old: the colours of that level before, or undefined.
void update_features(const Stages& s, const Tensor& old, const Region& region) {
  dispatch_plane(s.features, [&](auto tag) {
    using T = typename decltype(tag)::type;
    Texels<const T> previous = texels<const T>(Tensor());
    if (old.defined()) {  // as if its level lay among the others
      previous = {pointer<const T>(old) - s.colour_levels.offset[s.colour_level], old.size(1), 1};
    }
    for_each_pixel_of<SalienceFeatures, T>(s.features.device(), region, Work{1, 32},
                                           texture_view<const T>(s.colours, s.colour_levels), previous, s.colour_level,
                                           texture_view<T>(s.features, s.feature_levels));
  });
  update_levels(s.features, s.feature_levels, check_reducers("update_saliency", kMean, 1), of_planes(region, kFeatures));
}

void check_planes(const char* op, const char* argument, const Tensor& t, const char* names, int64_t planes, int64_t texels,
                  const Tensor& image) {
  check_shape(op, argument, t, names, {planes, texels, 1});
  check_dtype(op, argument, t, acc_dtype(image.scalar_type()), " (the arithmetic's)");
  check_same_device(op, argument, t, image);
  TEXVLM_CHECK(t.is_contiguous(), op, argument, "contiguous", "strides ", t.strides());
}

Tensor update_saliency(const Tensor& image, const Tensor& colours, const Tensor& features, const Tensor& dirty,
                       const Tensor& before, int64_t tile, bool first) {
  const char* op = "update_saliency";
  check_picture(op, "image", image);
  const int64_t batch = image.size(0), height = image.size(2), width = image.size(3);
  Stages s = plan(height, width);
  check_planes(op, "colours", colours, "[3 B, T, 1]", 3 * batch, s.colour_levels.texels, image);
  check_planes(op, "features", features, "[7 B, T', 1]", kFeatures * batch, s.feature_levels.texels, image);
  check_tiles(op, "dirty", dirty, image, batch, height, width, tile);
  check_tiles(op, "before", before, image, batch, height, width, tile);
  s.colours = colours;
  s.features = features;
  const auto raised = [&](Region region) {  // to the level of the features
    for (int level = 0; level < s.fine; ++level) region = above(region);
    return region;
  };
  Region changed = region_of(dirty, tile, height, width, 0);
  Region around = united(widened(raised(changed), 1), raised(region_of(before, tile, height, width, 0)));
  if (first || around.most()) {
    changed = region_of({{0, 0, height, 0, width}}, batch, height, width);
    around = raised(changed);
  }
  const int64_t fine = s.feature_levels.height[0] * s.feature_levels.width[0];
  Tensor old;
  if (!first) old = colours.narrow(1, s.colour_levels.offset[s.colour_level], fine).clone();
  update_colours(readable(image), s, changed);
  update_features(s, old, around);
  make_map(s, batch, acc_dtype(image.scalar_type()), image.device());
  return s.map;
}

}  // namespace

TEXVLM_OPS(ops) {
  ops.differentiable<saliency>("saliency");
  ops.op<saliency_backward>("saliency_backward");
  ops.in_place<update_saliency>("update_saliency");
}

}  // namespace texvlm
