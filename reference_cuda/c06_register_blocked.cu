// Register blocking with float4: every global load and every shared read of the main loop moves 16 bytes.
//
// Changes:  c05's scalar global loads become 16-byte ones, A lies transposed in shared memory, and 256
//           threads compute 4 x 4 results each.
// Why:      transposed, a thread's four rows of one k are neighbours: one LDS.128. Of c05's rows one LDS.128
//           brings four k, so that a thread must hold four k of A at once.
// Predicts: 2 shared-memory instructions for 16 FMAs, and 256 threads a block to hide their latency.
// Requires: fp32; any M, N, K (scalar global accesses unless N, K and the pointers allow 16 bytes).
// Bound by: two barriers and an exposed global latency a k-tile; 4 x 4 results use each value 4 times.
// Next:     c07 loads the next tile under this tile's FMAs, and computes 8 x 8 a thread.
#include "common.cuh"

template <bool VECTOR>
__global__ void __launch_bounds__(256)
    register_blocked_kernel(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c,
                            int M, int N, int K, float alpha, float beta) {
  constexpr int BLOCK_M = 64, BLOCK_N = 64, BLOCK_K = 16;

  const int tiles_n = ceil_div(N, BLOCK_N);
  const int pid_m = blockIdx.x / tiles_n, pid_n = blockIdx.x % tiles_n;
  const int row = threadIdx.x / 16 * 4;
  const int col = threadIdx.x % 16 * 4;
  const int a_row = threadIdx.x / 4, a_col = threadIdx.x % 4 * 4;
  const int b_row = threadIdx.x / 16, b_col = threadIdx.x % 16 * 4;

  // Four more floats a row halve the bank conflicts of the transposing stores and keep rows on 16 bytes.
  alignas(16) __shared__ float a_tile[BLOCK_K][BLOCK_M + 4];
  alignas(16) __shared__ float b_tile[BLOCK_K][BLOCK_N];
  float acc[4][4] = {};

  for (int k0 = 0; k0 < K; k0 += BLOCK_K) {
    const auto a_pack = load_pack<VECTOR>(a, pid_m * BLOCK_M + a_row, k0 + a_col, M, K);
    const auto b_pack = load_pack<VECTOR>(b, k0 + b_row, pid_n * BLOCK_N + b_col, K, N);
#pragma unroll
    for (int i = 0; i < 4; ++i) a_tile[a_col + i][a_row] = a_pack.x[i];
    pack_at(b_tile[b_row][b_col]) = b_pack;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < BLOCK_K; ++k) {
      const Pack<float> a_frag = pack_at(a_tile[k][row]);
      const Pack<float> b_frag = pack_at(b_tile[k][col]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] += a_frag.x[i] * b_frag.x[j];
      }
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    store_pack<VECTOR>(c, pid_m * BLOCK_M + row + i, pid_n * BLOCK_N + col, M, N, acc[i], alpha, beta);
  }
}

extern "C" cudaError_t launch(const char* variant, const Gemm& gemm) {
  const std::string_view name = variant;
  if (name != "64x64x16_4x4") return cudaErrorInvalidValue;
  const auto kernel =
      vectorizable<float>(gemm) ? register_blocked_kernel<true> : register_blocked_kernel<false>;
  return launch_tiles(kernel, 64, 64, 256, gemm);
}
