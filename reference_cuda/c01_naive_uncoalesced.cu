// Naive, uncoalesced: one thread computes one element of C, its row from the fast thread index.
//
// Changes:  nothing yet; this is the floor that the ladder is measured from.
// Why:      the 32 lanes of a warp stand in 32 rows, so one load of A touches 32 sectors for 128 bytes.
// Predicts: 33 sectors a warp and k (A 32, B one broadcast) where 5 would do.
// Requires: fp32; any M, N, K.
// Bound by: L1 transactions, then their latency.
// Next:     c02 takes the column from the fast index.
#include "common.cuh"

template <int BLOCK_M, int BLOCK_N>
__global__ void naive_uncoalesced_kernel(const float* __restrict__ a, const float* __restrict__ b,
                                         float* __restrict__ c, int M, int N, int K, float alpha,
                                         float beta) {
  // threadIdx.x, the index that varies within a warp, walks down a column of C.
  const int tiles_n = ceil_div(N, BLOCK_N);
  const int pid_m = blockIdx.x / tiles_n, pid_n = blockIdx.x % tiles_n;
  const int row = pid_m * BLOCK_M + threadIdx.x;
  const int col = pid_n * BLOCK_N + threadIdx.y;
  if (row >= M || col >= N) return;

  float acc = 0;
  a += size_t(row) * K;
  b += col;

  for (int k = 0; k < K; ++k) acc += a[k] * b[size_t(k) * N];

  store(c, row, col, M, N, acc, alpha, beta);
}

template <int BLOCK_M, int BLOCK_N>
cudaError_t run(const Gemm& gemm) {
  return launch_tiles(naive_uncoalesced_kernel<BLOCK_M, BLOCK_N>, BLOCK_M, BLOCK_N, dim3(BLOCK_M, BLOCK_N),
                      gemm);
}

extern "C" cudaError_t launch(const char* variant, const Gemm& gemm) {
  const std::string_view name = variant;
  if (name == "256") return run<256, 1>(gemm);
  if (name == "32x32") return run<32, 32>(gemm);
  return cudaErrorInvalidValue;
}
