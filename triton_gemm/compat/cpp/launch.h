// What a cached call launches, its launch by the CUDA driver, and the memory that launches share. Neither
// torch nor Python is used here.
#pragma once
#include <cuda.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>
#include <vector>

namespace triton_gemm {

constexpr int kMaxParameters = 128;
constexpr int kMaxBytes = 4096;  // of a kernel's parameters, as CUDA allows
constexpr int kMaxAddresses = 24;

// The driver's functions, and one that makes a device's primary context the calling thread's.
struct Driver {
  CUresult (*launch)(const CUlaunchConfig*, CUfunction, void**, void**);
  CUresult (*error_string)(CUresult, const char**);
  CUresult (*replace_address)(CUtensorMap*, void*);
  CUresult (*is_capturing)(CUstream, CUstreamCaptureStatus*);
  void (*make_context)(int device);
};

// Offsets are in bytes from the first parameter. `operand` is an index among a call's addresses.
struct AddressParameter {
  int offset, operand;
};
struct AlphaParameter {
  int offset, size;
};

// One launch of a kernel. Its parameters lie in `bytes`, complete but for those that differ between calls. A
// tensor map lies there as it is for another address.
struct Step {
  CUfunction function = nullptr;
  CUlaunchConfig config{};
  std::array<CUlaunchAttribute, 4> attributes{};
  std::vector<char> bytes;
  std::vector<int> offsets;
  std::vector<AddressParameter> addresses;
  std::vector<AlphaParameter> alphas;
  std::vector<AddressParameter> maps;

  void set_cooperative();
  void set_programmatic();
  void set_cluster(unsigned size);
  // Throws std::invalid_argument if a parameter lies outside of `bytes`, or names none of so many addresses.
  void check(int addresses) const;

 private:
  CUlaunchAttributeValue& add(CUlaunchAttributeID id);
};

// Launches a step with a call's addresses and alpha. Throws std::runtime_error in Triton's words.
void launch(const Step& step, const Driver& driver, CUstream stream, int device, const uint64_t* addresses,
            double alpha);

// Whether launches on the stream are recorded, or may be.
bool is_captured(const Driver& driver, CUstream stream);

// A CUDA graph that is launched once, after a call: a sample of what the learner times. Python has such a
// record (`runtime.turns.Job`), and changes all but `until` and `inside` where no thread may be launching it.
struct Job {
  int64_t until;     // 1: a call is to launch it; 0: a thread has taken it; less: there is none
  int64_t inside;    // threads that may be launching it
  int64_t launched;  // the driver's error, once it is launched; before less than 0
  int64_t device;
  CUstream stream;
  CUgraphExec graph;
  CUevent ended;
  CUresult (*launch)(CUgraphExec, CUstream);
  CUresult (*record)(CUevent, CUstream);

  bool waits() const { return __atomic_load_n(&until, __ATOMIC_ACQUIRE) > 0; }
  // Sets `until` for Python, whose own stores are plain: other threads of an Arm CPU may see those in another
  // order. Whoever sees this one sees all before it. Gives `inside` of after it: a thread not counted there
  // sees it.
  int64_t set(int64_t to);
  // A call was launched on that stream. A stream that is captured is left alone.
  void count(const Driver& driver, int of_device, CUstream of);
};

// Memory that launches of one stream share, for split-K.
struct Workspace {
  std::array<uint64_t, 2> addresses;  // of partial sums, and of counters
  uint64_t bytes;                     // of partial sums
  std::shared_ptr<void> owner;
};

// The workspaces of streams that no thread has for itself. Threads may share it.
class Workspaces {
 public:
  // The stream's, unless it has less than so many bytes or the stream is being captured.
  std::optional<Workspace> find(const Driver& driver, int device, CUstream stream, uint64_t bytes) const;
  void keep(int device, CUstream stream, Workspace workspace);
  void forget();

 private:
  using Kept = std::map<std::pair<int, CUstream>, Workspace>;
  mutable std::shared_mutex changing_;  // never held while a workspace ends
  Kept kept_;
};

}  // namespace triton_gemm
