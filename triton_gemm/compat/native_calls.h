// Calls like one before: what a call says, the entry that is for it, and its launch.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <deque>
#include <memory>

#include "native_entries.h"

namespace {

using Launcher = CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**);
using ErrorString = CUresult (*)(CUresult, const char**);

// What `setup` is told, as native.py says; all are kept for as long as the process lives.
PyObject *generation, *context, *in_backward, *precision, *enter_hook, *leave_hook, *ensure_context;
PyObject *name_number, *name_contexts, *name_calls;
Launcher launcher;
ErrorString error_string;

struct Call {  // what a call says, and what it is found by
  PyObject *said, *request;
  const at::Tensor* operands[kOperands];  // a, b, out if given, then the auxiliary ones
  int count = 0;
  bool given = false;  // whether there is an out
  double alpha = 1;
  bool dispatched = false;
  bool needs_grad = false;  // whether an operand needs a gradient, above autograd
  Reference policy;
  int64_t words[kWords];
  int size = 0;
  uint64_t hash = 0;

  void add(int64_t word) {
    words[size++] = word;
    hash = (hash ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
};

// Adds an operand. False for what is not plain memory: torch's wrappers have no storage or no address,
// Python's subclasses have a dispatch of their own.
bool add_operand(Call& call, const at::Tensor& x) {
  if (call.count == kOperands) return false;
  const c10::TensorImpl* impl = x.unsafeGetTensorImpl();
  if (!x.defined() || x.layout() != c10::kStrided || impl->has_symbolic_sizes_strides() ||
      !impl->has_storage() || impl->is_python_dispatch() || x.dim() > 4)
    return false;
  if (!call.dispatched) {
    if (x.is_neg()) return false;
    call.needs_grad |= c10::GradMode::is_enabled() && x.requires_grad();
  }
  const auto address = reinterpret_cast<uint64_t>(x.const_data_ptr());
  if (address == 0) return false;
  const c10::Device device = x.device();
  call.add(static_cast<int64_t>(x.scalar_type()) | x.dim() << 8 | int64_t{address % 16 == 0} << 12 |
           static_cast<int64_t>(device.type()) << 16 | static_cast<int64_t>(device.index()) << 32);
  for (const int64_t size : x.sizes()) call.add(size);
  for (const int64_t stride : x.strides()) call.add(stride);
  call.operands[call.count++] = &x;
  return true;
}

// As add_operand; above autograd also false for what needs a gradient or has a tangent.
bool add_underived(Call& call, const at::Tensor& x) {
  if (!call.dispatched && x._fw_grad(0).defined()) return false;
  return add_operand(call, x) && !call.needs_grad;
}

bool add_operand(Call& call, PyObject* given) {
  return THPVariable_CheckExact(given) && add_operand(call, THPVariable_Unpack(given));
}

// Reads what a call is like besides its operands, which are there. False where no entry is for such a call,
// perhaps with an exception of Python or C++.
bool read_state(Call& call) {
  const c10::Device device = call.operands[0]->device();
  for (int i = 1; i < call.count; ++i)
    if (call.operands[i]->device() != device) return false;
  if (device.is_cuda() && c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice() != device) return false;
  if (call.operands[0]->scalar_type() == at::kFloat) {
    Reference found;
    found.object = PyObject_CallNoArgs(precision);
    if (found.object == nullptr) return false;
    call.add(PyUnicode_Check(found.object) && PyUnicode_CompareWithASCIIString(found.object, "tf32") == 0);
  }
  PyObject* number = PyDict_GetItemWithError(generation, name_number);
  if (number == nullptr || !PyLong_Check(number)) return false;
  call.add(PyLong_AsLongLong(number));
  if (PyContextVar_Get(context, Py_None, &call.policy.object) < 0) return false;
  if (call.policy.object == Py_None) {
    PyObject* contexts = PyDict_GetItemWithError(generation, name_contexts);
    if (contexts == nullptr) return false;
    if (contexts == Py_True) {
      Py_DECREF(call.policy.object);
      call.policy.object = PyObject_CallNoArgs(in_backward);
      if (call.policy.object == nullptr) return false;
    }
  }
  return true;
}

void add_form(Call& call, int64_t auxiliary) {
  call.add(auxiliary << 2 | int64_t{call.alpha == 0} << 1 | int64_t{call.given});
}

// Reads what Python says: said, a, b, auxiliary, request, out, dispatched. As `read_state`.
bool read(Call& call, PyObject* const* arguments) {
  PyObject *auxiliary = arguments[3], *out = arguments[5];
  call.said = arguments[0], call.request = arguments[4], call.dispatched = arguments[6] == Py_True;
  if (!PyTuple_CheckExact(auxiliary) || !PyTuple_Check(call.request) || PyTuple_GET_SIZE(call.request) < 1)
    return false;
  PyObject* alpha = PyTuple_GET_ITEM(call.request, 0);
  if (PyFloat_CheckExact(alpha))
    call.alpha = PyFloat_AS_DOUBLE(alpha);
  else if (!PyLong_CheckExact(alpha))
    return false;
  else if ((call.alpha = PyLong_AsDouble(alpha)) == -1 && PyErr_Occurred())
    return false;
  call.given = out != Py_None;
  add_form(call, PyTuple_GET_SIZE(auxiliary));
  if (!add_operand(call, arguments[1]) || !add_operand(call, arguments[2])) return false;
  if (call.given && !add_operand(call, out)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(auxiliary); ++i)
    if (!add_operand(call, PyTuple_GET_ITEM(auxiliary, i))) return false;
  return read_state(call);
}

bool same(PyObject* x, PyObject* y) { return x == y || PyObject_RichCompareBool(x, y, Py_EQ) == 1; }

bool fits(const Entry& entry, const Call& call) {
  if (entry.words.size() != static_cast<size_t>(call.size) ||
      std::memcmp(entry.words.data(), call.words, sizeof(int64_t) * call.size) != 0)
    return false;
  if (!same(entry.said.object, call.said) || !same(entry.policy.object, call.policy.object)) return false;
  if (entry.request.object == call.request) return true;
  if (PyTuple_GET_SIZE(entry.request.object) != PyTuple_GET_SIZE(call.request)) return false;
  for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(call.request); ++i)  // of alpha only counts whether it is 0
    if (!same(PyTuple_GET_ITEM(entry.request.object, i), PyTuple_GET_ITEM(call.request, i))) return false;
  return true;
}

bool overlaps(const Entry& entry, const Call& call) {  // as `GemmPlan.overlap` and `fast_path.same_storage`
  const at::Tensor& out = *call.operands[2];
  const auto begin = reinterpret_cast<uint64_t>(out.const_data_ptr()), end = begin + entry.extents[2];
  for (int i = 0; i < 2; ++i) {
    const auto first = reinterpret_cast<uint64_t>(call.operands[i]->const_data_ptr());
    if (begin < first + entry.extents[i] && first < end) return true;
  }
  for (int i = 3; i < call.count; ++i)
    if (call.operands[i]->storage().data() == out.storage().data()) return true;
  return false;
}

bool has_hooks(PyObject* chain) {  // on launches; true also where that cannot be told
  PyObject* calls = PyObject_GetAttr(chain, name_calls);
  const bool found = calls == nullptr || !PyList_Check(calls) || PyList_GET_SIZE(calls) != 0;
  Py_XDECREF(calls);
  return found;
}

// The tensor map of an address, encoded by Python where this one has none. Null with an exception.
const Map* map_of(MapPlace& place, uint64_t address, size_t most) {
  const auto found = place.known.find(address);
  if (found != place.known.end()) return &found->second;
  Reference made;
  made.object = PyObject_CallFunction(place.encode.object, "K", static_cast<unsigned long long>(address));
  char* bytes;
  Py_ssize_t size;
  if (made.object == nullptr || PyBytes_AsStringAndSize(made.object, &bytes, &size) < 0) return nullptr;
  if (place.known.size() >= most) place.known.clear();
  Map& kept = place.known[address];
  std::memcpy(&kept, bytes, std::min(sizeof kept, static_cast<size_t>(size)));
  return &kept;
}

// Fills in a step's parameters. False with an exception.
bool fill(Step& step, char* parameters, void** pointers, const uint64_t* addresses, double alpha,
          size_t most) {
  std::memcpy(parameters, step.parameters.data(), step.parameters.size());
  for (const Place& place : step.addresses) std::memcpy(parameters + place.at, &addresses[place.operand], 8);
  const auto narrow = static_cast<float>(alpha);
  for (const auto& [at, size] : step.alphas)
    std::memcpy(parameters + at, size == 4 ? static_cast<const void*>(&narrow) : &alpha, size);
  for (MapPlace& place : step.maps) {
    const Map* map = map_of(place, addresses[place.operand], most);
    if (map == nullptr) return false;
    std::memcpy(parameters + place.at, map, sizeof *map);
  }
  for (size_t i = 0; i < step.offsets.size(); ++i) pointers[i] = parameters + step.offsets[i];
  return true;
}

bool launch(Step& step, CUstream stream, void** pointers, int device) {
  CUlaunchConfig config = step.config;
  config.hStream = stream;
  config.attrs = step.attributes;
  for (bool again = false;; again = true) {
    CUresult error;
    Py_BEGIN_ALLOW_THREADS;
    error = launcher(&config, step.function, pointers, nullptr);
    Py_END_ALLOW_THREADS;
    if (error == CUDA_SUCCESS) return true;
    if (error == CUDA_ERROR_INVALID_CONTEXT && !again) {  // this thread may have used no CUDA before
      PyObject* done = PyObject_CallFunction(ensure_context, "i", device);
      if (done == nullptr) return false;
      Py_DECREF(done);
      continue;
    }
    const char* words = nullptr;
    error_string(error, &words);
    PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s", words == nullptr ? "unknown error" : words);
    return false;
  }
}

CUstream stream_of(c10::Device device) {  // the current one
  if (!device.is_cuda()) return nullptr;
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  return static_cast<CUstream>(guard.getStreamNativeHandle(guard.getStream(device)));
}

// Runs an entry, which makes `result`, or writes it if it was given. False with an exception.
bool run(Entry& entry, const Call& call, size_t most_maps, at::Tensor& result) {
  const c10::Device device = call.operands[0]->device();
  const CUstream stream = stream_of(device);
  const bool given = call.given;
  result = given ? *call.operands[2] : entry.result.make();
  uint64_t addresses[kOperands + 3 + kTemporaries];
  int count = 0;
  for (int i = 0; i < 2; ++i)
    addresses[count++] = reinterpret_cast<uint64_t>(call.operands[i]->const_data_ptr());
  addresses[count++] = reinterpret_cast<uint64_t>(result.mutable_data_ptr());
  for (int i = given ? 3 : 2; i < call.count - entry.copies; ++i)
    addresses[count++] = reinterpret_cast<uint64_t>(call.operands[i]->const_data_ptr());
  Reference shared;  // memory for sums, which lives until all is launched
  if (entry.workspace.object != nullptr) {
    shared.object =
        PyObject_CallFunction(entry.workspace.object, "K", reinterpret_cast<unsigned long long>(stream));
    if (shared.object == nullptr) return false;
    for (int i = 0; i < 2; ++i)
      addresses[count++] =
          reinterpret_cast<uint64_t>(THPVariable_Unpack(PyList_GET_ITEM(shared.object, i)).data_ptr());
  }
  std::vector<at::Tensor> temporaries;
  for (const Empty& empty : entry.temporaries) {
    temporaries.push_back(empty.make());
    addresses[count++] = reinterpret_cast<uint64_t>(temporaries.back().data_ptr());
  }
  if (given && !call.dispatched) result.unsafeGetTensorImpl()->bump_version();
  if (entry.copies) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    result.copy_(*call.operands[call.count - 1]);
  }
  alignas(128) char parameters[kBytes];
  void* pointers[kParameters];
  for (Step& step : entry.steps)
    if (!fill(step, parameters, pointers, addresses, call.alpha, most_maps) ||
        !launch(step, stream, pointers, device.index()))
      return false;
  return true;
}

struct Table {
  PyObject_HEAD;
  size_t most_entries, most_maps;
  std::unordered_multimap<uint64_t, std::shared_ptr<Entry>>* entries;
  std::deque<std::pair<uint64_t, const Entry*>>* order;
};

PyTypeObject* table_type;

std::shared_ptr<Entry> find(const Table* table, const Call& call) {
  const auto [begin, end] = table->entries->equal_range(call.hash);
  std::shared_ptr<Entry> candidates[4];  // comparing may run Python, which may change the table
  int count = 0;
  for (auto at = begin; at != end && count < 4; ++at) candidates[count++] = at->second;
  for (int i = 0; i < count; ++i)
    if (fits(*candidates[i], call)) return candidates[i];
  return nullptr;
}

// The entry that is for a call that was read, or null for what Python must take: that a hook of Triton's
// wants to see, or whose out overlaps an operand. What was raised on the way is forgotten, since Python's way
// has the words for it.
template <typename Read>
std::shared_ptr<Entry> entry_for(const Table* table, Call& call, const Read& reads) {
  std::shared_ptr<Entry> found;
  try {
    if (!table->entries->empty() && reads()) found = find(table, call);
    if (found != nullptr && call.given)
      if (overlaps(*found, call) || (!call.dispatched && call.operands[2]->is_inference())) found = nullptr;
    if (found != nullptr && (has_hooks(enter_hook) || has_hooks(leave_hook))) found = nullptr;
  } catch (const std::exception&) {  // of a tensor without an address, say
    found = nullptr;
  }
  if (PyErr_Occurred()) {
    PyErr_Clear();
    found = nullptr;
  }
  return found;
}

}  // namespace
