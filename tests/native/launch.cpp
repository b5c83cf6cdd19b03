// Checks of launches and of tensor maps, with a driver that notes what it is shown.
#include "launch.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>

#include "checks.h"

namespace triton_gemm {
namespace {

struct Seen {
  CUfunction function;
  CUlaunchConfig config;
  std::vector<CUlaunchAttribute> attributes;
  std::vector<const char*> parameters;
};
thread_local std::vector<Seen> seen;
thread_local std::vector<CUresult> answers;  // to the next launches; then success
thread_local std::vector<int> contexts;
thread_local std::function<void(void** parameters)> look;

CUresult note(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  CHECK(extra == nullptr);
  seen.push_back({function, *config, {config->attrs, config->attrs + config->numAttrs}, {}});
  if (look) look(parameters);
  if (answers.empty()) return CUDA_SUCCESS;
  const CUresult answer = answers.front();
  answers.erase(answers.begin());
  return answer;
}

CUresult words(CUresult error, const char** text) {
  if (error == CUDA_ERROR_ILLEGAL_ADDRESS) *text = "an illegal address";
  return error == CUDA_ERROR_ILLEGAL_ADDRESS ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

const Driver driver{note, words, [](int device) { contexts.push_back(device); }};
const auto stream = reinterpret_cast<CUstream>(0x57);

// By another address and number another map.
struct CountingEncoder final : Encoder {
  std::atomic<int> made = 0;
  std::function<void(uint64_t)> before;

  static TensorMap map_of(uint64_t address) {
    TensorMap map;
    for (size_t i = 0; i < sizeof map.bytes; ++i) map.bytes[i] = static_cast<unsigned char>(address + i);
    return map;
  }
  TensorMap encode(uint64_t address) override {
    if (before) before(address);
    ++made;
    return map_of(address);
  }
};

bool is_map_of(uint64_t address, const void* bytes) {
  return std::memcmp(bytes, CountingEncoder::map_of(address).bytes, sizeof(TensorMap)) == 0;
}

template <typename T>
T at(const void* place) {
  T value;
  std::memcpy(&value, place, sizeof value);
  return value;
}

Step step_of(size_t bytes, std::vector<int> offsets) {
  Step step;
  step.function = reinterpret_cast<CUfunction>(0xF00D);
  step.bytes.resize(bytes, '\5');
  step.offsets = std::move(offsets);
  return step;
}

void launch_once(const Step& step, const std::vector<uint64_t>& addresses, double alpha) {
  TensorMaps maps(4);
  seen.clear(), contexts.clear();
  launch(step, driver, maps, stream, 3, addresses.data(), alpha);
}

void parameters_are_the_call_s() {
  Step step = step_of(48, {0, 8, 16, 24, 32, 40});
  step.addresses = {{0, 2}, {8, 0}, {40, 1}};
  step.alphas = {{16, 4}, {24, 8}};
  for (const double alpha : {1.0, 0.1, -2.5}) {
    look = [&](void** parameters) {
      CHECK(at<uint64_t>(parameters[0]) == 300 && at<uint64_t>(parameters[1]) == 100);
      CHECK(at<float>(parameters[2]) == static_cast<float>(alpha) && at<double>(parameters[3]) == alpha);
      CHECK(at<int>(parameters[2]) != 0x05050505 &&
            at<int>(static_cast<char*>(parameters[2]) + 4) == 0x05050505);
      CHECK(at<uint64_t>(parameters[4]) == 0x0505050505050505 && at<uint64_t>(parameters[5]) == 200);
    };
    launch_once(step, {100, 200, 300}, alpha);
    CHECK(seen.size() == 1);
  }
  look = nullptr;
}

void a_step_is_not_changed_by_its_launch() {
  Step step = step_of(16, {0, 8});
  step.addresses = {{0, 0}};
  step.alphas = {{8, 8}};
  const std::vector<char> before = step.bytes;
  launch_once(step, {100}, 2);
  CHECK(step.bytes == before && step.config.hStream == nullptr && step.config.attrs == nullptr);
}

void the_configuration_is_the_step_s_and_the_stream_the_call_s() {
  Step step = step_of(8, {0});
  step.config.gridDimX = 5, step.config.gridDimY = 6, step.config.gridDimZ = 7;
  step.config.blockDimX = 128, step.config.blockDimY = step.config.blockDimZ = 1;
  step.config.sharedMemBytes = 4096;
  launch_once(step, {}, 1);
  const CUlaunchConfig& config = seen.at(0).config;
  CHECK(seen[0].function == step.function && config.hStream == stream && config.sharedMemBytes == 4096);
  CHECK(config.gridDimX == 5 && config.gridDimY == 6 && config.gridDimZ == 7 && config.blockDimX == 128);
  CHECK(seen[0].attributes.empty());
}

void attributes_are_those_that_were_set() {
  std::vector<Step> steps(1, step_of(8, {0}));
  steps[0].set_programmatic();
  steps[0].set_cooperative();
  steps[0].set_cluster(4);
  steps.reserve(100);  // moves it
  launch_once(steps[0], {}, 1);
  const auto& found = seen.at(0).attributes;
  CHECK(found.size() == 4);
  CHECK(found[0].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
  CHECK(found[0].value.programmaticStreamSerializationAllowed == 1);
  CHECK(found[1].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && found[1].value.cooperative == 1);
  CHECK(found[2].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION && found[2].value.clusterDim.x == 4);
  CHECK(found[2].value.clusterDim.y == 1 && found[2].value.clusterDim.z == 1);
  CHECK(found[3].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE);
  CHECK(found[3].value.clusterSchedulingPolicyPreference == CU_CLUSTER_SCHEDULING_POLICY_SPREAD);
  Step alone = step_of(8, {0});
  alone.set_programmatic();
  launch_once(alone, {}, 1);
  CHECK(seen.at(0).attributes.size() == 1);
}

void what_the_driver_says_is_thrown_in_triton_s_words() {
  const Step step = step_of(8, {0});
  answers = {CUDA_ERROR_ILLEGAL_ADDRESS};
  CHECK_THROWS(launch_once(step, {}, 1), std::runtime_error, "Triton Error [CUDA]: an illegal address");
  CHECK(seen.size() == 1 && contexts.empty());
  answers = {CUDA_ERROR_UNKNOWN};
  CHECK_THROWS(launch_once(step, {}, 1), std::runtime_error, "Triton Error [CUDA]: unknown error");
}

void a_thread_without_a_context_gets_one() {
  const Step step = step_of(8, {0});
  answers = {CUDA_ERROR_INVALID_CONTEXT};
  launch_once(step, {}, 1);
  CHECK(seen.size() == 2 && contexts == std::vector<int>{3});
  CHECK(seen[1].function == step.function && seen[1].config.hStream == stream);
  answers = {CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT};
  CHECK_THROWS(launch_once(step, {}, 1), std::runtime_error, "Triton Error [CUDA]: unknown error");
  CHECK(seen.size() == 2 && contexts.size() == 1 && answers.empty());
}

// Whether `check` takes a step of 256 bytes for a call with two addresses.
bool fits(const std::function<void(Step&)>& change, int given = 2) {
  Step step = step_of(256, {0, 255});
  change(step);
  try {
    step.check(given);
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

void parameters_outside_are_refused() {
  CHECK(fits([](Step&) {}) && fits([](Step&) {}, kMaxAddresses) && !fits([](Step&) {}, kMaxAddresses + 1));
  for (const auto& [offset, is_right] : {std::pair{-1, false}, {0, true}, {255, true}, {256, false}})
    CHECK(fits([&](Step& step) { step.offsets.push_back(offset); }) == is_right);
  for (const auto& [offset, is_right] : {std::pair{-1, false}, {0, true}, {248, true}, {249, false}}) {
    CHECK(fits([&](Step& step) { step.addresses = {{offset, 0}}; }) == is_right);
    CHECK(fits([&](Step& step) { step.alphas = {{offset, 8}}; }) == is_right);
  }
  CHECK(fits([](Step& step) { step.alphas = {{252, 4}}; }) &&
        !fits([](Step& step) { step.alphas = {{0, 2}}; }));
  for (const auto& [offset, is_right] : {std::pair{-1, false}, {0, true}, {128, true}, {129, false}})
    CHECK(fits([&](Step& step) { step.maps = {{offset, 0, 1, nullptr}}; }) == is_right);
  for (const auto& [operand, is_right] : {std::pair{-1, false}, {0, true}, {1, true}, {2, false}}) {
    CHECK(fits([&](Step& step) { step.addresses = {{0, operand}}; }) == is_right);
    CHECK(fits([&](Step& step) { step.maps = {{0, operand, 1, nullptr}}; }) == is_right);
  }
  CHECK(fits([](Step& step) { step.bytes.resize(kMaxBytes); }));
  CHECK(!fits([](Step& step) { step.bytes.resize(kMaxBytes + 1); }));
  CHECK(fits([](Step& step) { step.offsets.resize(kMaxParameters); }));
  CHECK(!fits([](Step& step) { step.offsets.resize(kMaxParameters + 1); }));
}

// --- Tensor maps ---

void fill(TensorMaps& maps, const std::shared_ptr<CountingEncoder>& encoder, uint64_t address,
          uint64_t id = 1) {
  char bytes[sizeof(TensorMap)];
  maps.fill({{0, 0, id, encoder}}, &address, bytes);
  CHECK(is_map_of(address, bytes));
}

void a_launch_has_the_maps_of_its_addresses() {
  const auto encoder = std::make_shared<CountingEncoder>();
  Step step = step_of(320, {0, 128, 256});
  step.maps = {{0, 1, 1, encoder}, {128, 0, 2, encoder}};
  step.addresses = {{256, 1}};
  look = [](void** parameters) {
    for (int i = 0; i < 2; ++i) CHECK(reinterpret_cast<uintptr_t>(parameters[i]) % alignof(TensorMap) == 0);
    CHECK(is_map_of(20, parameters[0]) && is_map_of(10, parameters[1]) && at<uint64_t>(parameters[2]) == 20);
  };
  launch_once(step, {10, 20}, 1);
  look = nullptr;
  CHECK(seen.size() == 1 && encoder->made == 2);
}

void a_map_is_encoded_once_for_a_parameter_and_an_address() {
  TensorMaps maps(4);
  const auto one = std::make_shared<CountingEncoder>(), other = std::make_shared<CountingEncoder>();
  for (int i = 0; i < 3; ++i)
    for (const uint64_t address : {16, 32}) fill(maps, one, address, 1);
  CHECK(one->made == 2);
  for (int i = 0; i < 3; ++i) fill(maps, other, 16, 2);
  CHECK(one->made == 2 && other->made == 1);
}

void the_oldest_maps_are_given_up() {
  TensorMaps maps(3);
  const auto encoder = std::make_shared<CountingEncoder>();
  for (const uint64_t address : {1, 2, 3, 4}) fill(maps, encoder, address);
  for (const uint64_t address : {2, 3, 4}) fill(maps, encoder, address);
  CHECK(encoder->made == 4);
  fill(maps, encoder, 1);
  CHECK(encoder->made == 5);
  for (const uint64_t address : {3, 4, 1}) fill(maps, encoder, address);
  CHECK(encoder->made == 5);
}

void a_call_may_have_more_maps_than_are_kept() {
  TensorMaps maps(1);
  const auto encoder = std::make_shared<CountingEncoder>();
  const uint64_t addresses[] = {1, 2, 3};
  alignas(64) char bytes[3 * sizeof(TensorMap)];
  maps.fill({{0, 0, 1, encoder}, {128, 1, 1, encoder}, {256, 2, 1, encoder}}, addresses, bytes);
  for (int i = 0; i < 3; ++i) CHECK(is_map_of(addresses[i], bytes + 128 * i));
}

// Encoding needs the GIL, which a thread may hold that waits for the maps.
void others_go_on_while_a_map_is_encoded() {
  TensorMaps maps(4);
  const auto slow = std::make_shared<CountingEncoder>(), quick = std::make_shared<CountingEncoder>();
  fill(maps, quick, 7, 2);
  std::atomic<bool> begun = false, done = false;
  slow->before = [&](uint64_t) {
    begun = true;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (!done) {
      CHECK(std::chrono::steady_clock::now() < end);
      std::this_thread::yield();
    }
  };
  std::thread encoding([&] { fill(maps, slow, 1, 1); });
  while (!begun) std::this_thread::yield();
  for (const uint64_t address : {7, 8}) fill(maps, quick, address, 2);
  done = true;
  encoding.join();
}

void threads_that_encode_one_address_agree() {
  TensorMaps maps(2);
  const auto encoder = std::make_shared<CountingEncoder>();
  std::atomic<int> inside = 0;
  encoder->before = [&](uint64_t address) {
    if (address != 1) return;
    ++inside;
    while (inside < 4) std::this_thread::yield();  // all have seen that there is none
  };
  in_threads(4, [&](int) { fill(maps, encoder, 1); });
  CHECK(encoder->made == 4);
  for (const uint64_t address : {1, 2, 1, 2}) fill(maps, encoder, address);
  CHECK(encoder->made == 5);
}

void threads_share_maps() {
  TensorMaps maps(8);
  const auto encoder = std::make_shared<CountingEncoder>();
  in_threads(6, [&](int thread) {
    for (uint64_t i = 0; i < 2000; ++i) fill(maps, encoder, 1 + (i * 5 + thread) % 12, i % 2);
  });
  CHECK(encoder->made >= 24);
}

void an_encoder_that_fails_leaves_nothing() {
  TensorMaps maps(2);
  const auto encoder = std::make_shared<CountingEncoder>();
  encoder->before = [](uint64_t) { throw std::runtime_error("no map"); };
  CHECK_THROWS(fill(maps, encoder, 1), std::runtime_error, "no map");
  encoder->before = nullptr;
  fill(maps, encoder, 1);
  CHECK(encoder->made == 1);
}

}  // namespace
}  // namespace triton_gemm

int main() {
  using namespace triton_gemm;
  RUN(parameters_are_the_call_s);
  RUN(a_step_is_not_changed_by_its_launch);
  RUN(the_configuration_is_the_step_s_and_the_stream_the_call_s);
  RUN(attributes_are_those_that_were_set);
  RUN(what_the_driver_says_is_thrown_in_triton_s_words);
  RUN(a_thread_without_a_context_gets_one);
  RUN(parameters_outside_are_refused);
  RUN(a_launch_has_the_maps_of_its_addresses);
  RUN(a_map_is_encoded_once_for_a_parameter_and_an_address);
  RUN(the_oldest_maps_are_given_up);
  RUN(a_call_may_have_more_maps_than_are_kept);
  RUN(others_go_on_while_a_map_is_encoded);
  RUN(threads_that_encode_one_address_agree);
  RUN(threads_share_maps);
  RUN(an_encoder_that_fails_leaves_nothing);
}
