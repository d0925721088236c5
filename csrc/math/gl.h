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

// `count` texels, `N` channels of each; up to `M` the target is filled with zeros.
template <int N, int M, class T>
TEXVLM_HD void copy_group(const T* TEXVLM_RESTRICT in, int64_t in_step, T* TEXVLM_RESTRICT out, int64_t out_step, int64_t count) {
  for (int64_t x = 0; x < count; ++x)
    for (int i = 0; i < M; ++i) out[x * out_step + i] = i < N ? in[x * in_step + i] : T(0.0f);
}

// Level 0 of a packed texture [B, T, C] into groups; what is left of the last group becomes 0.
template <class T, int C>
struct TexelsToGroups {
  TextureView<const T> texture;
  GroupView<T> groups;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    for (int64_t c = c0; c < c1; c += 4) run(b, y, x, 1, c, c1 - c);
  }

#if defined(TEXVLM_HOST_LOOPS)
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    const int64_t channels = C ? C : texture.channels;
    for (int64_t c = 0; c < channels; c += 4) run(b, y, x0, x1 - x0, c, channels - c);
  }
#endif

  TEXVLM_HD void run(int64_t b, int64_t y, int64_t x, int64_t count, int64_t c, int64_t left) const {
    const T* in = texture.texel(b, 0, y, x) + c;
    T* out = groups.texel(b, 0, c / 4, y, x);
    const int64_t step = C ? C : texture.channels;
    if (left >= 4) return copy_group<4, 4>(in, step, out, 4, count);
    if (left == 3) return copy_group<3, 4>(in, step, out, 4, count);
    if (left == 2) return copy_group<2, 4>(in, step, out, 4, count);
    copy_group<1, 4>(in, step, out, 4, count);
  }
};

// One level of groups back into the packed texture.
template <class T, int C>
struct GroupsToTexels {
  GroupView<const T> groups;
  TextureView<T> texture;
  int level;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    for (int64_t c = c0; c < c1; c += 4) run(b, y, x, 1, c, c1 - c);
  }

#if defined(TEXVLM_HOST_LOOPS)
  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    const int64_t channels = C ? C : texture.channels;
    for (int64_t c = 0; c < channels; c += 4) run(b, y, x0, x1 - x0, c, channels - c);
  }
#endif

  TEXVLM_HD void run(int64_t b, int64_t y, int64_t x, int64_t count, int64_t c, int64_t left) const {
    const T* in = groups.texel(b, level, c / 4, y, x);
    T* out = texture.texel(b, level, y, x) + c;
    const int64_t step = C ? C : texture.channels;
    if (left >= 4) return copy_group<4, 4>(in, 4, out, step, count);
    if (left == 3) return copy_group<3, 3>(in, 4, out, step, count);
    if (left == 2) return copy_group<2, 2>(in, 4, out, step, count);
    copy_group<1, 1>(in, 4, out, step, count);
  }
};

}  // namespace texvlm
