// The set-up loops of math/taps.h, compiled once for each instruction set.
#include "math/taps.h"

#include "launch.h"

namespace texvlm {
namespace host {

template <int C, class A>
TEXVLM_HD void run_taps(const QueryView<A>& q, int64_t b, int64_t n, int count, const Placing& placing, BlockTaps<A>* out) {
  Coordinates<A> at;
  load_run(q, b, n, count, at);
  place_taps(at, placing, *out);
}
template <int C, class A>
TEXVLM_HD void listed_taps(const QueryView<A>& q, const int32_t* ids, int64_t per_picture, int count, const Placing& placing,
                           BlockTaps<A>* out) {
  Coordinates<A> at;
  load_listed(q, ids, per_picture, count, at);
  place_taps(at, placing, *out);
}
TEXVLM_ISA_DISPATCH(run_taps)
TEXVLM_ISA_DISPATCH(listed_taps)

}  // namespace host

void place_run(const QueryView<float>& q, int64_t b, int64_t n, int count, const Placing& placing, BlockTaps<float>& out) {
  host::run_taps_any<0>(q, b, n, count, placing, &out);
}
void place_run(const QueryView<double>& q, int64_t b, int64_t n, int count, const Placing& placing, BlockTaps<double>& out) {
  host::run_taps_any<0>(q, b, n, count, placing, &out);
}
void place_listed(const QueryView<float>& q, const int32_t* ids, int64_t per_picture, int count, const Placing& placing,
                  BlockTaps<float>& out) {
  host::listed_taps_any<0>(q, ids, per_picture, count, placing, &out);
}
void place_listed(const QueryView<double>& q, const int32_t* ids, int64_t per_picture, int count, const Placing& placing,
                  BlockTaps<double>& out) {
  host::listed_taps_any<0>(q, ids, per_picture, count, placing, &out);
}

}  // namespace texvlm
