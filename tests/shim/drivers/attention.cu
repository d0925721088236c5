// Attention by csrc/cuda/attention*.cu against plain loops in double: cells, what is chosen, what is
// read, the mass of places, and all gradients, by atomics and in fixed point.
#include "../expect.h"

#include "../../../csrc/cuda/attention.cu"
#include "../../../csrc/cuda/attention_backward.cu"
#include "../../../csrc/cuda/attention_pack.cu"
#include "../../../csrc/cuda/scatter.cu"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace {

using namespace texvlm;
using Numbers = std::vector<double>;

constexpr double kNone = -std::numeric_limits<double>::infinity();

struct Random {
  uint32_t state;
  double operator()() {  // in [-1, 1]
    state = state * 1664525u + 1013904223u;
    return static_cast<double>(state >> 8) / (1 << 23) - 1;
  }
};

// What is asked: sizes, and what is special about the places.
struct Question {
  int64_t batch, heads, kv_heads, rows, columns, dim, prefix;
  std::vector<int> levels;
  std::vector<int64_t> counts;
  int64_t tile_rows, tile_columns, queries;  // queries: of a tile of one
  Importance importance = Importance::spread;
  enum { weights, no_weights, all_masked, all_equal, one_nan, one_far } places = weights;
  double tolerance = 2e-4;

  AttentionShape shape() const {
    AttentionShape s{};
    s.cells.rows = rows, s.cells.columns = columns, s.cells.stages = static_cast<int>(levels.size());
    for (int i = 0; i < s.cells.stages; ++i) {
      s.cells.level[i] = levels[i];
      s.cells.offset[i + 1] = s.cells.offset[i] + s.cells.rows_of(i) * s.cells.columns_of(i);
      s.counts[i] = counts[i], s.splits += counts[i];
    }
    s.batch = batch, s.heads = heads, s.kv_heads = kv_heads, s.dim = dim, s.prefix = prefix;
    s.queries = tile_rows * tile_columns == 1 ? queries : rows * columns;
    s.tile_rows = tile_rows, s.tile_columns = tile_columns, s.scale = 0.7;
    return s;
  }
};

template <class T>
std::vector<T> stored(const Numbers& values) {
  std::vector<T> out(values.size());
  for (size_t i = 0; i < values.size(); ++i) out[i] = static_cast<T>(static_cast<Acc<T>>(values[i]));
  return out;
}
template <class V>
Numbers widened(const std::vector<V>& values) {
  Numbers out(values.size());
  for (size_t i = 0; i < values.size(); ++i) out[i] = static_cast<double>(values[i]);
  return out;
}

// Plain loops
// --------------------------------------------------------------------------------------------------------------------

struct Plain {
  const AttentionShape shape;
  Numbers q, k, v, prefix_k, prefix_v, log_weight;     // as stored
  Numbers keys, values, log_count, spread, low, high;  // of cells
  Numbers out, lse, mass;
  std::vector<int32_t> chosen;

  double log_of(int64_t b, int64_t j) const { return log_weight.empty() ? 0 : log_weight[b * shape.cells.places() + j]; }

  void pack() {
    const CellPyramid& c = shape.cells;
    const int64_t total = c.total(), heads = shape.batch * shape.kv_heads, dim = shape.dim, n = c.places();
    keys.assign(heads * total * dim, 0), values = low = high = keys;
    log_count.assign(shape.batch * total, kNone), spread.assign(heads * total * 2, 0);
    for (int s = 0; s < c.stages; ++s)
      for (int64_t cell = 0; cell < c.cells(s); ++cell)
        for (int64_t bh = 0; bh < heads; ++bh) {
          const int64_t b = bh / shape.kv_heads, to = bh * total + c.offset[s] + cell;
          std::vector<int64_t> in;
          for (int64_t j = 0; j < n; ++j)
            if (c.above(s, j / c.columns, j % c.columns) == c.offset[s] + cell && log_of(b, j) != kNone) in.push_back(j);
          double count = 0;
          for (const int64_t j : in) count += std::exp(log_of(b, j));
          log_count[b * total + c.offset[s] + cell] = std::log(count);
          for (int64_t d = 0; d < dim; ++d) {
            double mean_k = 0, mean_v = 0, least = HUGE_VAL, most = -HUGE_VAL;
            for (const int64_t j : in) {
              const double x = k[(bh * n + j) * dim + d], share = std::exp(log_of(b, j)) / count;
              mean_k += share * x, mean_v += share * v[(bh * n + j) * dim + d];
              least = x < least || x != x ? x : least, most = x > most || x != x ? x : most;
            }
            for (const int64_t j : in) {
              const double share = std::exp(log_of(b, j)) / count;
              spread[2 * to] += share * std::pow(k[(bh * n + j) * dim + d] - mean_k, 2);
              spread[2 * to + 1] += share * std::pow(v[(bh * n + j) * dim + d] - mean_v, 2);
            }
            keys[to * dim + d] = mean_k, values[to * dim + d] = mean_v;
            if (!in.empty()) low[to * dim + d] = least, high[to * dim + d] = most;
          }
        }
  }

  // Entries by number: cells, places, prefix.
  const double* row(bool key, int64_t bk, int64_t e) const {
    const int64_t total = shape.cells.total(), n = shape.cells.places(), d = shape.dim;
    if (e < total) return (key ? keys : values).data() + (bk * total + e) * d;
    if (e < total + n) return (key ? k : v).data() + (bk * n + e - total) * d;
    return (key ? prefix_k : prefix_v).data() + (bk * shape.prefix + e - total - n) * d;
  }
  double log_entry(int64_t b, int64_t e) const {
    const int64_t total = shape.cells.total();
    return e < total ? log_count[b * total + e] : e < total + shape.cells.places() ? log_of(b, e - total) : 0;
  }
  double score(int64_t bh, int64_t query, int64_t e) const {
    const double* x = q.data() + (bh * shape.queries + query) * shape.dim;
    const double* y = row(true, kv(bh), e);
    double sum = 0;
    for (int64_t d = 0; d < shape.dim; ++d) sum += x[d] * y[d];
    return shape.scale * sum + log_entry(bh / shape.heads, e);
  }
  int64_t kv(int64_t bh) const { return bh / shape.heads * shape.kv_heads + shape.kv_head(bh % shape.heads); }
  double log_sum(int64_t bh, int64_t query, const std::vector<int64_t>& entries) const {
    double top = kNone, sum = 0;
    for (const int64_t e : entries) top = std::max(top, score(bh, query, e));
    for (const int64_t e : entries) sum += std::exp(score(bh, query, e) - (top == kNone ? 0 : top));
    return sum == 0 ? kNone : top + std::log(sum);
  }

  std::vector<int64_t> best(Importance by, int64_t bh, const std::vector<int64_t>& queries, int s,
                            const std::vector<int64_t>& here, const std::vector<int64_t>& others) const {
    const int64_t b = bh / shape.heads, offset = shape.cells.offset[s], dim = shape.dim;
    std::vector<int64_t> present = others, ranked;
    for (const int64_t c : here)
      if (log_entry(b, offset + c) != kNone) present.push_back(offset + c);
    Numbers mass(here.size(), 0), bound(here.size(), 0), mean(dim, 0), value(here.size(), -1);
    int64_t said = 0;
    for (const int64_t query : queries) {
      const double sum = log_sum(bh, query, present);
      if (!std::isfinite(sum)) continue;
      ++said;
      for (int64_t d = 0; d < dim; ++d) mean[d] += q[(bh * shape.queries + query) * dim + d];
      for (size_t i = 0; i < here.size(); ++i)
        if (log_entry(b, offset + here[i]) != kNone) mass[i] += std::exp(score(bh, query, offset + here[i]) - sum);
    }
    double total = 0, shares = 0;
    for (size_t i = 0; i < here.size(); ++i) {
      if (log_entry(b, offset + here[i]) == kNone) continue;
      const int64_t at = kv(bh) * shape.cells.total() + offset + here[i];
      for (int64_t d = 0; d < dim; ++d) {
        const double u = shape.scale * mean[d] / std::max<int64_t>(said, 1), x = u * low[at * dim + d],
                     y = u * high[at * dim + d];
        bound[i] += std::isfinite(x + y) ? std::max(x, y) : NAN;
      }
      if (by == Importance::mass) bound[i] = 0;
      if (by == Importance::bound) mass[i] = 0;
      if (by == Importance::spread) mass[i] *= spread[2 * at] * std::sqrt(spread[2 * at + 1]);
      if (std::isfinite(mass[i])) total += mass[i];
      if (std::isfinite(bound[i])) shares += std::exp(bound[i]);
      ranked.push_back(i);
    }
    for (const int64_t i : ranked) {
      const double share = std::exp(bound[i]) / shares, part = total > 0 ? mass[i] / total : 0;
      value[i] = by == Importance::mass ? part : by == Importance::bound ? share : part + 2 * share;
      if (!std::isfinite(mass[i] + bound[i])) value[i] = HUGE_VAL;
    }
    std::vector<int64_t> order(here.size()), split;
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return value[i] > value[j] + 1e-9; });
    for (size_t i = 0; i < order.size() && i < static_cast<size_t>(shape.counts[s]); ++i) split.push_back(here[order[i]]);
    std::sort(split.begin(), split.end());
    return split;
  }

  // What a tile reads; what it splits into `chosen`, unless that is given.
  std::vector<int64_t> descend(Importance by, int64_t bh, int64_t tile, bool given) {
    const CellPyramid& c = shape.cells;
    std::vector<int64_t> others, here, queries;
    for (int64_t i = 0; i < shape.tile(tile).count(); ++i) queries.push_back(shape.tile(tile).cell(i));
    for (int64_t e = 0; e < shape.prefix; ++e) others.push_back(c.total() + c.places() + e);
    for (int64_t i = 0; i < c.first().count(); ++i) here.push_back(i);
    int32_t* row = chosen.data() + (bh * shape.tiles() + tile) * shape.splits;
    for (int s = 0; s < c.stages; row += shape.counts[s++]) {
      std::vector<int64_t> split;
      if (!given) {
        split = best(by, bh, queries, s, here, others);
        for (int64_t i = 0; i < shape.counts[s]; ++i)
          row[i] = i < static_cast<int64_t>(split.size()) ? static_cast<int32_t>(split[i]) : -1;
      }
      for (int64_t i = 0; given && i < shape.counts[s]; ++i)
        if (row[i] >= 0) split.push_back(row[i]);
      std::vector<int64_t> next;
      for (const int64_t i : here)
        if (!std::count(split.begin(), split.end(), i)) others.push_back(c.offset[s] + i);
      for (const int64_t i : split)
        for (int64_t j = 0; j < c.children(s, i).count(); ++j) next.push_back(c.children(s, i).cell(j));
      std::sort(next.begin(), next.end());
      here = next;
    }
    for (const int64_t i : here) others.push_back(c.total() + i);
    const int64_t b = bh / shape.heads;
    others.erase(std::remove_if(others.begin(), others.end(), [&](int64_t e) { return log_entry(b, e) == kNone; }), others.end());
    return others;
  }

  void attend(Importance by, bool given) {
    const int64_t n = shape.cells.places(), dim = shape.dim;
    out.assign(shape.batch * shape.heads * shape.queries * dim, 0), lse.assign(shape.batch * shape.heads * shape.queries, kNone);
    mass.assign(shape.batch * shape.heads * n, 0);
    for (int64_t bh = 0; bh < shape.batch * shape.heads; ++bh)
      for (int64_t tile = 0; tile < shape.tiles(); ++tile) {
        const std::vector<int64_t> entries = descend(by, bh, tile, given);
        for (int64_t i = 0; i < shape.tile(tile).count(); ++i) {
          const int64_t query = shape.tile(tile).cell(i), at = bh * shape.queries + query;
          lse[at] = log_sum(bh, query, entries);
          for (const int64_t e : entries) {
            const double p = std::exp(score(bh, query, e) - lse[at]);
            for (int64_t d = 0; d < dim; ++d) out[at * dim + d] += p * row(false, kv(bh), e)[d];
            share(bh, e, p);
          }
        }
      }
  }
  void share(int64_t bh, int64_t e, double p) {
    const int64_t n = shape.cells.places(), total = shape.cells.total(), b = bh / shape.heads;
    if (e >= total && e < total + n) mass[bh * n + e - total] += p;
    for (int s = 0; s < shape.cells.stages; ++s)
      for (int64_t j = 0; e < total && j < n; ++j)
        if (shape.cells.above(s, j / shape.cells.columns, j % shape.cells.columns) == e)
          mass[bh * n + j] += p * std::exp(log_of(b, j) - log_count[b * total + e]);
  }

  struct Gradients {
    Numbers q, k, v, log;  // of entries: [B kv_heads, entries, D], and [B kv_heads, entries]
  };
  Gradients adjoint(const Numbers& grad, const Numbers& grad_lse) {
    const int64_t all = shape.entries(), dim = shape.dim, heads = shape.batch * shape.kv_heads;
    Gradients g{Numbers(q.size(), 0), Numbers(heads * all * dim, 0), Numbers(heads * all * dim, 0), Numbers(heads * all, 0)};
    for (int64_t bh = 0; bh < shape.batch * shape.heads; ++bh)
      for (int64_t tile = 0; tile < shape.tiles(); ++tile) {
        const std::vector<int64_t> entries = descend(Importance::mass, bh, tile, true);
        for (int64_t i = 0; i < shape.tile(tile).count(); ++i) {
          const int64_t at = bh * shape.queries + shape.tile(tile).cell(i), bk = kv(bh);
          double delta = -grad_lse[at];
          for (int64_t d = 0; d < dim; ++d) delta += grad[at * dim + d] * out[at * dim + d];
          for (const int64_t e : entries) {
            const double p = std::exp(score(bh, at - bh * shape.queries, e) - lse[at]);
            double along = -delta;
            for (int64_t d = 0; d < dim; ++d) along += grad[at * dim + d] * row(false, bk, e)[d];
            g.log[bk * all + e] += p * along;
            for (int64_t d = 0; d < dim; ++d) {
              g.q[at * dim + d] += shape.scale * p * along * row(true, bk, e)[d];
              g.k[(bk * all + e) * dim + d] += shape.scale * p * along * q[at * dim + d];
              g.v[(bk * all + e) * dim + d] += p * grad[at * dim + d];
            }
          }
        }
      }
    return g;
  }
};

// ------------------------------------------------------------------------------------------------------------------------------

bool near(double a, double b, double tolerance) {
  return a == b || (std::isnan(a) && std::isnan(b)) || std::fabs(a - b) <= tolerance * (1 + std::fabs(b));
}
bool near(const Numbers& a, const Numbers& b, double tolerance) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (!near(a[i], b[i], tolerance)) return std::fprintf(stderr, "%zu: %g, not %g\n", i, a[i], b[i]), false;
  return true;
}

template <class T>
void pack_adjoint(const Question& ask, const Plain& plain, Random& random) {
  using A = Acc<T>;
  const AttentionShape& shape = plain.shape;
  const CellPyramid& c = shape.cells;
  const int64_t total = c.total(), n = c.places(), heads = shape.batch * shape.kv_heads, dim = shape.dim;
  Numbers grad_keys(heads * total * dim), grad_values(heads * total * dim), grad_log_count(shape.batch * total);
  for (Numbers* of : {&grad_keys, &grad_values, &grad_log_count})
    for (double& x : *of) x = random();
  Numbers k(heads * n * dim, 0), v(heads * n * dim, 0), log(shape.batch * n, 0);
  for (int64_t bh = 0; bh < heads; ++bh)
    for (int64_t j = 0; j < n; ++j)
      for (int s = 0; s < c.stages; ++s) {
        const int64_t b = bh / shape.kv_heads, cell = c.above(s, j / c.columns, j % c.columns), own = bh * n + j;
        if (plain.log_of(b, j) == kNone) continue;
        const double share = std::exp(plain.log_of(b, j) - plain.log_count[b * total + cell]);
        if (bh % shape.kv_heads == 0) log[b * n + j] += share * grad_log_count[b * total + cell];
        for (int64_t d = 0; d < dim; ++d) {
          const int64_t at = (bh * total + cell) * dim + d;
          k[own * dim + d] += share * grad_keys[at], v[own * dim + d] += share * grad_values[at];
          log[b * n + j] += share * ((plain.k[own * dim + d] - plain.keys[at]) * grad_keys[at] +
                                     (plain.v[own * dim + d] - plain.values[at]) * grad_values[at]);
        }
      }
  const std::vector<A> in[7] = {stored<A>(grad_keys),        stored<A>(grad_values), stored<A>(grad_log_count),
                                stored<A>(plain.log_weight), stored<A>(plain.keys),  stored<A>(plain.values),
                                stored<A>(plain.log_count)};
  const std::vector<T> of_k = stored<T>(plain.k), of_v = stored<T>(plain.v);
  std::vector<A> to_k(k.size()), to_v(v.size()), to_log(log.size());
  cuda::attention_pack_adjoint(
      AttentionPackAdjoint<A>{c, shape.batch, shape.kv_heads, dim, kStorage<T>, in[0].data(), in[1].data(), in[2].data(),
                              of_k.data(), of_v.data(), plain.log_weight.empty() ? nullptr : in[3].data(), in[4].data(),
                              in[5].data(), in[6].data(), to_k.data(), to_v.data(), to_log.data()},
      nullptr);
  EXPECT(near(widened(to_k), k, ask.tolerance));
  EXPECT(near(widened(to_v), v, ask.tolerance));
  EXPECT(near(widened(to_log), log, 10 * ask.tolerance));
}

template <class T>
void adjoint(const Question& ask, Plain& plain, Random& random, const AttentionShape& shape, const Attend<Acc<T>>& f,
             bool fixed) {
  using A = Acc<T>;
  const int64_t total = shape.cells.total(), n = shape.cells.places(), all = shape.entries(), dim = shape.dim;
  const int64_t heads = shape.batch * shape.kv_heads;
  Numbers grad(plain.q.size()), grad_lse(plain.lse.size());
  for (Numbers* of : {&grad, &grad_lse})
    for (double& x : *of) x = random();
  const std::vector<T> of_grad = stored<T>(grad);
  const std::vector<A> of_lse = stored<A>(grad_lse);
  const Plain::Gradients g = plain.adjoint(widened(of_grad), grad_lse);
  std::vector<A> q(plain.q.size()), k(heads * n * dim), v(k.size()), keys(heads * total * dim), values(keys.size());
  std::vector<A> log_count(heads * total), log_weight(heads * n), prefix_k(heads * shape.prefix * dim), prefix_v(prefix_k.size());
  std::vector<char> workspace(cuda::attend_adjoint_workspace<A>(shape), 'x');
  std::vector<unsigned long long> words(fixed ? cuda::attend_fixed_words(shape) : 0, 0);
  cuda::attend_adjoint(AttendAdjoint<A>{shape,
                                        kStorage<T>,
                                        of_grad.data(),
                                        of_lse.data(),
                                        f.q,
                                        f.k,
                                        f.v,
                                        f.prefix_k,
                                        f.prefix_v,
                                        f.keys,
                                        f.values,
                                        f.log_count,
                                        f.log_weight,
                                        f.out,
                                        f.lse,
                                        f.chosen,
                                        q.data(),
                                        k.data(),
                                        v.data(),
                                        keys.data(),
                                        values.data(),
                                        log_count.data(),
                                        log_weight.data(),
                                        prefix_k.data(),
                                        prefix_v.data()},
                       fixed ? words.data() : nullptr, workspace.data(), nullptr);
  // Of the entries of each head: cells, places, prefix.
  const auto part = [&](const Numbers& of, int64_t first, int64_t count, int64_t each) {
    Numbers out;
    for (int64_t bh = 0; bh < heads; ++bh) {
      const auto begin = of.begin() + (bh * all + first) * each;
      out.insert(out.end(), begin, begin + count * each);
    }
    return out;
  };
  const double tolerance = 5 * ask.tolerance;
  EXPECT(near(widened(q), g.q, tolerance));
  EXPECT(near(widened(keys), part(g.k, 0, total, dim), tolerance));
  EXPECT(near(widened(k), part(g.k, total, n, dim), tolerance));
  EXPECT(near(widened(prefix_k), part(g.k, total + n, shape.prefix, dim), tolerance));
  EXPECT(near(widened(values), part(g.v, 0, total, dim), tolerance));
  EXPECT(near(widened(v), part(g.v, total, n, dim), tolerance));
  EXPECT(near(widened(prefix_v), part(g.v, total + n, shape.prefix, dim), tolerance));
  EXPECT(near(widened(log_count), part(g.log, 0, total, 1), tolerance));
  EXPECT(near(widened(log_weight), part(g.log, total, n, 1), tolerance));
}

template <class T>
void check(const Question& ask, bool given = false) {
  using A = Acc<T>;
  const AttentionShape shape = ask.shape();
  const int64_t n = shape.cells.places(), total = shape.cells.total(), dim = shape.dim, heads = shape.batch * shape.kv_heads;
  Random random{static_cast<uint32_t>(n * 31 + dim)};
  const auto some = [&](int64_t count) {
    Numbers x(count);
    for (double& e : x) e = 1.5 * random();
    return widened(stored<T>(x));
  };
  Plain plain{shape,
              some(shape.batch * shape.heads * shape.queries * dim),
              some(heads * n * dim),
              some(heads * n * dim),
              some(heads * shape.prefix * dim),
              some(heads * shape.prefix * dim),
              {},
              {},
              {},
              {},
              {},
              {},
              {},
              {},
              {},
              {},
              {}};
  if (ask.places == Question::all_equal)
    for (Numbers* of : {&plain.k, &plain.v}) std::fill(of->begin(), of->end(), 0.25);
  if (ask.places == Question::one_nan) plain.k[(n / 2) * dim + dim / 2] = NAN;
  if (ask.places == Question::one_far) {
    plain.k[(n / 2) * dim + 1] = -HUGE_VAL;
    for (size_t i = 1; i < plain.q.size(); i += dim) plain.q[i] = 1;  // away from it
  }
  if (ask.places == Question::weights || ask.places == Question::all_masked) {
    plain.log_weight.resize(shape.batch * n);
    for (int64_t i = 0; i < shape.batch * n; ++i) {
      const bool gone = ask.places == Question::all_masked || i % 7 == 3 || (i % n) % shape.cells.columns < 2;
      plain.log_weight[i] = gone ? kNone : static_cast<double>(static_cast<A>(random()));
      if (gone) plain.k[i / n * shape.kv_heads * n * dim + i % n * dim] = NAN;  // and nobody is to see it
    }
  }
  plain.pack();
  const std::vector<T> q = stored<T>(plain.q), k = stored<T>(plain.k), v = stored<T>(plain.v);
  const std::vector<T> prefix_k = stored<T>(plain.prefix_k), prefix_v = stored<T>(plain.prefix_v);
  const std::vector<A> weight = stored<A>(plain.log_weight);
  const A* const log_weight = weight.empty() ? nullptr : weight.data();
  std::vector<A> keys(heads * total * dim), values(keys.size()), low(keys.size()), high(keys.size());
  std::vector<A> log_count(shape.batch * total), spread(heads * total * 2);
  cuda::attention_pack(
      AttentionPack<A>{shape.cells, shape.batch, shape.kv_heads, dim, kStorage<T>, k.data(), v.data(), log_weight, keys.data(),
                       values.data(), log_count.data(), spread.data(), low.data(), high.data()},
      nullptr);
  EXPECT(near(widened(keys), plain.keys, ask.tolerance));
  EXPECT(near(widened(values), plain.values, ask.tolerance));
  EXPECT(near(widened(log_count), plain.log_count, ask.tolerance));
  EXPECT(near(widened(spread), plain.spread, ask.tolerance));
  EXPECT(near(widened(low), plain.low, 0) && near(widened(high), plain.high, 0));

  const int64_t rows = shape.batch * shape.heads * shape.queries;
  plain.chosen.assign(shape.batch * shape.heads * shape.tiles() * shape.splits, -1);
  plain.attend(ask.importance, false);
  const std::vector<int32_t> choice = plain.chosen;
  std::vector<T> out(rows * dim);
  std::vector<A> lse(rows), mass(shape.batch * shape.heads * n);
  std::vector<int32_t> chosen(choice.size());
  std::vector<char> workspace(cuda::attend_workspace<A>(shape), 'x');
  std::vector<unsigned long long> masses(shape.batch * shape.heads * (total + n), 0);
  const Attend<A> f{shape,       ask.importance, kStorage<T>,      q.data(),
                    k.data(),    v.data(),       prefix_k.data(),  prefix_v.data(),
                    keys.data(), values.data(),  log_count.data(), spread.data(),
                    low.data(),  high.data(),    log_weight,       given ? choice.data() : nullptr,
                    out.data(),  lse.data(),     chosen.data(),    mass.data()};
  cuda::attend(f, masses.data(), workspace.data(), nullptr);
  EXPECT(chosen == choice);
  EXPECT(near(widened(out), plain.out, sizeof(T) == 2 ? 1e-2 : ask.tolerance));
  EXPECT(near(widened(lse), plain.lse, ask.tolerance));
  EXPECT(near(widened(mass), plain.mass, ask.tolerance));
  if (ask.places == Question::one_nan || ask.places == Question::one_far) return;
  plain.out = widened(out), plain.lse = widened(lse);
  for (const bool fixed : {false, true}) adjoint<T>(ask, plain, random, shape, f, fixed);
  pack_adjoint<T>(ask, plain, random);
}

}  // namespace

int main() {
  const std::vector<int> two{2, 1}, none;
  check<float>({1, 1, 1, 5, 6, 6, 3, two, {1, 2}, 8, 8, 0});   // rows that are not aligned
  check<float>({1, 2, 1, 5, 6, 68, 1, two, {1, 2}, 1, 1, 2});  // queries that are alone
  check<float>({1, 1, 1, 5, 6, 4, 0, two, {1, 2}, 4, 4, 0, Importance::mass}, true);
#if defined(__SANITIZE_THREAD__)  // hundreds of times slower, and races are the same in all that follow
  return done();
#endif
  check<float>({1, 2, 1, 11, 10, 8, 3, two, {3, 5}, 8, 8, 0});
  check<float>({1, 2, 2, 1, 37, 4, 1, {3}, {2}, 1, 64, 0, Importance::bound});  // cells of one row
  check<float>({1, 1, 1, 8, 8, 132, 2, two, {2, 4}, 8, 8, 0});                  // two parts
  check<float>({1, 1, 1, 12, 13, 132, 1, two, {4, 5}, 1, 1, 2});
  check<float>({2, 2, 1, 7, 9, 8, 2, {2}, {2}, 1, 1, 3});
  check<float>({1, 2, 1, 9, 10, 4, 0, none, {}, 1, 1, 3, Importance::spread, Question::no_weights});  // dense
  check<float>({1, 1, 1, 9, 10, 5, 2, none, {}, 8, 8, 0});
  check<float>({1, 1, 1, 8, 8, 4, 0, two, {2, 3}, 8, 8, 0, Importance::spread, Question::all_equal});
  check<float>({1, 1, 1, 8, 8, 4, 0, two, {2, 3}, 8, 8, 0, Importance::spread, Question::all_masked});
  check<float>({1, 1, 1, 8, 8, 4, 0, {2}, {2}, 1, 1, 2, Importance::spread, Question::all_masked});
  check<float>({1, 1, 1, 8, 8, 4, 1, two, {2, 3}, 8, 8, 0, Importance::spread, Question::one_nan});
  check<float>({1, 1, 1, 8, 8, 4, 1, two, {2, 3}, 8, 8, 0, Importance::spread, Question::one_far});
  check<float>({1, 1, 1, 8, 8, 4, 1, two, {2, 3}, 1, 1, 3, Importance::bound, Question::one_far});
  check<double>({1, 2, 1, 10, 9, 6, 2, two, {3, 4}, 8, 8, 0, Importance::spread, Question::weights, 1e-9});
  check<double>({1, 1, 1, 10, 9, 8, 2, two, {3, 4}, 1, 1, 2, Importance::spread, Question::weights, 1e-9});
  check<Half>({1, 1, 1, 9, 10, 8, 2, {2}, {2}, 8, 8, 0, Importance::spread, Question::weights, 1e-3});
  check<BFloat16>({1, 1, 1, 9, 10, 8, 2, {2}, {2}, 1, 1, 2, Importance::spread, Question::no_weights, 1e-3});
  return done();
}
