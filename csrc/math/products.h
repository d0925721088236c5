// Products of a few rows with a panel of lanes, held in registers: what the loops of attention on the host are made of.
//
// Sums run over t in order. Where they are compiled with contraction (csrc/attention.cpp says where and why) a multiply-add is
// rounded once: so sums differ between instruction sets in the last places, and on one do not depend on who computes what.
#pragma once

#include "lanes.h"

#if defined(TEXVLM_HAS_LANES)

namespace texvlm {

constexpr int kPanel = 64;  // lanes of a panel: queries of a tile

// W, the width of a vector, is the instruction set: 16 floats of AVX-512, 8 of AVX2, 4 (or 2 doubles) of the baseline. V vectors
// of R rows fill the registers.
template <int W>
constexpr int kPanelVectors = W == 16 ? 4 : 2;
constexpr int kRowsAtOnce = 6;

// c[i][j] (+)= sum_t a_i[t] b[t][j], for i < R and j < V W.
template <int W, int V, int R, bool Add, class A>
TEXVLM_HD void rows_by_panel(const A* const* a, int64_t n, const A* b, int64_t b_row, A* c, int64_t c_row) {
  Lanes<A, W> sum[R][V];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[i][v] = Add ? load_lanes<A, W>(c + i * c_row + v * W) : Lanes<A, W>{};
  for (int64_t t = 0; t < n; ++t) {
    Lanes<A, W> x[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) x[v] = load_lanes<A, W>(b + t * b_row + v * W);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[i][v] = a[i][t] * x[v] + sum[i][v];
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store_lanes<A, W>(c + i * c_row + v * W, sum[i][v]);
}

// c[i][j] += sum_t a_t[i] b[t][j], for i < R and j < V W.
template <int W, int V, int R, class A>
TEXVLM_HD void columns_by_panel(const A* const* a, int64_t first, int64_t n, const A* b, int64_t b_row, A* c, int64_t c_row) {
  Lanes<A, W> sum[R][V];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[i][v] = load_lanes<A, W>(c + i * c_row + v * W);
  for (int64_t t = 0; t < n; ++t) {
    Lanes<A, W> x[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) x[v] = load_lanes<A, W>(b + t * b_row + v * W);
    const A* const row = a[t] + first;
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[i][v] = row[i] * x[v] + sum[i][v];
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store_lanes<A, W>(c + i * c_row + v * W, sum[i][v]);
}

// c [rows][c_row] (+)= a_i . b [n][b_row], over the first `lanes` lanes, rounded up to whole panels of V W. Both a and c have
// room for whole groups of kRowsAtOnce rows, whose last ones are written too.
template <int W, int V, bool Add, class A>
TEXVLM_HD void multiply_rows(const A** a, int64_t rows, int64_t n, const A* b, int64_t b_row, int64_t lanes, A* c,
                             int64_t c_row) {
  for (int64_t i = rows; i % kRowsAtOnce; ++i) a[i] = a[rows - 1];
  for (int64_t i = 0; i < rows; i += kRowsAtOnce)
    for (int64_t j = 0; j < lanes; j += V * W)
      rows_by_panel<W, V, kRowsAtOnce, Add>(a + i, n, b + j, b_row, c + i * c_row + j, c_row);
}

// c [columns][c_row] += the transpose of the rows a_t, times b [n][b_row].
template <int W, int V, class A>
TEXVLM_HD void multiply_columns(const A* const* a, int64_t n, int64_t columns, const A* b, int64_t b_row, int64_t lanes, A* c,
                                int64_t c_row) {
  for (int64_t j = 0; j < lanes; j += V * W) {
    int64_t i = 0;
    for (; i + kRowsAtOnce <= columns; i += kRowsAtOnce)
      columns_by_panel<W, V, kRowsAtOnce>(a, i, n, b + j, b_row, c + i * c_row + j, c_row);
    for (; i + 4 <= columns; i += 4) columns_by_panel<W, V, 4>(a, i, n, b + j, b_row, c + i * c_row + j, c_row);
    for (; i < columns; ++i) columns_by_panel<W, V, 1>(a, i, n, b + j, b_row, c + i * c_row + j, c_row);
  }
}

// Four rows of n values, times `scale`, as four columns of a panel; and four columns as rows.
template <class A>
TEXVLM_HD void rows_to_columns(const A* const* rows, int64_t n, A scale, A* columns, int64_t pitch) {
  int64_t t = 0;
  for (; t + 4 <= n; t += 4) {
    Lanes<A, 4> v[4];
    for (int i = 0; i < 4; ++i) v[i] = load_lanes<A, 4>(rows[i] + t);
    transpose<A>(v[0], v[1], v[2], v[3]);
    for (int i = 0; i < 4; ++i) store_lanes<A, 4>(columns + (t + i) * pitch, v[i] * scale);
  }
  for (; t < n; ++t)
    for (int i = 0; i < 4; ++i) columns[t * pitch + i] = rows[i][t] * scale;
}
template <class A>
TEXVLM_HD void columns_to_rows(const A* columns, int64_t pitch, int64_t n, A* rows, int64_t row) {
  int64_t t = 0;
  for (; t + 4 <= n; t += 4) {
    Lanes<A, 4> v[4];
    for (int i = 0; i < 4; ++i) v[i] = load_lanes<A, 4>(columns + (t + i) * pitch);
    transpose<A>(v[0], v[1], v[2], v[3]);
    for (int i = 0; i < 4; ++i) store_lanes<A, 4>(rows + i * row + t, v[i]);
  }
  for (; t < n; ++t)
    for (int i = 0; i < 4; ++i) rows[i * row + t] = columns[t * pitch + i];
}

// The sums of four vectors, each over its own lanes.
template <int W, class A>
TEXVLM_HD Lanes<A, 4> sums_of(Lanes<A, W> p, Lanes<A, W> q, Lanes<A, W> r, Lanes<A, W> s) {
  Lanes<A, 4> a{}, b{}, c{}, d{};
  if constexpr (W < 4) {
    for (int l = 0; l < W; ++l) a[l] = p[l], b[l] = q[l], c[l] = r[l], d[l] = s[l];
  } else {
    for (int l = 0; l < W; l += 4) {
      Lanes<A, 4> parts[4];
      memcpy(&parts[0], reinterpret_cast<const A*>(&p) + l, sizeof(parts[0]));
      memcpy(&parts[1], reinterpret_cast<const A*>(&q) + l, sizeof(parts[0]));
      memcpy(&parts[2], reinterpret_cast<const A*>(&r) + l, sizeof(parts[0]));
      memcpy(&parts[3], reinterpret_cast<const A*>(&s) + l, sizeof(parts[0]));
      a += parts[0], b += parts[1], c += parts[2], d += parts[3];
    }
  }
  transpose<A>(a, b, c, d);
  return (a + b) + (c + d);
}

// s[i] (+)= a_i . x, over n values. Both a and s have room for whole groups of kVectorsAtOnce rows, whose last ones are written
// too.
constexpr int kVectorsAtOnce = 8;
template <int W, bool Add, class A>
TEXVLM_HD void multiply_vector(const A** a, int64_t rows, int64_t n, const A* x, A* s) {
  const int64_t whole = n / W * W;
  for (int64_t i = rows; i % kVectorsAtOnce; ++i) a[i] = a[rows - 1];
  for (int64_t i = 0; i < rows; i += kVectorsAtOnce) {
    const A* const* const row = a + i;
    Lanes<A, W> sum[kVectorsAtOnce];
#pragma GCC unroll 8
    for (int r = 0; r < kVectorsAtOnce; ++r) sum[r] = Lanes<A, W>{};
    for (int64_t t = 0; t < whole; t += W) {
      const Lanes<A, W> y = load_lanes<A, W>(x + t);
#pragma GCC unroll 8
      for (int r = 0; r < kVectorsAtOnce; ++r) sum[r] = load_lanes<A, W>(row[r] + t) * y + sum[r];
    }
#pragma GCC unroll 2
    for (int r = 0; r < kVectorsAtOnce; r += 4) {
      Lanes<A, 4> total = sums_of<W, A>(sum[r], sum[r + 1], sum[r + 2], sum[r + 3]);
      for (int64_t t = whole; t < n; ++t) total += Lanes<A, 4>{row[r][t], row[r + 1][t], row[r + 2][t], row[r + 3][t]} * x[t];
      if (Add) total += load_lanes<A, 4>(s + i + r);
      store_lanes<A, 4>(s + i + r, total);
    }
  }
}

// o[d] += sum_i p[i] a_i[d], over n values.
template <int W, int V, class A>
TEXVLM_HD void add_rows_at(const A* const* a, int64_t rows, int64_t d, const A* p, A* o) {
  Lanes<A, W> sum[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) sum[v] = load_lanes<A, W>(o + d + v * W);
  for (int64_t i = 0; i < rows; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[v] = p[i] * load_lanes<A, W>(a[i] + d + v * W) + sum[v];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) store_lanes<A, W>(o + d + v * W, sum[v]);
}
template <int W, class A>
TEXVLM_HD void add_rows(const A* const* a, int64_t rows, int64_t n, const A* p, A* o) {
  constexpr int V = W == 16 ? 4 : 8;
  int64_t d = 0;
  for (; d + V * W <= n; d += V * W) add_rows_at<W, V>(a, rows, d, p, o);
  for (; d + W <= n; d += W) add_rows_at<W, 1>(a, rows, d, p, o);
  for (; d < n; ++d)
    for (int64_t i = 0; i < rows; ++i) o[d] += p[i] * a[i][d];
}

}  // namespace texvlm
#endif
