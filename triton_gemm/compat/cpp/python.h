// Python's side: what C++ keeps of it, and what it asks it. Each of these takes the GIL itself where it needs
// it. module.cpp's unit alone includes this, since pybind11 takes long to compile.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

#include "operators.h"

namespace torch::jit {  // of pybind_utils.h, which takes long to compile
TORCH_PYTHON_API pybind11::object toPyObject(c10::IValue);
}

namespace triton_gemm {

namespace py = pybind11;

// Python's error, as a C++ exception that any thread may catch.
[[noreturn]] inline void throw_python() {
  python_error error;
  error.persist();
  throw std::move(error);
}

// The GIL is released while this lives. As pybind11's, which costs more.
class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(thread_); }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* thread_;
};

// A Python object that C++ keeps, which may end in a thread without the GIL, and after Python.
inline std::shared_ptr<PyObject> kept(py::handle object) {
  return {object.inc_ref().ptr(), [](PyObject* ended) {
            if (!Py_IsInitialized()) return;
            const py::gil_scoped_acquire gil;
            Py_DECREF(ended);
          }};
}

// Calls a Python function that is kept. The GIL is held.
template <typename... Arguments>
py::object ask(const std::shared_ptr<PyObject>& function, Arguments... arguments) {
  try {
    return py::handle(function.get())(arguments...);
  } catch (py::error_already_set& error) {  // it may not end without the GIL, as what is thrown from here
    error.restore();
    throw_python();
  }
}

struct PythonAllocator final : Allocator {
  std::shared_ptr<PyObject> function;  // stream -> [partial sums, counters], and whether others may have them

  explicit PythonAllocator(py::handle given) : function(kept(given)) {}

  Workspace workspace(int device, CUstream stream) override {
    const py::gil_scoped_acquire gil;
    const py::object made = ask(function, reinterpret_cast<uint64_t>(stream));
    auto memory = std::make_shared<std::array<at::Tensor, 2>>();
    Workspace found{};
    for (size_t i = 0; i < 2; ++i) {
      memory->at(i) = THPVariable_Unpack(py::object(made[py::int_(0)][py::int_(i)]).ptr());
      found.addresses[i] = reinterpret_cast<uint64_t>(memory->at(i).mutable_data_ptr());
    }
    found.bytes = memory->at(0).nbytes();
    found.owner = std::move(memory);
    // Before the GIL is released, so that Python gives none up in between.
    if (py::object(made[py::int_(1)]).is(py::bool_(true))) state.workspaces.keep(device, stream, found);
    return found;
  }
};

// Numbers that stand for Python objects in keys. All of it is read and written under the GIL.
class Numbers {
 public:
  // kUnknown where the object has none and gets none (`add`), or has no hash.
  int64_t of(py::handle object, bool add) {
    PyObject* found = PyDict_GetItemWithError(numbers_, object.ptr());
    if (found != nullptr) return PyLong_AsLongLong(found);
    if (PyErr_Occurred()) {
      if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw_python();
      PyErr_Clear();
      return kUnknown;
    }
    if (!add) return kUnknown;
    const py::int_ next(PyDict_GET_SIZE(numbers_) + 1);
    if (PyDict_SetItem(numbers_, object.ptr(), next.ptr()) < 0) throw_python();
    return next;
  }

  // Of a request, but for its first element, alpha. Most are one of a few constants.
  int64_t of_request(PyObject* request, bool add) {
    auto& [object, number] = recent_[(reinterpret_cast<uintptr_t>(request) >> 4) % recent_.size()];
    if (object.get() == request) return number;
    const auto rest =
        py::reinterpret_steal<py::object>(PyTuple_GetSlice(request, 1, PyTuple_GET_SIZE(request)));
    if (!rest) throw_python();
    const int64_t found = of(rest, add);
    if (found != kUnknown) {
      auto before = std::exchange(object, kept(request));
      number = found;
    }
    return found;
  }

 private:
  PyObject* numbers_ = PyDict_New();
  std::array<std::pair<std::shared_ptr<PyObject>, int64_t>, 64> recent_;
};

// Hooks on launches, of Triton's knobs.runtime. To look needs the GIL; that nothing was added since can be
// told without it by sizes, each of which is one word of an object that is never freed.
class Hooks {
 public:
  void set(py::handle runtime) {
    runtime_ = runtime.inc_ref().ptr();
    attributes_ = PyObject_GenericGetDict(runtime_, nullptr);
    for (size_t i = 0; i < 2; ++i) {
      chains_[i] = py::object(runtime.attr(kNames[i])).release().ptr();
      lists_[i] = py::object(py::handle(chains_[i]).attr("calls")).release().ptr();
      if (!PyList_CheckExact(lists_[i])) throw std::invalid_argument("chains of hooks are no lists");
    }
  }

  bool any() {
    if (is_empty(lists_[0]) && is_empty(lists_[1]) && attributes() == seen_.load(std::memory_order_relaxed))
      return false;
    const py::gil_scoped_acquire gil;
    const Py_ssize_t seen = attributes();
    bool are_known = true;
    for (size_t i = 0; i < 2; ++i) {
      const auto hook = py::reinterpret_steal<py::object>(PyObject_GetAttrString(runtime_, kNames[i]));
      if (!hook) throw_python();
      are_known &= hook.ptr() == chains_[i] && PyDict_GetItemString(attributes_, kNames[i]) == nullptr;
      if (hook.ptr() != chains_[i] && !hook.is_none()) return true;
      if (hook.ptr() == chains_[i] && !is_empty(lists_[i])) return true;
    }
    if (are_known) seen_.store(seen, std::memory_order_relaxed);
    return false;
  }

 private:
  static constexpr const char* kNames[] = {"launch_enter_hook", "launch_exit_hook"};

  static bool is_empty(PyObject* list) {
    return __atomic_load_n(&reinterpret_cast<PyVarObject*>(list)->ob_size, __ATOMIC_RELAXED) == 0;
  }
  Py_ssize_t attributes() const {
    return __atomic_load_n(&reinterpret_cast<PyDictObject*>(attributes_)->ma_used, __ATOMIC_RELAXED);
  }

  PyObject *runtime_ = nullptr, *attributes_ = nullptr, *chains_[2]{}, *lists_[2]{};
  std::atomic<Py_ssize_t> seen_ = -1;
};

// What of the setup only module.cpp sees. It is never freed either.
struct OfPython {
  Numbers numbers;
  Hooks hooks;
  PyObject* context = nullptr;  // the variable of a context's policy
  std::shared_ptr<PyObject> in_backward, make_context;
};
inline OfPython& of_python = *new OfPython;

bool any_hooks() { return of_python.hooks.any(); }

int64_t policy_here(bool add) {
  if (!state.policies.load(std::memory_order_acquire)) return 0;
  const py::gil_scoped_acquire gil;
  PyObject* found;
  if (PyContextVar_Get(of_python.context, Py_None, &found) < 0) throw_python();
  auto policy = py::reinterpret_steal<py::object>(found);
  if (policy.is_none()) policy = ask(of_python.in_backward);
  return policy.is_none() ? 0 : of_python.numbers.of(policy, add);
}

void report_call(const Entry& entry, const at::Tensor& b, CUstream stream) {
  const py::gil_scoped_acquire gil;
  try {
    py::handle(static_cast<PyObject*>(entry.owner.get()))
        .attr("report_call")(b, reinterpret_cast<uint64_t>(stream));
  } catch (py::error_already_set& error) {
    error.restore();
    throw_python();
  }
}

at::Tensor decide(PyObject* python, const c10::OperatorHandle& handle, const c10::IValue* arguments,
                  int positional) {
  const py::gil_scoped_acquire gil;
  py::tuple given(positional);
  py::dict named;
  for (size_t i = 0; i < handle.schema().arguments().size(); ++i) {
    const c10::Argument& argument = handle.schema().arguments()[i];
    if (argument.kwarg_only() && argument.default_value() == arguments[i]) continue;
    c10::TypePtr type = argument.real_type();
    if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    py::object value = type->kind() == c10::TypeKind::ScalarTypeType && arguments[i].isInt()
                           ? py::cast(static_cast<at::ScalarType>(arguments[i].toInt()))
                           : torch::jit::toPyObject(arguments[i]);
    if (argument.kwarg_only())
      named[argument.name().c_str()] = std::move(value);
    else
      given[i] = std::move(value);
  }
  const auto result = py::reinterpret_steal<py::object>(PyObject_Call(python, given.ptr(), named.ptr()));
  if (!result) throw_python();
  return result.is_none() ? at::Tensor() : THPVariable_Unpack(result.ptr());
}

}  // namespace triton_gemm
