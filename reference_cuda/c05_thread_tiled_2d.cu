// 2-D thread tiling: each thread computes an 8 x 8 piece of C from 8 values of A and 8 of B at a time.
//
// Changes:  c04's column of results becomes a THREAD_M x THREAD_N square.
// Why:      an outer product of 8 and 8 values in registers is 64 FMAs for 16 shared reads.
// Predicts: shared reads per result fall from 9K / 8 to K / 4: the FMA pipe becomes the roof.
// Requires: fp32; any M, N, K.
// Bound by: latency: two warps a block, scalar global loads, and strided shared reads that conflict on banks.
// Next:     c06 stores A transposed, so that 16 bytes of it are of one k, and stages 16 bytes at a time.
#include "common.cuh"

template <int BLOCK_M, int BLOCK_N, int BLOCK_K, int THREAD_M, int THREAD_N>
__global__ void __launch_bounds__((BLOCK_M * BLOCK_N / (THREAD_M * THREAD_N)))
    thread_tiled_2d_kernel(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c,
                           int M, int N, int K, float alpha, float beta) {
  constexpr int THREADS = BLOCK_M * BLOCK_N / (THREAD_M * THREAD_N);

  const int tiles_n = ceil_div(N, BLOCK_N);
  const int pid_m = blockIdx.x / tiles_n, pid_n = blockIdx.x % tiles_n;
  const int row = threadIdx.x / (BLOCK_N / THREAD_N) * THREAD_M;
  const int col = threadIdx.x % (BLOCK_N / THREAD_N) * THREAD_N;

  __shared__ float a_tile[BLOCK_M][BLOCK_K];
  __shared__ float b_tile[BLOCK_K][BLOCK_N];
  float acc[THREAD_M][THREAD_N] = {};

  for (int k0 = 0; k0 < K; k0 += BLOCK_K) {
    stage_tile<THREADS, BLOCK_K>(a_tile, a, pid_m * BLOCK_M, k0, M, K);
    stage_tile<THREADS, BLOCK_N>(b_tile, b, k0, pid_n * BLOCK_N, K, N);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < BLOCK_K; ++k) {
      float a_frag[THREAD_M], b_frag[THREAD_N];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) a_frag[i] = a_tile[row + i][k];
#pragma unroll
      for (int j = 0; j < THREAD_N; ++j) b_frag[j] = b_tile[k][col + j];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) acc[i][j] += a_frag[i] * b_frag[j];
      }
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) {
      store(c, pid_m * BLOCK_M + row + i, pid_n * BLOCK_N + col + j, M, N, acc[i][j], alpha, beta);
    }
  }
}

template <int BLOCK_M, int BLOCK_N, int BLOCK_K, int THREAD_M, int THREAD_N>
cudaError_t run(const Gemm& gemm) {
  return launch_tiles(thread_tiled_2d_kernel<BLOCK_M, BLOCK_N, BLOCK_K, THREAD_M, THREAD_N>, BLOCK_M, BLOCK_N,
                      BLOCK_M * BLOCK_N / (THREAD_M * THREAD_N), gemm);
}

extern "C" cudaError_t launch(const char* variant, const Gemm& gemm) {
  const std::string_view name = variant;
  if (name == "64x64x8_8x8") return run<64, 64, 8, 8, 8>(gemm);
  return cudaErrorInvalidValue;
}
