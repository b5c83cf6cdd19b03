// A call as the table is asked for it, and its run with torch's memory.
#pragma once
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "state.h"

namespace at::detail {  // of torch's library for CUDA; null where torch has none
__attribute__((weak)) TensorBase empty_strided_cuda(IntArrayRef, IntArrayRef, ScalarType,
                                                    std::optional<c10::Device>);
}

namespace triton_gemm {

constexpr int kOperands = 8;

struct Call {
  const at::Tensor* operands[kOperands];  // a, b, `out` if given, then the auxiliary ones
  int count = 0;
  bool given = false;       // whether there is an `out`
  bool dispatched = false;  // whether torch's dispatcher calls, below autograd
  bool needs_grad = false;
  double alpha = 1;
  Key key;

  c10::Device device() const { return operands[0]->device(); }
  int first_auxiliary() const { return given ? 3 : 2; }
};

// Adds an operand. False for what is not plain memory: torch's wrappers have no storage or no address,
// Python's subclasses have a dispatch of their own, and a storage may have been freed.
inline bool add_operand(Call& call, const at::Tensor& x) {
  if (call.count == kOperands || !x.defined() || x.layout() != c10::kStrided) return false;
  const c10::TensorImpl* impl = x.unsafeGetTensorImpl();
  if (impl->has_symbolic_sizes_strides() || !impl->has_storage() || impl->is_python_dispatch() || x.dim() > 4)
    return false;
  if (!call.dispatched) {
    if (x.is_neg()) return false;
    call.needs_grad |= c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() && x.requires_grad();
  }
  // The storage's own pointer: a view's address is an offset from it, null or not.
  if (impl->unsafe_storage().data() == nullptr) return false;
  const auto address = reinterpret_cast<uint64_t>(x.const_data_ptr());
  const c10::Device device = x.device();
  call.key.add(static_cast<int64_t>(x.scalar_type()) | x.dim() << 8 | int64_t{address % 16 == 0} << 12 |
               static_cast<int64_t>(device.type()) << 16 | static_cast<int64_t>(device.index()) << 32);
  for (const int64_t size : x.sizes()) call.key.add(size);
  for (const int64_t stride : x.strides()) call.key.add(stride);
  call.operands[call.count++] = &x;
  return true;
}

// As `add_operand`; above autograd also false for what needs a gradient or has a tangent.
inline bool add_underived(Call& call, const at::Tensor& x) {
  if (!call.dispatched && x._fw_grad(0).defined()) return false;
  return add_operand(call, x) && !call.needs_grad;
}

// Adds what a call is besides its operands, which come after.
inline void add_operation(Call& call, int64_t operation, int64_t request, int64_t auxiliary) {
  call.key.add(operation);
  call.key.add(request);
  call.key.add(auxiliary << 2 | int64_t{call.alpha == 0} << 1 | int64_t{call.given});
}

// Adds the state that choices depend on, after the operands. False where no entry can be for such a call.
inline bool add_state(Call& call, bool add = false) {
  const c10::Device device = call.device();
  for (int i = 1; i < call.count; ++i)
    if (call.operands[i]->device() != device) return false;
  if (device.is_cuda() && c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice() != device) return false;
  if (call.operands[0]->scalar_type() == at::kFloat)
    call.key.add(at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
                 at::Float32Precision::TF32);
  call.key.add(call.needs_grad);
  call.key.add(state.epoch.load(std::memory_order_acquire));
  const int64_t policy = policy_here(add);
  call.key.add(policy);
  return policy != kUnknown;
}

// Whether `out` may share memory with an operand, as `GemmPlan.overlap` and `fast_path.same_storage` say.
inline bool overlaps(const Entry& entry, const Call& call) {
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

inline CUstream stream_of(c10::Device device) {  // the current one
  if (!device.is_cuda()) return nullptr;
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  return static_cast<CUstream>(guard.getStreamNativeHandle(guard.getStream(device)));
}

// Whether Python must decide again what such a call runs on: its own kernels may be there by now, and a graph
// that is captured is to have them.
inline bool is_outdated(const Entry& entry, const Call& call) {
  if (entry.calls == nullptr) return false;
  return entry.stand_ins != state.stand_ins.load(std::memory_order_acquire) ||
         is_captured(*state.driver, stream_of(call.device()));
}

// The entry of a call whose `read` adds all that it is, or null for what Python must take: also what a hook
// on launches wants to see, and memory that a stream of each thread would have to wait for. Throws what
// Python raises.
template <typename Read>
std::shared_ptr<const Entry> entry_of(const Table& table, Call& call, const Read& read) {
  if (table.empty()) return nullptr;
  try {
    if (!read()) return nullptr;
  } catch (const c10::Error&) {  // of a tensor without an address, say
    return nullptr;
  }
  auto found = table.find(call.key);
  if (found == nullptr || is_outdated(*found, call)) return nullptr;
  if (call.given && (overlaps(*found, call) || (!call.dispatched && call.operands[2]->is_inference())))
    return nullptr;
  if (!found->temporaries.empty() && stream_of(call.device()) == CU_STREAM_PER_THREAD) return nullptr;
  return any_hooks() || found->turns.take_one() ? nullptr : found;
}

// Tells Python of a call that was launched, with its second operand. Throws what Python raises.
void report_call(const Entry& entry, const at::Tensor& b, CUstream stream);

inline at::Tensor make(const Shape& shape, c10::Device device) {
  const auto dtype = static_cast<at::ScalarType>(shape.dtype);
  if (device.is_cuda() && at::detail::empty_strided_cuda != nullptr)
    return at::Tensor(at::detail::empty_strided_cuda(shape.sizes, shape.strides, dtype, device));
  return at::empty_strided(shape.sizes, shape.strides, at::TensorOptions(dtype).device(device));
}

// Runs a call by its entry: the result, which is `out` if that was given. Callers release the GIL before:
// torch's allocator may wait for CUDA, whose host functions may wait for the GIL. preactivations: what those
// of the entry are added to.
inline at::Tensor run(const Entry& entry, const Call& call,
                      std::vector<at::Tensor>* preactivations = nullptr) {
  const c10::Device device = call.device();
  const CUstream stream = stream_of(device);
  const at::Tensor result = call.given ? *call.operands[2] : make(entry.result, device);
  uint64_t addresses[kMaxAddresses];
  int count = 0;
  for (int i = 0; i < 2; ++i)
    addresses[count++] = reinterpret_cast<uint64_t>(call.operands[i]->const_data_ptr());
  addresses[count++] = reinterpret_cast<uint64_t>(result.mutable_data_ptr());
  for (int i = call.first_auxiliary(); i < call.count - entry.copies; ++i)
    addresses[count++] = reinterpret_cast<uint64_t>(call.operands[i]->const_data_ptr());
  std::vector<at::Tensor> before;
  for (int i = 0; i < entry.preactivations; ++i) {
    before.push_back(make(entry.result, device));
    addresses[count++] = reinterpret_cast<uint64_t>(before.back().mutable_data_ptr());
  }
  std::optional<Workspace> workspace;  // lives until all is launched, as do temporaries
  if (entry.allocator != nullptr) {
    workspace = state.workspaces.find(*state.driver, device.index(), stream, entry.workspace_bytes);
    if (!workspace) workspace = entry.allocator->workspace(device.index(), stream);
    for (const uint64_t address : workspace->addresses) addresses[count++] = address;
  }
  std::vector<at::Tensor> temporaries;
  for (const Shape& shape : entry.temporaries) {
    temporaries.push_back(make(shape, device));
    addresses[count++] = reinterpret_cast<uint64_t>(temporaries.back().mutable_data_ptr());
  }
  if (call.given && !call.dispatched) result.unsafeGetTensorImpl()->bump_version();
  if (entry.copies) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    result.copy_(*call.operands[call.count - 1]);
  }
  if (entry.calls != nullptr) __atomic_fetch_add(entry.calls, 1, __ATOMIC_RELAXED);
  for (const Step& step : entry.steps)
    launch(step, *state.driver, stream, device.index(), addresses, call.alpha);
  if (entry.turns.job != nullptr && entry.turns.job->waits() && !at::hasCallbacks())
    entry.turns.job->count(*state.driver, device.index(), stream);
  entry.turns.say(*state.driver, stream);
  if (entry.turns.report_one()) report_call(entry, *call.operands[1], stream);
  if (preactivations != nullptr) preactivations->insert(preactivations->end(), before.begin(), before.end());
  return result;
}

}  // namespace triton_gemm
