// Products of torch's dispatcher that it calls without Python. They are registered once, and neither
// withdrawn nor freed.
#pragma once
#include "operators.h"

namespace triton_gemm {

// The GIL is held while this lives.
class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// All kernels of an operator, for each dispatch key the newest first. torch shows only the newest, so its
// private members are read here: an explicit instantiation may name them.
using Kernels = ska::flat_hash_map<c10::DispatchKey, std::list<c10::impl::AnnotatedKernel>>;
const Kernels& kernels_of(const c10::OperatorHandle& handle);
template <auto Definition, auto Member>
struct Opened {
  friend const Kernels& kernels_of(const c10::OperatorHandle& handle) {
    return (handle.*Definition)->op.*Member;
  }
};
template struct Opened<&c10::OperatorHandle::operatorDef_, &c10::impl::OperatorEntry::kernels_>;

// A kernel of torch's dispatcher. What the table has it launches or leaves to torch, and what it has not
// Python decides. Where nothing is routed the kernel that was there before is called: that takes two atomic
// loads, and no GIL. Nor is the GIL held while that kernel runs.
struct Product final : c10::OperatorKernel {
  static constexpr const char* kDebug = "triton_gemm";

  std::atomic<const c10::SafeKernelFunction*> before;  // torch's, or another library's; never freed
  std::shared_ptr<PyObject> python;                    // what decides, or null
  int64_t operation, request;                          // the numbers by which the table has its calls
  Places places;                                       // without operands: it has none of them
  std::vector<int> defaults;                           // arguments that must be None
  int count, positional;                               // of arguments
  c10::DispatchKey key;
  bool below_autograd;  // if false, it must refuse what needs a derivative
  Group* group;
  Counter *launches = nullptr, *left = nullptr;  // left: of a product that is always torch's

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    at::Tensor result;  // undefined where the call is torch's
    if (group->active.load(std::memory_order_acquire)) {
      const c10::IValue* arguments = stack->data() + stack->size() - count;
      if (!take(arguments, result) && python != nullptr)
        result = decide(python.get(), handle, arguments, positional);
    }
    if (!result.defined()) return pass(handle, keys, stack);
    torch::jit::drop(*stack, count);
    stack->emplace_back(std::move(result));
  }

  void pass(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const size_t size = stack->size();
    try {
      return before.load(std::memory_order_acquire)->callBoxed(handle, keys, stack);
    } catch (const c10::Error& error) {  // perhaps that another library has taken its kernel back
      if (std::string_view(error.what_without_backtrace()).find("has been invalidated") ==
              std::string_view::npos ||
          stack->size() != size || !look_beneath(handle))
        throw;
    }
    before.load(std::memory_order_acquire)->callBoxed(handle, keys, stack);
  }

  // Has `before` be what lies beneath this kernel now, and leaves this one where it is, because a library
  // that came later may call it. Libraries of Python register with the GIL; torch reads kernels without a
  // lock, too.
  bool look_beneath(const c10::OperatorHandle& handle) {
    const WithGil others_wait;
    const Kernels& kernels = kernels_of(handle);
    const auto found = kernels.find(key);
    if (found == kernels.end()) return false;
    const auto& stacked = found->second;
    const auto ours =
        std::find_if(stacked.rbegin(), stacked.rend(), [](const auto& x) { return x.debug == kDebug; });
    if (ours == stacked.rend() || ours == stacked.rbegin()) return false;
    const auto& beneath = *std::prev(ours);
    before.store(new c10::SafeKernelFunction(&beneath.kernel, beneath.debug,
                                             std::make_shared<c10::OperatorHandle>(handle)),
                 std::memory_order_release);
    return true;
  }

  static bool number(const c10::IValue& given, double& value) {
    if (!given.isInt() && !given.isDouble()) return false;
    value = given.isInt() ? static_cast<double>(given.toInt()) : given.toDouble();
    return true;
  }

  // Whether it is known what computes this call: the kernels of an entry, which give `result`, or torch.
  bool take(const c10::IValue* arguments, at::Tensor& result) const {
    if (left != nullptr) return left->fetch_add(1, std::memory_order_relaxed), true;
    const Table* table = group->table.load(std::memory_order_acquire);
    if (table == nullptr || places.a < 0) return false;
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
    const bool launched = !found->steps.empty();
    if (launched) result = run(*found, call);
    (launched ? launches : static_cast<const Left&>(*found).count)->fetch_add(1, std::memory_order_relaxed);
    return true;
  }
};

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void register_product(Group& group, const std::string& whole, const std::string& key,
                      std::shared_ptr<PyObject> python, const std::string& name, int64_t operation,
                      int64_t request, Places places) {
  Quiet handler;  // torch warns of kernels that are overridden
  const c10::WarningUtils::WarningHandlerGuard quiet(&handler);
  auto& dispatcher = c10::Dispatcher::singleton();
  const size_t dot = whole.find('.');
  const std::string overload = dot == std::string::npos ? "" : whole.substr(dot + 1);
  const auto handle = dispatcher.findSchemaOrThrow(whole.substr(0, dot).c_str(), overload.c_str());
  auto product = std::make_unique<Product>();
  product->key = c10::parseDispatchKey(key);
  product->before = new c10::SafeKernelFunction(handle.getComputedKernelForDispatchKey(product->key));
  product->python = std::move(python);
  product->operation = operation, product->request = request, product->places = places;
  const auto& arguments = handle.schema().arguments();
  product->count = static_cast<int>(arguments.size());
  product->positional = static_cast<int>(
      std::count_if(arguments.begin(), arguments.end(), [](const auto& x) { return !x.kwarg_only(); }));
  const int named[] = {places.a, places.b, places.input, places.alpha, places.beta, places.out};
  for (int i = 0; i < product->count; ++i)
    if (std::find(std::begin(named), std::end(named), i) == std::end(named)) product->defaults.push_back(i);
  product->below_autograd = key.rfind("Autograd", 0) != 0;
  product->group = &group;
  if (places.a >= 0)
    product->launches = &group.launches[name];
  else if (product->python == nullptr)
    product->left = &group.left[name];
  const c10::DispatchKey dispatch = product->key;
  group.registrations.push_back(dispatcher.registerImpl(
      handle.operator_name(), dispatch, c10::KernelFunction::makeFromBoxedFunctor(std::move(product)),
      std::nullopt, nullptr, Product::kDebug));
  group.alive.push_back(handle.getComputedKernelForDispatchKey(dispatch));
}

}  // namespace triton_gemm
