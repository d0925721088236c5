// The mip chain of a picture in one launch: a block makes up to six levels of its 64 x 64 texels in shared memory, and the last
// block of a picture to finish makes the levels that are left. Method: AMD FidelityFX single pass downsampler (2020).
//
// Level 0 passes through shared memory in strips of rows: planes of a picture are read along x and stored interleaved, so both
// sides are whole cache lines for any channel count. Every level is computed from what is stored of the level above, by
// MipDown::reduce, so the chain equals the host's bit for bit. Bytes moved: level 0 once in (and for a picture, once out) and
// every other level once out; halo texels again.
//
// Odd sizes. A texel above an odd axis looks at three, so a tile needs a halo, which about doubles per level. Levels are fused
// as long as the halo of level 0 stays within an eighth of the tile's side (three levels where all are odd); the rest is a chain
// of its own, by the last block where it is at most kTailTiles tiles, in a second launch otherwise. So 1024 x 1024 is one
// launch, 4096 x 4096 is one, 1080 x 1920 is two, 16384 x 16384 is two.
#pragma once

#include "../math/pyramid.h"
#include "launch.cuh"

namespace texvlm::cuda {

// Up to `count` levels above level `base`, tile by tile. need: texels per axis that a tile wants of each of its levels.
constexpr int kFusedLevels = 6;
struct MipSegment {
  int base, count, tiles_y, tiles_x;
  int need_y[kFusedLevels + 1], need_x[kFusedLevels + 1];

  TEXVLM_HD int64_t tiles() const { return static_cast<int64_t>(tiles_y) * tiles_x; }
};

// One launch: the first segment by all blocks, the others by the last block of each picture.
constexpr int kMostSegments = 16;
constexpr int64_t kTailTiles = 4;
struct MipPlan {
  int segments;
  MipSegment segment[kMostSegments];
};

inline bool fits(const int64_t* size, int side, int count, int* need) {
  need[count] = side >> count;
  for (int l = count - 1; l >= 0; --l)
    need[l] = size[l] == 1 ? 1 : static_cast<int>(minimum<int64_t>(2 * need[l + 1] + size[l] % 2, size[l]));
  return need[0] <= side + side / 8;
}

inline MipSegment plan_segment(const Levels& levels, int base, int side) {
  MipSegment s{};
  s.base = base;
  for (s.count = minimum(level_count(side, side), levels.count - base) - 1; s.count > 1; --s.count)
    if (fits(levels.height + base, side, s.count, s.need_y) && fits(levels.width + base, side, s.count, s.need_x)) break;
  fits(levels.height + base, side, s.count, s.need_y);  // a single level always fits
  fits(levels.width + base, side, s.count, s.need_x);
  const int64_t each = side >> s.count;
  s.tiles_y = static_cast<int>((levels.height[base + s.count] + each - 1) / each);
  s.tiles_x = static_cast<int>((levels.width[base + s.count] + each - 1) / each);
  return s;
}

// The launch that starts above level `base`; its last segment says where the next one starts.
inline MipPlan plan_launch(const Levels& levels, int base, int side) {
  MipPlan plan{};
  while (base + 1 < levels.count && plan.segments < kMostSegments) {
    const MipSegment s = plan_segment(levels, base, side);
    if (plan.segments > 0 && s.tiles() > kTailTiles) break;
    plan.segment[plan.segments++] = s;
    base += s.count;
  }
  return plan;
}

namespace {

// Side: of a tile in texels. C: channels, or 0: known at run time, in groups of `kGroup`, that fill as much shared memory.
template <class T, int C, int Side>
struct MipShape {
  static constexpr int kSide = Side;
  static constexpr int kGroup = C ? C : static_cast<int>(65536 / (Side * Side) / sizeof(T));
  static constexpr int kStripRows = Side / 8;  // of level 1
  static constexpr int kStrip = (2 * kStripRows + 1) * (Side + Side / 8) * kGroup;
  static constexpr int kFirst = (Side / 2 + Side / 16) * (Side / 2 + Side / 16) * kGroup;
  static constexpr int kSecond = (Side / 4 + Side / 32) * (Side / 4 + Side / 32) * kGroup;
  static_assert((kStrip + kFirst + kSecond) * sizeof(T) <= 48 * 1024 - 64, "static shared memory");
};

// Mean: all channels are means, which most textures are: modes, and windows of nine, take the registers of every thread.
template <class S, class T, int C, int Side, bool Mean>
struct MipTile {
  using A = Acc<T>;
  using Shape = MipShape<T, C, Side>;
  static constexpr int kWarps = kThreads / 32;

  const ImageView<const S>& image;
  const TextureView<T>& texture;
  const Reducers& reducers;
  int64_t b, first_channel;
  int group;  // channels here

  // An axis of one level of the tile: where it begins in the level, how many texels there are, how many are this tile's to store.
  struct Span {
    int origin, size, extent, owned;
  };
  __device__ static Span span(int64_t sides, int l, int need, int tile, int tiles) {
    const int size = static_cast<int>(sides), origin = tile * (Side >> l), left = size - origin;
    return {origin, size, minimum(need, left), tile + 1 == tiles ? left : minimum(Side >> l, left)};
  }
  struct Area {
    Span y, x;
  };
  __device__ Area area(const MipSegment& s, int l, int tile_y, int tile_x) const {
    return {span(texture.levels.height[s.base + l], l, s.need_y[l], tile_y, s.tiles_y),
            span(texture.levels.width[s.base + l], l, s.need_x[l], tile_x, s.tiles_x)};
  }

  __device__ int channels_here() const { return C ? C : group; }

  // Element e of a row of texels: the channels of this group, texel after texel, lie close in shared memory and in the texture
  // only where the group is all channels.
  __device__ int64_t in_texture(int e) const {
    const int g = channels_here();
    if (g == texture.channels) return e;
    const int x = e / g;
    return x * texture.channels + (e - x * g);
  }

  // Rows [begin, end) of the base level to the strip; all loads of a part are on their way before the first is stored.
  __device__ void load_picture(const Area& a, int begin, int end, T* strip) const {
    constexpr int kColumns = Side / 32, kPart = C ? C : 4;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = channels_here();
#pragma unroll 1
    for (int row = begin + warp; row < end; row += kWarps) {
      T* out = strip + (row - begin) * a.x.extent * g;
      const S* in = &image.at(b, first_channel, a.y.origin + row, a.x.origin);
      for (int x0 = lane; x0 < a.x.extent; x0 += Side) {
        for (int c0 = 0; c0 < g; c0 += kPart) {
          S v[kColumns][kPart];
#pragma unroll
          for (int k = 0; k < kColumns; ++k)
#pragma unroll
            for (int c = 0; c < kPart; ++c)
              if (x0 + 32 * k < a.x.extent && c0 + c < g)
                v[k][c] = in[(x0 + 32 * k) * image.stride_x + (c0 + c) * image.stride_c];
#pragma unroll
          for (int k = 0; k < kColumns; ++k)
#pragma unroll
            for (int c = 0; c < kPart; ++c)
              if (x0 + 32 * k < a.x.extent && c0 + c < g)
                out[(x0 + 32 * k) * g + c0 + c] =
                    static_cast<T>(ImageToTexels<S>::template For<T, 0>::scaled(static_cast<A>(v[k][c])));
        }
      }
    }
  }

  __device__ void load_stored(const Area& a, int base, int begin, int end, T* strip) const {
    constexpr int kAhead = C == 1 ? 2 : C ? 2 * C : 8;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int pitch = a.x.extent * channels_here();
#pragma unroll 1
    for (int row = begin + warp; row < end; row += kWarps) {
      T* out = strip + (row - begin) * pitch;
      const T* in = texture.texel(b, base, a.y.origin + row, a.x.origin) + first_channel;
      for (int e0 = lane; e0 < pitch; e0 += 32 * kAhead) {
        T v[kAhead];
#pragma unroll
        for (int k = 0; k < kAhead; ++k)
          if (e0 + 32 * k < pitch) v[k] = in[in_texture(e0 + 32 * k)];
#pragma unroll
        for (int k = 0; k < kAhead; ++k)
          if (e0 + 32 * k < pitch) out[e0 + 32 * k] = v[k];
      }
    }
  }

  // Rows of level 0 that this tile owns, [begin, end) of the strip that starts at row `first`.
  __device__ void store_level0(const Area& a, int first, int begin, int end, const T* strip) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int pitch = a.x.extent * channels_here(), owned = a.x.owned * channels_here();
    for (int row = begin + warp; row < minimum(end, a.y.owned); row += kWarps) {
      T* out = texture.texel(b, 0, a.y.origin + row, a.x.origin) + first_channel;
      for (int e = lane; e < owned; e += 32) out[in_texture(e)] = strip[(row - first) * pitch + e];
    }
  }

  // Rows [begin, end) of level `level` from the area `from` of the level above, whose rows in `in` start at `first`; to the
  // texture, and to `out`, for the next level.
  __device__ void reduce(const Area& from, const T* in, int first, const Area& to, int level, int begin, int end, T* out) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = channels_here();
    const int pitch = from.x.extent * g, wide = to.x.extent * g;
    const bool halves = from.y.size % 2 == 0 && from.x.size % 2 == 0;
    for (int row = begin + warp; row < end; row += kWarps) {
      const AxisTaps<A> ty = axis_taps<A>(to.y.origin + row, from.y.size);
      const T* rows = in + (static_cast<int>(ty.first - from.y.origin) - first) * pitch;
      T* stored = texture.texel(b, level, to.y.origin + row, to.x.origin) + first_channel;
#pragma unroll 2
      for (int e = lane; e < wide; e += 32) {
        const int x = e / g, c = e - x * g;
        A value;
        if (Mean && halves) {
          const AxisTaps<A> two{0, 2, {A(0.5), A(0.5), A(0)}};
          value = gathered(rows + 2 * x * g + c, pitch, g, two, two);
        } else {
          const AxisTaps<A> tx = axis_taps<A>(to.x.origin + x, from.x.size);
          const T* window = rows + static_cast<int>(tx.first - from.x.origin) * g + c;
          value = Mean ? gathered(window, pitch, g, ty, tx)
                       : MipDown<T, 0>::reduce(reducers.of(first_channel + c), window, pitch, g, ty, tx);
        }
        const T rounded = static_cast<T>(value);
        out[row * wide + e] = rounded;
        if (row < to.y.owned && x < to.x.owned) stored[in_texture(e)] = rounded;
      }
    }
  }

  // All levels of the segment for one tile. The block is in step afterwards.
  __device__ void run(const MipSegment& s, int tile_y, int tile_x, bool from_picture, T* strip, T* one, T* two) const {
    const Area base = area(s, 0, tile_y, tile_x), next = area(s, 1, tile_y, tile_x);
    const bool single = base.y.size == 1;
    const int odd = static_cast<int>(base.y.size % 2);
#pragma unroll 1
    for (int begin = 0; begin < next.y.extent; begin += Shape::kStripRows) {
      const int end = minimum(begin + Shape::kStripRows, next.y.extent);
      const int top = single ? 0 : 2 * begin, bottom = single ? 1 : 2 * end + odd;
      if (from_picture) {
        load_picture(base, top, bottom, strip);
      } else {
        load_stored(base, s.base, top, bottom, strip);
      }
      __syncthreads();
      // an odd level's third row is the next strip's first, which stores it
      if (from_picture) store_level0(base, top, top, end == next.y.extent ? bottom : 2 * end, strip);
      reduce(base, strip, top, next, s.base + 1, begin, end, one);
      __syncthreads();
    }
    Area above = next;
    for (int l = 2; l <= s.count; ++l) {
      const Area here = area(s, l, tile_y, tile_x);
      reduce(above, one, 0, here, s.base + l, 0, here.y.extent, two);
      __syncthreads();
      T* const other = one;
      one = two;
      two = other;
      above = here;
    }
  }
};

// That shall fit on a multiprocessor: some load while others compute.
template <class T, bool Mean>
constexpr int kBlocks = sizeof(T) < 8 && Mean ? 3 : 2;

// counters: one per picture and channel group, zero before; null where one tile is all.
template <class S, class T, int C, int Side, bool Mean>
__global__ void __launch_bounds__(kThreads, kBlocks<T, Mean>)
    mip_chain_kernel(ImageView<const S> image, TextureView<T> texture, Reducers reducers, MipPlan plan, int64_t batch,
                     unsigned* counters) {
  using Shape = MipShape<T, C, Side>;
  TEXVLM_SHARED(strip, T[Shape::kStrip]);
  TEXVLM_SHARED(one, T[Shape::kFirst]);
  TEXVLM_SHARED(two, T[Shape::kSecond]);
  TEXVLM_SHARED(last, bool);
  const int64_t groups = (texture.channels + Shape::kGroup - 1) / Shape::kGroup, tiles = plan.segment[0].tiles();
  for (int64_t z = blockIdx.y; z < batch * groups; z += gridDim.y) {
    const int64_t b = z / groups, first = (z - b * groups) * Shape::kGroup;
    const int group = static_cast<int>(minimum<int64_t>(Shape::kGroup, texture.channels - first));
    const MipTile<S, T, C, Side, Mean> tile{image, texture, reducers, b, first, group};
    for (int64_t i = blockIdx.x; i < tiles; i += gridDim.x) {
      int64_t j = i;
      for (int k = 0; k < plan.segments;) {
        const MipSegment& s = plan.segment[k];
        const int y = static_cast<int>(j / s.tiles_x), x = static_cast<int>(j - static_cast<int64_t>(y) * s.tiles_x);
        tile.run(s, y, x, s.base == 0 && image.data != nullptr, strip, one, two);
        if (k > 0 && ++j < s.tiles()) continue;
        if (k == 0 && counters && plan.segments > 1) {
          __threadfence();  // what this thread has stored is visible before its tile counts as done
          __syncthreads();
          if (threadIdx.x == 0) last = atomicAdd(counters + z, 1u) == static_cast<unsigned>(tiles - 1);
          __syncthreads();
          if (!last) break;
          __threadfence();  // and what the others have stored is read after
        }
        j = 0;
        ++k;
      }
    }
  }
}

}  // namespace
}  // namespace texvlm::cuda
