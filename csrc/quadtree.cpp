// Host code of the stem `quadtree`: the best k disjoint nodes of a quadtree over cells.
#include "math/quadtree.h"

#include "autograd.h"
#include "cuda/quadtree.h"
#include "launch.h"
#include "tensor.h"

namespace texvlm {
namespace host {

template <int C, class F>
TEXVLM_HD void cut_trees(const F& f, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) f(OneThread{}, b);
}
TEXVLM_ISA_DISPATCH(cut_trees)

}  // namespace host

namespace {

std::tuple<Tensor, Tensor, Tensor> quadtree_cut(const Tensor& values, Size rows_, Size columns_, int64_t levels, int64_t k) {
  const char* op = "quadtree_cut";
  const int64_t rows = rows_, columns = columns_;
  TEXVLM_CHECK(rows >= 1, op, "rows", "at least 1", rows);
  TEXVLM_CHECK(columns >= 1, op, "columns", "at least 1", columns);
  TEXVLM_CHECK(levels >= 1 && levels <= kMaxTreeLevels, op, "levels", "from 1 to " + std::to_string(kMaxTreeLevels), levels);
  TEXVLM_CHECK(k >= 0, op, "k", "at least 0", k);
  TEXVLM_CHECK(rows <= INT32_MAX / columns / 2, op, "rows", "fewer than 2^30 cells in all", rows, " x ", columns);
  const QuadTree tree = QuadTree::of(rows, columns, static_cast<int>(levels));
  check_shape(op, "values", values, "[B, nodes]", {-1, tree.nodes()});
  TEXVLM_CHECK(values.scalar_type() == at::kFloat || values.scalar_type() == at::kDouble, op, "values", "float32 or float64",
               values.scalar_type());
  const int64_t batch = values.size(0);
  const Tensor taken = new_tensor(values.sizes(), at::kBool, values.device());
  const Tensor bound = new_tensor({batch}, values.scalar_type(), values.device()),
               price = new_tensor({batch}, values.scalar_type(), values.device());
  if (batch == 0) return {taken, bound, price};
  const Tensor best = new_tensor(values.sizes(), values.scalar_type(), values.device()),
               tokens = new_tensor(values.sizes(), at::kInt, values.device());
  const auto run = [&](auto zero) {
    using A = decltype(zero);
    const QuadTreeCut<A> cut{.tree = tree,
                             .values = pointer<const A>(values),
                             .stride_b = values.stride(0),
                             .stride_n = values.stride(1),
                             .k = k,
                             .taken = pointer<bool>(taken),
                             .bound = pointer<A>(bound),
                             .price = pointer<A>(price),
                             .best = pointer<A>(best),
                             .tokens = pointer<int32_t>(tokens)};
    if (on_cuda(values.device())) {
      const c10::DeviceGuard guard(values.device());
      return cuda::quadtree_cut(cut, batch, current_stream(values.device()));
    }
    host::parallel(batch, 64 * tree.nodes(),
                   [&](int64_t begin, int64_t end) { host::cut_trees_any<0, host::kBest<A>>(cut, begin, end); });
  };
  values.scalar_type() == at::kDouble ? run(0.0) : run(0.0f);
  return {taken, bound, price};
}

}  // namespace

TEXVLM_OPS(ops) { ops.op<quadtree_cut>("quadtree_cut"); }

}  // namespace texvlm
