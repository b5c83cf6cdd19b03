// What a cached call launches, and its launch by the CUDA driver. Neither torch nor Python is used here.
#pragma once
#include <cuda.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace triton_gemm {

constexpr int kMaxParameters = 128;
constexpr int kMaxBytes = 4096;  // of a kernel's parameters, as CUDA allows
constexpr int kMaxAddresses = 24;

struct Driver {
  CUresult (*launch)(const CUlaunchConfig*, CUfunction, void**, void**);
  CUresult (*error_string)(CUresult, const char**);
  void (*make_context)(int device);  // makes the device's primary context the calling thread's
};

struct TensorMap {
  alignas(64) unsigned char bytes[128];
};
static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));

// Encodes the tensor map of an operand from its address; its sizes and strides are the encoder's.
struct Encoder {
  virtual ~Encoder() = default;
  virtual TensorMap encode(uint64_t address) = 0;
};

// Offsets are in bytes from the first parameter. `operand` is an index among a call's addresses.
struct AddressParameter {
  int offset, operand;
};
struct AlphaParameter {
  int offset, size;
};
struct MapParameter {
  int offset, operand;
  uint64_t id;  // no other parameter's
  std::shared_ptr<Encoder> encoder;
};

// Encoded tensor maps by parameter and address, for all calls together. Threads may share it.
class TensorMaps {
 public:
  explicit TensorMaps(size_t capacity) : capacity_(capacity) {}
  // Puts the maps of these parameters for a call's addresses into `bytes`.
  void fill(const std::vector<MapParameter>& parameters, const uint64_t* addresses, char* bytes);

 private:
  using Name = std::pair<uint64_t, uint64_t>;
  struct Hash {
    size_t operator()(const Name& name) const {
      return (name.first * 0x9E3779B97F4A7C15u) ^ (name.second >> 4);
    }
  };
  const size_t capacity_;
  std::mutex changing_;  // never held while anything is encoded
  std::unordered_map<Name, TensorMap, Hash> maps_;
  std::deque<Name> order_;
};

// One launch of a kernel. Its parameters lie in `bytes`, complete but for those that differ between calls.
struct Step {
  CUfunction function = nullptr;
  CUlaunchConfig config{};
  std::array<CUlaunchAttribute, 4> attributes{};
  std::vector<char> bytes;
  std::vector<int> offsets;
  std::vector<AddressParameter> addresses;
  std::vector<AlphaParameter> alphas;
  std::vector<MapParameter> maps;

  void set_cooperative();
  void set_programmatic();
  void set_cluster(unsigned size);
  // Throws std::invalid_argument if a parameter lies outside of `bytes`, or names none of so many addresses.
  void check(int addresses) const;

 private:
  CUlaunchAttributeValue& add(CUlaunchAttributeID id);
};

// Launches a step with a call's addresses and alpha. Throws std::runtime_error in Triton's words.
void launch(const Step& step, const Driver& driver, TensorMaps& maps, CUstream stream, int device,
            const uint64_t* addresses, double alpha);

}  // namespace triton_gemm
