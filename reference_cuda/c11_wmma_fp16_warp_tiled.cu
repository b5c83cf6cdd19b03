// FP16 tensor cores, warp tiling: a warp holds 64 x 64 of C in 4 x 4 fragments.
//
// Changes:  c10's 2 x 2 fragments a warp become 4 x 4.
// Why:      4 + 4 fragment loads feed 16 products: half a load a product, where c10 needs one and c09 two.
// Predicts: at least twice c09, whose limit is those loads.
// Requires: fp16 in, fp32 out; any M, N, K (scalar global loads unless N, K and the pointers allow 16 bytes).
// Bound by: registers: 128 sums a thread leave few warps to hide global and barrier latency.
// Next:     asynchronous copies, and wgmma, which reads shared memory itself: what k08 compiles to.
#include "wmma.cuh"

template <int WARPS_M, int WARPS_N, int BLOCK_K, bool VECTOR>
__global__ void __launch_bounds__((32 * WARPS_M * WARPS_N))
    wmma_fp16_warp_tiled_kernel(const half* __restrict__ a, const half* __restrict__ b, float* __restrict__ c,
                                int M, int N, int K, float alpha, float beta) {
  constexpr int BLOCK_M = 64 * WARPS_M, BLOCK_N = 64 * WARPS_N, PAD = 8;
  constexpr int WARPS = WARPS_M * WARPS_N, THREADS = 32 * WARPS;

  const int tiles_n = ceil_div(N, BLOCK_N);
  const int pid_m = blockIdx.x / tiles_n, pid_n = blockIdx.x % tiles_n;
  const int warp = threadIdx.x / 32;
  const int row = warp / WARPS_N * 64, col = warp % WARPS_N * 64;

  alignas(32) __shared__ half a_tile[BLOCK_M][BLOCK_K + PAD];
  alignas(32) __shared__ half b_tile[BLOCK_K][BLOCK_N + PAD];
  alignas(32) __shared__ float scratch[WARPS][16][16];
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a_frag[4];
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> b_frag;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> acc[4][4];
#pragma unroll
  for (int i = 0; i < 16; ++i) wmma::fill_fragment(acc[i / 4][i % 4], 0.0f);

  for (int k0 = 0; k0 < K; k0 += BLOCK_K) {
#pragma unroll
    for (int i = 8 * threadIdx.x; i < BLOCK_M * BLOCK_K; i += 8 * THREADS) {
      pack_at(a_tile[i / BLOCK_K][i % BLOCK_K]) =
          load_pack<VECTOR>(a, pid_m * BLOCK_M + i / BLOCK_K, k0 + i % BLOCK_K, M, K);
    }
#pragma unroll
    for (int i = 8 * threadIdx.x; i < BLOCK_K * BLOCK_N; i += 8 * THREADS) {
      pack_at(b_tile[i / BLOCK_N][i % BLOCK_N]) =
          load_pack<VECTOR>(b, k0 + i / BLOCK_N, pid_n * BLOCK_N + i % BLOCK_N, K, N);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < BLOCK_K; k += 16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) wmma::load_matrix_sync(a_frag[i], &a_tile[row + 16 * i][k], BLOCK_K + PAD);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        wmma::load_matrix_sync(b_frag, &b_tile[k][col + 16 * j], BLOCK_N + PAD);
#pragma unroll
        for (int i = 0; i < 4; ++i) wmma::mma_sync(acc[i][j], a_frag[i], b_frag, acc[i][j]);
      }
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < 16; ++i) {
    store_fragment(scratch[warp], acc[i / 4][i % 4], c, pid_m * BLOCK_M + row + i / 4 * 16,
                   pid_n * BLOCK_N + col + i % 4 * 16, M, N, alpha, beta);
  }
}

template <int WARPS_M, int WARPS_N, int BLOCK_K>
cudaError_t run(const Gemm& gemm) {
  const auto kernel = vectorizable<half>(gemm)
                          ? wmma_fp16_warp_tiled_kernel<WARPS_M, WARPS_N, BLOCK_K, true>
                          : wmma_fp16_warp_tiled_kernel<WARPS_M, WARPS_N, BLOCK_K, false>;
  return launch_tiles(kernel, 64 * WARPS_M, 64 * WARPS_N, 32 * WARPS_M * WARPS_N, gemm);
}

extern "C" cudaError_t launch(const char* variant, const Gemm& gemm) {
  const std::string_view name = variant;
  if (name == "128x128_4w") return run<2, 2, 32>(gemm);
  if (name == "64x64_1w") return run<1, 1, 16>(gemm);
  return cudaErrorInvalidValue;
}
