// Mipmaps: one level from the stored level above it, and the adjoint, texel by texel.
//
// Even axes: the 2-tap box. Odd axes, 2n+1 -> n: the polyphase 3-tap box with weights (n-i, n, i+1)/(2n+1) on texels 2i, 2i+1,
// 2i+2, which loses no texel and keeps the mean (S. Guthe and P. Heckbert, "Non-Power-of-Two Mipmapping", NVIDIA TR-01838, 2005).
// Max, min and mode look at the same texels (a window of 2 or 3 per axis). Both directions are in gather form: no atomics.
#pragma once

#include <type_traits>

#include "lanes.h"
#include "separable.h"
#include "taps.h"
#include "texture.h"

namespace texvlm {

// The source texels of destination texel i on an axis of n texels.
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

// Picture [B, C, H, W] (any strides; type S, uint8 is divided by 255) to level 0.
template <class S>
struct ImageToTexels {
  template <class T, int C>
  struct For {
    ImageView<const S> image;
    TextureView<T> texture;

    template <class V>
    TEXVLM_HD static V scaled(V v) {
      return std::is_same_v<S, uint8_t> ? v / Acc<T>(255) : v;
    }

    TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
      T* out = texture.texel(b, 0, y, x);
      for (int64_t c = c0; c < c1; ++c) out[c] = static_cast<T>(scaled(static_cast<Acc<T>>(image.at(b, c, y, x))));
    }

#if defined(TEXVLM_HAS_LANES)
    TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
      const int64_t channels = C ? C : texture.channels;
      int64_t x = x0;
      T* TEXVLM_RESTRICT out = texture.texel(b, 0, y, 0);
      const S* TEXVLM_RESTRICT in = &image.at(b, 0, y, 0);
      if (image.stride_c == 1 && image.stride_x == channels) {  // texels already: one run of values
        constexpr int N = 8;
        int64_t i = x0 * channels;
        for (; i + N <= x1 * channels; i += N) store_lanes<Acc<T>, N>(out + i, scaled(load_lanes<Acc<T>, N>(in + i)));
        for (; i < x1 * channels; ++i) out[i] = static_cast<T>(scaled(static_cast<Acc<T>>(in[i])));
        return;
      }
      if (image.stride_x == 1) {
        if constexpr (C == 3) {
          const S *TEXVLM_RESTRICT red = in, *TEXVLM_RESTRICT green = in + image.stride_c,
                                   *TEXVLM_RESTRICT blue = in + 2 * image.stride_c;
          for (; x < x1; ++x) {
            out[3 * x] = static_cast<T>(scaled(static_cast<Acc<T>>(red[x])));
            out[3 * x + 1] = static_cast<T>(scaled(static_cast<Acc<T>>(green[x])));
            out[3 * x + 2] = static_cast<T>(scaled(static_cast<Acc<T>>(blue[x])));
          }
        } else {
          x = transposed(in, out, channels, x0, x1);
        }
      }
      for (; x < x1; ++x) (*this)(b, y, x, 0, channels);
    }

    // Whole cache lines of 4 planes at a time: the planes are often a power of two apart, and more of them would evict each
    // other.
    TEXVLM_HD int64_t transposed(const S* in, T* out, int64_t channels, int64_t x, int64_t x1) const {
      using A = Acc<T>;
      using V = Lanes<A, 4>;
      constexpr int64_t kLine = 64 / sizeof(S) < 16 ? 64 / sizeof(S) : 16;
      for (; x + kLine <= x1; x += kLine) {
        int64_t c = 0;
        for (; c + 4 <= channels; c += 4) {
          const S* plane = in + c * image.stride_c + x;
          for (int64_t i = 0; i < kLine; i += 4) {
            V p = load_lanes<A, 4>(plane + i), q = load_lanes<A, 4>(plane + image.stride_c + i);
            V r = load_lanes<A, 4>(plane + 2 * image.stride_c + i), s = load_lanes<A, 4>(plane + 3 * image.stride_c + i);
            transpose<A>(p, q, r, s);
            T* texel = out + (x + i) * channels + c;
            store_lanes<A, 4>(texel, scaled(p));
            store_lanes<A, 4>(texel + channels, scaled(q));
            store_lanes<A, 4>(texel + 2 * channels, scaled(r));
            store_lanes<A, 4>(texel + 3 * channels, scaled(s));
          }
        }
        for (; c < channels; ++c)
          for (int64_t i = x; i < x + kLine; ++i)
            out[i * channels + c] = static_cast<T>(scaled(static_cast<A>(in[c * image.stride_c + i])));
      }
      return x;
    }
#endif
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

  TEXVLM_HD static Acc<T> reduce(Reducer reducer, const T* in, int64_t pitch, int64_t channels, const AxisTaps<Acc<T>>& ty,
                                 const AxisTaps<Acc<T>>& tx) {
    using A = Acc<T>;
    if (reducer == Reducer::mean) return gathered(in, pitch, channels, ty, tx);  // row() has the same order
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

#if defined(TEXVLM_HAS_LANES)
  static constexpr int N = lanes_for(C);

  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    const int64_t channels = C ? C : texture.channels, guarded = x1 - (channels < N ? guard_texels(channels, N) : 0);
    int64_t x = x0;
    if (x1 - x0 <= kRun && channels >= 2) prefetch_below(b, y, x0, x1);
    if (channels >= 2) {  // of one channel, the compiler makes better vectors along x
      const bool halves = texture.levels.height[level - 1] % 2 == 0 && texture.levels.width[level - 1] % 2 == 0;
      if (!reducers.uniform || reducers.first != Reducer::mean) {
        x = row_of_lanes<true, false>(b, y, x, guarded);
      } else if (halves) {
        if constexpr (C == 3 || C == 4) x = row_of_pairs(b, y, x, guarded);
        x = row_of_lanes<false, true>(b, y, x, guarded);
      } else {
        x = row_of_lanes<false, false>(b, y, x, guarded);
      }
    } else if (reducers.first == Reducer::mean && texture.levels.height[level - 1] % 2 == 0 &&
               texture.levels.width[level - 1] % 2 == 0) {
      const T* TEXVLM_RESTRICT top = texture.texel(b, level - 1, 2 * y, 0);
      const T* TEXVLM_RESTRICT bottom = texture.texel(b, level - 1, 2 * y + 1, 0);
      T* TEXVLM_RESTRICT out = texture.texel(b, level, y, 0);
      for (; x < x1; ++x) {
        const Acc<T> left = static_cast<Acc<T>>(top[2 * x]) + static_cast<Acc<T>>(bottom[2 * x]);
        const Acc<T> right = static_cast<Acc<T>>(top[2 * x + 1]) + static_cast<Acc<T>>(bottom[2 * x + 1]);
        out[x] = static_cast<T>(Acc<T>(0.25) * (left + right));
      }
    }
    for (; x < x1; ++x) (*this)(b, y, x, 0, channels);
  }

  // Few channels, even sides: the sum of every texel with its three neighbours, as one stream, of which every second is kept.
  TEXVLM_HD int64_t row_of_pairs(int64_t b, int64_t y, int64_t x, int64_t end) const {
    using A = Acc<T>;
    constexpr int64_t kTexels = 64;
    A sums[2 * kTexels * N];
    const T* TEXVLM_RESTRICT top = texture.texel(b, level - 1, 2 * y, 0);
    const T* TEXVLM_RESTRICT bottom = texture.texel(b, level - 1, 2 * y + 1, 0);
    T* out = texture.texel(b, level, y, 0);
    for (; x + kTexels <= end; x += kTexels) {
      const T *p = top + 2 * x * C, *q = bottom + 2 * x * C;
      for (int64_t i = 0; i < (2 * kTexels - 1) * C; ++i) {
        const A left = static_cast<A>(p[i]) + static_cast<A>(q[i]), right = static_cast<A>(p[i + C]) + static_cast<A>(q[i + C]);
        sums[i] = A(0.25) * (left + right);
      }
      for (int64_t i = 0; i < kTexels; ++i) store_lanes<A, N>(out + (x + i) * C, load_lanes<A, N>(sums + 2 * i * C));
    }
    return x;
  }

  // What the next row will read: in runs too short for the hardware to find out.
  TEXVLM_HD void prefetch_below(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    const int64_t channels = C ? C : texture.channels, height = texture.levels.height[level - 1];
    for (int64_t row = minimum(2 * y + 2, height - 1); row <= minimum(2 * y + 3, height - 1); ++row) {
      const T* const in = texture.texel(b, level - 1, row, 0);
      for (int64_t i = 2 * x0 * channels; i < 2 * x1 * channels; i += 64 / static_cast<int64_t>(sizeof(T)))
        TEXVLM_PREFETCH(in + i);
    }
  }

  // All channels of one texel at a time, the last group of lanes overlapping the one before. Mixed: mean, max and min of every
  // channel, then each channel takes its own. Halves: both axes are even, so all weights are 1/2. Returns where it stopped.
  template <bool Mixed, bool Halves>
  TEXVLM_HD int64_t row_of_lanes(int64_t b, int64_t y, int64_t x, int64_t end) const {
    using A = Acc<T>;
    using V = Lanes<A, N>;
    using I = typename IntLike<A>::type;
    using M = Lanes<I, N>;
    const int64_t channels = C ? C : texture.channels, width = texture.levels.width[level - 1], pitch = width * channels;
    const AxisTaps<A> ty = axis_taps<A>(y, texture.levels.height[level - 1]);
    const T* in = texture.texel(b, level - 1, ty.first, 0);
    T* out = texture.texel(b, level, y, 0);
    I kind[Mixed ? Reducers::kMaxMixed + N : 1];  // -1 where the channel is a max (min), else 0
    I kind_min[Mixed ? Reducers::kMaxMixed + N : 1];
    if (Mixed) {
      if (channels > Reducers::kMaxMixed) return x;
      for (int64_t c = 0; c < maximum<int64_t>(channels, N); ++c) {
        const Reducer r = c < channels ? reducers.of(c) : Reducer::mean;
        kind[c] = r == Reducer::max ? -1 : 0;
        kind_min[c] = r == Reducer::min ? -1 : 0;
      }
    }
    for (; x < end; ++x) {
      const AxisTaps<A> tx = Halves ? AxisTaps<A>{2 * x, 2, {A(0.5), A(0.5), A(0)}} : axis_taps<A>(x, width);
      const T* p = in + tx.first * channels;
      for (int64_t group = 0; group < channels; group += N) {
        const int64_t c = channels < N ? group : minimum(group, channels - N);
        V mean, high, low;
        if (Halves && !Mixed) {
          mean = A(0.25) * ((load_lanes<A, N>(p + c) + load_lanes<A, N>(p + pitch + c)) +
                            (load_lanes<A, N>(p + channels + c) + load_lanes<A, N>(p + pitch + channels + c)));
        } else {
          mean = V{} + A(0);
          high = low = load_lanes<A, N>(p + c);
          for (int j = 0; j < tx.count; ++j) {
            V column = V{} + A(0);
            for (int i = 0; i < ty.count; ++i) {
              const V v = load_lanes<A, N>(p + i * pitch + j * channels + c);
              column += ty.weight[i] * v;
              if (Mixed) {
                high = ((v > high) | (v != v)) ? v : high;
                low = ((v < low) | (v != v)) ? v : low;
              }
            }
            mean += tx.weight[j] * column;
          }
        }
        if (Mixed) {
          const M is_max = load_lanes<I, N>(kind + c), is_min = load_lanes<I, N>(kind_min + c);
          mean = is_max ? high : (is_min ? low : mean);
        }
        store_lanes<A, N>(out + x * channels + c, mean);
      }
      if (Mixed && reducers.any_mode) {
        for (int64_t c = 0; c < channels; ++c)
          if (reducers.of(c) == Reducer::mode)
            out[x * channels + c] = static_cast<T>(reduce(Reducer::mode, p + c, pitch, channels, ty, tx));
      }
    }
    return x;
  }
#endif
};

#if defined(TEXVLM_HOST_LOOPS)
// Several levels of a band of rows while they are in the cache, the picture's own rows first if there is a picture to read.
//   A band is 2^levels rows of level 0; all heights above it are even, so no band reads another's rows. Texel y of the launch is
//   the band, and its columns only tell the launcher how much work a band is.
template <class S>
struct MipBand {
  template <class T, int C>
  struct For {
    ImageView<const S> image;  // data is null when level 0 is there already
    TextureView<T> texture;
    int levels;
    Reducers reducers;

    TEXVLM_HD void row(int64_t b, int64_t band, int64_t, int64_t) const {
      if (image.data != nullptr) {
        const typename ImageToTexels<S>::template For<T, C> write{image, texture};
        for (int64_t y = band << levels; y < (band + 1) << levels; ++y) one_row(write, b, y, texture.levels.width[0]);
      }
      for (int level = 1; level <= levels; ++level) {
        const MipDown<T, C> down{texture, level, reducers};
        for (int64_t y = band << (levels - level); y < (band + 1) << (levels - level); ++y)
          one_row(down, b, y, texture.levels.width[level]);
      }
    }

    template <class F>
    TEXVLM_HD static void one_row(const F& f, int64_t b, int64_t y, int64_t width) {
#if defined(TEXVLM_HAS_LANES)
      f.row(b, y, 0, width);
#else  // compilers without vector extensions
      for (int64_t x = 0; x < width; ++x) f(b, y, x, 0, C ? C : f.texture.channels);
#endif
    }
  };
};
#endif

// Adjoint of MipDown: what one texel of level `level` - 1 receives from level `level`, added to its own gradient.
//   grad [B, T, C]: the incoming gradients of all levels; work: the accumulated gradients of levels >= 1, as if level 0 lay
//   before them. data: the pyramid, for max and min.
template <class T, int C>
struct MipDownAdjoint {
  using A = Acc<T>;
  TextureView<const T> grad;
  Texels<const T> data;
  Texels<A> work;
  ImageView<A> image;  // the gradient of the picture, for level 1 -> 0
  int level;
  Reducers reducers;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    const Levels& l = grad.levels;
    const AxisTaps<A> py = axis_parents<A>(y, l.height[level - 1]), px = axis_parents<A>(x, l.width[level - 1]);
    const T* own = grad.texel(b, level - 1, y, x);
    const A* above = work.texel(l, b, level, py.first, px.first);
    const bool to_image = level == 1;
    A* out = to_image ? &image.at(b, 0, y, x) : work.texel(l, b, level - 1, y, x);
    const int64_t step = to_image ? image.stride_c : 1, pitch = l.width[level] * work.channels;
    for (int64_t c = c0; c < c1; ++c) {
      const A from = reducers.of(c) == Reducer::mean ? gathered(above + c, pitch, work.channels, py, px) : A(0);
      out[c * step] = static_cast<A>(own[c]) + from;
    }
    if (!reducers.any_extremum) return;
    for (int i = 0; i < py.count; ++i)
      for (int j = 0; j < px.count; ++j) {
        const AxisTaps<A> ty = axis_taps<A>(py.first + i, l.height[level - 1]),
                          tx = axis_taps<A>(px.first + j, l.width[level - 1]);
        const T* window = data.texel(l, b, level - 1, ty.first, tx.first);
        for (int64_t c = c0; c < c1; ++c) {
          const Reducer r = reducers.of(c);
          if (r != Reducer::max && r != Reducer::min) continue;
          const bool won = ty.count == 2 && tx.count == 2 ? wins<2>(window + c, ty, tx, y, x, r == Reducer::max)
                                                          : wins<0>(window + c, ty, tx, y, x, r == Reducer::max);
          out[c * step] += won ? above[i * pitch + j * work.channels + c] : A(0);
        }
      }
  }

  // Whether (y, x) is the first extremal texel, row-major, of a window of N x N texels (0: as many as there are taps).
  template <int N>
  TEXVLM_HD bool wins(const T* window, const AxisTaps<A>& ty, const AxisTaps<A>& tx, int64_t y, int64_t x, bool is_max) const {
    const int64_t pitch = grad.levels.width[level - 1] * data.channels, my_y = y - ty.first, my_x = x - tx.first;
    const A mine = static_cast<A>(window[my_y * pitch + my_x * data.channels]);
    bool won = true;
    for (int i = 0; i < (N ? N : ty.count); ++i)
      for (int j = 0; j < (N ? N : tx.count); ++j) {
        const A v = static_cast<A>(window[i * pitch + j * data.channels]);
        const bool before = i < my_y || (i == my_y && j < my_x), me = i == my_y && j == my_x;
        won &= before ? beats(mine, v, is_max) : me || !beats(v, mine, is_max);
      }
    return won;
  }

  TEXVLM_HD void row(int64_t b, int64_t y, int64_t x0, int64_t x1) const {
    const Levels& l = grad.levels;
    const int64_t channels = C ? C : grad.channels, width = l.width[level - 1];
    const AxisTaps<A> py = axis_parents<A>(y, l.height[level - 1]);
    const bool to_image = level == 1;
    const int64_t step_x = to_image ? image.stride_x : channels, step_c = to_image ? image.stride_c : 1;
    for (int64_t x = x0; x < x1; x += kRun) {
      const int n = static_cast<int>(minimum<int64_t>(kRun, x1 - x));
      AxisTaps<A> px[kRun];
      for (int i = 0; i < n; ++i) px[i] = axis_parents<A>(x + i, width);
      const T* TEXVLM_RESTRICT own = grad.texel(b, level - 1, y, x);
      A* TEXVLM_RESTRICT out = to_image ? &image.at(b, 0, y, x) : work.texel(l, b, level - 1, y, x);
      for (int64_t begin = 0, end; begin < channels; begin = end) {  // channels of one reducer that follow each other
        const Reducer reducer = reducers.of(begin);
        for (end = reducers.uniform ? channels : begin + 1; end < channels && reducers.of(end) == reducer;) ++end;
        if (reducer != Reducer::mean) {
          for (int i = 0; i < n; ++i) (*this)(b, y, x + i, begin, end);
          continue;
        }
        gather_run<C, 1>(work.texel(l, b, level, py.first, 0), l.width[level] * channels, channels, begin, end, py, px, n,
                         [&](int i, int64_t c0, auto count, const A* sums) {
                           const T* const mine = own + i * channels + c0;
                           A* const to = out + i * step_x + c0 * step_c;
                           for (int c = 0; c < count; ++c) to[c * step_c] = static_cast<A>(mine[c]) + sums[c];
                         });
      }
    }
  }
};

// The last level's own gradient: where the way back starts.
template <class T, int C>
struct MipAdjointSeed {
  using A = Acc<T>;
  TextureView<const T> grad;
  Texels<A> work;
  ImageView<A> image;

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t c0, int64_t c1) const {
    const int last = grad.levels.count - 1;
    const T* own = grad.texel(b, last, y, x);
    for (int64_t c = c0; c < c1; ++c) {
      if (last == 0) {
        image.at(b, c, y, x) = static_cast<A>(own[c]);
      } else {
        work.texel(grad.levels, b, last, y, x)[c] = static_cast<A>(own[c]);
      }
    }
  }
};

}  // namespace texvlm
