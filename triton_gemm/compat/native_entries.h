// What a call like one before launches, as `runtime/native.py` describes it.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <cuda.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

namespace at::detail {  // of torch's library for CUDA; null where torch has none
__attribute__((weak)) TensorBase empty_strided_cuda(IntArrayRef, IntArrayRef, ScalarType,
                                                    std::optional<c10::Device>);
}

namespace {

constexpr int kOperands = 8, kTemporaries = 8, kWords = 96, kParameters = 128,
              kBytes = 4096;  // CUDA allows kernels 4 KB of parameters

struct Reference {  // to a Python object that is kept
  PyObject* object = nullptr;
  Reference() = default;
  explicit Reference(PyObject* given) : object(given) { Py_XINCREF(given); }
  Reference(Reference&& other) noexcept : object(std::exchange(other.object, nullptr)) {}
  Reference& operator=(Reference&& other) noexcept {
    std::swap(object, other.object);
    return *this;
  }
  ~Reference() { Py_XDECREF(object); }
};

struct Empty {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  c10::Device device{c10::kCPU};

  at::Tensor make() const {
    if (device.is_cuda() && at::detail::empty_strided_cuda != nullptr)
      return at::Tensor(at::detail::empty_strided_cuda(sizes, strides, dtype, device));
    return at::empty_strided(sizes, strides, at::TensorOptions(dtype).device(device));
  }
};

struct alignas(64) Map {
  unsigned char bytes[sizeof(CUtensorMap)];
};

struct Place {  // of an address among the parameters
  int at, operand;
};

struct MapPlace : Place {
  Reference encode;  // address -> Triton's object of a tensor map
  std::unordered_map<uint64_t, Map> known;
};

struct Step {
  CUfunction function;
  CUlaunchConfig config{};
  CUlaunchAttribute attributes[4]{};
  std::vector<char> parameters;  // those that calls share, and room for the others
  std::vector<int> offsets;
  std::vector<Place> addresses;
  std::vector<std::pair<int, int>> alphas;  // where, and of how many bytes
  std::vector<MapPlace> maps;
};

enum Derivative { kNone, kProduct, kLinear };  // of nothing, a @ b and a @ b.T, with or without a bias

struct Entry {
  Reference said, policy, request, plan, workspace;
  std::vector<int64_t> words;
  Empty result;
  std::vector<Empty> temporaries;
  std::array<uint64_t, 3> extents;  // bytes from the first element of a, b and c to the end of the last
  int derivative;                   // that C++ has
  int copies;  // whether the launches add to the result, which is a copy of the last auxiliary operand first
  std::vector<Step> steps;
};

std::vector<int64_t> integers(PyObject* given) {
  std::vector<int64_t> found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); ++i)
    found.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(given, i)));
  return found;
}

bool parse(Empty& empty, PyObject* given, c10::Device device) {
  PyObject *sizes, *strides, *dtype;
  if (!PyArg_ParseTuple(given, "O!O!O", &PyTuple_Type, &sizes, &PyTuple_Type, &strides, &dtype)) return false;
  empty = {integers(sizes), integers(strides), reinterpret_cast<THPDtype*>(dtype)->scalar_type, device};
  return !PyErr_Occurred();
}

bool parse(Step& step, PyObject* given) {
  unsigned long long function;
  int cluster, cooperative, pdl;
  const char* parameters;
  Py_ssize_t size;
  PyObject *offsets, *addresses, *alphas, *maps;
  CUlaunchConfig& config = step.config;
  if (!PyArg_ParseTuple(given, "K(III)IIippy#O!O!O!O!", &function, &config.gridDimX, &config.gridDimY,
                        &config.gridDimZ, &config.blockDimX, &config.sharedMemBytes, &cluster, &cooperative,
                        &pdl, &parameters, &size, &PyTuple_Type, &offsets, &PyTuple_Type, &addresses,
                        &PyTuple_Type, &alphas, &PyTuple_Type, &maps))
    return false;
  if (size > kBytes || PyTuple_GET_SIZE(offsets) > kParameters)
    return PyErr_SetString(PyExc_ValueError, "too many parameters"), false;
  step.function = reinterpret_cast<CUfunction>(function);
  config.blockDimY = config.blockDimZ = 1;
  const auto attribute = [&](CUlaunchAttributeID id) -> CUlaunchAttributeValue& {
    CUlaunchAttribute& next = step.attributes[config.numAttrs++];
    next.id = id;
    return next.value;
  };
  if (pdl)
    attribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION).programmaticStreamSerializationAllowed =
        1;
  if (cooperative) attribute(CU_LAUNCH_ATTRIBUTE_COOPERATIVE).cooperative = 1;
  if (cluster > 1) {
    attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE).clusterSchedulingPolicyPreference =
        CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
  }
  step.parameters.assign(parameters, parameters + size);
  for (const int64_t at : integers(offsets)) step.offsets.push_back(static_cast<int>(at));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(addresses); ++i) {
    Place& place = step.addresses.emplace_back();
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(addresses, i), "ii", &place.at, &place.operand)) return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(alphas); ++i) {
    auto& [at, bytes] = step.alphas.emplace_back();
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(alphas, i), "ii", &at, &bytes)) return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(maps); ++i) {
    MapPlace& place = step.maps.emplace_back();
    PyObject* encode;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(maps, i), "iiO", &place.at, &place.operand, &encode)) return false;
    place.encode = Reference(encode);
  }
  return !PyErr_Occurred();
}

bool parse(Entry& entry, PyObject* given, c10::Device device) {
  PyObject *plan, *workspace, *result, *temporaries, *steps;
  unsigned long long a, b, c;
  if (!PyArg_ParseTuple(given, "OOOO!(KKK)piO!", &plan, &workspace, &result, &PyTuple_Type, &temporaries, &a,
                        &b, &c, &entry.copies, &entry.derivative, &PyTuple_Type, &steps))
    return false;
  entry.plan = Reference(plan);
  if (workspace != Py_None) entry.workspace = Reference(workspace);
  entry.extents = {a, b, c};
  if (!parse(entry.result, result, device)) return false;
  if (PyTuple_GET_SIZE(temporaries) > kTemporaries)
    return PyErr_SetString(PyExc_ValueError, "too many temporaries"), false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(temporaries); ++i)
    if (!parse(entry.temporaries.emplace_back(), PyTuple_GET_ITEM(temporaries, i), device)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); ++i)
    if (!parse(entry.steps.emplace_back(), PyTuple_GET_ITEM(steps, i))) return false;
  return true;
}

}  // namespace
