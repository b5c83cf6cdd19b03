// Entries of the table, from what `runtime/native.py` describes: its `Entry` and `Step`, by the names of
// their fields.
#pragma once
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>

#include "python.h"

namespace triton_gemm {

template <typename T>
T field(py::handle object, const char* name) {
  return object.attr(name).cast<T>();
}

inline Shape parse_shape(py::handle given) {
  const py::object dtype = given.attr("dtype");
  if (!THPDtype_Check(dtype.ptr())) throw std::invalid_argument("a shape has no dtype");
  return {field<std::vector<int64_t>>(given, "sizes"), field<std::vector<int64_t>>(given, "strides"),
          static_cast<int>(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type)};
}

inline Step parse_step(py::handle given) {
  Step step;
  step.function = reinterpret_cast<CUfunction>(field<uint64_t>(given, "function"));
  const auto grid = field<std::array<unsigned, 3>>(given, "grid");
  step.config.gridDimX = grid[0], step.config.gridDimY = grid[1], step.config.gridDimZ = grid[2];
  step.config.blockDimX = field<unsigned>(given, "threads");
  step.config.blockDimY = step.config.blockDimZ = 1;
  step.config.sharedMemBytes = field<unsigned>(given, "shared");
  if (field<bool>(given, "pdl")) step.set_programmatic();
  if (field<bool>(given, "cooperative")) step.set_cooperative();
  if (const auto cluster = field<unsigned>(given, "cluster"); cluster > 1) step.set_cluster(cluster);
  const auto bytes = field<std::string>(given, "parameters");
  step.bytes.assign(bytes.begin(), bytes.end());
  step.offsets = field<std::vector<int>>(given, "offsets");
  for (const auto& [offset, operand] : field<std::vector<std::pair<int, int>>>(given, "addresses"))
    step.addresses.push_back({offset, operand});
  for (const auto& [offset, size] : field<std::vector<std::pair<int, int>>>(given, "alphas"))
    step.alphas.push_back({offset, size});
  for (const auto& [offset, operand] : field<std::vector<std::pair<int, int>>>(given, "maps"))
    step.maps.push_back({offset, operand});
  return step;
}

// operands: how many a call has, with its result.
inline std::shared_ptr<const Entry> parse_entry(py::handle given, int operands) {
  auto entry = std::make_shared<Entry>();
  entry->result = parse_shape(given.attr("result"));
  for (const py::handle shape : given.attr("temporaries")) entry->temporaries.push_back(parse_shape(shape));
  entry->workspace_bytes = field<uint64_t>(given, "workspace_bytes");
  if (const py::object workspace = given.attr("workspace"); !workspace.is_none())
    entry->allocator = std::make_shared<PythonAllocator>(workspace);
  entry->extents = field<std::array<uint64_t, 3>>(given, "extents");
  entry->copies = field<bool>(given, "copies");
  entry->preactivations = field<int>(given, "preactivations");
  const auto derivative = field<int>(given, "derivative"), activation = field<int>(given, "activation");
  if (entry->preactivations < 0 || entry->preactivations > 2 || derivative < 0 ||
      derivative > static_cast<int>(Derivative::kLinear) || activation < 0 ||
      activation > static_cast<int>(Activation::kSilu))
    throw std::invalid_argument("no such derivative");
  entry->derivative = static_cast<Derivative>(derivative);
  entry->activation = static_cast<Activation>(activation);
  for (const py::handle step : given.attr("steps")) {
    entry->steps.push_back(parse_step(step));
    entry->steps.back().check(operands - entry->copies + entry->preactivations +
                              2 * (entry->allocator != nullptr) +
                              static_cast<int>(entry->temporaries.size()));
  }
  entry->owner = kept(given.attr("plan"));
  entry->calls = reinterpret_cast<int64_t*>(field<uint64_t>(given, "calls"));
  const auto turns = field<std::array<uint64_t, 2>>(given, "turns");
  entry->turns = {reinterpret_cast<int64_t*>(turns[0]), reinterpret_cast<Job*>(turns[1])};
  entry->stand_ins = state.stand_ins.load(std::memory_order_acquire);
  return entry;
}

}  // namespace triton_gemm
