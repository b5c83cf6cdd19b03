// Python's view of a twin: launch() on raw addresses. Compiled once beside every .cu file; no torch headers.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "gemm.h"

static void launch_or_throw(const std::string& variant, uintptr_t a, uintptr_t b, uintptr_t c, int M, int N,
                            int K, double alpha, double beta, uintptr_t stream) {
  // alpha = 0 must not read A and B: an empty sum does not.
  const auto pointer = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  const Gemm gemm{pointer(a), pointer(b), pointer(c),
                  M,          N,          alpha == 0 ? 0 : K,
                  alpha,      beta,       static_cast<cudaStream_t>(pointer(stream))};
  const cudaError_t error = launch(variant.c_str(), gemm);
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("launch", &launch_or_throw); }
