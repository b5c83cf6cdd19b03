// TF32 tensor cores through wmma 16 x 16 x 8: fp32 in memory, 10 bits of mantissa in the product.
//
// Changes:  c06's outer product becomes a tensor-core instruction; four warps hold 32 x 32 of C each.
// Why:      one mma_sync multiplies what a warp needs 64 FFMAs for, in four instructions. They would truncate
//           their operands: rounding to nearest, once, on the way to shared memory, halves the worst error.
// Predicts: fragment loads, 2 + 2 for 4 products, replace FFMA issue as the limit; far from the peak.
// Requires: fp32, sm_80; any M, N, K (scalar global accesses unless N, K and the pointers allow 16 bytes).
// Bound by: two barriers and an exposed global latency for only 8 of k.
// Next:     c09 halves the bytes: fp16 operands.
#include "wmma.cuh"

template <bool VECTOR>
__global__ void __launch_bounds__(128)
    wmma_tf32_kernel(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, int M,
                     int N, int K, float alpha, float beta) {
  constexpr int BLOCK_M = 64, BLOCK_N = 64, BLOCK_K = 8;

  const int tiles_n = ceil_div(N, BLOCK_N);
  const int pid_m = blockIdx.x / tiles_n, pid_n = blockIdx.x % tiles_n;
  const int warp = threadIdx.x / 32;
  const int row = warp / 2 * 32, col = warp % 2 * 32;
  const int a_row = threadIdx.x / 2, a_col = threadIdx.x % 2 * 4;
  const int b_row = threadIdx.x / 16, b_col = threadIdx.x % 16 * 4;

  alignas(32) __shared__ float a_tile[BLOCK_M][BLOCK_K + 4];
  alignas(32) __shared__ float b_tile[BLOCK_K][BLOCK_N + 4];
  alignas(32) __shared__ float scratch[4][16][16];
  wmma::fragment<wmma::matrix_a, 16, 16, 8, wmma::precision::tf32, wmma::row_major> a_frag[2];
  wmma::fragment<wmma::matrix_b, 16, 16, 8, wmma::precision::tf32, wmma::row_major> b_frag[2];
  wmma::fragment<wmma::accumulator, 16, 16, 8, float> acc[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) wmma::fill_fragment(acc[i / 2][i % 2], 0.0f);

  for (int k0 = 0; k0 < K; k0 += BLOCK_K) {
    const auto a_pack = load_pack<VECTOR>(a, pid_m * BLOCK_M + a_row, k0 + a_col, M, K);
    const auto b_pack = load_pack<VECTOR>(b, k0 + b_row, pid_n * BLOCK_N + b_col, K, N);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a_tile[a_row][a_col + i] = wmma::__float_to_tf32(a_pack.x[i]);
      b_tile[b_row][b_col + i] = wmma::__float_to_tf32(b_pack.x[i]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      wmma::load_matrix_sync(a_frag[i], &a_tile[row + 16 * i][0], BLOCK_K + 4);
      wmma::load_matrix_sync(b_frag[i], &b_tile[0][col + 16 * i], BLOCK_N + 4);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      wmma::mma_sync(acc[i / 2][i % 2], a_frag[i / 2], b_frag[i % 2], acc[i / 2][i % 2]);
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    store_fragment(scratch[warp], acc[i / 2][i % 2], c, pid_m * BLOCK_M + row + i / 2 * 16,
                   pid_n * BLOCK_N + col + i % 2 * 16, M, N, alpha, beta);
  }
}

extern "C" cudaError_t launch(const char* variant, const Gemm& gemm) {
  const std::string_view name = variant;
  if (name != "64x64x8_4w") return cudaErrorInvalidValue;
  return launch_tiles(vectorizable<float>(gemm) ? wmma_tf32_kernel<true> : wmma_tf32_kernel<false>, 64, 64,
                      128, gemm);
}
