// Registration of ops: one line for an op, which serves both devices, autograd and autocast.
//
//   TEXVLM_OPS(ops) {
//     ops.differentiable<sample_lod>("sample_lod");        // gradients by the op sample_lod_backward
//     ops.op<sample_lod_backward>("sample_lod_backward");  // none of its own: second derivatives raise
//     ops.in_place<update_mipmaps>("update_mipmaps");      // none either: it writes into arguments
//     ops.promotes("sample_lod", {"uv", "lod"});           // under autocast
//   }
//
// The functions are the kernels. They are plain C++: an argument is what it is in the schema, but `Size` stands for a SymInt, and
// `const TextureArgs&` for the four arguments of a texture.
//
// How the gradients of op `f` are reached. The first argument of `f_backward`, and those after it that are called grad..., are
// the gradients of the first results. Then comes what it needs, by name: an argument that is called as one of f's arguments or
// results is handed that one, and keyword `mask` says which of its own results are wanted. It returns the gradients of the
// arguments that its results are named after (grad_uv: uv), or without names, of the first tensor. So a new parameter of f and
// f_backward is a change of their schemas and kernels alone.
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace texvlm {

using at::Tensor;
using c10::IValue;
using c10::SymInt;
using Names = c10::List<std::string>;  // `str[]` in a schema

// `Tensor?` in a schema, and the same as a tensor that may be undefined.
using Maybe = const std::optional<Tensor>&;
inline Tensor given(Maybe t) { return t.value_or(Tensor()); }

inline std::vector<std::string> strings(const Names& names) {
  std::vector<std::string> out;
  out.reserve(names.size());
  for (size_t i = 0; i < names.size(); ++i) out.push_back(names.get(i));
  return out;
}

// ---- arguments of kernels ----

// `SymInt` in a schema.
struct Size {
  int64_t value;
  operator int64_t() const { return value; }
};

// `SymInt height, SymInt width, str[] reducer, int levels` in a schema.
struct TextureArgs {
  int64_t height, width;
  Names reducer;
  int64_t levels;
};

// What a kernel's argument is in the schema, as C++ types, and how it is made of the values from the I-th on.
template <class A>
struct Argument {
  using Flat = std::tuple<A>;
  template <size_t I, class Values>
  static A of(const Values& v) {
    return std::get<I>(v);
  }
};
template <>
struct Argument<Size> {
  using Flat = std::tuple<SymInt>;
  template <size_t I, class Values>
  static Size of(const Values& v) {
    return {std::get<I>(v).expect_int()};
  }
};
template <>
struct Argument<const TextureArgs&> {
  using Flat = std::tuple<SymInt, SymInt, Names, int64_t>;
  template <size_t I, class Values>
  static TextureArgs of(const Values& v) {
    return {std::get<I>(v).expect_int(), std::get<I + 1>(v).expect_int(), std::get<I + 2>(v), std::get<I + 3>(v)};
  }
};

// ---- gradients ----

// The arguments and, once they are there, the results of a call, by their names in the schema.
class Call {
 public:
  Call(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> arguments, c10::ArrayRef<IValue> results = {})
      : schema_(schema), arguments_(arguments), results_(results) {}

  const IValue* find(const std::string& name) const;
  const IValue& operator[](const std::string& name) const;
  const IValue& result(size_t i) const { return results_[i]; }

 private:
  const c10::FunctionSchema& schema_;
  c10::ArrayRef<IValue> arguments_, results_;
};

using FromCall = std::function<IValue(const Call&)>;

// What names alone don't say of how an op's gradients are reached.
struct GradientRule {
  std::string op;                                    // the backward; without one NAME_backward
  std::map<std::string, FromCall> arguments;         // of it, made of the op's call
  std::function<void(const Call&)> refuse;           // looks at the op's call before it is recorded, and may raise
  std::function<void(const Call&)> refuse_backward;  // at the backward's call
  bool pack = false;                                 // whether the backward wants contiguous gradients

  GradientRule& by(std::string backward) { return op = std::move(backward), *this; }
  GradientRule& packed() { return pack = true, *this; }
  GradientRule& given(const std::string& argument, FromCall value) { return arguments[argument] = std::move(value), *this; }
  GradientRule& refused_by(std::function<void(const Call&)> check) { return refuse = std::move(check), *this; }
  GradientRule& backward_refused_by(std::function<void(const Call&)> check) { return refuse_backward = std::move(check), *this; }
};

// For `given`: a result; a size of an argument; an argument or result of another name; always the same.
FromCall result(size_t i);
FromCall size_of(const char* argument, int64_t dimension);
FromCall same_as(const char* name);
FromCall always(IValue value);

// The node of autograd for a call, made from the schemas of an op and its backward (autograd.cpp).
class Formula;
const Formula* make_formula(std::string op, GradientRule rule);
const std::string& name_of(const Formula* formula);
// Runs the op below autograd on the arguments on the stack, and leaves its results there, recorded.
void run_recorded(const Formula* formula, torch::jit::Stack& stack);

// The typed handle of an op: internal calls go through the dispatcher too.
template <class Signature>
c10::TypedOperatorHandle<Signature> op_handle(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").typed<Signature>();
}

// Whether a call must be recorded: it must also be for forward-mode tangents, because that raises; skipping it would make jvp
// return zeros in silence. Inside functorch transforms this raises; what functorch leaves behind once it has been used does not
// count.
inline bool records(bool grad_mode, const Tensor& t) {
  return t.defined() && ((grad_mode && t.requires_grad()) || t._fw_grad(0).defined());
}
inline bool records(bool grad_mode, Maybe t) { return t && records(grad_mode, *t); }
inline bool records(bool grad_mode, at::TensorList list) {
  for (const Tensor& t : list)
    if (records(grad_mode, t)) return true;
  return false;
}
template <class A>
bool records(bool, const A&) {
  return false;
}
// Raises inside functorch's transforms, saying what takes gradients instead.
void refuse_transforms(const at::functorch::FuncTorchTLSBase& transforms);
template <class... A>
bool any_records(const A&... arguments) {
  if (const auto& transforms = at::functorch::functorchTLSAccessor()) refuse_transforms(*transforms);
  const bool grad_mode = c10::GradMode::is_enabled();
  return (records(grad_mode, arguments) || ...);
}

// A kernel as the dispatcher calls it, with the schema's arguments one by one, and the same at the key Autograd.
template <auto function, class Signature, class Flat>
struct Entry;
template <auto function, class R, class... A, class... F>
struct Entry<function, R(A...), std::tuple<F...>> {
  static inline const Formula* formula = nullptr;

  static R kernel(F... arguments) { return on(std::forward_as_tuple(arguments...), std::index_sequence_for<A...>()); }

  static R autograd(F... arguments) {
    if (any_records(arguments...)) {
      torch::jit::Stack stack = c10::impl::boxArgs<F...>(std::forward<F>(arguments)...);
      run_recorded(formula, stack);
      return c10::impl::PopResult<R>::call(stack);
    }
    static const auto op = op_handle<R(F...)>(name_of(formula));
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op.call(std::forward<F>(arguments)...);
  }

 private:
  static constexpr std::array<size_t, sizeof...(A)> widths{std::tuple_size_v<typename Argument<A>::Flat>...};
  static constexpr size_t begin(size_t argument) {
    size_t sum = 0;
    for (size_t i = 0; i < argument; ++i) sum += widths[i];
    return sum;
  }
  template <class Values, size_t... I>
  static R on(const Values& values, std::index_sequence<I...>) {
    return function(Argument<A>::template of<begin(I)>(values)...);
  }
};
template <auto function, class Signature>
struct EntryOf;
template <auto function, class R, class... A>
struct EntryOf<function, R (*)(A...)> {
  using type = Entry<function, R(A...), decltype(std::tuple_cat(std::declval<typename Argument<A>::Flat>()...))>;
};

// ---- registration ----

// Excludes the autocast keys in a scope, for the kernels registered there.
struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

class Ops {
 public:
  enum class At { devices, autograd, autocast, in_place };
  Ops(torch::Library& library, At at) : library_(library), at_(at) {}

  // An op without gradients: where one is asked for, it raises.
  template <auto function>
  void op(const char* name) const {
    kernel<function>(name);
    if (at_ == At::autograd) not_differentiable(name);
  }
  // An op that writes into arguments, which its schema marks (a!): it refuses gradients of all its tensors, and counts the
  // writes, so that autograd sees a saved tensor change, and the cache of texture arrays its texels.
  template <auto function>
  void in_place(const char* name) const {
    kernel<function>(name);
    if (at_ == At::autograd) refuses_gradients(name);
    if (at_ == At::in_place) counts_writes(name);
  }
  template <auto function>
  void differentiable(const char* name, GradientRule rule = {}) const {
    using E = typename EntryOf<function, decltype(function)>::type;
    kernel<function>(name);
    if (at_ != At::autograd) return;
    E::formula = make_formula(std::string("texvlm::") + name, std::move(rule));
    library_.impl(name, &E::autograd);
  }
  // Autocast: texels keep their dtype; coordinates and scores are promoted to float32 (float64 stays).
  void promotes(const char* name, std::vector<std::string> arguments) const;

 private:
  template <auto function>
  void kernel(const char* name) const {
    if (at_ == At::devices) library_.impl(name, &EntryOf<function, decltype(function)>::type::kernel);
  }
  void not_differentiable(const char* name) const;
  void refuses_gradients(const char* name) const;
  void counts_writes(const char* name) const;

  torch::Library& library_;
  At at_;
};

#define TEXVLM_OPS(ops)                                                                  \
  static void texvlm_ops(const Ops&);                                                    \
  TORCH_LIBRARY_IMPL(texvlm, CPU, m) { texvlm_ops({m, Ops::At::devices}); }              \
  TORCH_LIBRARY_IMPL(texvlm, CUDA, m) { texvlm_ops({m, Ops::At::devices}); }             \
  TORCH_LIBRARY_IMPL(texvlm, Autograd, m) { texvlm_ops({m, Ops::At::autograd}); }        \
  TORCH_LIBRARY_IMPL(texvlm, ADInplaceOrView, m) { texvlm_ops({m, Ops::At::in_place}); } \
  TORCH_LIBRARY_IMPL(texvlm, AutocastCPU, m) { texvlm_ops({m, Ops::At::autocast}); }     \
  TORCH_LIBRARY_IMPL(texvlm, AutocastCUDA, m) { texvlm_ops({m, Ops::At::autocast}); }    \
  static void texvlm_ops(const Ops& ops)

}  // namespace texvlm
