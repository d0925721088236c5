// Channels in groups of four: OpenGL textures have RGBA texels, so C channels of B pictures become B * ceil(C / 4) layers.
#pragma once

#include "texture.h"

namespace texvlm {

// Layers of RGBA texels, level after level: [layers, h, w, 4] each. Layer b * groups + g holds channels 4 g .. 4 g + 3 of picture
// b.
template <class T>
struct GroupView {
  T* data;
  int64_t groups, layers;
  Levels levels;

  TEXVLM_HD T* level(int l) const { return data + 4 * layers * levels.offset[l]; }
  TEXVLM_HD T* texel(int64_t b, int l, int64_t g, int64_t y, int64_t x) const {
    return level(l) + 4 * (((b * groups + g) * levels.height[l] + y) * levels.width[l] + x);
  }
  TEXVLM_HD int64_t texels_of(int l) const { return levels.height[l] * levels.width[l]; }
};

// Level 0 of a packed texture [B, T, C] into groups; what is left of the last group becomes 0.
template <class T, int C>
struct TexelsToGroups {
  TextureView<const T> texture;
  GroupView<T> groups;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    const T* in = texture.texel(b, 0, y, x);
    const int64_t apart = 4 * groups.texels_of(0);
    T* out = groups.texel(b, 0, c0 / 4, y, x);
    for (int64_t c = c0; c < c1; c += 4, out += apart)
      for (int64_t i = 0; i < 4; ++i) out[i] = c + i < c1 ? in[c + i] : T(0.0f);
  }
};

// One level of groups back into the packed texture.
template <class T, int C>
struct GroupsToTexels {
  GroupView<const T> groups;
  TextureView<T> texture;
  int level;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    const int64_t apart = 4 * groups.texels_of(level);
    const T* in = groups.texel(b, level, c0 / 4, y, x);
    T* out = texture.texel(b, level, y, x);
    for (int64_t c = c0; c < c1; c += 4, in += apart)
      for (int64_t i = 0; i < 4 && c + i < c1; ++i) out[c + i] = in[i];
  }
};

}  // namespace texvlm
