#include "launch.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace triton_gemm {
namespace {

// Throws what the driver says of a call that fails. A thread that has used no CUDA before may have no
// context.
template <typename Body>
void succeed(const Driver& driver, int device, const Body& call) {
  CUresult error = call();
  if (error == CUDA_ERROR_INVALID_CONTEXT) {
    driver.make_context(device);
    error = call();
  }
  if (error == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver.error_string(error, &text);
  throw std::runtime_error(std::string("Triton Error [CUDA]: ") + (text ? text : "unknown error"));
}

}  // namespace

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
  for (const auto& [offset, operand] : maps)
    fits &= lies_in(offset, sizeof(CUtensorMap)) && offset % alignof(CUtensorMap) == 0 && operand >= 0 &&
            operand < given;
  if (!fits) throw std::invalid_argument("a parameter of a launch lies outside of its bytes or operands");
}

void launch(const Step& step, const Driver& driver, CUstream stream, int device, const uint64_t* addresses,
            double alpha) {
  alignas(alignof(CUtensorMap)) char bytes[kMaxBytes];
  void* pointers[kMaxParameters];
  std::memcpy(bytes, step.bytes.data(), step.bytes.size());
  for (const auto& [offset, operand] : step.addresses) std::memcpy(bytes + offset, &addresses[operand], 8);
  const auto narrow = static_cast<float>(alpha);
  for (const auto& [offset, size] : step.alphas)
    std::memcpy(bytes + offset, size == 4 ? static_cast<const void*>(&narrow) : &alpha, size);
  for (const auto& [offset, operand] : step.maps)
    succeed(driver, device, [&, map = reinterpret_cast<CUtensorMap*>(bytes + offset), which = operand] {
      return driver.replace_address(map, reinterpret_cast<void*>(addresses[which]));
    });
  for (size_t i = 0; i < step.offsets.size(); ++i) pointers[i] = bytes + step.offsets[i];
  CUlaunchConfig config = step.config;
  config.hStream = stream;
  config.attrs = const_cast<CUlaunchAttribute*>(step.attributes.data());  // which the driver only reads
  succeed(driver, device, [&] { return driver.launch(&config, step.function, pointers, nullptr); });
}

bool is_captured(const Driver& driver, CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return driver.is_capturing(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

int64_t Job::set(int64_t to) {
  __atomic_store_n(&until, to, __ATOMIC_SEQ_CST);
  return __atomic_load_n(&inside, __ATOMIC_SEQ_CST);
}

void Job::count(const Driver& driver, int of_device, CUstream of) {
  __atomic_fetch_add(&inside, 1, __ATOMIC_SEQ_CST);  // from here on Python changes nothing but `until`
  int64_t waiting = 1;
  if (__atomic_load_n(&until, __ATOMIC_SEQ_CST) > 0 && device == of_device && stream == of &&
      __atomic_compare_exchange_n(&until, &waiting, 0, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    if (is_captured(driver, of)) {
      int64_t taken = 0;  // and not withdrawn meanwhile
      __atomic_compare_exchange_n(&until, &taken, 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    } else {
      CUresult error = launch(graph, of);
      if (error == CUDA_SUCCESS) error = record(ended, of);
      __atomic_store_n(&launched, error, __ATOMIC_RELEASE);
    }
  }
  __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
}

std::optional<Workspace> Workspaces::find(const Driver& driver, int device, CUstream stream,
                                          uint64_t bytes) const {
  if (is_captured(driver, stream)) return std::nullopt;
  const std::shared_lock lock(changing_);
  const auto found = kept_.find({device, stream});
  if (found == kept_.end() || found->second.bytes < bytes) return std::nullopt;
  return found->second;
}

void Workspaces::keep(int device, CUstream stream, Workspace workspace) {
  const std::unique_lock lock(changing_);
  std::swap(kept_[{device, stream}], workspace);  // the one before ends after the lock
}

void Workspaces::forget() {
  Kept given_up;
  const std::unique_lock lock(changing_);
  given_up.swap(kept_);
}

}  // namespace triton_gemm
