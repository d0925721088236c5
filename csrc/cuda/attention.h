// The kernels of the stem `attention`: a block per group of cells, and a block per tile of queries.
#pragma once

#include "../math/attention.h"
#include "launch.h"

namespace texvlm::cuda {

// Tensors are dense, as their structs in math/attention.h say. Nothing is read back, nothing depends on values beyond what is
// computed: every call can be captured. Empty ones (no batch, no heads, no places, no queries) launch nothing that is not needed.

// One launch each.
template <class A>
void attention_pack(const AttentionPack<A>& f, void* stream);
template <class A>
void attention_pack_adjoint(const AttentionPackAdjoint<A>& f, void* stream);

// Bytes of workspace that attend() needs, for A or its adjoint; it may hold anything. It grows with what one tile reads, not with
// the number of tiles beyond those that run at a time.
template <class A>
int64_t attend_workspace(const AttentionShape& shape);
template <class A>
int64_t attend_adjoint_workspace(const AttentionShape& shape);

// One launch; with f.mass (zeros before) two. masses: where f.mass is wanted, zeros [B, heads, M + N], in which the mass of
// entries is summed in fixed point, so that it does not depend on an order; else null.
template <class A>
void attend(const Attend<A>& f, unsigned long long* masses, void* workspace, void* stream);

// One launch with float atomics. fixed: null, or attend_fixed_words() zeros: then all that several tiles add to is summed in
// fixed point, which takes a few launches more and gives the same bits every time. grad_q is stored, the others are added to.
int64_t attend_fixed_words(const AttentionShape& shape);
template <class A>
void attend_adjoint(const AttendAdjoint<A>& f, unsigned long long* fixed, void* workspace, void* stream);

}  // namespace texvlm::cuda
