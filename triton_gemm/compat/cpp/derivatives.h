// Derivatives of cached calls, above torch's autograd: in C++ what `functional.ops._Gemm` is in Python.
#pragma once
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include "operators.h"

namespace triton_gemm {

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
  using MaybeTensor = const std::optional<at::Tensor>&;
  using Signature =
      at::Tensor(const at::Tensor&, const at::Tensor&, MaybeTensor, const at::Scalar&, const at::Scalar&,
                 std::optional<std::string_view>, std::optional<at::ScalarType>,
                 std::optional<std::string_view>, std::optional<bool>, MaybeTensor, MaybeTensor, MaybeTensor);
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

inline void save(Context* context, const at::Tensor& a, const at::Tensor& b,
                 const std::optional<at::Tensor>& bias, const at::Tensor& more) {
  context->set_materialize_grads(false);
  variable_list saved{b.requires_grad() ? a : at::Tensor(), a.requires_grad() ? b : at::Tensor()};
  if (more.defined()) saved.push_back(more);
  context->save_for_backward(std::move(saved));
  context->saved_data["by columns"] = int64_t{by_columns(a)} | int64_t{by_columns(b)} << 1;
  if (bias.has_value()) context->saved_data["bias"] = bias->sizes();
}

// For a, b, the bias and the two other arguments of a node. grad: of a @ b + bias.
inline variable_list gradients(Context* context, const variable_list& saved, const at::Tensor& grad) {
  variable_list found(4);
  if (!grad.defined()) return found;
  const at::Tensor &a = saved[0], &b = saved[1];
  const int64_t columns = context->saved_data["by columns"].toInt();
  if (context->needs_input_grad(0)) {
    const at::Tensor of_c = grad.to(b.scalar_type());  // another than b's where a hook has changed that
    found[0] = columns & 1 ? gemm(b, of_c.mT()).mT() : gemm(of_c, b.mT());
  }
  if (context->needs_input_grad(1)) {
    const at::Tensor x = rows_of(a), y = rows_of(grad.to(a.scalar_type()));
    found[1] = columns & 2 ? gemm(y.mT(), x).mT() : gemm(x.mT(), y);
  }
  const auto bias = context->saved_data.find("bias");
  if (bias != context->saved_data.end() && context->needs_input_grad(2))
    found[2] = down_columns(grad, bias->second.toIntVector());
  return found;
}

struct GemmNode : torch::autograd::Function<GemmNode> {
  static constexpr bool is_traceable = true;

  static at::Tensor forward(Context* context, const at::Tensor& a, const at::Tensor& b,
                            const std::optional<at::Tensor>& bias, const Launch* launch) {
    save(context, a, b, bias, at::Tensor());
    return run(launch->entry, launch->call);
  }

  static variable_list backward(Context* context, variable_list grads) {
    return gradients(context, context->get_saved_variables(), grads[0]);
  }
};

// The same with an activation: the result and, but for relu, what the activation is applied to, which can be
// differentiated too, as the backward that is made of it is.
struct ActivatedNode : torch::autograd::Function<ActivatedNode> {
  static constexpr bool is_traceable = true;

  static variable_list forward(Context* context, const at::Tensor& a, const at::Tensor& b,
                               const std::optional<at::Tensor>& bias, const Launch* launch) {
    at::Tensor before;
    const at::Tensor result = run(launch->entry, launch->call, &before);
    save(context, a, b, bias, before.defined() ? before : result);
    context->saved_data["activation"] = static_cast<int64_t>(launch->entry.activation);
    if (!before.defined()) return {result};
    return {result, before};
  }

  static variable_list backward(Context* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    at::Tensor grad;
    if (grads[0].defined())
      grad = through(static_cast<Activation>(context->saved_data["activation"].toInt()), grads[0], saved[2]);
    if (grads.size() > 1 && grads[1].defined()) grad = grad.defined() ? grad.add(grads[1]) : grads[1];
    return gradients(context, saved, grad);
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
         (call.count == 2 || call.operands[2]->scalar_type() == a.scalar_type()) && !is_watched();
}

at::Tensor with_derivative(const Entry& entry, const Call& call) {
  const Launch launch{entry, call};
  const at::Tensor& b = *call.operands[1];
  std::optional<at::Tensor> bias;
  if (call.count > 2) bias = *call.operands[2];
  const at::Tensor right = entry.derivative == Derivative::kLinear ? b.t() : b;
  if (entry.activation != Activation::kNone)
    return ActivatedNode::apply(*call.operands[0], right, bias, &launch)[0];
  return GemmNode::apply(*call.operands[0], right, bias, &launch);
}

}  // namespace triton_gemm
