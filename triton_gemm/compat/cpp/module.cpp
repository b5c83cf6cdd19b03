// The module `triton_gemm_native`: a table of cached calls, which it launches, and products of torch's
// dispatcher that look their calls up in one. `compat/native.py` builds and loads it, `runtime/native.py`
// describes entries. What a table has no entry for is Python's, so Python alone decides what a call may run
// on.
#include <pybind11/pybind11.h>
#include <unistd.h>

#include "operators.h"
#include "parse.h"

namespace triton_gemm {
namespace {

using Kind =
    std::pair<pid_t, Py_ssize_t>;  // a process, as a child finds nothing in its parent's, and a capacity

struct PyTable {
  PyObject_HEAD;
  Table* table;
  Kind kind;
};
PyTypeObject* table_type;
// Tables that ended: threads without the GIL may be reading them, so they are used again and not freed. A
// thread that finds another rule's call in one was called before that rule began, and may launch by it as
// well.
auto& unused = *new std::multimap<Kind, Table*>;

// Reads what Python says: op, a, b, auxiliary, request, out, dispatched. False where no entry is for such a
// call.
bool read(Call& call, PyObject* const* arguments, bool add) {
  PyObject *auxiliary = arguments[3], *request = arguments[4], *out = arguments[5];
  const auto add_python = [&](PyObject* given) {
    return THPVariable_CheckExact(given) && add_operand(call, THPVariable_Unpack(given));
  };
  if (!PyTuple_CheckExact(auxiliary) || !PyTuple_Check(request) || PyTuple_GET_SIZE(request) < 1)
    return false;
  PyObject* alpha = PyTuple_GET_ITEM(request, 0);
  if (PyFloat_CheckExact(alpha)) {
    call.alpha = PyFloat_AS_DOUBLE(alpha);
  } else if (!PyLong_CheckExact(alpha) || ((call.alpha = PyLong_AsDouble(alpha)) == -1 && PyErr_Occurred())) {
    PyErr_Clear();  // of an integer that is too large
    return false;
  }
  call.dispatched = arguments[6] == Py_True, call.given = out != Py_None;
  const int64_t operation = of_python.numbers.of(arguments[0], add);
  const int64_t number = operation < 0 ? operation : of_python.numbers.of_request(request, add);
  if (number < 0) return false;
  add_operation(call, operation, number, PyTuple_GET_SIZE(auxiliary));
  if (!add_python(arguments[1]) || !add_python(arguments[2]) || (call.given && !add_python(out)))
    return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(auxiliary); ++i)
    if (!add_python(PyTuple_GET_ITEM(auxiliary, i))) return false;
  return add_state(call, add);
}

template <typename Body>
PyObject* translated(const Body& body) {
  try {
    return body();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// take(op, a, b, auxiliary, request, out, dispatched): the result, with its derivative where it needs one, or
// None for what Python must take.
PyObject* take(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 7) return PyErr_Format(PyExc_TypeError, "take() takes 7 arguments");
  return translated([&]() -> PyObject* {
    Call call;
    const auto found = entry_of(*reinterpret_cast<PyTable*>(self)->table, call,
                                [&] { return read(call, arguments, false); });
    if (found == nullptr || found->steps.empty() || (call.needs_grad && !has_derivative(*found, call)))
      Py_RETURN_NONE;
    at::Tensor result;
    {
      const WithoutGil others_may_run;
      result = call.needs_grad ? with_derivative(*found, call) : run(*found, call);
    }
    return call.given ? Py_NewRef(arguments[5]) : THPVariable_Wrap(std::move(result));
  });
}

// keep(what `take` takes, an entry): whether it is kept: not for what `take` would not look for.
PyObject* keep(PyObject* self, PyObject* given) {
  PyObject *arguments, *description;
  if (!PyArg_ParseTuple(given, "O!O", &PyTuple_Type, &arguments, &description)) return nullptr;
  if (PyTuple_GET_SIZE(arguments) != 7) return PyErr_Format(PyExc_TypeError, "take() takes 7 arguments");
  return translated([&] {
    Call call;
    if (!read(call, &PyTuple_GET_ITEM(arguments, 0), true)) return Py_NewRef(Py_False);
    auto entry = parse_entry(description, call.count + !call.given);
    if (entry->steps.empty()) throw std::invalid_argument("an entry has no launch");
    stream_of(call.device());  // or it says here that this torch has no such call
    reinterpret_cast<PyTable*>(self)->table->keep(call.key, std::move(entry));
    return Py_NewRef(Py_True);
  });
}

PyObject* forget(PyObject* self, PyObject*) {
  reinterpret_cast<PyTable*>(self)->table->clear();
  Py_RETURN_NONE;
}

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject*) {
  Py_ssize_t capacity;
  if (!PyArg_ParseTuple(arguments, "n", &capacity)) return nullptr;
  auto* self = reinterpret_cast<PyTable*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->kind = {getpid(), capacity};
  auto found = unused.extract(self->kind);
  self->table = found.empty() ? new Table(capacity) : found.mapped();
  return reinterpret_cast<PyObject*>(self);
}

void end(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  auto [table, kind] =
      std::pair(reinterpret_cast<PyTable*>(self)->table, reinterpret_cast<PyTable*>(self)->kind);
  table->clear();
  unused.emplace(kind, table);
  type->tp_free(self);
  Py_DECREF(type);
}

Table* table_of(PyObject* given) {
  if (given == Py_None) return nullptr;
  if (Py_TYPE(given) != table_type) throw torch::TypeError("that is no table");
  return reinterpret_cast<PyTable*>(given)->table;
}

// setup(configuration): with the fields that it reads here.
PyObject* setup(PyObject*, PyObject* given) {
  return translated([&] {
    const py::handle configuration(given);
    of_python.context = py::object(configuration.attr("context")).release().ptr();
    of_python.in_backward = kept(configuration.attr("in_backward"));
    of_python.make_context = kept(configuration.attr("make_context"));
    of_python.hooks.set(configuration.attr("hooks"));
    Py_RETURN_NONE;
  });
}

// connect(launch, error_string, replace_address, is_capturing): the addresses of the driver's functions; no
// entry may be kept before. Threads may be reading what an earlier call has set, so that is not freed.
PyObject* connect(PyObject*, PyObject* given) {
  unsigned long long launch, error_string, replace_address, is_capturing;
  if (!PyArg_ParseTuple(given, "KKKK", &launch, &error_string, &replace_address, &is_capturing))
    return nullptr;
  state.driver = new Driver{reinterpret_cast<decltype(Driver::launch)>(launch),
                            reinterpret_cast<decltype(Driver::error_string)>(error_string),
                            reinterpret_cast<decltype(Driver::replace_address)>(replace_address),
                            reinterpret_cast<decltype(Driver::is_capturing)>(is_capturing), [](int device) {
                              const py::gil_scoped_acquire gil;
                              ask(of_python.make_context, device);
                            }};
  Py_RETURN_NONE;
}

// forget_workspaces(): has Python asked for the workspace of each stream once more.
PyObject* forget_workspaces(PyObject*, PyObject*) {
  state.workspaces.forget();
  Py_RETURN_NONE;
}

// run_job(address, device, stream): as `Job::count`, of a call that Python has launched.
PyObject* run_job(PyObject*, PyObject* given) {
  unsigned long long address, stream;
  int device;
  if (!PyArg_ParseTuple(given, "KiK", &address, &device, &stream)) return nullptr;
  {
    const WithoutGil others_may_run;
    reinterpret_cast<Job*>(address)->count(*state.driver, device, reinterpret_cast<CUstream>(stream));
  }
  Py_RETURN_NONE;
}

// set_job(address, until): as `Job::set`.
PyObject* set_job(PyObject*, PyObject* given) {
  unsigned long long address;
  long long until;
  if (!PyArg_ParseTuple(given, "KL", &address, &until)) return nullptr;
  return PyLong_FromLongLong(reinterpret_cast<Job*>(address)->set(until));
}

// forget_stand_ins(): has Python decide again on each call that runs on a stand-in.
PyObject* forget_stand_ins(PyObject*, PyObject*) {
  state.stand_ins.fetch_add(1, std::memory_order_acq_rel);
  Py_RETURN_NONE;
}

// follow(epoch, policies): the state that choices depend on from now on.
PyObject* follow(PyObject*, PyObject* given) {
  long long epoch;
  int policies;
  if (!PyArg_ParseTuple(given, "Lp", &epoch, &policies)) return nullptr;
  if (policies) state.policies.store(true, std::memory_order_release);
  int64_t before = state.epoch.load();  // threads may come here in another order than they got their numbers
  while (before < epoch && !state.epoch.compare_exchange_weak(before, epoch)) {
  }
  Py_RETURN_NONE;
}

// group(): makes a group, and returns its number.
PyObject* group(PyObject*, PyObject*) {
  groups.emplace_back();
  return PyLong_FromSize_t(groups.size() - 1);
}

Group& group_at(py::handle number) { return groups.at(number.cast<size_t>()); }

// register(group, operator, key, python, op, request, places): puts a product in the place of the operator's
// kernel for that dispatch key. python(*arguments) computes what the table has not, or returns None for what
// is torch's; None: all that is. The table has calls by `op` and the request; places None: it has none of
// them.
PyObject* register_(PyObject*, PyObject* given) {
  PyObject *number, *operation, *request, *python, *where;
  const char *full, *key;
  Places places;
  if (!PyArg_ParseTuple(given, "OssOUO!O", &number, &full, &key, &python, &operation, &PyTuple_Type, &request,
                        &where))
    return nullptr;
  if (where != Py_None && !PyArg_ParseTuple(where, "iiiiii", &places.a, &places.b, &places.input,
                                            &places.alpha, &places.beta, &places.out))
    return nullptr;
  return translated([&] {
    register_product(group_at(number), full, key, python == Py_None ? nullptr : kept(python),
                     PyUnicode_AsUTF8(operation), of_python.numbers.of(operation, true),
                     of_python.numbers.of_request(request, true), places);
    Py_RETURN_NONE;
  });
}

// unregister(group): takes the group's products back, and frees none, as threads may be running them.
PyObject* unregister(PyObject*, PyObject* number) {
  return translated([&] {
    group_at(number).registrations.clear();
    Py_RETURN_NONE;
  });
}

void set_route(Group& group, bool active, Table* table) {
  group.table.store(table, std::memory_order_release);
  group.active.store(active, std::memory_order_release);
}

// route(group, active, table): whether the group's products are routed from now on, and the table that they
// ask.
PyObject* route(PyObject*, PyObject* given) {
  PyObject *number, *table;
  int active;
  if (!PyArg_ParseTuple(given, "OpO", &number, &active, &table)) return nullptr;
  return translated([&] {
    set_route(group_at(number), active != 0, table_of(table));
    Py_RETURN_NONE;
  });
}

// change(group, rules, function, arguments): function(*arguments), which changes the list of rules; from then
// on the group's products are routed as the last of them has it. No line of Python runs between both, so no
// signal's handler; what the garbage collector ends may come here meanwhile.
PyObject* change(PyObject*, PyObject* given) {
  PyObject *number, *rules, *function, *arguments;
  if (!PyArg_ParseTuple(given, "OO!OO!", &number, &PyList_Type, &rules, &function, &PyTuple_Type, &arguments))
    return nullptr;
  return translated([&]() -> PyObject* {
    auto result = py::reinterpret_steal<py::object>(PyObject_Call(function, arguments, nullptr));
    if (!result) return nullptr;
    const auto last = [&] {
      const Py_ssize_t size = PyList_GET_SIZE(rules);
      return size == 0 ? py::object() : py::reinterpret_borrow<py::object>(PyList_GET_ITEM(rules, size - 1));
    };
    py::object rule;
    do {
      rule = last();
      py::object table = py::none();
      if (rule && py::object(rule.attr("predicate")).is_none()) table = rule.attr("fast").attr("table");
      set_route(group_at(number), bool{rule}, table_of(table.ptr()));
    } while (!last().is(rule));
    return result.release().ptr();
  });
}

// leave(group, table, what `take` takes, name): has such calls be torch's, and counts them by that name.
PyObject* leave(PyObject*, PyObject* given) {
  PyObject *number, *table, *arguments;
  const char* name;
  if (!PyArg_ParseTuple(given, "OOO!s", &number, &table, &PyTuple_Type, &arguments, &name)) return nullptr;
  if (PyTuple_GET_SIZE(arguments) != 7) return PyErr_Format(PyExc_TypeError, "take() takes 7 arguments");
  return translated([&] {
    Call call;
    if (!read(call, &PyTuple_GET_ITEM(arguments, 0), true)) Py_RETURN_NONE;
    auto entry = std::make_shared<Left>();
    entry->count = &group_at(number).left[name];
    table_of(table)->keep(call.key, std::move(entry));
    Py_RETURN_NONE;
  });
}

// counted(group, left, reset): how many calls C++ launched by `op`, or left to torch by the names of `leave`;
// then from zero, if `reset`.
PyObject* counted(PyObject*, PyObject* given) {
  PyObject* number;
  int left, reset;
  if (!PyArg_ParseTuple(given, "Opp", &number, &left, &reset)) return nullptr;
  return translated([&] {
    Group& group = group_at(number);
    py::dict found;
    for (auto& [name, count] : left ? group.left : group.launches)
      found[name.c_str()] = reset ? count.exchange(0) : count.load();
    return found.release().ptr();
  });
}

// backward_by(table, op, request, many_rows): which calls a backward's products are like from now on; None:
// none.
PyObject* backward_by(PyObject*, PyObject* given) {
  PyObject *table, *operation, *request;
  long long many_rows;
  if (!PyArg_ParseTuple(given, "OOO!L", &table, &operation, &PyTuple_Type, &request, &many_rows))
    return nullptr;
  return translated([&] {
    backward.table.store(nullptr, std::memory_order_release);
    backward.operation = of_python.numbers.of(operation, true);
    backward.request = of_python.numbers.of_request(request, true);
    backward.many_rows = many_rows;
    backward.table.store(table_of(table), std::memory_order_release);
    Py_RETURN_NONE;
  });
}

PyMethodDef methods[] = {
    {"take", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(take)), METH_FASTCALL, nullptr},
    {"keep", keep, METH_VARARGS, nullptr},
    {"forget", forget, METH_NOARGS, nullptr},
    {}};
PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(end)},
                       {Py_tp_methods, methods},
                       {}};
PyType_Spec spec = {"triton_gemm_native.Table", sizeof(PyTable), 0, Py_TPFLAGS_DEFAULT, slots};
PyMethodDef functions[] = {{"setup", setup, METH_O, nullptr},
                           {"connect", connect, METH_VARARGS, nullptr},
                           {"forget_workspaces", forget_workspaces, METH_NOARGS, nullptr},
                           {"forget_stand_ins", forget_stand_ins, METH_NOARGS, nullptr},
                           {"run_job", run_job, METH_VARARGS, nullptr},
                           {"set_job", set_job, METH_VARARGS, nullptr},
                           {"follow", follow, METH_VARARGS, nullptr},
                           {"group", group, METH_NOARGS, nullptr},
                           {"register", register_, METH_VARARGS, nullptr},
                           {"unregister", unregister, METH_O, nullptr},
                           {"route", route, METH_VARARGS, nullptr},
                           {"change", change, METH_VARARGS, nullptr},
                           {"leave", leave, METH_VARARGS, nullptr},
                           {"counted", counted, METH_VARARGS, nullptr},
                           {"backward_by", backward_by, METH_VARARGS, nullptr},
                           {}};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "triton_gemm_native", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace triton_gemm

PyMODINIT_FUNC PyInit_triton_gemm_native() {
  using namespace triton_gemm;
  PyObject* module = PyModule_Create(&definition);
  if (table_type == nullptr) table_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (module != nullptr &&
      (table_type == nullptr ||
       PyModule_AddObjectRef(module, "Table", reinterpret_cast<PyObject*>(table_type)) < 0))
    Py_CLEAR(module);
  return module;
}
