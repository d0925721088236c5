// A texture: every level of a pyramid in ONE buffer [B, T, C], channels last, levels one after another.
#pragma once

#include "scalar.h"

namespace texvlm {

constexpr int kMaxLevels = 32;

enum class Reducer : uint8_t { mean = 0, max = 1, min = 2, mode = 3 };

// Levels of a full pyramid: 1 + floor(log2(max(height, width))).
inline int level_count(int64_t height, int64_t width) {
  int count = 1;
  while (count < kMaxLevels && (maximum(height, width) >> count) > 0) ++count;
  return count;
}

// The level table is a pure function of (height, width, levels): level l has max(1, H >> l) x max(1, W >> l) texels.
struct Levels {
  int count;
  int64_t height[kMaxLevels], width[kMaxLevels], offset[kMaxLevels];  // offset: texels before the level
  int64_t texels;                                                     // T
};

inline Levels make_levels(int64_t height, int64_t width, int count) {
  Levels t{};
  t.count = count;
  for (int l = 0; l < count; ++l) {
    t.height[l] = maximum<int64_t>(1, height >> l);
    t.width[l] = maximum<int64_t>(1, width >> l);
    t.offset[l] = t.texels;
    t.texels += t.height[l] * t.width[l];
  }
  return t;
}

// How each channel is reduced from level to level: one for all, or 2 bits a channel.
struct Reducers {
  static constexpr int kMaxMixed = 1024;
  bool uniform;
  Reducer first;
  bool any_mode, any_extremum;
  uint64_t bits[kMaxMixed / 32];

  TEXVLM_HD Reducer of(int64_t c) const { return uniform ? first : static_cast<Reducer>((bits[c >> 5] >> (2 * (c & 31))) & 3u); }
};

// [B, T, C] contiguous; T is the texel type. A batch of 1 has batch_stride 0, so it is shared by all queries.
template <class T>
struct Texels {
  T* data;
  int64_t batch_stride, channels;

  TEXVLM_HD T* texel(const Levels& levels, int64_t b, int level, int64_t y, int64_t x) const {
    return data + b * batch_stride + (levels.offset[level] + y * levels.width[level] + x) * channels;
  }
};

// With its levels, which take 800 bytes: a functor has one of these, and Texels where it reads or writes others of the same
// levels.
template <class T>
struct TextureView : Texels<T> {
  Levels levels;

  TEXVLM_HD T* texel(int64_t b, int level, int64_t y, int64_t x) const { return Texels<T>::texel(levels, b, level, y, x); }
};

// A dense picture [B, C, H, W] with any strides (in elements), stride 0 too.
template <class T>
struct ImageView {
  T* data;
  int64_t stride_b, stride_c, stride_y, stride_x;

  TEXVLM_HD T& at(int64_t b, int64_t c, int64_t y, int64_t x) const {
    return data[b * stride_b + c * stride_c + y * stride_y + x * stride_x];
  }
};

}  // namespace texvlm
