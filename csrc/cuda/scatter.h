// Scatter on CUDA whose sums do not depend on the order of additions: 64-bit fixed point.
//
// Integers add up to the same in any order, so atomics are reproducible as they are; sorting by texel would cost several passes
// over (query, tap) pairs, and ends with one thread that adds up a hot texel. Per query the weights of a texel sum to at most 1,
// so no sum exceeds count * largest, which is scaled to 2^61: the error of a sum of n terms is at most n * count * largest *
// 2^-60. Terms that are not finite are added to the result itself: infinities and NaN do not depend on the order either.
// Workspace: 8 bytes per gradient value, and 8 bytes.
#pragma once

#include "../math/scalar.h"
#include "launch.h"

namespace texvlm::cuda {

struct FixedPoint {
  unsigned long long *sums, *largest;  // zeros before; sums null: plain floating-point atomics
  int64_t count;                       // of queries
};

// The largest finite magnitude of `values`, as the bits of a double.
template <class T>
void largest_magnitude(const T* values, int64_t count, unsigned long long* largest, void* stream);
// out[i] += sums[i]
template <class A>
void add_fixed(const FixedPoint& fixed, A* out, int64_t count, void* stream);

}  // namespace texvlm::cuda
