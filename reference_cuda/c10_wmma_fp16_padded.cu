// FP16 tensor cores, four warps a block: 64 x 64 of C from shared tiles whose rows are padded by 8.
//
// Changes:  c09's fragments come from shared memory, staged 16 bytes a thread; a warp holds 2 x 2 of them.
// Why:      a fragment load reads 16 bytes of eight rows at a time. Rows of 32 and 128 bytes put two and
//           eight of them on the same banks; 16 bytes more a row put none.
// Predicts: A is read N / 64 times and B M / 64 times: a quarter of c09's traffic.
// Requires: fp16 in, fp32 out; any M, N, K (scalar global loads unless N, K and the pointers allow 16 bytes).
// Bound by: two barriers and an exposed global latency for only 16 of k.
// Next:     c11 gives a warp 4 x 4 fragments.
#include "wmma.cuh"

template <bool VECTOR>
__global__ void __launch_bounds__(128)
    wmma_fp16_padded_kernel(const half* __restrict__ a, const half* __restrict__ b, float* __restrict__ c,
                            int M, int N, int K, float alpha, float beta) {
  constexpr int BLOCK_M = 64, BLOCK_N = 64, BLOCK_K = 16, PAD = 8;

  const int tiles_n = ceil_div(N, BLOCK_N);
  const int pid_m = blockIdx.x / tiles_n, pid_n = blockIdx.x % tiles_n;
  const int warp = threadIdx.x / 32;
  const int row = warp / 2 * 32, col = warp % 2 * 32;
  const int a_row = threadIdx.x / 2, a_col = threadIdx.x % 2 * 8;
  const int b_row = threadIdx.x / 8, b_col = threadIdx.x % 8 * 8;

  alignas(32) __shared__ half a_tile[BLOCK_M][BLOCK_K + PAD];
  alignas(32) __shared__ half b_tile[BLOCK_K][BLOCK_N + PAD];
  alignas(32) __shared__ float scratch[4][16][16];
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a_frag[2];
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> b_frag[2];
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> acc[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) wmma::fill_fragment(acc[i / 2][i % 2], 0.0f);

  for (int k0 = 0; k0 < K; k0 += BLOCK_K) {
    pack_at(a_tile[a_row][a_col]) = load_pack<VECTOR>(a, pid_m * BLOCK_M + a_row, k0 + a_col, M, K);
    pack_at(b_tile[b_row][b_col]) = load_pack<VECTOR>(b, k0 + b_row, pid_n * BLOCK_N + b_col, K, N);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      wmma::load_matrix_sync(a_frag[i], &a_tile[row + 16 * i][0], BLOCK_K + PAD);
      wmma::load_matrix_sync(b_frag[i], &b_tile[0][col + 16 * i], BLOCK_N + PAD);
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
  if (name != "64x64x16_4w") return cudaErrorInvalidValue;
  const auto kernel =
      vectorizable<half>(gemm) ? wmma_fp16_padded_kernel<true> : wmma_fp16_padded_kernel<false>;
  return launch_tiles(kernel, 64, 64, 128, gemm);
}
