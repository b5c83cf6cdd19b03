// What module.cpp and operators.cpp need of each other. torch's headers of derivatives and those of pybind11
// cost a compiler much, so of the two, which are compiled at once, each includes one kind.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <map>

#include "calls.h"

namespace triton_gemm {

using Counter = std::atomic<int64_t>;

// Products that begin and end to be routed together. Groups are never freed, for kernels outlive Python.
struct Group {
  std::atomic<bool> active = false;               // if not, all calls are torch's
  std::atomic<Table*> table = nullptr;            // null: Python decides every call
  std::map<std::string, Counter> launches, left;  // by operation; by operation and why torch computes it
  std::vector<c10::RegistrationHandleRAII> registrations;
  std::vector<c10::SafeKernelFunction> alive;  // kernels that were replaced, which threads may be running
};
inline auto& groups = *new std::deque<Group>;

// Where a product has its operands and factors among its arguments; -1: it has none.
struct Places {
  int a = -1, b = -1, input = -1, alpha = -1, beta = -1, out = -1;
};

// An entry of the table without a launch: such calls are torch's.
struct Left final : Entry {
  Counter* count;
};

// Registers a Product for an operator and a dispatch key, in the place of what is there now. python: what
// decides, or null. name: by which its calls are counted.
void register_product(Group& group, const std::string& whole, const std::string& key,
                      std::shared_ptr<PyObject> python, const std::string& name, int64_t operation,
                      int64_t request, Places places);

// What a Python callable computes of a call, or an undefined tensor for what is torch's.
at::Tensor decide(PyObject* python, const c10::OperatorHandle& handle, const c10::IValue* arguments,
                  int positional);

// How the products of a backward are found. They are calls of the operator with its defaults.
struct Backward {
  std::atomic<Table*> table = nullptr;
  int64_t operation = 0, request = 0;  // set before the table
  int64_t many_rows = 0;               // of a gradient, from which on a product with ones sums them
};
inline Backward& backward = *new Backward;

// Whether `with_derivative` can make the result of a call that needs a gradient.
bool has_derivative(const Entry& entry, const Call& call);

// The result of a call that needs a gradient, whose entry it is.
at::Tensor with_derivative(const Entry& entry, const Call& call);

}  // namespace triton_gemm
