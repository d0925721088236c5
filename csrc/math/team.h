// What the threads that share a row or a picture can do together, so that an algorithm of many steps stands once. The host has
// one thread, a block of CUDA many (csrc/cuda/*.cu have theirs).
#pragma once

#include "reduce.h"

namespace texvlm {

struct OneThread {
  static constexpr int64_t rank = 0, size = 1;
  TEXVLM_HD void wait() const {}
  template <class V>
  TEXVLM_HD V before(V own, V& total) const {  // the sum of those of lower rank, and of all
    total = own;
    return V(0);
  }
  template <class A>
  TEXVLM_HD int64_t best(A, int64_t index) const {  // the index of the greatest, ties to the lowest; -1: none
    return index;
  }
  template <class F>
  TEXVLM_HD typename F::template Part<1> total(const F& f, int64_t row, int64_t count) const {  // a reduction (reduce.h)
    return reduced(f, row, count);
  }
};

}  // namespace texvlm
