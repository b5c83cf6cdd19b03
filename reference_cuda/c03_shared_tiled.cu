// Shared-memory tiling: a block stages TILE x TILE of A and of B, and reads every element TILE times.
//
// Changes:  c02's global loads go through shared memory; the element type is a template parameter.
// Why:      TILE threads want the same word, and shared memory is nearer than L2.
// Predicts: global reads per result fall from 2K to 2K / TILE; shared reads are 2K.
//           PAD gives nothing: a[y][k] is a broadcast and b[k][x] a row, so no banks conflict without it.
//           It costs: odd rows keep the compiler from reading A four words at a time, 64 loads for 40.
// Requires: fp32 or int32 (alpha and beta are then whole numbers); any M, N, K.
// Bound by: shared-memory bandwidth: a warp's 40 loads for 32 multiply-adds, of which an SM does 4 a clock.
// Next:     c04 keeps several results a thread, so that one shared read serves several FMAs.
#include "common.cuh"

template <typename T, int TILE, int PAD>
__global__ void shared_tiled_kernel(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ c,
                                    int M, int N, int K, T alpha, T beta) {
  const int tiles_n = ceil_div(N, TILE);
  const int pid_m = blockIdx.x / tiles_n, pid_n = blockIdx.x % tiles_n;
  const int x = threadIdx.x, y = threadIdx.y;
  const int row = pid_m * TILE + y;
  const int col = pid_n * TILE + x;

  __shared__ T a_tile[TILE][TILE + PAD];
  __shared__ T b_tile[TILE][TILE + PAD];
  T acc = 0;

  for (int k0 = 0; k0 < K; k0 += TILE) {
    a_tile[y][x] = load(a, row, k0 + x, M, K);
    b_tile[y][x] = load(b, k0 + y, col, K, N);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TILE; ++k) acc += a_tile[y][k] * b_tile[k][x];
    __syncthreads();
  }

  store(c, row, col, M, N, acc, alpha, beta);
}

template <typename T, int TILE, int PAD>
cudaError_t run(const Gemm& gemm) {
  return launch_tiles(shared_tiled_kernel<T, TILE, PAD>, TILE, TILE, dim3(TILE, TILE), gemm);
}

extern "C" cudaError_t launch(const char* variant, const Gemm& gemm) {
  const std::string_view name = variant;
  if (name == "fp32_32") return run<float, 32, 0>(gemm);
  if (name == "fp32_32_pad") return run<float, 32, 1>(gemm);
  if (name == "fp32_16") return run<float, 16, 0>(gemm);
  if (name == "fp32_16_pad") return run<float, 16, 1>(gemm);
  if (name == "int32_16") return run<int, 16, 0>(gemm);
  if (name == "int32_16_pad") return run<int, 16, 1>(gemm);
  if (name == "int32_32") return run<int, 32, 0>(gemm);
  if (name == "int32_32_pad") return run<int, 32, 1>(gemm);
  return cudaErrorInvalidValue;
}
