// 1-D thread tiling: each thread computes THREAD_M results of one column and reads B once for all of them.
//
// Changes:  c03's one result a thread becomes THREAD_M rows of one column, held in registers.
// Why:      a value of B in a register serves THREAD_M FMAs; only A is read from shared memory for each.
// Predicts: shared reads per result fall from 2K to K (1 + 1 / THREAD_M), with 8 rows 9K / 8: up to 1.8.
// Requires: fp32; any M, N, K.
// Bound by: shared-memory bandwidth still: more than one word for every FMA; read four of A at a time they
//           are a warp's 24 loads for 64 FMAs, of which an SM does 4 a clock.
// Next:     c05 tiles columns too, so that A is reused as B is.
#include "common.cuh"

template <int BLOCK_M, int BLOCK_N, int BLOCK_K, int THREAD_M>
__global__ void __launch_bounds__((BLOCK_M * BLOCK_N / THREAD_M))
    thread_tiled_1d_kernel(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c,
                           int M, int N, int K, float alpha, float beta) {
  constexpr int THREADS = BLOCK_M * BLOCK_N / THREAD_M;

  const int tiles_n = ceil_div(N, BLOCK_N);
  const int pid_m = blockIdx.x / tiles_n, pid_n = blockIdx.x % tiles_n;
  const int row = threadIdx.x / BLOCK_N * THREAD_M;
  const int col = threadIdx.x % BLOCK_N;

  __shared__ float a_tile[BLOCK_M][BLOCK_K];
  __shared__ float b_tile[BLOCK_K][BLOCK_N];
  float acc[THREAD_M] = {};

  for (int k0 = 0; k0 < K; k0 += BLOCK_K) {
    stage_tile<THREADS, BLOCK_K>(a_tile, a, pid_m * BLOCK_M, k0, M, K);
    stage_tile<THREADS, BLOCK_N>(b_tile, b, k0, pid_n * BLOCK_N, K, N);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < BLOCK_K; ++k) {
      const float b_value = b_tile[k][col];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) acc[i] += a_tile[row + i][k] * b_value;
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
    store(c, pid_m * BLOCK_M + row + i, pid_n * BLOCK_N + col, M, N, acc[i], alpha, beta);
  }
}

template <int BLOCK_M, int BLOCK_N, int BLOCK_K, int THREAD_M>
cudaError_t run(const Gemm& gemm) {
  return launch_tiles(thread_tiled_1d_kernel<BLOCK_M, BLOCK_N, BLOCK_K, THREAD_M>, BLOCK_M, BLOCK_N,
                      BLOCK_M * BLOCK_N / THREAD_M, gemm);
}

extern "C" cudaError_t launch(const char* variant, const Gemm& gemm) {
  const std::string_view name = variant;
  if (name == "64x64x8_8") return run<64, 64, 8, 8>(gemm);
  if (name == "32x32x32_8") return run<32, 32, 32, 8>(gemm);
  return cudaErrorInvalidValue;
}
