// FP16 tensor cores, one warp a block: a 16 x 16 tile of C, fragments straight from global memory.
//
// Changes:  c08's operands become fp16; no sharing, no blocking: the naive kernel of the tensor cores.
// Why:      the smallest wmma is one warp's 16 x 16 x 16; the sum stays in fp32.
// Predicts: two fragment loads for one product of 8192 FLOP: a few percent of the tensor peak.
// Requires: fp16 in, fp32 out; any M, N, K (through shared memory unless all tiles are whole and aligned).
// Bound by: L1 and L2: A is read N / 16 times and B M / 16 times.
// Next:     c10 shares tiles between four warps.
#include "wmma.cuh"

template <bool WHOLE>
__global__ void __launch_bounds__(32)
    wmma_fp16_kernel(const half* __restrict__ a, const half* __restrict__ b, float* __restrict__ c, int M,
                     int N, int K, float alpha, float beta) {
  const int tiles_n = ceil_div(N, 16);
  const int row = blockIdx.x / tiles_n * 16, col = blockIdx.x % tiles_n * 16;

  alignas(32) __shared__ half a_tile[16][16], b_tile[16][16];
  alignas(32) __shared__ float scratch[16][16];
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a_frag;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> b_frag;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> acc;
  wmma::fill_fragment(acc, 0.0f);

  for (int k0 = 0; k0 < K; k0 += 16) {
    if constexpr (WHOLE) {
      wmma::load_matrix_sync(a_frag, a + size_t(row) * K + k0, K);
      wmma::load_matrix_sync(b_frag, b + size_t(k0) * N + col, N);
    } else {
      stage_tile<32, 16>(a_tile, a, row, k0, M, K);
      stage_tile<32, 16>(b_tile, b, k0, col, K, N);
      __syncwarp();
      wmma::load_matrix_sync(a_frag, &a_tile[0][0], 16);
      wmma::load_matrix_sync(b_frag, &b_tile[0][0], 16);
      __syncwarp();
    }
    wmma::mma_sync(acc, a_frag, b_frag, acc);
  }

  store_fragment(scratch, acc, c, row, col, M, N, alpha, beta);
}

extern "C" cudaError_t launch(const char* variant, const Gemm& gemm) {
  const std::string_view name = variant;
  if (name != "16x16_1w") return cudaErrorInvalidValue;
  // wmma wants fragments on 32 bytes: 16 halves.
  const bool whole = aligned(gemm, 32) && gemm.M % 16 == 0 && gemm.N % 16 == 0 && gemm.K % 16 == 0;
  return launch_tiles(whole ? wmma_fp16_kernel<true> : wmma_fp16_kernel<false>, 16, 16, 32, gemm);
}
