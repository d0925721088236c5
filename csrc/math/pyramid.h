// Mipmaps: one level from the stored level above it, and the adjoint, texel by texel.
//
// Even axes: the 2-tap box. Odd axes, 2n+1 -> n: the polyphase 3-tap box with weights (n-i, n, i+1)/(2n+1) on texels 2i, 2i+1,
// 2i+2, which loses no texel and keeps the mean (S. Guthe and P. Heckbert, "Non-Power-of-Two Mipmapping", NVIDIA TR-01838, 2005).
// Max, min and mode look at the same texels (a window of 2 or 3 per axis). Both directions are in gather form: no atomics.
#pragma once

#include "texture.h"

namespace texvlm {

// The source texels of destination texel i on an axis of n texels.
template <class A>
struct AxisTaps {
  int64_t first;
  int count;
  A weight[3];
};

template <class A>
TEXVLM_HD AxisTaps<A> axis_taps(int64_t i, int64_t n) {
  if (n == 1) return {0, 1, {A(1), A(0), A(0)}};
  if (n % 2 == 0) return {2 * i, 2, {A(0.5), A(0.5), A(0)}};
  const int64_t half = n / 2;
  return {2 * i, 3, {A(half - i) / A(n), A(half) / A(n), A(i + 1) / A(n)}};
}

// Adjoint of axis_taps: the destination texels that read source texel i.
template <class A>
TEXVLM_HD AxisTaps<A> axis_parents(int64_t i, int64_t n) {
  if (n == 1) return {0, 1, {A(1), A(0), A(0)}};
  if (n % 2 == 0) return {i / 2, 1, {A(0.5), A(0), A(0)}};
  const int64_t half = n / 2, j = i / 2;
  if (i % 2) return {j, 1, {A(half) / A(n), A(0), A(0)}};
  if (j == 0) return {0, 1, {A(half) / A(n), A(0), A(0)}};
  if (j == half) return {half - 1, 1, {A(half) / A(n), A(0), A(0)}};
  return {j - 1, 2, {A(j) / A(n), A(half - j) / A(n), A(0)}};
}

// Comparison of max (and, reversed, of min): true where `a` replaces `best`. NaN wins and stays, so it propagates.
template <class A>
TEXVLM_HD bool beats(A a, A best, bool is_max) {
  return (is_max ? a > best : a < best) || (a != a && best == best);
}

// The most frequent of at most 9 values; ties go to the lowest.
template <class A>
TEXVLM_HD A mode_of(const A* v, int n) {
  A best = v[0];
  int best_count = 0;
  for (int i = 0; i < n; ++i) {
    int count = 0;
    for (int j = 0; j < n; ++j) count += v[j] == v[i];
    if (count > best_count || (count == best_count && v[i] < best)) {
      best = v[i];
      best_count = count;
    }
  }
  return best;
}

// Picture [B, C, H, W] (any strides, type S; `scale` is 1/255 for uint8) to level 0.
template <class S>
struct ImageToTexels {
  template <class T, int C>
  struct For {
    ImageView<const S> image;
    TextureView<T> texture;
    Acc<T> divisor;

    TEXVLM_HD T convert(S v) const { return static_cast<T>(divisor == Acc<T>(1) ? static_cast<Acc<T>>(v) : static_cast<Acc<T>>(v) / divisor); }

    TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
      T* out = texture.texel(b, 0, y, x);
      for (int64_t c = c0; c < c1; ++c) out[c] = convert(image.at(b, c, y, x));
    }

    // Blocks of 16 texels: reads run along x, writes stay inside a few cache lines.
    TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
      const int64_t channels = C ? C : texture.channels;
      T* TEXVLM_RESTRICT out = texture.texel(b, 0, y, 0);
      const S* in = &image.at(b, 0, y, 0);
      if (image.stride_x == 1 && C > 0) {
        const S* TEXVLM_RESTRICT plane[C ? C : 1];
        for (int c = 0; c < C; ++c) plane[c] = in + c * image.stride_c;
        for (int64_t x = x0; x < x1; ++x)
          for (int c = 0; c < C; ++c) out[x * C + c] = convert(plane[c][x]);
        return;
      }
      constexpr int64_t kBlock = 16;
      for (int64_t x = x0; x < x1; x += kBlock) {
        const int64_t stop = minimum(x + kBlock, x1);
        for (int64_t c = 0; c < channels; ++c) {
          const S* plane = in + c * image.stride_c;
          for (int64_t i = x; i < stop; ++i) out[i * channels + c] = convert(plane[i * image.stride_x]);
        }
      }
    }
  };
};

// Level `level` from the stored level above it.
template <class T, int C>
struct MipDown {
  TextureView<T> texture;
  int level;
  Reducers reducers;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    using A = Acc<T>;
    const int64_t channels = C ? C : texture.channels, width = texture.levels.width[level - 1];
    const AxisTaps<A> ty = axis_taps<A>(y, texture.levels.height[level - 1]), tx = axis_taps<A>(x, width);
    const T* in = texture.texel(b, level - 1, ty.first, tx.first);
    T* out = texture.texel(b, level, y, x);
    const int64_t pitch = width * channels;
    for (int64_t c = c0; c < c1; ++c) out[c] = static_cast<T>(reduce(reducers.of(c), in + c, pitch, channels, ty, tx));
  }

  // Vertical sums first, then horizontal: row() does the same arithmetic in the same order.
  TEXVLM_HD static Acc<T> mean(const T* in, int64_t pitch, int64_t channels, const AxisTaps<Acc<T>>& ty, const AxisTaps<Acc<T>>& tx) {
    Acc<T> sum = 0;
    for (int j = 0; j < tx.count; ++j) {
      Acc<T> column = 0;
      for (int i = 0; i < ty.count; ++i) column += ty.weight[i] * static_cast<Acc<T>>(in[i * pitch + j * channels]);
      sum += tx.weight[j] * column;
    }
    return sum;
  }

  TEXVLM_HD static Acc<T> reduce(Reducer reducer, const T* in, int64_t pitch, int64_t channels, const AxisTaps<Acc<T>>& ty,
                                 const AxisTaps<Acc<T>>& tx) {
    using A = Acc<T>;
    if (reducer == Reducer::mean) return mean(in, pitch, channels, ty, tx);
    if (reducer == Reducer::mode) {
      A values[9];
      int n = 0;
      for (int i = 0; i < ty.count; ++i)
        for (int j = 0; j < tx.count; ++j) values[n++] = static_cast<A>(in[i * pitch + j * channels]);
      return mode_of(values, n);
    }
    A best = static_cast<A>(in[0]);
    for (int i = 0; i < ty.count; ++i)
      for (int j = 0; j < tx.count; ++j) {
        const A v = static_cast<A>(in[i * pitch + j * channels]);
        best = beats(v, best, reducer == Reducer::max) ? v : best;
      }
    return best;
  }

  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    using A = Acc<T>;
    const int64_t channels = C ? C : texture.channels;
    const int64_t height = texture.levels.height[level - 1], width = texture.levels.width[level - 1];
    const bool even = height % 2 == 0 && width % 2 == 0;
    if (!even || !reducers.uniform || reducers.first != Reducer::mean) {
      for (int64_t x = x0; x < x1; ++x) (*this)(b, y, x, 0, channels);
      return;
    }
    const T* TEXVLM_RESTRICT top = texture.texel(b, level - 1, 2 * y, 0);
    const T* TEXVLM_RESTRICT bottom = top + width * channels;
    T* TEXVLM_RESTRICT out = texture.texel(b, level, y, 0);
    for (int64_t x = x0; x < x1; ++x) {
      const T *p = top + 2 * x * channels, *q = bottom + 2 * x * channels;
      for (int64_t c = 0; c < channels; ++c) {
        const A left = A(0.5) * static_cast<A>(p[c]) + A(0.5) * static_cast<A>(q[c]);
        const A right = A(0.5) * static_cast<A>(p[c + channels]) + A(0.5) * static_cast<A>(q[c + channels]);
        out[x * channels + c] = static_cast<T>(A(0.5) * left + A(0.5) * right);
      }
    }
  }
};

// Adjoint of MipDown: what one texel of level `level` - 1 receives from level `level`, added to its own gradient.
//   grad [B, T, C]: the incoming gradients of all levels; work [B, T - H*W, C]: the accumulated gradients of levels >= 1 (levels
//   counted from 0 in `work`'s own table, so level l of the texture is level l - 1 of work). data: the pyramid, for max and min.
template <class T, int C>
struct MipDownAdjoint {
  using A = Acc<T>;
  TextureView<const T> grad, data;
  TextureView<A> work;
  ImageView<A> image;  // the gradient of the picture, for level 1 -> 0
  int level;
  Reducers reducers;

  // Whether (y, x) is the first extremal texel, row-major, of the window that `parent` was reduced from.
  TEXVLM_HD bool is_winner(int64_t b, int64_t c, int64_t y, int64_t x, int64_t parent_y, int64_t parent_x, bool is_max) const {
    const int64_t height = data.levels.height[level - 1], width = data.levels.width[level - 1];
    const AxisTaps<A> ty = axis_taps<A>(parent_y, height), tx = axis_taps<A>(parent_x, width);
    int64_t best_y = ty.first, best_x = tx.first;
    A best = static_cast<A>(data.texel(b, level - 1, best_y, best_x)[c]);
    for (int i = 0; i < ty.count; ++i)
      for (int j = 0; j < tx.count; ++j) {
        const A v = static_cast<A>(data.texel(b, level - 1, ty.first + i, tx.first + j)[c]);
        if (beats(v, best, is_max)) {
          best = v;
          best_y = ty.first + i;
          best_x = tx.first + j;
        }
      }
    return best_y == y && best_x == x;
  }

  TEXVLM_HD A gather(int64_t b, int64_t c, int64_t y, int64_t x, const AxisTaps<A>& py, const AxisTaps<A>& px, Reducer reducer) const {
    if (reducer == Reducer::mode) return A(0);
    A sum = 0;
    for (int i = 0; i < py.count; ++i)
      for (int j = 0; j < px.count; ++j) {
        const int64_t parent_y = py.first + i, parent_x = px.first + j;
        const A g = work.texel(b, level - 1, parent_y, parent_x)[c];
        if (reducer == Reducer::mean) {
          sum += py.weight[i] * px.weight[j] * g;
        } else if (is_winner(b, c, y, x, parent_y, parent_x, reducer == Reducer::max)) {
          sum += g;
        }
      }
    return sum;
  }

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    const AxisTaps<A> py = axis_parents<A>(y, grad.levels.height[level - 1]), px = axis_parents<A>(x, grad.levels.width[level - 1]);
    const T* own = grad.texel(b, level - 1, y, x);
    for (int64_t c = c0; c < c1; ++c) {
      const A total = static_cast<A>(own[c]) + gather(b, c, y, x, py, px, reducers.of(c));
      if (level == 1) {
        image.at(b, c, y, x) = total;
      } else {
        work.texel(b, level - 2, y, x)[c] = total;
      }
    }
  }
};

// The last level's own gradient: where the way back starts.
template <class T, int C>
struct MipAdjointSeed {
  using A = Acc<T>;
  TextureView<const T> grad;
  TextureView<A> work;
  ImageView<A> image;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    const int last = grad.levels.count - 1;
    const T* own = grad.texel(b, last, y, x);
    for (int64_t c = c0; c < c1; ++c) {
      if (last == 0) {
        image.at(b, c, y, x) = static_cast<A>(own[c]);
      } else {
        work.texel(b, last - 1, y, x)[c] = static_cast<A>(own[c]);
      }
    }
  }
};

}  // namespace texvlm
