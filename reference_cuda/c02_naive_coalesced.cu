// Naive, coalesced: still one thread one element, its column from the fast thread index.
//
// Changes:  c01's two thread indices are swapped, nothing else.
// Why:      32 lanes read 32 neighbours in a row of B, one 128-byte line; A is one broadcast word.
// Predicts: 5 sectors a warp and k instead of 33: up to 6.6 times c01 where transactions bind it.
// Requires: fp32; any M, N, K.
// Bound by: L1: two loads for every FMA.
// Next:     c03 reads each operand once a block and shares it.
#include "common.cuh"

template <int BLOCK_M, int BLOCK_N>
__global__ void naive_coalesced_kernel(const float* __restrict__ a, const float* __restrict__ b,
                                       float* __restrict__ c, int M, int N, int K, float alpha, float beta) {
  // threadIdx.x, the index that varies within a warp, walks along a row of C.
  const int tiles_n = ceil_div(N, BLOCK_N);
  const int pid_m = blockIdx.x / tiles_n, pid_n = blockIdx.x % tiles_n;
  const int row = pid_m * BLOCK_M + threadIdx.y;
  const int col = pid_n * BLOCK_N + threadIdx.x;
  if (row >= M || col >= N) return;

  float acc = 0;
  a += size_t(row) * K;
  b += col;

  for (int k = 0; k < K; ++k) acc += a[k] * b[size_t(k) * N];

  store(c, row, col, M, N, acc, alpha, beta);
}

template <int BLOCK_M, int BLOCK_N>
cudaError_t run(const Gemm& gemm) {
  return launch_tiles(naive_coalesced_kernel<BLOCK_M, BLOCK_N>, BLOCK_M, BLOCK_N, dim3(BLOCK_N, BLOCK_M),
                      gemm);
}

extern "C" cudaError_t launch(const char* variant, const Gemm& gemm) {
  const std::string_view name = variant;
  if (name == "256") return run<1, 256>(gemm);
  if (name == "16x16") return run<16, 16>(gemm);
  if (name == "32x32") return run<32, 32>(gemm);
  return cudaErrorInvalidValue;
}
