// Host code of the stem `features`: what cells of the picture's grid hold, as numbers.
#include "math/features.h"

#include <ATen/ops/stack.h>

#include <optional>

#include "autograd.h"
#include "launch.h"
#include "queries.h"
#include "tensor.h"

namespace texvlm {
namespace {

constexpr int64_t kMaxCell = int64_t{1} << 20,
                  kMaxSamples = 4096;  // sample counts then stay far inside 32 bits

// The arguments of forward and backward, checked.
struct Cells {
  Levels levels;
  Reducers reducers;
  int64_t rows, columns, batch, count, cell, samples, dims = 0;
  std::vector<Term> terms;
  std::vector<int64_t> channels;  // by slot
  int statistics = 0;             // slots that moments are taken of
  bool entropy_too = false;
  Tensor query;
  at::ArrayRef<double> weights;  // of each term, or none

  Cells(const char* op, const Tensor& data, const Tensor& cells, const TextureArgs& of, int64_t cell_, int64_t samples_,
        const Names& names, at::IntArrayRef firsts, Maybe query_, at::IntArrayRef lights, at::ArrayRef<double> weights_) {
    const auto [table, all] = check_texture(op, data, of);
    levels = table, reducers = all, cell = cell_, samples = samples_;
    check_shape(op, "cells", cells, "[B, n]", {-1, -1});
    check_dtype(op, "cells", cells, at::kLong, "");
    check_same_device(op, "cells", cells, data);
    batch = cells.size(0), count = cells.size(1);
    TEXVLM_CHECK(data.size(0) == 1 || data.size(0) == batch, op, "data",
                 "of batch 1 or of the batch of cells (" + std::to_string(batch) + ")", "batch ", data.size(0));
    TEXVLM_CHECK(cell >= 1 && cell <= kMaxCell, op, "cell", "from 1 to " + std::to_string(kMaxCell) + " pixels", cell);
    TEXVLM_CHECK(samples >= 1 && samples <= kMaxSamples, op, "samples", "from 1 to " + std::to_string(kMaxSamples), samples);
    rows = (of.height + cell - 1) / cell, columns = (of.width + cell - 1) / cell;
    if (query_ && query_->defined()) {
      query = *query_;
      check_shape(op, "query", query, "[B, D]", {-1, -1});
      check_dtype(op, "query", query, acc_dtype(data.scalar_type()), "");
      check_same_device(op, "query", query, data);
      TEXVLM_CHECK(query.size(0) == 1 || query.size(0) == batch, op, "query",
                   "of batch 1 or of the batch of cells (" + std::to_string(batch) + ")", "batch ", query.size(0));
      dims = query.size(1);
      query = query.contiguous();
    }
    read_terms(op, strings(names), firsts, lights, data.size(2));
    weights = weights_;
    TEXVLM_CHECK(weights.empty() || weights.size() == terms.size(), op, "weights",
                 "none, or one for each term (" + std::to_string(terms.size()) + ")", weights.size(), " of them");
  }

  void read_terms(const char* op, const std::vector<std::string>& names, at::IntArrayRef firsts, at::IntArrayRef lights,
                  int64_t present) {
    TEXVLM_CHECK(names.size() <= kMaxTerms, op, "terms", "at most " + std::to_string(kMaxTerms), names.size(), " of them");
    TEXVLM_CHECK(firsts.size() == names.size(), op, "channels", "one for each term (" + std::to_string(names.size()) + ")",
                 firsts.size(), " of them");
    bool light = false;
    for (size_t t = 0; t < names.size(); ++t) {
      int what = 0;
      while (what < static_cast<int>(std::size(kStatistics)) && names[t] != kStatistics[what]) ++what;
      TEXVLM_CHECK(what < static_cast<int>(std::size(kStatistics)), op, "terms",
                   "mean, max, min, variance, rms, entropy, cosine or residual", "'", names[t], "'");
      const Term term{static_cast<Statistic>(what), 0};
      terms.push_back(term);
      entropy_too = entropy_too || term.what == Statistic::entropy;
      if (term.what == Statistic::entropy || term.what == Statistic::residual) {
        light = true;
        continue;
      }
      TEXVLM_CHECK(term.what != Statistic::cosine || dims > 0, op, "query", "given for the term cosine", "none");
      const int64_t wide = term.what == Statistic::cosine ? dims : 1;
      TEXVLM_CHECK(firsts[t] >= 0 && firsts[t] + wide <= present, op, "channels",
                   "from 0 to " + std::to_string(present - wide) + " for the term " + names[t], firsts[t]);
      const auto known = std::find(channels.begin(), channels.end(), firsts[t]);
      if (wide == 1 && known != channels.end()) {
        terms.back().slot = static_cast<int>(known - channels.begin());
        continue;
      }
      terms.back().slot = statistics;
      for (int64_t c = 0; c < wide; ++c) channels.push_back(firsts[t] + c);
      statistics = static_cast<int>(channels.size());
    }
    if (light) {
      TEXVLM_CHECK(lights.size() == 3, op, "lights", "the 3 channels red, green and blue", lights.size(), " of them");
      for (const int64_t c : lights) {
        TEXVLM_CHECK(c >= 0 && c < present, op, "lights", "from 0 to " + std::to_string(present - 1), c);
        channels.push_back(c);
      }
    }
    TEXVLM_CHECK(channels.size() <= kMaxSlots, op, "terms", "of at most " + std::to_string(kMaxSlots) + " channels in all",
                 channels.size());
  }

  // What both functors are told of the terms and the query.
  template <class F>
  void describe(F& f) const {
    f.query = dims ? pointer<const typename F::A>(query) : nullptr;
    f.query_b = dims && query.size(0) > 1 ? dims : 0;
    f.count = count;
    f.terms = static_cast<int>(terms.size()), f.dims = static_cast<int>(dims);
    std::copy(terms.begin(), terms.end(), f.term);
    for (size_t t = 0; t < terms.size(); ++t) f.weight[t] = static_cast<typename F::A>(weights.empty() ? 1 : weights[t]);
  }
};

Tensor cell_features(const Tensor& data, const Tensor& cells, const TextureArgs& of, int64_t cell, int64_t samples, Names terms,
                     at::IntArrayRef channels, Maybe query, at::IntArrayRef lights, at::ArrayRef<double> weights) {
  const Cells c("cell_features", data, cells, of, cell, samples, terms, channels, query, lights, weights);
  std::vector<int64_t> sizes{c.batch, c.count};
  if (weights.empty()) sizes.push_back(static_cast<int64_t>(c.terms.size()));
  Tensor out = new_tensor(sizes, acc_dtype(data.scalar_type()), data.device());
  if (c.terms.empty()) return out;
  dispatch_texel(data.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Acc<T>;
    const A lod = static_cast<A>(std::log2(static_cast<double>(cell) / static_cast<double>(samples)));
    CellFeatures<T, 0> f{};
    f.texture = texture_view<const T>(data, c.levels);
    f.cells = cells.const_data_ptr<int64_t>();
    f.stride_b = cells.stride(0), f.stride_n = cells.stride(1);
    c.describe(f);
    f.out = pointer<A>(out);
    f.rows = c.rows, f.columns = c.columns, f.cell = cell, f.samples = samples;
    f.rows_at_once = samples >= kChunk ? 1 : kChunk / samples;
    f.statistics = c.statistics;
    f.entropy_too = c.entropy_too;
    f.weighed = !weights.empty();
    for (const Term& term : c.terms)
      f.all_moments =
          f.all_moments || term.what == Statistic::max || term.what == Statistic::min || term.what == Statistic::variance;
    f.level = level_lerp(lod, c.levels.count);
    f.nearest_level = nearest_level(lod, c.levels.count);
    for (size_t s = 0; s < c.channels.size(); ++s) {
      f.channel[s] = static_cast<int32_t>(c.channels[s]);
      f.nearest[s] = c.reducers.of(c.channels[s]) == Reducer::mode;
      f.any_nearest = f.any_nearest || f.nearest[s];
    }
    // cell / samples = 2^l, and the level is exactly 2^l times smaller: sample j of cell c is then texel c *
    // samples + j
    const int64_t step = int64_t{1} << f.level.l0;
    f.aligned = !f.any_nearest && samples * step == cell && of.height % step == 0 && of.width % step == 0;
    const int64_t side = samples == 1 ? kSamplesAround : samples;
    if (c.entropy_too) f.table = EntropyTable<A>::of(side * side);
    const int64_t cost = 2 * side * side * static_cast<int64_t>(c.channels.size());
    for_each_item<host::kBest<T>>(data.device(), c.batch, c.count, cost, f);
  });
  return out;
}

// The samples of a cell are a patch around its centre, so their gradients go the way of those.
std::tuple<Tensor, Tensor> cell_features_backward(const Tensor& grad, const Tensor& data, const Tensor& cells,
                                                  const TextureArgs& of, int64_t cell, int64_t samples, Names terms,
                                                  at::IntArrayRef channels, Maybe query, at::IntArrayRef lights,
                                                  at::ArrayRef<double> weights, std::array<bool, 2> mask) {
  const char* op = "cell_features_backward";
  const Cells c(op, data, cells, of, cell, samples, terms, channels, query, lights, weights);
  const at::ScalarType acc = acc_dtype(data.scalar_type());
  if (weights.empty()) {
    check_shape(op, "grad", grad, "[B, n, terms]", {c.batch, c.count, static_cast<int64_t>(c.terms.size())});
  } else {
    check_shape(op, "grad", grad, "[B, n]", {c.batch, c.count});
  }
  check_dtype(op, "grad", grad, acc, "");
  check_same_device(op, "grad", grad, data);
  const bool by_query = mask[1] && c.dims > 0;
  Tensor grad_data;
  Tensor grad_query = by_query ? new_zeros({c.batch, c.count, c.dims}, acc, data.device()) : Tensor();
  const int64_t slots = c.statistics;
  if (slots > 0 && c.batch * c.count > 0) {
    // of a texture with many more channels, those that are read are copied
    const bool all = data.size(2) <= 2 * slots;
    std::vector<Tensor> used;
    for (int64_t s = 0; s < slots && !all; ++s) used.push_back(data.select(2, c.channels[s]));
    const Tensor few = all ? data : at::stack(used, 2);
    // cells outside the grid have no place: their patches are NaN, and get and give no gradient
    const Tensor known = cells.ge(0).logical_and(cells.lt(c.rows * c.columns));
    const Tensor x = cells.remainder(c.columns).to(acc).add(0.5).mul(static_cast<double>(cell) / of.width);
    const Tensor y = cells.floor_divide(c.columns).to(acc).add(0.5).mul(static_cast<double>(cell) / of.height);
    const Tensor centre = at::stack({x, y}, -1).masked_fill(known.logical_not().unsqueeze(-1), NAN);
    const double wanted = std::log2(static_cast<double>(cell) / static_cast<double>(samples));
    const double lod = std::clamp(wanted, 0.0, static_cast<double>(c.levels.count - 1));
    const Tensor lods = centre.new_full({c.batch, c.count}, lod);
    std::optional<Tensor> axes;  // where the samples lie closer or wider than the texels of their level
    if (wanted != lod) {
      const Tensor spacing = centre.new_zeros({2, 2});
      spacing.diagonal().fill_(std::exp2(wanted - lod));
      axes = spacing.expand({c.batch, c.count, 2, 2}).contiguous();
    }
    Names reducers = of.reducer;
    if (!all && of.reducer.size() > 1) {
      reducers = Names();
      for (int64_t s = 0; s < slots; ++s) reducers.push_back(of.reducer.get(c.channels[s]));
    }
    using Forward = Tensor(const Tensor&, const Tensor&, const Tensor&, SymInt, SymInt, Names, int64_t, int64_t, c10::string_view,
                           const std::optional<Tensor>&);
    static const auto extract = op_handle<Forward>("texvlm::extract_patches");
    const Tensor patches = extract.call(few, centre, lods, of.height, of.width, reducers, of.levels, samples, "clamp", axes);
    const Tensor grad_patches = new_zeros(patches.sizes(), data.scalar_type(), data.device());
    dispatch_texel(data.scalar_type(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      using A = Acc<T>;
      CellFeaturesAdjoint<T, 0> f{};
      f.samples = pointer<const T>(patches);
      f.grad = pointer<const A>(grad);
      f.grad_b = grad.stride(0), f.grad_n = grad.stride(1), f.grad_t = weights.empty() ? grad.stride(2) : 0;
      c.describe(f);
      f.grad_samples = pointer<T>(grad_patches);
      f.grad_query = by_query ? pointer<A>(grad_query) : nullptr;
      f.places = samples * samples, f.channels = few.size(2);
      f.slots = static_cast<int>(slots);
      for (int64_t s = 0; s < slots; ++s) f.channel[s] = static_cast<int32_t>(all ? c.channels[s] : s);
      for_each_item<host::kBest<T>>(data.device(), c.batch, c.count, 4 * samples * samples * slots, f);
    });
    if (mask[0]) {
      using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                                  SymInt, SymInt, Names, int64_t, int64_t, c10::string_view,
                                                                  const std::optional<Tensor>&, std::array<bool, 4>);
      static const auto scatter = op_handle<Backward>("texvlm::extract_patches_backward");
      const Tensor few_grads = std::get<0>(scatter.call(grad_patches, few, centre, lods, of.height, of.width, reducers, of.levels,
                                                        samples, "clamp", axes, {true, false, false, false}));
      if (all) {
        grad_data = few_grads;
      } else {
        grad_data = new_zeros(data.sizes(), data.scalar_type(), data.device());
        for (int64_t s = 0; s < slots; ++s) grad_data.select(2, c.channels[s]).add_(few_grads.select(2, s));
      }
    }
    if (by_query) grad_query.masked_fill_(known.logical_not().unsqueeze(-1), 0);
  }
  if (mask[0] && !grad_data.defined()) grad_data = new_zeros(data.sizes(), data.scalar_type(), data.device());
  if (by_query) {
    grad_query = grad_query.sum(1);
    if (c.query.size(0) == 1 && c.batch != 1) grad_query = grad_query.sum(0, true);
  }
  return {grad_data, grad_query};
}

}  // namespace

TEXVLM_OPS(ops) {
  ops.differentiable<cell_features>("cell_features");
  ops.op<cell_features_backward>("cell_features_backward");
  ops.promotes("cell_features", {"query"});
}

}  // namespace texvlm
