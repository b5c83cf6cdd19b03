// What the tensor-core twins share: the alpha/beta store of an accumulator fragment.
#pragma once

#include <cuda_fp16.h>
#include <mma.h>

#include "common.cuh"

namespace wmma = nvcuda::wmma;

// Which lane holds which element is unspecified, so alpha, beta and the edges are applied in shared memory.
template <typename Accumulator>
__device__ void store_fragment(float (&scratch)[16][16], const Accumulator& acc, float* c, int row, int col,
                               int M, int N, float alpha, float beta) {
  wmma::store_matrix_sync(&scratch[0][0], acc, 16, wmma::mem_row_major);
  __syncwarp();
#pragma unroll
  for (int i = threadIdx.x % 32; i < 16 * 16; i += 32) {
    store(c, row + i / 16, col + i % 16, M, N, scratch[i / 16][i % 16], alpha, beta);
  }
  __syncwarp();  // the next fragment overwrites the scratch
}
