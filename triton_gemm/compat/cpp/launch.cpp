#include "launch.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>

namespace triton_gemm {

void TensorMaps::fill(const std::vector<MapParameter>& parameters, const uint64_t* addresses, char* bytes) {
  std::unique_lock lock(changing_);
  for (const MapParameter& parameter : parameters) {
    const Name name{parameter.id, addresses[parameter.operand]};
    auto found = maps_.find(name);
    if (found == maps_.end()) {
      lock.unlock();
      const TensorMap made = parameter.encoder->encode(name.second);
      lock.lock();
      while (maps_.size() >= capacity_) {
        maps_.erase(order_.front());
        order_.pop_front();
      }
      bool is_new;
      std::tie(found, is_new) = maps_.emplace(name, made);
      if (is_new) order_.push_back(name);
    }
    std::memcpy(bytes + parameter.offset, found->second.bytes, sizeof(TensorMap));
  }
}

CUlaunchAttributeValue& Step::add(CUlaunchAttributeID id) {
  CUlaunchAttribute& next = attributes.at(config.numAttrs++);
  next.id = id;
  return next.value;
}

void Step::set_cooperative() { add(CU_LAUNCH_ATTRIBUTE_COOPERATIVE).cooperative = 1; }

void Step::set_programmatic() {
  add(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION).programmaticStreamSerializationAllowed = 1;
}

void Step::set_cluster(unsigned size) {
  add(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim = {size, 1, 1};
  add(CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE).clusterSchedulingPolicyPreference =
      CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
}

void Step::check(int given) const {
  const auto lies_in = [&](int offset, size_t size) {
    return offset >= 0 && static_cast<size_t>(offset) + size <= bytes.size();
  };
  bool fits = bytes.size() <= kMaxBytes && offsets.size() <= kMaxParameters && given <= kMaxAddresses;
  for (const int offset : offsets) fits &= lies_in(offset, 1);
  for (const auto& [offset, operand] : addresses)
    fits &= lies_in(offset, 8) && operand >= 0 && operand < given;
  for (const auto& [offset, size] : alphas) fits &= (size == 4 || size == 8) && lies_in(offset, size);
  for (const auto& map : maps)
    fits &= lies_in(map.offset, sizeof(TensorMap)) && map.operand >= 0 && map.operand < given;
  if (!fits) throw std::invalid_argument("a parameter of a launch lies outside of its bytes or operands");
}

void launch(const Step& step, const Driver& driver, TensorMaps& maps, CUstream stream, int device,
            const uint64_t* addresses, double alpha) {
  alignas(128) char bytes[kMaxBytes];
  void* pointers[kMaxParameters];
  std::memcpy(bytes, step.bytes.data(), step.bytes.size());
  for (const auto& [offset, operand] : step.addresses) std::memcpy(bytes + offset, &addresses[operand], 8);
  const auto narrow = static_cast<float>(alpha);
  for (const auto& [offset, size] : step.alphas)
    std::memcpy(bytes + offset, size == 4 ? static_cast<const void*>(&narrow) : &alpha, size);
  if (!step.maps.empty()) maps.fill(step.maps, addresses, bytes);
  for (size_t i = 0; i < step.offsets.size(); ++i) pointers[i] = bytes + step.offsets[i];
  CUlaunchConfig config = step.config;
  config.hStream = stream;
  config.attrs = const_cast<CUlaunchAttribute*>(step.attributes.data());  // which the driver only reads
  CUresult error = driver.launch(&config, step.function, pointers, nullptr);
  if (error == CUDA_ERROR_INVALID_CONTEXT) {  // this thread may have used no CUDA before
    driver.make_context(device);
    error = driver.launch(&config, step.function, pointers, nullptr);
  }
  if (error == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver.error_string(error, &text);
  throw std::runtime_error(std::string("Triton Error [CUDA]: ") + (text ? text : "unknown error"));
}

}  // namespace triton_gemm
