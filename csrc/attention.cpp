// Host code of the stem `attention`: keys and values as a texture, one softmax over near and far.
#include <ATen/Context.h>

#include "math/attention_adjoint_loops.h"
#include "math/attention_loops.h"
#include "math/attention_pack_loops.h"
#include "math/attention_queries.h"

#include "autograd.h"
#include "cuda/attention.h"
#include "launch.h"
#include "tensor.h"

namespace texvlm {
namespace host {

// The loops, compiled per instruction set; C is the width of their vectors. With contraction, which takes a third off: what
// floats decide here, which cells are split, may differ between machines where two are as good.
template <int C, class A>
TEXVLM_HD void attend_tiles(const Attend<A>& f, int64_t begin, int64_t end) {
  AttendOnHost<A>(f).template tiles<C>(begin, end);
}
template <int C, class A>
TEXVLM_HD void attend_queries(const Attend<A>& f, int64_t begin, int64_t end) {
  AttendQueriesOnHost<A>(f).template queries<C>(begin, end);
}
template <int C, class A>
TEXVLM_HD void adjoin_tiles(const AttendAdjoint<A>& f, int64_t slices, int64_t begin, int64_t end) {
  AttendAdjointOnHost<A>(f, slices).template slices<C, false>(begin, end);
}
template <int C, class A>
TEXVLM_HD void adjoin_queries(const AttendAdjoint<A>& f, int64_t slices, int64_t begin, int64_t end) {
  AttendAdjointOnHost<A>(f, slices).template slices<C, true>(begin, end);
}
template <int C, class A>
TEXVLM_HD void pack_bands(const AttentionPack<A>& f, int64_t begin, int64_t end) {
  AttentionPackOnHost<A>(f).bands(begin, end);
}
template <int C, class A>
TEXVLM_HD void unpack_rows(const AttentionPackAdjoint<A>& f, int64_t begin, int64_t end) {
  AttentionPackAdjointOnHost<A>(f).rows(begin, end);
}
// They move memory: AVX-512 would bring nothing.
template <class A>
constexpr Isa kPacking = std::is_same_v<A, double> ? Isa::base : Isa::v3;
TEXVLM_ISA_DISPATCH(pack_bands)
TEXVLM_ISA_DISPATCH(unpack_rows)

// Double, too, is there to be right, and compiled in a hurry.
#if TEXVLM_DISPATCHES_ISA && !defined(__clang__)
#define TEXVLM_CONTRACTED , optimize("fp-contract=fast")
#else
#define TEXVLM_CONTRACTED
#endif
#if TEXVLM_DISPATCHES_ISA
#define TEXVLM_BEST_OF(name)                                                                                          \
  template <class... A>                                                                                               \
  __attribute__((target("arch=x86-64-v4,prefer-vector-width=512") TEXVLM_CONTRACTED)) void name##_v4(const A&... a) { \
    name<16>(a...);                                                                                                   \
  }                                                                                                                   \
  template <class... A>                                                                                               \
  __attribute__((target("arch=x86-64-v3") TEXVLM_CONTRACTED)) void name##_v3(const A&... a) {                         \
    name<8>(a...);                                                                                                    \
  }
#define TEXVLM_TRY_BEST_OF(name)                  \
  if constexpr (std::is_same_v<Number, float>) {  \
    if (isa() == Isa::v4) return name##_v4(a...); \
    if (isa() == Isa::v3) return name##_v3(a...); \
  }
#else
#define TEXVLM_BEST_OF(name)
#define TEXVLM_TRY_BEST_OF(name)
#endif
#define TEXVLM_WIDTH_DISPATCH(name)                   \
  TEXVLM_BEST_OF(name)                                \
  template <int C, class... A>                        \
  TEXVLM_IN_A_HURRY void name##_base(const A&... a) { \
    name<C>(a...);                                    \
  }                                                   \
  template <class Number, class... A>                 \
  void name##_best(const A&... a) {                   \
    TEXVLM_TRY_BEST_OF(name)                          \
    name##_base<16 / int{sizeof(Number)}>(a...);      \
  }
TEXVLM_WIDTH_DISPATCH(attend_tiles)
TEXVLM_WIDTH_DISPATCH(attend_queries)
TEXVLM_WIDTH_DISPATCH(adjoin_tiles)
TEXVLM_WIDTH_DISPATCH(adjoin_queries)

}  // namespace host

namespace {

using Ints = at::IntArrayRef;

CellPyramid check_pyramid(const char* op, int64_t height, int64_t width, Ints levels) {
  TEXVLM_CHECK(height >= 1 && width >= 1 && height <= INT32_MAX / 4 / width, op, "grid", "of 1 to 2^29 places", height, " x ",
               width);
  TEXVLM_CHECK(levels.size() <= kMaxAttentionStages, op, "levels", "at most " + std::to_string(kMaxAttentionStages), levels);
  CellPyramid cells{};
  cells.rows = height, cells.columns = width, cells.stages = static_cast<int>(levels.size());
  for (int s = 0; s < cells.stages; ++s) {
    TEXVLM_CHECK(levels[s] >= 1 && levels[s] <= 30 && (s == 0 || levels[s] < levels[s - 1]), op, "levels",
                 "coarse levels that decrease, each from 1 to 30", levels);
    cells.level[s] = static_cast<int>(levels[s]);
    cells.offset[s + 1] = cells.offset[s] + cells.rows_of(s) * cells.columns_of(s);
  }
  return cells;
}

// `b`: a dense tensor of this dtype and shape on the device of `beside`.
void check_like(const char* op, const char* argument, const Tensor& t, const char* names, std::initializer_list<int64_t> sizes,
                at::ScalarType dtype, const Tensor& beside) {
  check_shape(op, argument, t, names, sizes);
  check_dtype(op, argument, t, dtype, "");
  check_same_device(op, argument, t, beside);
}

template <class A>
A* maybe(const Tensor& t) {
  return t.defined() ? pointer<A>(t) : nullptr;
}

// ---- packing ----

// Keys and values of all places, dense, and the weights beside them.
struct Places {
  CellPyramid cells;
  Tensor k, v, log_weight;
  int64_t batch, heads, dim;
  at::ScalarType dtype, acc;

  Places(const char* op, const Tensor& k_, const Tensor& v_, int64_t height, int64_t width, Ints levels, Maybe log_weight_) {
    check_shape(op, "k", k_, "[B, heads, N, D]", {-1, -1, -1, -1});
    dtype = k_.scalar_type(), acc = acc_dtype(dtype);
    check_texel_dtype(op, "k", dtype);
    batch = k_.size(0), heads = k_.size(1), dim = k_.size(3);
    cells = check_pyramid(op, height, width, levels);
    TEXVLM_CHECK(k_.size(2) == height * width, op, "k",
                 "[B, heads, N, D] with N = " + std::to_string(height) + " * " + std::to_string(width) + " places", shape_of(k_));
    TEXVLM_CHECK(heads >= 1 && dim >= 1, op, "k", "of at least one head and one coordinate", shape_of(k_));
    check_like(op, "v", v_, "[B, heads, N, D] as k", {batch, heads, k_.size(2), dim}, dtype, k_);
    k = k_.contiguous(), v = v_.contiguous();
    if (given(log_weight_).defined()) {
      check_like(op, "log_weight", *log_weight_, "[B, N]", {batch, k_.size(2)}, acc, k_);
      log_weight = log_weight_->contiguous();
    }
  }
  Storage storage() const {
    return dtype == at::kHalf ? Storage::half : dtype == at::kBFloat16 ? Storage::bfloat16 : Storage::own;
  }
  Tensor cells_of(int64_t width) const { return new_tensor({batch, heads, cells.total(), width}, acc, k.device()); }
};

using Packed = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Packed attention_pack(const Tensor& k, const Tensor& v, Size height, Size width, Ints levels, Maybe log_weight) {
  const Places p("attention_pack", k, v, height, width, levels, log_weight);
  const Tensor keys = p.cells_of(p.dim), values = p.cells_of(p.dim), low = p.cells_of(p.dim), high = p.cells_of(p.dim);
  const Tensor log_count = new_tensor({p.batch, p.cells.total()}, p.acc, k.device()), spread = p.cells_of(2);
  if (p.batch > 0 && p.cells.stages > 0)
    dispatch_plane(p.acc, [&](auto tag) {
      using A = typename decltype(tag)::type;
      const AttentionPack<A> f{.cells = p.cells,
                               .batch = p.batch,
                               .heads = p.heads,
                               .dim = p.dim,
                               .storage = p.storage(),
                               .k = pointer<const void>(p.k),
                               .v = pointer<const void>(p.v),
                               .log_weight = maybe<const A>(p.log_weight),
                               .keys = pointer<A>(keys),
                               .values = pointer<A>(values),
                               .log_count = pointer<A>(log_count),
                               .spread = pointer<A>(spread),
                               .low = pointer<A>(low),
                               .high = pointer<A>(high)};
      if (on_cuda(k.device())) {
        const c10::DeviceGuard guard(k.device());
        return cuda::attention_pack(f, current_stream(k.device()));
      }
      const int64_t bands = p.cells.rows_of(0);
      host::parallel(p.batch * bands, 4 * p.heads * p.dim * p.cells.places() / bands,
                     [&](int64_t begin, int64_t end) { host::pack_bands_any<0, host::kPacking<A>>(f, begin, end); });
    });
  return {keys, values, log_count, spread, low, high};
}

std::tuple<Tensor, Tensor, Tensor> attention_pack_backward(const Tensor& grad_keys, const Tensor& grad_values,
                                                           const Tensor& grad_log_count, const Tensor& k, const Tensor& v,
                                                           Size height, Size width, Ints levels, Maybe log_weight,
                                                           const Tensor& keys, const Tensor& values, const Tensor& log_count,
                                                           std::array<bool, 3> mask) {
  const char* op = "attention_pack_backward";
  const Places p(op, k, v, height, width, levels, log_weight);
  const int64_t total = p.cells.total();
  const auto dense = [&](const char* argument, const Tensor& t) {
    check_like(op, argument, t, "[B, heads, M, D]", {p.batch, p.heads, total, p.dim}, p.acc, k);
    return t.contiguous();
  };
  const Tensor of_keys = dense("grad_keys", grad_keys), of_values = dense("grad_values", grad_values);
  const Tensor packed_keys = dense("keys", keys), packed_values = dense("values", values);
  check_like(op, "grad_log_count", grad_log_count, "[B, M]", {p.batch, total}, p.acc, k);
  check_like(op, "log_count", log_count, "[B, M]", {p.batch, total}, p.acc, k);
  const Tensor of_count = grad_log_count.contiguous(), count = log_count.contiguous();
  const auto wanted = [&](bool want, Ints sizes) { return want ? new_tensor(sizes, p.acc, k.device()) : Tensor(); };
  Tensor grad_k = wanted(mask[0], k.sizes()), grad_v = wanted(mask[1], k.sizes());
  const Tensor grad_log_weight = wanted(mask[2] && p.log_weight.defined(), {p.batch, p.cells.places()});
  if (p.batch > 0)
    dispatch_plane(p.acc, [&](auto tag) {
      using A = typename decltype(tag)::type;
      const AttentionPackAdjoint<A> f{.cells = p.cells,
                                      .batch = p.batch,
                                      .heads = p.heads,
                                      .dim = p.dim,
                                      .storage = p.storage(),
                                      .grad_keys = pointer<const A>(of_keys),
                                      .grad_values = pointer<const A>(of_values),
                                      .grad_log_count = pointer<const A>(of_count),
                                      .k = pointer<const void>(p.k),
                                      .v = pointer<const void>(p.v),
                                      .log_weight = maybe<const A>(p.log_weight),
                                      .keys = pointer<const A>(packed_keys),
                                      .values = pointer<const A>(packed_values),
                                      .log_count = pointer<const A>(count),
                                      .grad_k = maybe<A>(grad_k),
                                      .grad_v = maybe<A>(grad_v),
                                      .grad_log_weight = maybe<A>(grad_log_weight)};
      if (on_cuda(k.device())) {
        const c10::DeviceGuard guard(k.device());
        return cuda::attention_pack_adjoint(f, current_stream(k.device()));
      }
      host::parallel(p.batch * p.cells.rows, 4 * p.heads * p.dim * p.cells.columns,
                     [&](int64_t begin, int64_t end) { host::unpack_rows_any<0, host::kPacking<A>>(f, begin, end); });
    });
  if (grad_k.defined()) grad_k = grad_k.to(p.dtype);
  if (grad_v.defined()) grad_v = grad_v.to(p.dtype);
  return {grad_k, grad_v, grad_log_weight};
}

// ---- attending ----

// What forward and backward are given alike, checked and dense.
struct Attending {
  const char* op;
  Places places;
  AttentionShape shape;
  Tensor q, keys, values, log_count, prefix_k, prefix_v;

  Attending(const char* op_, const Tensor& q_, const Tensor& k, const Tensor& v, const Tensor& keys_, const Tensor& values_,
            const Tensor& log_count_, int64_t height, int64_t width, Ints levels, Ints counts, double scale, Ints tile,
            Maybe log_weight, Maybe prefix_k_, Maybe prefix_v_)
      : op(op_), places(op_, k, v, height, width, levels, log_weight) {
    const Places& p = places;
    check_shape(op, "q", q_, "[B, H, Nq, D] with B and D as k", {p.batch, -1, -1, p.dim});
    check_dtype(op, "q", q_, p.dtype, " (as k)");
    check_same_device(op, "q", q_, k);
    TEXVLM_CHECK(q_.size(1) >= 1 && q_.size(1) % p.heads == 0, op, "q",
                 "[B, H, Nq, D] with H a multiple of the " + std::to_string(p.heads) + " heads of k", shape_of(q_));
    keys = packed("keys", keys_), values = packed("values", values_);
    check_like(op, "log_count", log_count_, "[B, M]", {p.batch, p.cells.total()}, p.acc, k);
    log_count = log_count_.contiguous();
    const Tensor some_k = given(prefix_k_), some_v = given(prefix_v_);
    TEXVLM_CHECK(some_k.defined() == some_v.defined(), op, "prefix_v", "given where prefix_k is, and else left out",
                 some_v.defined() ? shape_of(some_v) : "nothing");
    if (some_k.defined()) {
      check_like(op, "prefix_k", some_k, "[B, heads of k, P, D]", {p.batch, p.heads, -1, p.dim}, p.dtype, k);
      check_like(op, "prefix_v", some_v, "as prefix_k", {p.batch, p.heads, some_k.size(2), p.dim}, p.dtype, k);
      prefix_k = some_k.contiguous(), prefix_v = some_v.contiguous();
    }
    q = q_.contiguous();

    shape.cells = p.cells;
    shape.batch = p.batch, shape.heads = q.size(1), shape.kv_heads = p.heads, shape.queries = q.size(2), shape.dim = p.dim;
    shape.prefix = prefix_k.defined() ? prefix_k.size(2) : 0;
    TEXVLM_CHECK(std::isfinite(scale), op, "scale", "finite", scale);
    shape.scale = scale;
    TEXVLM_CHECK(tile.size() == 2 && tile[0] >= 1 && tile[1] >= 1 && tile[0] <= kTileQueries && tile[1] <= kTileQueries &&
                     tile[0] * tile[1] <= kTileQueries,
                 op, "query_tile", "rows and columns of 1 to " + std::to_string(kTileQueries) + " queries", tile);
    shape.tile_rows = tile[0], shape.tile_columns = tile[1];
    TEXVLM_CHECK(shape.alone() || shape.queries == p.cells.places(), op, "q",
                 "one query for each of the " + std::to_string(p.cells.places()) + " places, unless query_tile is [1, 1]",
                 shape_of(q_));
    TEXVLM_CHECK(counts.size() == levels.size(), op, "counts", "one for each of the " + std::to_string(levels.size()) + " levels",
                 counts);
    shape.splits = 0;
    for (size_t s = 0; s < counts.size(); ++s) {
      TEXVLM_CHECK(counts[s] >= 0 && counts[s] <= p.cells.cells(static_cast<int>(s)), op, "counts",
                   "from 0 to the number of cells of the level", counts);
      shape.counts[s] = counts[s], shape.splits += counts[s];
    }
  }

  Tensor packed(const char* argument, const Tensor& t, int64_t width = 0) const {
    const Places& p = places;
    check_like(op, argument, t, width ? "[B, heads of k, M, 2]" : "[B, heads of k, M, D]",
               {p.batch, p.heads, p.cells.total(), width ? width : p.dim}, p.acc, p.k);
    return t.contiguous();
  }
  Tensor choice(const char* argument, const Tensor& t) const {
    check_like(op, argument, t, "[B, H, tiles, sum(counts)]", {shape.batch, shape.heads, shape.tiles(), shape.splits}, at::kInt,
               places.k);
    return t.contiguous();
  }
  at::Device device() const { return places.k.device(); }
  bool empty() const { return shape.batch == 0 || shape.queries == 0; }
  // About how many values a query costs.
  int64_t cost() const {
    int64_t entries = shape.cells.stages ? shape.cells.cells(0) : shape.cells.places();
    for (int s = 0; s < shape.cells.stages; ++s)
      entries += shape.counts[s] << 2 * (shape.cells.level[s] - (s + 1 < shape.cells.stages ? shape.cells.level[s + 1] : 0));
    return minimum(entries, shape.entries()) * shape.dim;
  }
};

Importance importance_of(const char* op, c10::string_view name) {
  if (name == "spread") return Importance::spread;
  if (name == "mass") return Importance::mass;
  TEXVLM_CHECK(name == "bound", op, "importance", "spread, mass or bound", name);
  return Importance::bound;
}

Tensor workspace(int64_t bytes, at::Device device) { return new_tensor({bytes}, at::kByte, device); }

using Attended = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Attended hierarchical_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, const Tensor& values,
                                const Tensor& log_count, const Tensor& spread, const Tensor& low, const Tensor& high, Size height,
                                Size width, Ints levels, Ints counts, double scale, Ints query_tile, c10::string_view importance,
                                bool with_mass, Maybe log_weight, Maybe prefix_k, Maybe prefix_v, Maybe choice) {
  const char* op = "hierarchical_attention";
  const Attending a(op, q, k, v, keys, values, log_count, height, width, levels, counts, scale, query_tile, log_weight, prefix_k,
                    prefix_v);
  const AttentionShape& shape = a.shape;
  const Tensor spreads = a.packed("spread", spread, 2), lows = a.packed("low", low), highs = a.packed("high", high);
  const Importance by = importance_of(op, importance);
  const Tensor chosen_before = given(choice).defined() ? a.choice("choice", *choice) : Tensor();
  const at::Device device = a.device();
  const at::ScalarType acc = a.places.acc;
  const Tensor out = new_tensor(a.q.sizes(), a.places.dtype, device);
  const Tensor lse = new_tensor({shape.batch, shape.heads, shape.queries}, acc, device);
  const Tensor chosen = new_tensor({shape.batch, shape.heads, shape.tiles(), shape.splits}, at::kInt, device);
  const Tensor mass = new_zeros({shape.batch, shape.heads, with_mass ? shape.cells.places() : 0}, acc, device);
  if (a.empty()) return {out, lse, chosen, mass};
  dispatch_plane(a.places.acc, [&](auto tag) {
    using A = typename decltype(tag)::type;
    const Attend<A> f{.shape = shape,
                      .importance = by,
                      .storage = a.places.storage(),
                      .q = pointer<const void>(a.q),
                      .k = pointer<const void>(a.places.k),
                      .v = pointer<const void>(a.places.v),
                      .prefix_k = maybe<const void>(a.prefix_k),
                      .prefix_v = maybe<const void>(a.prefix_v),
                      .keys = pointer<const A>(a.keys),
                      .values = pointer<const A>(a.values),
                      .log_count = pointer<const A>(a.log_count),
                      .spread = pointer<const A>(spreads),
                      .low = pointer<const A>(lows),
                      .high = pointer<const A>(highs),
                      .log_weight = maybe<const A>(a.places.log_weight),
                      .choice = maybe<const int32_t>(chosen_before),
                      .out = pointer<void>(out),
                      .lse = pointer<A>(lse),
                      .chosen = pointer<int32_t>(chosen),
                      .mass = with_mass ? pointer<A>(mass) : nullptr};
    if (on_cuda(device)) {
      const c10::DeviceGuard guard(device);
      const Tensor space = workspace(cuda::attend_workspace<A>(shape), device);
      const Tensor masses =
          with_mass ? new_zeros({shape.batch, shape.heads, shape.cells.total() + shape.cells.places()}, at::kLong, device)
                    : Tensor();
      return cuda::attend(f, maybe<unsigned long long>(masses), space.data_ptr(), current_stream(device));
    }
    // Tiles of a head add to its mass: one after another.
    const int64_t each = shape.alone() ? (shape.queries + kPanel - 1) / kPanel : shape.tiles(), together = with_mass ? each : 1;
    host::parallel(shape.batch * shape.heads * each / together, a.cost() * minimum<int64_t>(kPanel, shape.queries) * together,
                   [&](int64_t begin, int64_t end) {
                     begin *= together, end *= together;
                     shape.alone() ? host::attend_queries_best<A>(f, begin, end) : host::attend_tiles_best<A>(f, begin, end);
                   });
  });
  return {out, lse, chosen, mass};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Tiles of few heads are shared out to slices, whose sums are added in their order: as many on every machine.
constexpr int64_t kSlices = 8;

Gradients hierarchical_attention_backward(const Tensor& grad, const Tensor& grad_lse, const Tensor& q, const Tensor& k,
                                          const Tensor& v, const Tensor& keys, const Tensor& values, const Tensor& log_count,
                                          const Tensor& out, const Tensor& lse, const Tensor& chosen, Size height, Size width,
                                          Ints levels, Ints counts, double scale, Ints query_tile, Maybe log_weight,
                                          Maybe prefix_k, Maybe prefix_v, std::array<bool, 9> mask) {
  const char* op = "hierarchical_attention_backward";
  const Attending a(op, q, k, v, keys, values, log_count, height, width, levels, counts, scale, query_tile, log_weight, prefix_k,
                    prefix_v);
  const AttentionShape& shape = a.shape;
  const Places& p = a.places;
  check_like(op, "grad", grad, "[B, H, Nq, D] as q", {shape.batch, shape.heads, shape.queries, shape.dim}, p.dtype, k);
  check_like(op, "out", out, "[B, H, Nq, D] as q", {shape.batch, shape.heads, shape.queries, shape.dim}, p.dtype, k);
  check_like(op, "grad_lse", grad_lse, "[B, H, Nq]", {shape.batch, shape.heads, shape.queries}, p.acc, k);
  check_like(op, "lse", lse, "[B, H, Nq]", {shape.batch, shape.heads, shape.queries}, p.acc, k);
  const Tensor incoming = grad.contiguous(), of_lse = grad_lse.contiguous(), outs = out.contiguous(), lses = lse.contiguous();
  const Tensor choice = a.choice("chosen", chosen);
  const at::Device device = a.device();
  const bool cuda = on_cuda(device);
  const int64_t heads = maximum<int64_t>(1, shape.batch * shape.kv_heads), total = shape.cells.total(),
                places = shape.cells.places();
  const int64_t slices = cuda ? 1 : minimum((kSlices + heads - 1) / heads, maximum<int64_t>(1, shape.tiles()));
  const auto zeros = [&](bool wanted, std::initializer_list<int64_t> of_head) {
    if (!wanted) return Tensor();
    std::vector<int64_t> sizes{slices, shape.batch, shape.kv_heads};
    sizes.insert(sizes.end(), of_head);
    return new_zeros(sizes, p.acc, device);
  };
  Tensor grad_q = mask[0] ? new_zeros(a.q.sizes(), p.acc, device) : Tensor();
  Tensor grad_k = zeros(mask[1], {places, shape.dim}), grad_v = zeros(mask[2], {places, shape.dim});
  Tensor grad_keys = zeros(mask[3], {total, shape.dim}), grad_values = zeros(mask[4], {total, shape.dim});
  Tensor grad_log_count = zeros(mask[5], {total}), grad_log_weight = zeros(mask[6] && p.log_weight.defined(), {places});
  Tensor grad_prefix_k = zeros(mask[7] && a.prefix_k.defined(), {shape.prefix, shape.dim});
  Tensor grad_prefix_v = zeros(mask[8] && a.prefix_v.defined(), {shape.prefix, shape.dim});
  if (!a.empty())
    dispatch_plane(p.acc, [&](auto tag) {
      using A = typename decltype(tag)::type;
      const AttendAdjoint<A> f{.shape = shape,
                               .storage = p.storage(),
                               .grad = pointer<const void>(incoming),
                               .grad_lse = pointer<const A>(of_lse),
                               .q = pointer<const void>(a.q),
                               .k = pointer<const void>(p.k),
                               .v = pointer<const void>(p.v),
                               .prefix_k = maybe<const void>(a.prefix_k),
                               .prefix_v = maybe<const void>(a.prefix_v),
                               .keys = pointer<const A>(a.keys),
                               .values = pointer<const A>(a.values),
                               .log_count = pointer<const A>(a.log_count),
                               .log_weight = maybe<const A>(p.log_weight),
                               .out = pointer<const void>(outs),
                               .lse = pointer<const A>(lses),
                               .chosen = pointer<const int32_t>(choice),
                               .grad_q = maybe<A>(grad_q),
                               .grad_k = maybe<A>(grad_k),
                               .grad_v = maybe<A>(grad_v),
                               .grad_keys = maybe<A>(grad_keys),
                               .grad_values = maybe<A>(grad_values),
                               .grad_log_count = maybe<A>(grad_log_count),
                               .grad_log_weight = maybe<A>(grad_log_weight),
                               .grad_prefix_k = maybe<A>(grad_prefix_k),
                               .grad_prefix_v = maybe<A>(grad_prefix_v)};
      if (cuda) {
        const c10::DeviceGuard guard(device);
        const Tensor space = workspace(cuda::attend_adjoint_workspace<A>(shape), device);
        const Tensor fixed = at::globalContext().deterministicAlgorithms()
                                 ? new_zeros({cuda::attend_fixed_words(shape)}, at::kLong, device)
                                 : Tensor();
        return cuda::attend_adjoint(f, maybe<unsigned long long>(fixed), space.data_ptr(), current_stream(device));
      }
      host::parallel(heads * slices, a.cost() * 4 * shape.queries * shape.heads / shape.kv_heads / slices,
                     [&](int64_t begin, int64_t end) {
                       shape.alone() ? host::adjoin_queries_best<A>(f, slices, begin, end)
                                     : host::adjoin_tiles_best<A>(f, slices, begin, end);
                     });
    });
  const auto summed = [&](Tensor& t, at::ScalarType dtype, bool over_heads) {
    if (!t.defined()) return;
    t = slices == 1 ? t.squeeze(0) : t.sum(0);
    if (over_heads) t = shape.kv_heads == 1 ? t.squeeze(1) : t.sum(1);
    t = t.to(dtype);
  };
  if (grad_q.defined()) grad_q = grad_q.to(p.dtype);
  summed(grad_k, p.dtype, false), summed(grad_v, p.dtype, false);
  summed(grad_keys, p.acc, false), summed(grad_values, p.acc, false);
  summed(grad_log_count, p.acc, true), summed(grad_log_weight, p.acc, true);
  summed(grad_prefix_k, p.dtype, false), summed(grad_prefix_v, p.dtype, false);
  return {grad_q, grad_k, grad_v, grad_keys, grad_values, grad_log_count, grad_log_weight, grad_prefix_k, grad_prefix_v};
}

}  // namespace

TEXVLM_OPS(ops) {
  ops.differentiable<attention_pack>("attention_pack");
  ops.op<attention_pack_backward>("attention_pack_backward");
  ops.differentiable<hierarchical_attention>("hierarchical_attention");
  ops.op<hierarchical_attention_backward>("hierarchical_attention_backward");
}

}  // namespace texvlm
