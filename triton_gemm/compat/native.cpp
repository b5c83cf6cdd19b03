// The extension's table of calls like one before, and products of torch's dispatcher by it. `native.py`
// builds it, and `runtime/native.py` makes its entries. What an entry does not cover is a miss, which Python
// takes; so Python alone decides what a call may run on.
#include <algorithm>
#include <map>
#include <memory>

#include "native_derivatives.h"

namespace {

// take(said, a, b, auxiliary, request, out, dispatched): the result, with its derivative where it needs one,
// or None for what Python must take.
PyObject* take(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  const auto* table = reinterpret_cast<Table*>(self);
  if (count != 7) return PyErr_Format(PyExc_TypeError, "take() takes 7 arguments");
  Call call;
  const auto found = entry_for(table, call, [&] { return read(call, arguments); });
  if (found == nullptr) Py_RETURN_NONE;
  try {
    at::Tensor result;
    if (call.needs_grad) {
      if (!has_derivative(*found, call)) Py_RETURN_NONE;
      result = with_derivative(*found, call, table->most_maps);
    } else if (!run(*found, call, table->most_maps, result)) {
      return nullptr;
    }
    return call.given ? Py_NewRef(arguments[5]) : THPVariable_Wrap(std::move(result));
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// keep(what `take` takes, an entry): whether it is kept: not for what `take` would not look for.
PyObject* keep(PyObject* self, PyObject* given) {
  auto* table = reinterpret_cast<Table*>(self);
  PyObject *arguments, *what;
  if (!PyArg_ParseTuple(given, "O!O", &PyTuple_Type, &arguments, &what)) return nullptr;
  if (PyTuple_GET_SIZE(arguments) != 7) return PyErr_Format(PyExc_TypeError, "take() takes 7 arguments");
  try {
    Call call;
    auto entry = std::make_shared<Entry>();
    if (!read(call, &PyTuple_GET_ITEM(arguments, 0))) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_False);
    if (!parse(*entry, what, call.operands[0]->device())) return nullptr;
    stream_of(call.operands[0]->device());  // or it says here that this torch has no such call
    entry->said = Reference(call.said), entry->request = Reference(call.request);
    entry->policy = std::move(call.policy);
    entry->words.assign(call.words, call.words + call.size);
    while (table->order->size() >= table->most_entries) {
      const auto [hash, oldest] = table->order->front();
      table->order->pop_front();
      const auto [begin, end] = table->entries->equal_range(hash);
      table->entries->erase(
          std::find_if(begin, end, [&](const auto& one) { return one.second.get() == oldest; }));
    }
    table->order->emplace_back(call.hash, entry.get());
    table->entries->emplace(call.hash, std::move(entry));
    Py_RETURN_TRUE;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyObject* forget(PyObject* self, PyObject*) {
  auto* table = reinterpret_cast<Table*>(self);
  const auto dropped = std::move(*table->entries);  // whose objects' ends may run Python
  table->entries->clear();
  table->order->clear();
  Py_RETURN_NONE;
}

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject*) {
  Py_ssize_t entries, maps;
  if (!PyArg_ParseTuple(arguments, "nn", &entries, &maps)) return nullptr;
  auto* table = reinterpret_cast<Table*>(type->tp_alloc(type, 0));
  if (table == nullptr) return nullptr;
  table->most_entries = entries, table->most_maps = maps;
  table->entries = new std::remove_pointer_t<decltype(table->entries)>;
  table->order = new std::remove_pointer_t<decltype(table->order)>;
  return reinterpret_cast<PyObject*>(table);
}

void end(PyObject* self) {
  auto* table = reinterpret_cast<Table*>(self);
  PyTypeObject* type = Py_TYPE(self);
  delete table->entries;
  delete table->order;
  type->tp_free(self);
  Py_DECREF(type);
}

// --- Products that torch's dispatcher calls without Python ---

// Products that are overridden together. All of it is read and written under the GIL. Groups are never freed,
// for kernels outlive Python.
struct Group {
  Table* routed = nullptr;  // the table that they ask, or null
  std::vector<c10::RegistrationHandleRAII> registrations;
  std::map<std::string, int64_t> launches;
};
auto& groups = *new std::deque<Group>;

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

struct Places {  // of operands and factors among the arguments of a product; -1: it has none
  int a, b, input, alpha, beta, out;
};

// A kernel in the place of another. What the table has it launches; the rest is for the kernel that was
// there.
struct Product final : c10::OperatorKernel {
  c10::SafeKernelFunction before;
  Reference said, request;  // as Python would say them
  Places places;
  std::vector<int> defaults;  // arguments that must be None
  int count = 0;              // of arguments
  bool below_autograd;        // if false, it must refuse what needs a derivative
  Group* group;
  int64_t* launched;

  Product(c10::SafeKernelFunction kernel) : before(std::move(kernel)) {}

  ~Product() override {  // by torch's dispatcher at the end of the process, if not before
    if (!Py_IsInitialized()) said.object = request.object = nullptr;  // they are gone with Python
  }

  void operator()(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    at::Tensor result;
    if (!take(stack->data() + stack->size() - count, result)) return before.callBoxed(operation, keys, stack);
    torch::jit::drop(*stack, count);
    stack->emplace_back(std::move(result));
  }

  static bool number(const c10::IValue& given, double& value) {
    if (!given.isInt() && !given.isDouble()) return false;
    value = given.isInt() ? static_cast<double>(given.toInt()) : given.toDouble();
    return true;
  }

  bool add(Call& call, const c10::IValue& given) const { return add_underived(call, given.toTensor()); }

  bool take(const c10::IValue* arguments, at::Tensor& result) const {
    const bool adds = places.input >= 0 && arguments[places.input].isTensor(), given = places.out >= 0;
    double beta = 1, alpha = 1;
    if (places.alpha >= 0 && !number(arguments[places.alpha], alpha)) return false;
    if (adds && !(number(arguments[places.beta], beta) && beta == 1)) return false;
    for (const int i : defaults)
      if (!arguments[i].isNone()) return false;
    if (!below_autograd && c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python)) return false;
    const pybind11::gil_scoped_acquire gil;
    const Reference alive(reinterpret_cast<PyObject*>(group->routed));
    const Table* table = group->routed;
    if (table == nullptr) return false;
    Call call;
    call.said = said.object, call.request = request.object, call.dispatched = below_autograd,
    call.given = given, call.alpha = alpha;
    const auto found = entry_for(table, call, [&] {
      add_form(call, adds);
      return add(call, arguments[places.a]) && add(call, arguments[places.b]) &&
             (!given || add(call, arguments[places.out])) && (!adds || add(call, arguments[places.input])) &&
             read_state(call);
    });
    if (found == nullptr) return false;
    if (!run(*found, call, table->most_maps, result)) throw_python();
    ++*launched;
    return true;
  }
};

// group(): makes a group, and returns its number.
PyObject* group(PyObject*, PyObject*) {
  groups.emplace_back();
  return PyLong_FromSize_t(groups.size() - 1);
}

// override(group, operator, key, of, said, request, places): whether a Product is now in the place of the
// operator's kernel for that dispatch key, which it is if that one was registered by the Python file `of`.
// Its calls are found by `said` and the request.
PyObject* override(PyObject*, PyObject* given) {
  PyObject *said, *request;
  const char *full, *key, *file;
  Py_ssize_t number;
  Places places;
  if (!PyArg_ParseTuple(given, "nsssUO(iiiiii)", &number, &full, &key, &file, &said, &request, &places.a,
                        &places.b, &places.input, &places.alpha, &places.beta, &places.out))
    return nullptr;
  try {
    Quiet handler;  // torch warns of kernels that are overridden
    const c10::WarningUtils::WarningHandlerGuard quiet(&handler);
    Group& group = groups.at(number);
    const std::string whole = full, name = whole.substr(0, whole.find('.'));
    const std::string overload = whole.size() > name.size() ? whole.substr(name.size() + 1) : "";
    auto& dispatcher = c10::Dispatcher::singleton();
    const c10::DispatchKey dispatch = c10::parseDispatchKey(key);
    const auto handle = dispatcher.findSchemaOrThrow(name.c_str(), overload.c_str());
    auto product = std::make_unique<Product>(handle.getComputedKernelForDispatchKey(dispatch));
    if (product->before.debug().find(file) == std::string::npos) Py_RETURN_FALSE;
    product->said = Reference(said), product->request = Reference(request), product->places = places;
    product->count = static_cast<int>(handle.schema().arguments().size());
    const int named[] = {places.a, places.b, places.input, places.alpha, places.beta, places.out};
    for (int i = 0; i < product->count; ++i)
      if (std::find(std::begin(named), std::end(named), i) == std::end(named)) product->defaults.push_back(i);
    product->below_autograd = std::string(key).rfind("Autograd", 0) != 0;
    product->group = &group, product->launched = &group.launches[PyUnicode_AsUTF8(said)];
    group.registrations.push_back(dispatcher.registerImpl(
        {name, overload}, dispatch, c10::KernelFunction::makeFromBoxedFunctor(std::move(product)),
        std::nullopt, nullptr, "triton_gemm"));
    Py_RETURN_TRUE;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

Group* group_of(PyObject* number) {
  const size_t found = PyLong_AsSize_t(number);
  if (found < groups.size()) return &groups[found];
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "there is no such group");
  return nullptr;
}

// withdraw(group): takes back the group's overrides.
PyObject* withdraw(PyObject*, PyObject* number) {
  Group* group = group_of(number);
  if (group == nullptr) return nullptr;
  group->registrations.clear();
  Py_RETURN_NONE;
}

// route(group, table): which table the group's products ask from now on; None: none.
PyObject* route(PyObject*, PyObject* given) {
  PyObject *number, *table;
  if (!PyArg_ParseTuple(given, "OO", &number, &table)) return nullptr;
  Group* group = group_of(number);
  if (group == nullptr) return nullptr;
  Table* found = Py_TYPE(table) == table_type ? reinterpret_cast<Table*>(table) : nullptr;
  Py_XINCREF(found);
  std::swap(group->routed, found);
  Py_XDECREF(found);
  Py_RETURN_NONE;
}

// launched(group, reset): how many calls of each product C++ launched, by `said`; then from zero, if so
// asked.
PyObject* launched(PyObject*, PyObject* given) {
  PyObject* number;
  int reset;
  if (!PyArg_ParseTuple(given, "Op", &number, &reset)) return nullptr;
  Group* group = group_of(number);
  PyObject* found = group == nullptr ? nullptr : PyDict_New();
  if (found == nullptr) return nullptr;
  for (auto& [said, count] : group->launches) {
    PyObject* counted = PyLong_FromLongLong(count);
    if (found == nullptr || counted == nullptr || PyDict_SetItemString(found, said.c_str(), counted) < 0)
      Py_CLEAR(found);
    Py_XDECREF(counted);
    if (reset) count = 0;
  }
  return found;
}

// setup(launcher, error_string, generation, context, in_backward, precision, enter_hook, leave_hook,
// ensure_context)
PyObject* setup(PyObject*, PyObject* arguments) {
  unsigned long long launch, words;
  if (!PyArg_ParseTuple(arguments, "KKO!OOOOOO", &launch, &words, &PyDict_Type, &generation, &context,
                        &in_backward, &precision, &enter_hook, &leave_hook, &ensure_context))
    return nullptr;
  Py_INCREF(arguments);
  launcher = reinterpret_cast<Launcher>(launch), error_string = reinterpret_cast<ErrorString>(words);
  name_number = PyUnicode_InternFromString("number"), name_contexts = PyUnicode_InternFromString("contexts");
  name_calls = PyUnicode_InternFromString("calls");
  Py_RETURN_NONE;
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
PyType_Spec spec = {"triton_gemm_native.Table", sizeof(Table), 0, Py_TPFLAGS_DEFAULT, slots};
PyMethodDef functions[] = {{"setup", setup, METH_VARARGS, nullptr},
                           {"group", group, METH_NOARGS, nullptr},
                           {"override", override, METH_VARARGS, nullptr},
                           {"withdraw", withdraw, METH_O, nullptr},
                           {"route", route, METH_VARARGS, nullptr},
                           {"launched", launched, METH_VARARGS, nullptr},
                           {"backward_by", backward_by, METH_VARARGS, nullptr},
                           {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "triton_gemm_native", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_triton_gemm_native() {
  PyObject* module = PyModule_Create(&definition);
  table_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (module != nullptr &&
      PyModule_AddObjectRef(module, "Table", reinterpret_cast<PyObject*>(table_type)) < 0)
    return nullptr;
  return module;
}
