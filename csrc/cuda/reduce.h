// The reduction of rows on CUDA: defined in reduce.cuh and instantiated per functor in the .cu of its stem.
#pragma once

#include "../math/reduce.h"
#include "launch.h"

namespace texvlm::cuda {

#if defined(TEXVLM_WITH_CUDA)
// A block takes a row. Asynchronous on `stream`; a launch error is thrown.
template <class F>
void launch_rows_reduced(const F& f, int64_t rows, int64_t count, void* stream);
#else
template <class F>
void launch_rows_reduced(const F&, int64_t, int64_t, void*) {
  not_built();
}
#endif

}  // namespace texvlm::cuda
