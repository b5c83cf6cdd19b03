// Products that torch's dispatcher calls without Python. They are registered once, and neither withdrawn nor
// freed.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <map>

#include "calls.h"

namespace triton_gemm {

// Products whose calls are looked up in one table. Groups are never freed, for kernels outlive Python.
struct Group {
  std::atomic<bool> active = false;          // if not, all calls are torch's
  std::atomic<Table*> table = nullptr;       // null: Python takes every call
  std::shared_ptr<PyObject> registers_anew;  // called when torch's kernel is gone
  std::map<std::string, std::atomic<int64_t>> launches;
  std::vector<c10::RegistrationHandleRAII> registrations;
  std::vector<c10::SafeKernelFunction> alive;  // kernels that were replaced, which threads may be running
};
inline auto& groups = *new std::deque<Group>;

// Where a product has its operands and factors among its arguments; -1: it has none.
struct Places {
  int a, b, input, alpha, beta, out;
};

// A kernel of torch's dispatcher. What the table has it launches, and what it has not Python's kernel takes.
// Where nothing is routed the kernel that was there before is called: that takes two atomic loads, and no
// GIL.
struct Product final : c10::OperatorKernel {
  c10::SafeKernelFunction before;  // torch's, or another library's
  c10::SafeKernelFunction python;
  int64_t operation, request;  // the numbers of what Python would say
  Places places;
  std::vector<int> defaults;  // arguments that must be None
  int count;                  // of arguments
  bool below_autograd;        // if false, it must refuse what needs a derivative
  Group* group;
  std::atomic<int64_t>* launches;

  Product(c10::SafeKernelFunction before, c10::SafeKernelFunction python)
      : before(std::move(before)), python(std::move(python)) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (!group->active.load(std::memory_order_acquire)) return pass(handle, keys, stack);
    at::Tensor result;
    if (!take(stack->data() + stack->size() - count, result))
      return python.callBoxed(python.opHandle(), keys, stack);
    torch::jit::drop(*stack, count);
    stack->emplace_back(std::move(result));
  }

  void pass(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    try {
      return before.callBoxed(handle, keys, stack);
    } catch (const c10::Error& error) {  // another library has taken its kernel back
      if (group->registers_anew == nullptr ||
          std::string_view(error.what_without_backtrace()).find("has been invalidated") ==
              std::string_view::npos)
        throw;
    }
    {
      const pybind11::gil_scoped_acquire gil;
      ask(group->registers_anew);
    }
    handle.redispatchBoxed(keys, stack);
  }

  static bool number(const c10::IValue& given, double& value) {
    if (!given.isInt() && !given.isDouble()) return false;
    value = given.isInt() ? static_cast<double>(given.toInt()) : given.toDouble();
    return true;
  }

  bool take(const c10::IValue* arguments, at::Tensor& result) const {
    const Table* table = group->table.load(std::memory_order_acquire);
    if (table == nullptr) return false;
    const bool adds = places.input >= 0 && arguments[places.input].isTensor();
    Call call;
    call.dispatched = below_autograd, call.given = places.out >= 0;
    double beta = 1;
    if (places.alpha >= 0 && !number(arguments[places.alpha], call.alpha)) return false;
    if (adds && !(number(arguments[places.beta], beta) && beta == 1)) return false;
    for (const int i : defaults)
      if (!arguments[i].isNone()) return false;
    if (!below_autograd && c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python)) return false;
    const auto add = [&](int place) { return add_underived(call, arguments[place].toTensor()); };
    add_operation(call, operation, request, adds);
    const auto found = entry_of(*table, call, [&] {
      return add(places.a) && add(places.b) && (!call.given || add(places.out)) &&
             (!adds || add(places.input)) && add_state(call);
    });
    if (found == nullptr) return false;
    result = run(*found, call);
    launches->fetch_add(1, std::memory_order_relaxed);
    return true;
  }
};

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Registers a Product for an operator and a dispatch key, in the place of what is there now.
inline void register_product(Group& group, const std::string& whole, const std::string& key,
                             const std::string& python, const std::string& operation_name, int64_t operation,
                             int64_t request, Places places) {
  Quiet handler;  // torch warns of kernels that are overridden
  const c10::WarningUtils::WarningHandlerGuard quiet(&handler);
  auto& dispatcher = c10::Dispatcher::singleton();
  const c10::DispatchKey dispatch = c10::parseDispatchKey(key);
  const auto find = [&](const std::string& full) {
    const size_t dot = full.find('.');
    const std::string name = full.substr(0, dot),
                      overload = dot == std::string::npos ? "" : full.substr(dot + 1);
    return dispatcher.findSchemaOrThrow(name.c_str(), overload.c_str());
  };
  const auto handle = find(whole);
  auto product = std::make_unique<Product>(handle.getComputedKernelForDispatchKey(dispatch),
                                           find(python).getComputedKernelForDispatchKey(dispatch));
  product->operation = operation, product->request = request, product->places = places;
  product->count = static_cast<int>(handle.schema().arguments().size());
  const int named[] = {places.a, places.b, places.input, places.alpha, places.beta, places.out};
  for (int i = 0; i < product->count; ++i)
    if (std::find(std::begin(named), std::end(named), i) == std::end(named)) product->defaults.push_back(i);
  product->below_autograd = key.rfind("Autograd", 0) != 0;
  product->group = &group, product->launches = &group.launches[operation_name];
  group.registrations.push_back(dispatcher.registerImpl(
      handle.operator_name(), dispatch, c10::KernelFunction::makeFromBoxedFunctor(std::move(product)),
      std::nullopt, nullptr, "triton_gemm"));
  group.alive.push_back(handle.getComputedKernelForDispatchKey(dispatch));
}

}  // namespace triton_gemm
