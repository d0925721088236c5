// What every differentiable op shares: when to record, how to reach another op, what autocast does.
//
// The pattern of an op `f` (see pyramid.cpp for a whole one):
//   schema f and f_backward in ops.cpp; one kernel each, registered for CPU and CUDA; at the Autograd key a function that
//   calls the op below autograd when nothing needs a gradient, and torch::autograd::Function::apply otherwise; the backward
//   calls f_backward through the dispatcher, so that compile, fakes and opcheck see it.
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

namespace texvlm {

using at::Tensor;
using c10::SymInt;
using Names = c10::List<std::string>;  // `str[]` in a schema
using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

// `Tensor?` in a schema, and the same as a tensor that may be undefined.
using Maybe = const std::optional<Tensor>&;
inline Tensor given(Maybe t) { return t.value_or(Tensor()); }
inline std::optional<Tensor> maybe(const Tensor& t) { return t.defined() ? std::optional<Tensor>(t) : std::nullopt; }

inline std::vector<std::string> strings(const Names& names) {
  std::vector<std::string> out;
  out.reserve(names.size());
  for (size_t i = 0; i < names.size(); ++i) out.push_back(names.get(i));
  return out;
}

// The typed handle of another op: internal calls go through the dispatcher too.
template <class Signature>
c10::TypedOperatorHandle<Signature> op_handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Whether Function::apply must run. It must also run for forward-mode tangents, because it raises there: skipping it would make
// jvp return zeros in silence. Inside functorch transforms this raises, as apply would; what functorch leaves behind once it has
// been used does not count.
inline bool records(std::initializer_list<const Tensor*> inputs) {
  if (const auto& transforms = at::functorch::functorchTLSAccessor()) transforms->checkSupportsCppAutogradFunction();
  const bool grad_mode = c10::GradMode::is_enabled();
  for (const Tensor* t : inputs) {
    if (!t->defined()) continue;
    if (grad_mode && t->requires_grad()) return true;
    if (t->_fw_grad(0).defined()) return true;
  }
  return false;
}

// A gradient in the dtype of what it belongs to.
inline Tensor cast_like(const Tensor& gradient, const Tensor& like) {
  return gradient.defined() ? gradient.to(like.scalar_type()) : gradient;
}

// Autocast: texels keep their dtype; coordinates and scores are promoted to float32 (float64 stays).
inline Tensor promoted(const Tensor& t) {
  return t.defined() && (t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16) ? t.to(at::kFloat) : t;
}

inline std::optional<Tensor> promoted(Maybe t) { return t ? std::optional<Tensor>(promoted(*t)) : std::nullopt; }

// Excludes the autocast keys in a scope, for the kernels registered there.
struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

// As TORCH_LIBRARY_IMPL(texvlm, key, m), for both devices at once: the kernels, and what autocast does.
#define TEXVLM_BOTH(name, first, second, m)                      \
  static void name(torch::Library&);                             \
  TORCH_LIBRARY_IMPL(texvlm, first, library) { name(library); }  \
  TORCH_LIBRARY_IMPL(texvlm, second, library) { name(library); } \
  static void name(torch::Library& m)
#define TEXVLM_KERNELS(m) TEXVLM_BOTH(texvlm_kernels, CPU, CUDA, m)
#define TEXVLM_AUTOCAST(m) TEXVLM_BOTH(texvlm_autocast, AutocastCPU, AutocastCUDA, m)

}  // namespace texvlm
