// The reduction of rows on CUDA: defined in reduce.cuh and instantiated per functor in the .cu of its stem.
#pragma once

#include "../math/reduce.h"
#include "launch.h"

namespace texvlm::cuda {

// A block takes a row. Asynchronous on `stream`; a launch error is thrown.
template <class F>
void launch_rows_reduced(const F& f, int64_t rows, int64_t count, void* stream);

}  // namespace texvlm::cuda
