#include "pyramid.h"

#include <type_traits>

#include "launch.cuh"
#include "mip_chain.cuh"
#include "regions.cuh"

namespace texvlm::cuda {
namespace {

// body(C, Side, Mean): one to four channels in tiles of 64 x 64; any number of them in groups, in tiles of 32 x 32 that take as
// much shared memory and reach whole sectors of each texel. Few kinds for types other than float, and one where not all
// channels are means: each is compiled per architecture.
template <class T, class Body>
void with_kind(int64_t channels, bool mean, const Body& body) {
  constexpr std::integral_constant<int, 64> wide{};
  constexpr std::integral_constant<int, 32> narrow{};
  constexpr std::integral_constant<int, 0> any{};
  if (!mean) return body(any, narrow, std::false_type{});
  if constexpr (sizeof(T) < 8) {
    if (channels == 3) return body(std::integral_constant<int, 3>{}, wide, std::true_type{});
  }
  if constexpr (std::is_same_v<T, float>) {
    if (channels == 1) return body(std::integral_constant<int, 1>{}, wide, std::true_type{});
    if (channels == 4) return body(std::integral_constant<int, 4>{}, wide, std::true_type{});
  }
  body(any, narrow, std::true_type{});
}

// body(plan, columns) for each launch; columns: pictures times groups of channels, each with a counter of its own.
template <class Shape, class Body>
void each_launch(const Levels& levels, int64_t batch, int64_t channels, const Body& body) {
  for (int base = 0; base + 1 < levels.count;) {
    const MipPlan plan = plan_launch(levels, base, Shape::kSide);
    body(plan, batch * ((channels + Shape::kGroup - 1) / Shape::kGroup));
    const MipSegment& last = plan.segment[plan.segments - 1];
    base = last.base + last.count;
  }
}

bool all_means(const Reducers& reducers) { return reducers.uniform && reducers.first == Reducer::mean; }

}  // namespace

template <class T>
int64_t mip_counters(const Levels& levels, const Reducers& reducers, int64_t batch, int64_t channels) {
  int64_t counters = 0;
  with_kind<T>(channels, all_means(reducers), [&](auto c, auto side, auto) {
    each_launch<MipShape<T, decltype(c)::value, decltype(side)::value>>(
        levels, batch, channels, [&](const MipPlan&, int64_t columns) { counters += columns; });
  });
  return counters;
}

template <class S, class T>
void mip_chain(const ImageView<const S>& image, const TextureView<T>& texture, const Reducers& reducers, int64_t batch,
               unsigned* counters, void* stream) {
  const Levels& levels = texture.levels;
  if (batch <= 0 || texture.channels <= 0) return;
  if (levels.count == 1) {  // no chain
    if (!image.data) return;
    const typename ImageToTexels<S>::template For<T, 0> copy{image, texture};
    return launch_texels(copy, batch, 0, levels.height[0], 0, levels.width[0], texture.channels, stream);
  }
  with_kind<T>(texture.channels, all_means(reducers), [&](auto c, auto side, auto mean) {
    constexpr int C = decltype(c)::value, Side = decltype(side)::value;
    each_launch<MipShape<T, C, Side>>(levels, batch, texture.channels, [&](const MipPlan& plan, int64_t columns) {
      const int64_t tiles = plan.segment[0].tiles();
      const dim3 grid(at_most(tiles, INT32_MAX), at_most(columns, kMaxGridYZ));
      launch(mip_chain_kernel<S, T, C, Side, decltype(mean)::value>, grid, kThreads, 0, stream, image, texture, reducers, plan,
             batch, tiles > 1 ? counters : nullptr);
      counters += columns;
    });
  });
}

#define TEXVLM_MIP_CHAIN(S, T) \
  template void mip_chain<S, T>(const ImageView<const S>&, const TextureView<T>&, const Reducers&, int64_t, unsigned*, void*)
#define TEXVLM_MIP_CHAINS(T)    \
  TEXVLM_MIP_CHAIN(uint8_t, T); \
  TEXVLM_MIP_CHAIN(T, T);       \
  template int64_t mip_counters<T>(const Levels&, const Reducers&, int64_t, int64_t)
TEXVLM_MIP_CHAINS(float);
TEXVLM_MIP_CHAINS(double);
TEXVLM_MIP_CHAINS(Half);
TEXVLM_MIP_CHAINS(BFloat16);

// Level 0 alone, for other makers of the levels above it.
#define TEXVLM_IMAGES(T)                            \
  TEXVLM_TEXELS(ImageToTexels<uint8_t>::For<T, 0>); \
  TEXVLM_TEXELS(ImageToTexels<T>::For<T, 0>)
TEXVLM_IMAGES(float);
TEXVLM_IMAGES(double);
TEXVLM_IMAGES(Half);
TEXVLM_IMAGES(BFloat16);

// Single levels inside rectangles and regions, and the adjoint: coarse to fine, in gather form, without atomics.
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_REGIONS, MipDown);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_TEXELS, MipDownAdjoint);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_TEXELS, MipAdjointSeed);

}  // namespace texvlm::cuda
