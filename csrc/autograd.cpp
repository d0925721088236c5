// Gradients of every differentiable op, from the schemas of the op and of its backward (autograd.h says by which rules).
#include "autograd.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>

namespace texvlm {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;
using torch::jit::Stack;

const IValue* Call::find(const std::string& name) const {
  const auto at = [&](const std::vector<c10::Argument>& list, c10::ArrayRef<IValue> values) -> const IValue* {
    for (size_t i = 0; i < values.size(); ++i)
      if (list[i].name() == name) return &values[i];
    return nullptr;
  };
  const IValue* argument = at(schema_.arguments(), arguments_);
  return argument ? argument : at(schema_.returns(), results_);
}

const IValue& Call::operator[](const std::string& name) const {
  const IValue* value = find(name);
  TORCH_INTERNAL_ASSERT(value, schema_.name(), " has no argument and no result ", name);
  return *value;
}

FromCall result(size_t i) {
  return [=](const Call& call) { return call.result(i); };
}
FromCall size_of(const char* argument, int64_t dimension) {
  return [=](const Call& call) { return IValue(call[argument].toTensor().sym_size(dimension)); };
}
FromCall same_as(const char* name) {
  return [=](const Call& call) { return call[name]; };
}
FromCall always(IValue value) {
  return [value = std::move(value)](const Call&) { return value; };
}

void refuse_transforms(const at::functorch::FuncTorchTLSBase& transforms) {
  try {
    transforms.checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    TORCH_CHECK(
        false,
        "texvlm: torch.func.grad, vjp, jvp and their kin do not see through texvlm's ops, whose gradients are recorded by autograd; "
        "use torch.autograd.grad(loss, inputs) or .backward(), and torch.autograd.functional.vjp or jacobian for products and "
        "whole Jacobians");
  }
}

namespace {

bool is_tensor(const c10::Argument& a) { return a.type()->isSubtypeOf(*c10::OptionalType::ofTensor()); }
bool is_tensor_list(const c10::Argument& a) { return a.type()->isSubtypeOf(*c10::ListType::ofTensors()); }
bool is_wanted(const c10::Argument& a) { return a.name() == "mask"; }

Tensor tensor_of(const IValue& v) { return v.isNone() ? Tensor() : v.toTensor(); }
IValue value_of(const Tensor& t) { return t.defined() ? IValue(t) : IValue(); }

}  // namespace

class Formula {
 public:
  Formula(std::string op, GradientRule how, int64_t at) : name(std::move(op)), rule(std::move(how)), number(at) {}

  // The schemas are looked up in the first call: the order of static initialisers is not known.
  void resolve() const { std::call_once(once_, &Formula::look_up, this); }

  static std::vector<std::unique_ptr<const Formula>>& all() {
    static std::vector<std::unique_ptr<const Formula>> formulas;
    return formulas;
  }

  std::string name;
  GradientRule rule;
  int64_t number;  // in all()
  mutable std::optional<c10::OperatorHandle> forward, backward;
  mutable size_t gradients = 1;           // leading arguments of `backward`
  mutable std::vector<size_t> arguments;  // that the results of `backward` belong to

 private:
  void look_up() const {
    auto& dispatcher = c10::Dispatcher::singleton();
    forward = dispatcher.findSchemaOrThrow(name.c_str(), "");
    const std::string other = rule.op.empty() ? name + "_backward" : rule.op;
    backward = dispatcher.findSchemaOrThrow(other.c_str(), "");
    const auto &of = forward->schema().arguments(), &results = backward->schema().returns();
    for (const c10::Argument& result : results) {
      size_t i = 0;
      while (i < of.size() && !(result.name() == "grad_" + of[i].name() || (results.size() == 1 && is_tensor(of[i])))) ++i;
      TORCH_INTERNAL_ASSERT(i < of.size(), other, " returns ", result.name(), ", which is no gradient of an argument of ", name);
      arguments.push_back(i);
    }
    const auto& wanted = backward->schema().arguments();
    for (gradients = 1; gradients < wanted.size() && wanted[gradients].name().rfind("grad", 0) == 0;) ++gradients;
  }

  mutable std::once_flag once_;
};

const Formula* make_formula(std::string op, GradientRule rule) {
  auto& all = Formula::all();
  all.push_back(std::make_unique<const Formula>(std::move(op), std::move(rule), static_cast<int64_t>(all.size())));
  return all.back().get();
}

const std::string& name_of(const Formula* formula) { return formula->name; }

namespace {

// The tensors among the arguments of a call, one after another, and how many each argument has: a list has several.
struct Inputs {
  tensor_list tensors;
  std::vector<int64_t> counts;

  Inputs(const c10::FunctionSchema& schema, const Stack& arguments) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      const size_t before = tensors.size();
      if (is_tensor_list(schema.arguments()[i])) {
        const auto list = arguments[i].toTensorVector();
        tensors.insert(tensors.end(), list.begin(), list.end());
      } else if (is_tensor(schema.arguments()[i]) && tensor_of(arguments[i]).defined()) {
        tensors.push_back(arguments[i].toTensor());
      }
      counts.push_back(static_cast<int64_t>(tensors.size() - before));
    }
  }
};

// One node for all ops.
struct Differentiable : torch::autograd::Function<Differentiable> {
  static tensor_list forward(AutogradContext* ctx, at::TensorList /*inputs*/, const Formula& f,
                             const std::vector<int64_t>& counts, Stack& stack) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const Stack arguments = stack;
    f.forward->callBoxed(stack);
    const Call call(f.forward->schema(), arguments, stack);

    tensor_list saved;
    c10::impl::GenericList values(c10::AnyType::get());
    const auto& wanted = f.backward->schema().arguments();
    for (size_t i = f.gradients; i < wanted.size(); ++i) {
      const c10::Argument& a = wanted[i];
      if (is_wanted(a)) continue;
      const auto own = f.rule.arguments.find(a.name());
      const IValue* const same = own == f.rule.arguments.end() ? call.find(a.name()) : nullptr;
      TORCH_INTERNAL_ASSERT(same || own != f.rule.arguments.end() || a.default_value(), f.name, " does not say what ", a.name(),
                            " of its backward is");
      const IValue value = same ? *same : own != f.rule.arguments.end() ? own->second(call) : *a.default_value();
      if (is_tensor(a)) {
        saved.push_back(tensor_of(value));
      } else if (is_tensor_list(a)) {
        const auto list = value.toTensorVector();
        saved.insert(saved.end(), list.begin(), list.end());
        values.push_back(static_cast<int64_t>(list.size()));
      } else {
        values.push_back(value);
      }
    }
    ctx->saved_data["op"] = f.number;
    ctx->saved_data["values"] = values;
    ctx->saved_data["counts"] = counts;
    ctx->save_for_backward(std::move(saved));

    tensor_list out, fixed;
    for (const IValue& result : stack) {
      out.push_back(result.toTensor());
      // Results that the backward takes no gradient of have none.
      if (!out.back().is_floating_point() || out.size() > f.gradients) fixed.push_back(out.back());
    }
    if (!fixed.empty()) ctx->mark_non_differentiable(fixed);
    return out;
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const Formula& f = *Formula::all()[ctx->saved_data["op"].toInt()];
    const auto& of = f.forward->schema().arguments();
    const auto counts = ctx->saved_data["counts"].toIntVector();
    std::vector<size_t> begin{0};  // where the tensors of each argument begin among the inputs
    for (const int64_t count : counts) begin.push_back(begin.back() + static_cast<size_t>(count));

    const auto saved = ctx->get_saved_variables();
    const auto values = ctx->saved_data["values"].toList();
    const auto& wanted = f.backward->schema().arguments();
    size_t next_tensor = 0, next_value = 0;
    c10::List<bool> mask;
    for (const size_t argument : f.arguments) {
      for (size_t i = begin[argument]; i < begin[argument + 1]; ++i) mask.push_back(ctx->needs_input_grad(i));
      if (counts[argument] == 0 && is_tensor(of[argument])) mask.push_back(false);
    }
    Stack stack;
    for (size_t i = 0; i < f.gradients; ++i) stack.emplace_back(f.rule.pack ? grads[i].contiguous() : grads[i]);
    for (size_t i = f.gradients; i < wanted.size(); ++i) {
      if (is_wanted(wanted[i])) {
        stack.emplace_back(mask);
      } else if (is_tensor(wanted[i])) {
        stack.push_back(value_of(saved[next_tensor++]));
      } else if (is_tensor_list(wanted[i])) {
        const auto from = saved.begin() + static_cast<std::ptrdiff_t>(next_tensor);
        const int64_t count = values.get(next_value++).toInt();
        next_tensor += static_cast<size_t>(count);
        stack.emplace_back(std::vector<Tensor>(from, from + count));
      } else {
        stack.push_back(values.get(next_value++));
      }
    }
    if (f.rule.refuse_backward) f.rule.refuse_backward(Call(f.backward->schema(), stack));
    f.backward->callBoxed(stack);

    tensor_list out(begin.back() + 3);  // the formula, the counts and the stack are arguments too
    for (size_t r = 0; r < f.arguments.size(); ++r) {
      const size_t first = begin[f.arguments[r]], last = begin[f.arguments[r] + 1];
      for (size_t i = first; i < last; ++i)
        if (ctx->needs_input_grad(i))
          out[i] = is_tensor_list(of[f.arguments[r]]) ? stack[r].toTensorList().get(i - first) : tensor_of(stack[r]);
    }
    return out;
  }
};

// Autocast of an op: some of its arguments are promoted.
struct Promote final : c10::OperatorKernel {
  explicit Promote(std::vector<std::string> arguments) : names(std::move(arguments)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) const {
    const NoAutocast guard;
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      IValue& value = (*stack)[stack->size() - arguments.size() + i];
      if (!value.isTensor() || std::find(names.begin(), names.end(), arguments[i].name()) == names.end()) continue;
      const Tensor& t = value.toTensor();
      if (t.defined() && (t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16)) value = t.to(at::kFloat);
    }
    op.callBoxed(stack);
  }

  std::vector<std::string> names;
};

// The tensors among the arguments of a call, which are last on the stack: f(argument, tensor).
template <class F>
void each_tensor(const c10::FunctionSchema& schema, const Stack& stack, const F& f) {
  const auto& arguments = schema.arguments();
  const size_t first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const IValue& value = stack[first + i];
    if (value.isTensor() && value.toTensor().defined()) f(arguments[i], value.toTensor());
  }
}

void refuse_gradients(const c10::OperatorHandle& op, Stack* stack) {
  each_tensor(op.schema(), *stack, [&](const c10::Argument& argument, const Tensor& t) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !(c10::GradMode::is_enabled() && t.requires_grad()) && !t._fw_grad(0).defined(), op.schema().name(),
        ": works in place and is not differentiable; call it under torch.no_grad() or on ", argument.name(), ".detach()");
  });
  const at::AutoDispatchBelowAutograd guard;
  op.callBoxed(stack);
}

// PyTorch's fallback counts only what an op returns.
void count_writes(const c10::OperatorHandle& op, Stack* stack) {
  std::vector<Tensor> written;
  each_tensor(op.schema(), *stack, [&](const c10::Argument& argument, const Tensor& t) {
    if (argument.alias_info() && argument.alias_info()->isWrite()) written.push_back(t);
  });
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(stack);
  }
  for (const Tensor& t : written) torch::autograd::impl::bump_version(t);
}

}  // namespace

void run_recorded(const Formula* formula, Stack& stack) {
  formula->resolve();
  const auto& schema = formula->forward->schema();
  if (formula->rule.refuse) formula->rule.refuse(Call(schema, stack));
  const Inputs inputs(schema, stack);
  const tensor_list results = Differentiable::apply(at::TensorList(inputs.tensors), *formula, inputs.counts, stack);
  stack.assign(results.begin(), results.end());
}

void Ops::not_differentiable(const char* name) const { library_.impl(name, torch::autograd::autogradNotImplementedFallback()); }

void Ops::refuses_gradients(const char* name) const {
  library_.impl(name, torch::CppFunction::makeFromBoxedFunction<refuse_gradients>());
}

void Ops::counts_writes(const char* name) const {
  library_.impl(name, torch::CppFunction::makeFromBoxedFunction<count_writes>());
}

void Ops::promotes(const char* name, std::vector<std::string> arguments) const {
  if (at_ != At::autocast) return;
  library_.impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Promote>(std::move(arguments))));
}

}  // namespace texvlm
