// Just enough CUDA for g++ to run the twins: one fiber a thread, one block after another.
//
// A barrier yields to the next fiber, so every thread of a block arrives before any goes on. Threads run
// forwards or backwards: a kernel that lacks a barrier is hardly right in both orders. A wmma fragment is the
// whole tile, held by every lane. -fsanitize=undefined watches alignment and array bounds.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx, blockIdx;
extern "C" {
inline bool run_backwards = false;
}

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
using cudaStream_t = void*;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace fibers {
constexpr size_t STACK = 64 << 10;
struct Fiber {
  ucontext_t context;
  bool done;
};
inline ucontext_t scheduler;
inline Fiber* running;
inline std::function<void()> body;

inline void yield() { swapcontext(&running->context, &scheduler); }
inline void enter() {
  body();
  running->done = true;
  yield();
}

inline void run_block(dim3 block) {
  const unsigned threads = block.x * block.y;
  static std::vector<char> stacks;
  if (stacks.size() < threads * STACK) stacks.resize(threads * STACK);
  std::vector<Fiber> fibers(threads);
  for (unsigned t = 0; t < threads; ++t) {
    fibers[t].done = false;
    getcontext(&fibers[t].context);
    fibers[t].context.uc_stack.ss_sp = &stacks[t * STACK];
    fibers[t].context.uc_stack.ss_size = STACK;
    makecontext(&fibers[t].context, enter, 0);
  }
  for (unsigned alive = threads; alive > 0;) {
    alive = 0;
    for (unsigned i = 0; i < threads; ++i) {
      const unsigned t = run_backwards ? threads - 1 - i : i;
      if (fibers[t].done) continue;
      running = &fibers[t];
      threadIdx = dim3(t % block.x, t / block.x);
      swapcontext(&scheduler, &fibers[t].context);
      alive += !fibers[t].done;
    }
  }
}
}  // namespace fibers

inline void __syncthreads() { fibers::yield(); }
inline void __syncwarp() { fibers::yield(); }

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args... args) {
  fibers::body = [&] { kernel(args...); };
  for (unsigned block = 0; block < config->gridDim.x; ++block) {
    blockIdx = dim3(block, 0, 0);
    fibers::run_block(config->blockDim);
  }
  return cudaSuccess;
}

using half = _Float16;

namespace nvcuda::wmma {
struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
enum layout_t { mem_row_major };
namespace precision {
struct tf32;
}

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
  static constexpr int ROWS = std::is_same_v<Use, matrix_b> ? K : M;
  static constexpr int COLS = std::is_same_v<Use, matrix_a> ? K : N;
  float x[ROWS][COLS];
};

inline void require(bool condition) {
  if (!condition) abort();
}

template <typename Fragment>
void fill_fragment(Fragment& fragment, float value) {
  for (auto& row : fragment.x)
    for (auto& x : row) x = value;
}

template <typename Fragment, typename T>
void load_matrix_sync(Fragment& fragment, const T* tile, unsigned leading) {
  require(uintptr_t(tile) % 32 == 0 && leading * sizeof(T) % 16 == 0);
  for (int i = 0; i < Fragment::ROWS; ++i)
    for (int j = 0; j < Fragment::COLS; ++j) fragment.x[i][j] = float(tile[i * size_t(leading) + j]);
}

template <typename Fragment>
void store_matrix_sync(float* tile, const Fragment& fragment, unsigned leading, layout_t) {
  require(uintptr_t(tile) % 32 == 0 && leading % 4 == 0);
  for (int i = 0; i < Fragment::ROWS; ++i)
    for (int j = 0; j < Fragment::COLS; ++j) tile[i * leading + j] = fragment.x[i][j];
}

template <typename D, typename A, typename B>
void mma_sync(D& d, const A& a, const B& b, const D& c) {
  d = c;
  for (int i = 0; i < A::ROWS; ++i)
    for (int k = 0; k < A::COLS; ++k)
      for (int j = 0; j < B::COLS; ++j) d.x[i][j] += a.x[i][k] * b.x[k][j];
}

inline float __float_to_tf32(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits + 0x1000) & ~0x1fffu;
  memcpy(&x, &bits, 4);
  return x;
}
}  // namespace nvcuda::wmma
