// Warp tiling, double-buffered: the next k-tile travels to registers while this one is multiplied.
//
// Changes:  c06 computes 8 x 8 a thread in warp tiles of 64 x 32; two stages, one barrier a k-tile.
// Why:      with two stages the writer of the next tile does not wait for the readers of this one, and
//           global latency hides behind 64 BLOCK_K FMAs a thread.
// Predicts: 4 LDS.128 for 64 FMAs. Lanes i and i ^ 1 read the same of A, i and i ^ 2 the same of B, so that
//           the hardware serves half a warp at once: 8 wavefronts a warp and k against 16 cycles of FMA on
//           an SM. Shared memory is half used, and the FMA pipe is the roof.
// Requires: fp32; any M, N, K (scalar global accesses unless N, K and the pointers allow 16 bytes).
// Bound by: FFMA issue: the share of instructions that are FFMA; then power.
// Next:     c08 leaves the FMA pipe for the tensor cores.
#include "common.cuh"

constexpr int BLOCK_M = 128, BLOCK_N = 128, THREADS = 256;

// Two blocks an SM leave 128 registers a thread: enough without the scalar path's addresses.
template <int BLOCK_K, bool VECTOR>
__global__ void __launch_bounds__(THREADS, VECTOR ? 2 : 1)
    warp_tiled_kernel(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, int M,
                      int N, int K, float alpha, float beta) {
  constexpr int PACKS = BLOCK_M * BLOCK_K / (4 * THREADS);  // of each operand, for one thread and k-tile

  // 2 x 4 warps, 8 x 4 lanes; a lane's results are four 4 x 4 squares, 32 rows and 16 columns apart.
  const int tiles_n = ceil_div(N, BLOCK_N);
  const int pid_m = blockIdx.x / tiles_n, pid_n = blockIdx.x % tiles_n;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / 4 * 64 + lane / 2 % 8 * 4;
  const int col = warp % 4 * 32 + (lane / 16 * 2 + lane % 2) * 4;
  const int a_row = threadIdx.x / (BLOCK_K / 4), a_col = threadIdx.x % (BLOCK_K / 4) * 4;
  const int b_row = threadIdx.x / (BLOCK_N / 4), b_col = threadIdx.x % (BLOCK_N / 4) * 4;

  // Four more floats a row spread A's transposing stores over the banks: no conflicts with BLOCK_K = 8.
  alignas(16) __shared__ float a_tile[2][BLOCK_K][BLOCK_M + 4];
  alignas(16) __shared__ float b_tile[2][BLOCK_K][BLOCK_N];
  Pack<float> a_next[PACKS], b_next[PACKS];
  const auto fetch = [&](int k0) {
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      a_next[p] = load_pack<VECTOR>(a, pid_m * BLOCK_M + a_row + p * (BLOCK_M / PACKS), k0 + a_col, M, K);
      b_next[p] = load_pack<VECTOR>(b, k0 + b_row + p * (BLOCK_K / PACKS), pid_n * BLOCK_N + b_col, K, N);
    }
  };
  float acc[8][8] = {};
  fetch(0);

  for (int k0 = 0, stage = 0; k0 < K; k0 += BLOCK_K, stage ^= 1) {
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
#pragma unroll
      for (int j = 0; j < 4; ++j) a_tile[stage][a_col + j][a_row + p * (BLOCK_M / PACKS)] = a_next[p].x[j];
      pack_at(b_tile[stage][b_row + p * (BLOCK_K / PACKS)][b_col]) = b_next[p];
    }
    // The one barrier: this stage is written, and nobody still reads the other one.
    __syncthreads();
    fetch(k0 + BLOCK_K);  // past K this reads nothing
#pragma unroll
    for (int k = 0; k < BLOCK_K; ++k) {
      const Pack<float> a_frag[2] = {pack_at(a_tile[stage][k][row]), pack_at(a_tile[stage][k][row + 32])};
      const Pack<float> b_frag[2] = {pack_at(b_tile[stage][k][col]), pack_at(b_tile[stage][k][col + 16])};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) acc[i][j] += a_frag[i / 4].x[i % 4] * b_frag[j / 4].x[j % 4];
      }
    }
  }

#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      store_pack<VECTOR>(c, pid_m * BLOCK_M + row + i / 4 * 32 + i % 4, pid_n * BLOCK_N + col + j / 4 * 16, M,
                         N, &acc[i][j], alpha, beta);
    }
  }
}

template <int BLOCK_K>
cudaError_t run(const Gemm& gemm) {
  const auto kernel =
      vectorizable<float>(gemm) ? warp_tiled_kernel<BLOCK_K, true> : warp_tiled_kernel<BLOCK_K, false>;
  return launch_tiles(kernel, BLOCK_M, BLOCK_N, THREADS, gemm);
}

extern "C" cudaError_t launch(const char* variant, const Gemm& gemm) {
  const std::string_view name = variant;
  if (name == "128x128x8_8x8") return run<8>(gemm);
  if (name == "128x128x16_8x8") return run<16>(gemm);
  return cudaErrorInvalidValue;
}
