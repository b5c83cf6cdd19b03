// What the extension is set up with, as calls see it. What asks Python is defined in python.h.
#pragma once
#include <Python.h>

#include "table.h"

namespace triton_gemm {

constexpr int64_t kUnknown = -1;  // the number of a Python object that has none

// It is never freed, for kernels of torch's dispatcher outlive Python.
struct State {
  std::atomic<int64_t> epoch = 0;         // `generation.number`
  std::atomic<bool> policies = false;     // whether a policy was ever set in a context
  std::atomic<Driver*> driver = nullptr;  // null until entries may be kept
  std::atomic<int64_t> stand_ins = 0;     // how often Python had all entries of stand-ins forgotten
  Workspaces workspaces;
};
inline State& state = *new State;

bool any_hooks();               // on launches, of Triton's knobs.runtime
int64_t policy_here(bool add);  // the number of the policy that counts in this context, 0 without one

}  // namespace triton_gemm
