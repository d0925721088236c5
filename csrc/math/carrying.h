// Which cell's value a cell takes over from the frame before, and how much what is seen there differs from what it was computed
// from.
//
// Values move whole, to the cell that is nearest to where they lie; each has an offset, by how much of a cell it lies beside the
// cell that holds it, so that movements by less than a cell add up. A residual counts by the contrast around it: a difference is
// seen if it is some share of what is there anyway (E. H. Weber's law).
#pragma once

#include "exponential.h"
#include "texture.h"

namespace texvlm {

// What cells are made of: appearance now, in the frame before, and of the values that are held, [B, A, rows, columns]; the
// offsets [B, 2, rows, columns], (y, x); flow [B, 2, h, w] and occlusion [B, h, w], null where nothing moves; still [B, rows,
// columns].
template <class T>
struct CarriedCells {
  ImageView<const T> now, before, held, offset, flow;
  ImageView<const bool> occlusion, still;
  int64_t channels, rows, columns, h, w;
};

// The pixels of a cell: those that it touches, as in adaptive pooling.
struct CellSpan {
  int64_t begin, end;
  TEXVLM_HD CellSpan(int64_t i, int64_t cells, int64_t pixels)
      : begin(i * pixels / cells), end(((i + 1) * pixels + cells - 1) / cells) {}
};

template <class T, int C>
struct Carry {
  CarriedCells<T> in;
  T floor, quiet, occluded;
  int64_t* source;    // [B, rows, columns]
  T *offset, *moved;  // [B, 2, rows, columns], [B, A, rows, columns]: the offsets and the appearance of what is held now
  T* residual;        // [2, B, rows, columns]: the mean difference of colours, and over contrast + floor; infinite where lost
  int64_t plane;      // values of [B, rows, columns]

  // Standard deviation of the colours of the 3 x 3 cells around.
  TEXVLM_HD T contrast(int64_t b, int64_t y, int64_t x) const {
    T total = 0;
    for (int64_t c = 0; c < in.channels; ++c) {
      T v[9], mean = 0, variance = 0;
      for (int k = 0; k < 9; ++k) {
        v[k] = in.now.at(b, c, clamp(y + k / 3 - 1, int64_t{0}, in.rows - 1), clamp(x + k % 3 - 1, int64_t{0}, in.columns - 1));
        mean += v[k];
      }
      mean /= T(9);
      for (int k = 0; k < 9; ++k) variance += (v[k] - mean) * (v[k] - mean);
      total += variance / T(9);
    }
    return sqrt_of(total / static_cast<T>(in.channels));
  }

  // The mean difference between the colours of cell (y, x) now and those of a cell of other planes.
  TEXVLM_HD T difference(const ImageView<const T>& other, int64_t b, int64_t y, int64_t x, int64_t oy, int64_t ox) const {
    T total = 0;
    for (int64_t c = 0; c < in.channels; ++c) total += absolute(in.now.at(b, c, y, x) - other.at(b, c, oy, ox));
    return total / static_cast<T>(in.channels);
  }

  // By how many cells (y, x) came from elsewhere, in the mean over its pixels. False where that is not known.
  TEXVLM_HD bool shift(int64_t b, int64_t y, int64_t x, T& by_y, T& by_x) const {
    const CellSpan r(y, in.rows, in.h), c(x, in.columns, in.w);
    T u = 0, v = 0, hidden = 0;
    for (int64_t i = r.begin; i < r.end; ++i) {
      for (int64_t j = c.begin; j < c.end; ++j) {
        u += in.flow.at(b, 0, i, j), v += in.flow.at(b, 1, i, j);
        if (in.occlusion.data && in.occlusion.at(b, 0, i, j)) hidden += T(1);
      }
    }
    const T each = T(1) / static_cast<T>((r.end - r.begin) * (c.end - c.begin));
    const bool known = finite(u) && finite(v);
    by_x =
        known ? clamp(u * each, -static_cast<T>(in.w), static_cast<T>(in.w)) * (static_cast<T>(in.columns) / static_cast<T>(in.w))
              : T(0);
    by_y = known ? clamp(v * each, -static_cast<T>(in.h), static_cast<T>(in.h)) * (static_cast<T>(in.rows) / static_cast<T>(in.h))
                 : T(0);
    return known && !(hidden * each > occluded);
  }

  TEXVLM_HD void operator()(int64_t b, int64_t y, int64_t x, int64_t, int64_t) const {
    const T scale = contrast(b, y, x) + floor;
    int64_t from_y = y, from_x = x;
    T off_y = in.offset.at(b, 0, y, x), off_x = in.offset.at(b, 1, y, x);
    bool known = true;
    const bool stays = !in.flow.data || in.still.at(b, 0, y, x) || difference(in.before, b, y, x, y, x) <= quiet * scale;
    if (!stays) {
      T by_y, by_x;
      known = shift(b, y, x, by_y, by_x);
      const T place_y = static_cast<T>(y) + by_y, place_x = static_cast<T>(x) + by_x;
      const int64_t near_y = static_cast<int64_t>(floor_of(place_y + T(0.5))),
                    near_x = static_cast<int64_t>(floor_of(place_x + T(0.5)));
      T least = T(-1);
      for (int k = 0; k < 9; ++k) {  // the middle first: a tie leaves a value where it is
        const int at = (k + 4) % 9;
        const int64_t cy = clamp(near_y + at / 3 - 1, int64_t{0}, in.rows - 1),
                      cx = clamp(near_x + at % 3 - 1, int64_t{0}, in.columns - 1);
        const T dy = in.offset.at(b, 0, cy, cx) + (static_cast<T>(cy) - place_y),
                dx = in.offset.at(b, 1, cy, cx) + (static_cast<T>(cx) - place_x), distance = dy * dy + dx * dx;
        if (least >= T(0) && !(distance < least)) continue;
        least = distance, from_y = cy, from_x = cx, off_y = dy, off_x = dx;
      }
    }
    const int64_t cell = y * in.columns + x, at = b * in.rows * in.columns + cell, all = in.rows * in.columns;
    source[at] = from_y * in.columns + from_x;
    offset[(b * 2) * all + cell] = off_y, offset[(b * 2 + 1) * all + cell] = off_x;
    for (int64_t c = 0; c < in.channels; ++c) moved[(b * in.channels + c) * all + cell] = in.held.at(b, c, from_y, from_x);
    const T differs = difference(in.held, b, y, x, from_y, from_x);
    residual[at] = differs;
    residual[plane + at] = known ? differs / scale : T(INFINITY);
  }
};

}  // namespace texvlm
