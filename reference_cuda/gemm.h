// The contract between a twin's CUDA source and whoever calls it: no torch, no Python.
#pragma once

#include <cuda_runtime_api.h>

// C = alpha A B + beta C, all three row-major and contiguous: A is M x K, B is K x N, C is M x N.
// The scalars are double so that int32 twins receive every integer exactly.
struct Gemm {
  const void* a;
  const void* b;
  void* c;
  int M, N, K;
  double alpha, beta;
  cudaStream_t stream;
};

// Every twin defines this once. An unknown variant is cudaErrorInvalidValue; M and N are at least 1.
extern "C" cudaError_t launch(const char* variant, const Gemm& gemm);
