// What every twin shares: guarded loads, the alpha/beta store, and the launch over tiles of C.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string_view>

#include "gemm.h"

template <typename T>
__host__ __device__ constexpr T ceil_div(T x, T y) {
  return (x + y - 1) / y;
}

// Sixteen bytes: the most that one thread moves in one instruction.
template <typename T>
struct alignas(16) Pack {
  static constexpr int SIZE = 16 / sizeof(T);
  T x[SIZE];
};

// The pack that starts at x, an element on 16 bytes.
template <typename T>
__device__ Pack<T>& pack_at(T& x) {
  return reinterpret_cast<Pack<T>&>(x);
}

// Outside the matrix the operands read as zero, so that main loops need no edge case.
template <typename T>
__device__ T load(const T* matrix, int row, int col, int rows, int cols) {
  return row < rows && col < cols ? matrix[size_t(row) * cols + col] : T{};
}

// VECTOR promises 16-byte rows and pointers: then a pack is either wholly inside or wholly outside.
template <bool VECTOR, typename T>
__device__ Pack<T> load_pack(const T* matrix, int row, int col, int rows, int cols) {
  Pack<T> pack{};
  if constexpr (VECTOR) {
    if (row < rows && col < cols) {
      pack = *reinterpret_cast<const Pack<T>*>(matrix + size_t(row) * cols + col);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Pack<T>::SIZE; ++i) pack.x[i] = load(matrix, row, col + i, rows, cols);
  }
  return pack;
}

// A tile[ROWS][COLS] of a matrix into shared memory; LEADING >= COLS is the padded row.
template <int THREADS, int COLS, typename T, int ROWS, int LEADING>
__device__ void stage_tile(T (&tile)[ROWS][LEADING], const T* matrix, int row, int col, int rows, int cols) {
#pragma unroll
  for (int i = threadIdx.x; i < ROWS * COLS; i += THREADS) {
    tile[i / COLS][i % COLS] = load(matrix, row + i / COLS, col + i % COLS, rows, cols);
  }
}

// beta = 0 must not read C, which may hold NaN.
template <typename T>
__device__ void store(T* c, int row, int col, int M, int N, T acc, T alpha, T beta) {
  if (row >= M || col >= N) return;
  T& out = c[size_t(row) * N + col];
  out = beta == T(0) ? alpha * acc : alpha * acc + beta * out;
}

template <bool VECTOR>
__device__ void store_pack(float* c, int row, int col, int M, int N, const float* acc, float alpha,
                           float beta) {
  if constexpr (VECTOR) {
    if (row >= M || col >= N) return;
    Pack<float>& out = *reinterpret_cast<Pack<float>*>(c + size_t(row) * N + col);
    Pack<float> pack{};
    if (beta != 0) pack = out;
#pragma unroll
    for (int i = 0; i < 4; ++i) pack.x[i] = alpha * acc[i] + beta * pack.x[i];
    out = pack;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) store(c, row, col + i, M, N, acc[i], alpha, beta);
  }
}

inline bool aligned(const Gemm& gemm, size_t bytes) {
  const auto bits = uintptr_t(gemm.a) | uintptr_t(gemm.b) | uintptr_t(gemm.c);
  return bits % bytes == 0;
}

// Whether load_pack<true, T> and store_pack<true> are legal: a row is N or K elements.
template <typename T>
bool vectorizable(const Gemm& gemm) {
  return aligned(gemm, sizeof(Pack<T>)) && gemm.N % Pack<T>::SIZE == 0 && gemm.K % Pack<T>::SIZE == 0;
}

// One block a tile, numbered row by row. The grid is 1-D because y and z end at 65535.
template <typename In, typename Out>
cudaError_t launch_tiles(void (*kernel)(const In*, const In*, Out*, int, int, int, Out, Out), int block_m,
                         int block_n, dim3 threads, const Gemm& gemm) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(ceil_div(gemm.M, block_m)) * unsigned(ceil_div(gemm.N, block_n)));
  config.blockDim = threads;
  config.stream = gemm.stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<const In*>(gemm.a), static_cast<const In*>(gemm.b),
                            static_cast<Out*>(gemm.c), gemm.M, gemm.N, gemm.K, Out(gemm.alpha),
                            Out(gemm.beta));
}
