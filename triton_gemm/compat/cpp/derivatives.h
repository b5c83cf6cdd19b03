// Derivatives of cached calls, above torch's autograd: in C++ what `functional.ops._Gemm` is in Python.
#pragma once
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include "operators.h"

namespace triton_gemm {

using MaybeTensor = std::optional<at::Tensor>;

// Whether something wants to see products that go through the dispatcher: a mode of Python, a transform of
// functorch, a profiler or another observer.
inline bool is_watched() {
  using c10::impl::tls_is_dispatch_key_included;
  return tls_is_dispatch_key_included(c10::DispatchKey::Python) ||
         tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) || at::hasCallbacks();
}

// a @ b by the table, or else by the operator, which is differentiable itself.
inline at::Tensor gemm(const at::Tensor& a, const at::Tensor& b) {
  const Table* table = backward.table.load(std::memory_order_acquire);
  if (table != nullptr && !is_watched()) {
    Call call;
    add_operation(call, backward.operation, backward.request, 0);
    const auto found = entry_of(
        *table, call, [&] { return add_underived(call, a) && add_underived(call, b) && add_state(call); });
    if (found != nullptr) return run(*found, call);
  }
  using Signature = at::Tensor(
      const at::Tensor&, const at::Tensor&, const MaybeTensor&, const at::Scalar&, const at::Scalar&,
      std::optional<std::string_view>, std::optional<at::ScalarType>, std::optional<std::string_view>,
      std::optional<bool>, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&);
  const auto operation =
      c10::Dispatcher::singleton().findSchemaOrThrow("triton_gemm::gemm", "").typed<Signature>();
  return operation.call(a, b, {}, 1, 1, {}, {}, {}, {}, {}, {}, {});
}

inline at::Tensor rows_of(const at::Tensor& x) { return x.reshape_symint({-1, x.sym_size(-1)}); }

inline bool by_columns(const at::Tensor& x) { return x.stride(-2) == 1 && x.stride(-1) != 1; }

struct Launch {
  const Entry& entry;
  const Call& call;
};

// As `ops._through_addition`, of a bias with one value for each column: entries add no other without a
// copy.
inline at::Tensor down_columns(const at::Tensor& grad, at::IntArrayRef sizes) {
  const c10::TensorImpl* impl = grad.unsafeGetTensorImpl();
  if (is_watched() || grad.element_size() != 2 || !impl->has_storage() || impl->is_python_dispatch() ||
      impl->has_symbolic_sizes_strides())
    return grad.sum_to_size(sizes);
  const int64_t columns = grad.size(-1), rows = grad.numel() / columns;
  if (rows < backward.many_rows) return grad.sum_to_size(sizes);
  return gemm(at::ones({1, rows}, grad.options()), grad.reshape({rows, columns})).reshape(sizes);
}

// Gradients of a @ b + bias have their operands' strides, so that accumulating copies none. What is saved is
// what Python's node saves, as a checkpoint gives one what the other has saved. Compiled autograd traces the
// backward, whose sizes it may not know.
using Context = torch::autograd::AutogradContext;
using torch::autograd::variable_list;

inline void save(Context* context, const at::Tensor& a, const at::Tensor& b, const MaybeTensor& bias,
                 const MaybeTensor& gate, const variable_list& more) {
  context->set_materialize_grads(false);
  const bool needs_a = b.requires_grad() || (gate && gate->requires_grad());
  variable_list saved{needs_a ? a : at::Tensor(), a.requires_grad() ? b : at::Tensor()};
  if (gate) saved.push_back(a.requires_grad() ? *gate : at::Tensor());
  saved.insert(saved.end(), more.begin(), more.end());
  context->save_for_backward(std::move(saved));
  context->saved_data["by columns"] =
      int64_t{by_columns(a)} | int64_t{by_columns(b)} << 1 | int64_t{gate && by_columns(*gate)} << 2;
  if (bias) context->saved_data["bias"] = bias->sizes();
}

inline at::Tensor sum_of(const at::Tensor& x, const at::Tensor& y) {
  return !x.defined() ? y : !y.defined() ? x : x.add(y);
}

// Adds to the gradients of a node's arguments (a, b, bias, gate, gate_bias) those of a @ b + bias, or of a @
// gate + gate_bias, whose own gradient is `grad`. A gate has a bias of the same sizes where b has one.
inline void add_gradients(Context* context, const at::Tensor& a, const at::Tensor& b, const at::Tensor& grad,
                          bool is_gate, variable_list& found) {
  if (!grad.defined()) return;
  const int64_t columns = context->saved_data["by columns"].toInt();
  const auto bias = context->saved_data.find("bias");
  const bool has_bias = bias != context->saved_data.end();
  const int place = is_gate ? 3 : 1, edge = is_gate ? 2 + has_bias : 1;  // no edge leads to what is not given
  if (context->needs_input_grad(0)) {
    const at::Tensor of_c = grad.to(b.scalar_type());  // another than b's where a hook has changed that
    found[0] = sum_of(found[0], columns & 1 ? gemm(b, of_c.mT()).mT() : gemm(of_c, b.mT()));
  }
  if (context->needs_input_grad(edge)) {
    const at::Tensor x = rows_of(a), y = rows_of(grad.to(a.scalar_type()));
    found[place] = columns & (is_gate ? 4 : 2) ? gemm(y.mT(), x).mT() : gemm(x.mT(), y);
  }
  if (has_bias && context->needs_input_grad(edge + 1))
    found[place + 1] = down_columns(grad, bias->second.toIntVector());
}

struct GemmNode : torch::autograd::Function<GemmNode> {
  static constexpr bool is_traceable = true;

  static at::Tensor forward(Context* context, const at::Tensor& a, const at::Tensor& b,
                            const MaybeTensor& bias, const Launch* launch) {
    save(context, a, b, bias, {}, {});
    return run(launch->entry, launch->call);
  }

  static variable_list backward(Context* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    variable_list found(4);
    add_gradients(context, saved[0], saved[1], grads[0], false, found);
    return found;
  }
};

// The same with an activation or a gate: the result and the preactivations, which are what the activation is
// applied to, but for relu without a gate, and with one a @ b + bias. They can be differentiated, too, as the
// backward that is made of them is.
struct ActivatedNode : torch::autograd::Function<ActivatedNode> {
  static constexpr bool is_traceable = true;

  static variable_list forward(Context* context, const at::Tensor& a, const at::Tensor& b,
                               const MaybeTensor& bias, const MaybeTensor& gate,
                               const MaybeTensor& /*gate_bias*/, const Launch* launch) {
    variable_list before;
    const at::Tensor result = run(launch->entry, launch->call, &before);
    save(context, a, b, bias, gate, before.empty() ? variable_list{result} : before);
    context->saved_data["activation"] = static_cast<int64_t>(launch->entry.activation);
    before.insert(before.begin(), result);
    return before;
  }

  // As `activations.through_activation`.
  static variable_list backward(Context* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const auto activation = static_cast<Activation>(context->saved_data["activation"].toInt());
    const bool gated = saved.size() == 5;  // a, b, gate, and both preactivations
    grads.resize(3);
    const at::Tensor &grad = grads[0], &before = saved[gated ? 3 : 2];
    at::Tensor of_before, of_ungated;
    if (grad.defined()) {
      of_before = through(activation, gated ? grad.mul(saved[4]) : grad, before);
      if (gated) of_ungated = grad.mul(apply_to(activation, before));
    }
    of_before = sum_of(of_before, grads[1]);
    variable_list found(6);
    if (gated) add_gradients(context, saved[0], saved[1], sum_of(of_ungated, grads[2]), false, found);
    add_gradients(context, saved[0], saved[gated ? 2 : 1], of_before, gated, found);
    return found;
  }

  static at::Tensor apply_to(Activation activation, const at::Tensor& x) {
    if (activation == Activation::kRelu) return x.relu();
    if (activation == Activation::kSilu) return at::silu(x);
    return at::gelu(x, activation == Activation::kGelu ? "none" : "tanh");
  }

  // As `activations.derivative`.
  static at::Tensor through(Activation activation, const at::Tensor& grad, const at::Tensor& x) {
    if (activation == Activation::kRelu) return at::threshold_backward(grad, x, 0);
    if (activation == Activation::kGelu) return at::gelu_backward(grad, x, "none");
    if (activation == Activation::kGeluTanh) return at::gelu_backward(grad, x, "tanh");
    if (!c10::GradMode::is_enabled()) return at::silu_backward(grad, x);
    const at::Tensor gate = x.sigmoid();  // what can be differentiated again
    return x.mul(gate.neg().add(1)).add(1).mul(gate).mul(grad);
  }
};

// Of alpha an entry knows only whether it is 0.
bool has_derivative(const Entry& entry, const Call& call) {
  const at::Tensor &a = *call.operands[0], &b = *call.operands[1];
  return entry.derivative != Derivative::kNone && !call.given && call.alpha == 1 && a.dim() >= 2 &&
         b.dim() == 2 && entry.result.dtype == static_cast<int>(a.scalar_type()) &&
         (call.count == 2 || call.operands[2]->scalar_type() == a.scalar_type()) &&
         (call.count <= 3 || entry.preactivations == 2) && !is_watched();
}

at::Tensor with_derivative(const Entry& entry, const Call& call) {
  const Launch launch{entry, call};
  const auto right = [&](const at::Tensor& x) { return entry.derivative == Derivative::kLinear ? x.t() : x; };
  const at::Tensor &a = *call.operands[0], b = right(*call.operands[1]);
  const bool gated = entry.preactivations == 2;  // auxiliary operands: bias, gate, gate_bias; or the gate
  MaybeTensor bias, gate, gate_bias;
  if (call.count > 2 + gated) bias = *call.operands[2];
  if (gated) gate = right(*call.operands[bias ? 3 : 2]);
  if (gated && bias) gate_bias = *call.operands[4];
  if (entry.activation != Activation::kNone)
    return ActivatedNode::apply(a, b, bias, gate, gate_bias, &launch)[0];
  return GemmNode::apply(a, b, bias, &launch);
}

}  // namespace triton_gemm
