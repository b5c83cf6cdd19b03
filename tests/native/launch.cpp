// Tests of launches and workspaces, with a fake driver that records its arguments.
#include "launch.h"

#include <atomic>
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
thread_local std::vector<CUresult> answers;  // to the next launches; later ones succeed
thread_local std::vector<int> contexts;
thread_local std::function<void(void** parameters)> on_launch;

CUresult taken_from(std::vector<CUresult>& results) {
  if (results.empty()) return CUDA_SUCCESS;
  const CUresult result = results.front();
  results.erase(results.begin());
  return result;
}

CUresult record_launch(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  CHECK(extra == nullptr);
  seen.push_back({function, *config, {config->attrs, config->attrs + config->numAttrs}, {}});
  if (on_launch) on_launch(parameters);
  return taken_from(answers);
}

CUresult error_string(CUresult error, const char** text) {
  if (error == CUDA_ERROR_ILLEGAL_ADDRESS) *text = "an illegal address";
  return error == CUDA_ERROR_ILLEGAL_ADDRESS ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Replaces the address of a tensor map, which is in the map's first bytes.
thread_local std::vector<CUresult> refusals;  // to the next replacements; later ones succeed
CUresult replace(CUtensorMap* map, void* address) {
  CHECK(reinterpret_cast<uintptr_t>(map) % alignof(CUtensorMap) == 0);
  const CUresult refusal = taken_from(refusals);
  if (refusal == CUDA_SUCCESS) std::memcpy(map, &address, sizeof address);
  return refusal;
}

// Stream 1 is being captured; for stream 2 the query fails.
CUresult is_capturing(CUstream stream, CUstreamCaptureStatus* status) {
  *status = stream == reinterpret_cast<CUstream>(1) ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                                    : CU_STREAM_CAPTURE_STATUS_NONE;
  return stream == reinterpret_cast<CUstream>(2) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

const Driver driver{record_launch, error_string, replace, is_capturing,
                    [](int device) { contexts.push_back(device); }};
const auto stream = reinterpret_cast<CUstream>(0x57);

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
  seen.clear(), contexts.clear();
  launch(step, driver, stream, 3, addresses.data(), alpha);
}

// Jobs: what was launched and recorded, in any thread.
std::atomic<int> graphs = 0, events = 0;
std::atomic<CUresult> graph_answer = CUDA_SUCCESS;

const auto graph = reinterpret_cast<CUgraphExec>(0x11);
const auto event = reinterpret_cast<CUevent>(0x22);

CUresult launch_graph(CUgraphExec of, CUstream) {
  CHECK(of == graph);
  ++graphs;
  return graph_answer;
}

CUresult record_event(CUevent of, CUstream) {
  CHECK(of == event);
  ++events;
  return CUDA_SUCCESS;
}

// A job that nobody has launched, when no graph was.
Job job_of(CUstream of) {
  graphs = events = 0;
  return {1, 0, -1, 3, of, graph, event, launch_graph, record_event};
}

TEST(a_job_is_launched_once) {
  Job job = job_of(stream);
  CHECK(job.waits());
  for (int call = 0; call < 3; ++call) {
    CHECK(graphs == (call > 0) && job.launched == (call > 0 ? 0 : -1));
    job.count(driver, 3, stream);
  }
  CHECK(job.until == 0);
  CHECK(graphs == 1 && events == 1 && job.inside == 0 && !job.waits());
  graph_answer = CUDA_ERROR_ILLEGAL_ADDRESS;
  job = job_of(stream);
  job.count(driver, 3, stream);
  CHECK(job.launched == CUDA_ERROR_ILLEGAL_ADDRESS && graphs == 1 && events == 0);
  graph_answer = CUDA_SUCCESS;
}

TEST(a_job_waits_for_its_stream_and_for_the_end_of_a_capture) {
  Job job = job_of(stream);
  job.count(driver, 2, stream);
  job.count(driver, 3, nullptr);
  CHECK(graphs == 0 && job.until == 1);
  Job captured = job_of(reinterpret_cast<CUstream>(1));
  captured.count(driver, 3, captured.stream);
  CHECK(graphs == 0 && captured.waits() && captured.launched == -1);
  job.until = -1;
  job.count(driver, 3, stream);
  CHECK(graphs == 0 && job.inside == 0);
}

TEST(of_threads_that_come_at_once_one_launches_a_job) {
  std::vector<Job> jobs(4000, job_of(stream));
  std::atomic<size_t> arrived = 0;
  in_threads(2, [&](int) {
    for (size_t i = 0; i < jobs.size(); ++i) {
      ++arrived;
      for (int spins = 0; arrived < 2 * (i + 1); ++spins)
        if (spins > 1000) std::this_thread::yield();
      jobs[i].count(driver, 3, stream);
    }
  });
  CHECK(graphs == 4000 && events == 4000);
}

// One thread begins and withdraws jobs, as Python does; what was withdrawn is launched by nobody.
TEST(threads_launch_no_job_that_was_withdrawn) {
  Job job = job_of(stream);
  job.until = -1;
  std::atomic<bool> ends = false;
  int begun = 0, launched = 0;
  in_threads(4, [&](int thread) {
    if (thread != 0) {
      while (!ends)
        if (job.waits()) job.count(driver, 3, stream);
      return;
    }
    for (int i = 0; i < 3000; ++i) {
      __atomic_store_n(&job.launched, -1, __ATOMIC_RELAXED);
      job.device = 3, job.stream = stream;
      job.set(1 + i % 3);
      ++begun;
      if (i % 2) std::this_thread::yield();
      job.set(-1);
      while (__atomic_load_n(&job.inside, __ATOMIC_SEQ_CST) != 0) std::this_thread::yield();
      job.device = 9, job.stream = nullptr;  // ThreadSanitizer sees a thread that reads them now
      launched += __atomic_load_n(&job.launched, __ATOMIC_RELAXED) == 0;
    }
    ends = true;
  });
  CHECK(graphs == launched && events == launched && launched <= begun && job.inside == 0);
}

TEST(who_sees_a_job_sees_all_of_it) {
  const Job made = job_of(stream);
  std::vector<Job> jobs(100, Job{});
  in_threads(2, [&](int thread) {
    for (Job& job : jobs) {
      if (thread == 0) {
        job.launched = made.launched, job.device = made.device, job.stream = made.stream;
        job.graph = made.graph, job.ended = made.ended, job.launch = made.launch, job.record = made.record;
        job.set(1);
      } else {
        while (!job.waits()) std::this_thread::yield();
        job.count(driver, 3, stream);
      }
    }
  });
  CHECK(graphs == 100 && events == 100);
}

TEST(parameters_are_the_call_s) {
  Step step = step_of(48, {0, 8, 16, 24, 32, 40});
  step.addresses = {{0, 2}, {8, 0}, {40, 1}};
  step.alphas = {{16, 4}, {24, 8}};
  for (const double alpha : {1.0, 0.1, -2.5}) {
    on_launch = [&](void** parameters) {
      CHECK(at<uint64_t>(parameters[0]) == 300 && at<uint64_t>(parameters[1]) == 100);
      CHECK(at<float>(parameters[2]) == static_cast<float>(alpha) && at<double>(parameters[3]) == alpha);
      CHECK(at<int>(parameters[2]) != 0x05050505 &&
            at<int>(static_cast<char*>(parameters[2]) + 4) == 0x05050505);
      CHECK(at<uint64_t>(parameters[4]) == 0x0505050505050505 && at<uint64_t>(parameters[5]) == 200);
    };
    launch_once(step, {100, 200, 300}, alpha);
    CHECK(seen.size() == 1);
  }
  on_launch = nullptr;
}

TEST(a_step_is_not_changed_by_its_launch) {
  Step step = step_of(16, {0, 8});
  step.addresses = {{0, 0}};
  step.alphas = {{8, 8}};
  const std::vector<char> before = step.bytes;
  launch_once(step, {100}, 2);
  CHECK(step.bytes == before && step.config.hStream == nullptr && step.config.attrs == nullptr);
}

TEST(the_configuration_is_the_step_s_and_the_stream_the_call_s) {
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

TEST(attributes_are_those_that_were_set) {
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

TEST(driver_errors_are_thrown_as_triton_throws_them) {
  const Step step = step_of(8, {0});
  answers = {CUDA_ERROR_ILLEGAL_ADDRESS};
  CHECK_THROWS(launch_once(step, {}, 1), std::runtime_error, "Triton Error [CUDA]: an illegal address");
  CHECK(seen.size() == 1 && contexts.empty());
  answers = {CUDA_ERROR_UNKNOWN};
  CHECK_THROWS(launch_once(step, {}, 1), std::runtime_error, "Triton Error [CUDA]: unknown error");
}

TEST(a_thread_without_a_context_gets_one) {
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

TEST(parameters_outside_are_refused) {
  CHECK(fits([](Step&) {}) && fits([](Step&) {}, kMaxAddresses) && !fits([](Step&) {}, kMaxAddresses + 1));
  for (const auto& [offset, is_right] : {std::pair{-1, false}, {0, true}, {255, true}, {256, false}})
    CHECK(fits([&](Step& step) { step.offsets.push_back(offset); }) == is_right);
  for (const auto& [offset, is_right] : {std::pair{-1, false}, {0, true}, {248, true}, {249, false}}) {
    CHECK(fits([&](Step& step) { step.addresses = {{offset, 0}}; }) == is_right);
    CHECK(fits([&](Step& step) { step.alphas = {{offset, 8}}; }) == is_right);
  }
  CHECK(fits([](Step& step) { step.alphas = {{252, 4}}; }) &&
        !fits([](Step& step) { step.alphas = {{0, 2}}; }));
  for (const auto& [offset, is_right] :
       {std::pair{-64, false}, {0, true}, {32, false}, {128, true}, {192, false}})
    CHECK(fits([&](Step& step) { step.maps = {{offset, 0}}; }) == is_right);
  for (const auto& [operand, is_right] : {std::pair{-1, false}, {0, true}, {1, true}, {2, false}}) {
    CHECK(fits([&](Step& step) { step.addresses = {{0, operand}}; }) == is_right);
    CHECK(fits([&](Step& step) { step.maps = {{0, operand}}; }) == is_right);
  }
  CHECK(fits([](Step& step) { step.bytes.resize(kMaxBytes); }));
  CHECK(!fits([](Step& step) { step.bytes.resize(kMaxBytes + 1); }));
  CHECK(fits([](Step& step) { step.offsets.resize(kMaxParameters); }));
  CHECK(!fits([](Step& step) { step.offsets.resize(kMaxParameters + 1); }));
}

TEST(a_launch_has_the_maps_of_its_addresses) {
  Step step = step_of(320, {0, 128, 256});
  step.maps = {{0, 1}, {128, 0}};
  step.addresses = {{256, 1}};
  on_launch = [](void** parameters) {
    CHECK(at<uint64_t>(parameters[0]) == 20 && at<uint64_t>(parameters[1]) == 10);
    for (int i = 0; i < 2; ++i)
      for (int byte = 8; byte < 128; ++byte) CHECK(static_cast<char*>(parameters[i])[byte] == '\5');
    CHECK(at<uint64_t>(parameters[2]) == 20);
  };
  launch_once(step, {10, 20}, 1);
  CHECK(seen.size() == 1);
  refusals = {CUDA_ERROR_INVALID_CONTEXT};
  launch_once(step, {10, 20}, 1);
  CHECK(seen.size() == 1 && contexts == std::vector<int>{3});
  on_launch = nullptr;
  refusals = {CUDA_ERROR_ILLEGAL_ADDRESS};
  CHECK_THROWS(launch_once(step, {10, 20}, 1), std::runtime_error, "Triton Error [CUDA]: an illegal address");
  CHECK(seen.empty());
}

// --- Workspaces ---

Workspace workspace_of(uint64_t address, uint64_t bytes, std::shared_ptr<void> owner = nullptr) {
  return {{address, address + 1}, bytes, std::move(owner)};
}

uint64_t found_in(const Workspaces& workspaces, int device, CUstream of_stream, uint64_t bytes) {
  const auto found = workspaces.find(driver, device, of_stream, bytes);
  CHECK(!found || (found->bytes >= bytes && found->addresses[1] == found->addresses[0] + 1));
  return found ? found->addresses[0] : 0;
}

TEST(a_workspace_is_its_stream_s_on_its_device) {
  Workspaces workspaces;
  const auto other = reinterpret_cast<CUstream>(0x58);
  workspaces.keep(0, stream, workspace_of(100, 8));
  workspaces.keep(1, stream, workspace_of(200, 8));
  workspaces.keep(0, nullptr, workspace_of(300, 8));
  CHECK(found_in(workspaces, 0, stream, 8) == 100 && found_in(workspaces, 1, stream, 8) == 200);
  CHECK(found_in(workspaces, 0, nullptr, 8) == 300 && found_in(workspaces, 0, other, 8) == 0);
  CHECK(found_in(workspaces, 0, stream, 9) == 0);
  workspaces.keep(0, stream, workspace_of(400, 9));
  CHECK(found_in(workspaces, 0, stream, 9) == 400);
  workspaces.forget();
  CHECK(found_in(workspaces, 0, stream, 0) == 0 && found_in(workspaces, 1, stream, 0) == 0);
}

TEST(a_captured_stream_has_none) {
  Workspaces workspaces;
  for (const uintptr_t number : {1, 2}) {
    const auto captured = reinterpret_cast<CUstream>(number);
    workspaces.keep(0, captured, workspace_of(100, 8));
    CHECK(found_in(workspaces, 0, captured, 8) == 0);
  }
}

// Freeing memory may use the workspaces again, which would deadlock if their lock were held.
TEST(memory_is_freed_without_the_lock) {
  Workspaces workspaces;
  int ended = 0;
  const auto owner = [&] {
    return std::shared_ptr<void>(nullptr,
                                 [&](void*) { ++ended, workspaces.keep(1, stream, workspace_of(1, 1)); });
  };
  workspaces.keep(0, stream, workspace_of(100, 8, owner()));
  workspaces.keep(0, stream, workspace_of(200, 8, owner()));
  CHECK(ended == 1);
  {
    const auto held = workspaces.find(driver, 0, stream, 8);
    workspaces.forget();
    CHECK(ended == 1 && held->addresses[0] == 200);
  }
  CHECK(ended == 2);
  workspaces.keep(0, stream, workspace_of(300, 8, owner()));
  workspaces.forget();
  CHECK(ended == 3);
}

TEST(threads_share_workspaces) {
  Workspaces workspaces;
  in_threads(6, [&](int thread) {
    const auto mine = reinterpret_cast<CUstream>(static_cast<uintptr_t>(16 + thread % 3));
    for (uint64_t i = 1; i < 2000; ++i) {
      const auto memory = std::make_shared<uint64_t>(i);
      workspaces.keep(0, mine, workspace_of(i, i, memory));
      const auto found = workspaces.find(driver, 0, mine, 1);
      CHECK(!found || *static_cast<uint64_t*>(found->owner.get()) == found->addresses[0]);
      if (i % 64 == 0) workspaces.forget();
    }
  });
}

}  // namespace
}  // namespace triton_gemm
