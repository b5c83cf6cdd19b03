// The table of cached calls: what a call is looked up by, and what it launches. Neither torch nor Python is
// used here.
#pragma once
#include <atomic>
#include <deque>
#include <unordered_map>

#include "launch.h"

namespace triton_gemm {

constexpr int kMaxWords = 96;

// All that calls have in common that launch the same, as integers: the operation, the state that choices
// depend on, and of every operand all but its address.
struct Key {
  int64_t words[kMaxWords];
  int size = 0;
  uint64_t hash = 0;

  // Words beyond the last are not kept: such a key is `full`, and no call has it.
  void add(int64_t word) {
    if (size < kMaxWords) words[size] = word;
    ++size;
    hash = (hash ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  bool full() const { return size > kMaxWords; }
};

struct Shape {
  std::vector<int64_t> sizes, strides;
  int dtype;  // c10::ScalarType
};

// Finds a workspace where `Workspaces` has none.
struct Allocator {
  virtual ~Allocator() = default;
  virtual Workspace workspace(int device, CUstream stream) = 0;
};

// C++ has none; that of a @ b or of a @ b.T, with or without a bias.
enum class Derivative { kNone, kProduct, kLinear };
// What is applied to the product, where C++ has its derivative.
enum class Activation { kNone, kRelu, kGelu, kGeluTanh, kSilu };

// Of a plan that takes turns: Python changes these numbers, too, while threads count calls. A call that is
// lost or counted twice does no harm.
struct Turns {
  // Calls until Python takes one; 1: the next is reported to Python, 2: the next reports its stream; that
  // stream.
  int64_t* own = nullptr;
  Job* job = nullptr;  // of all plans

  // Whether Python is to take this call, as it may run on another plan.
  bool take_one() const { return own != nullptr && __atomic_sub_fetch(own, 1, __ATOMIC_RELAXED) < 0; }
  // Whether this call, which was launched, is to be reported to Python.
  bool report_one() const { return own != nullptr && __atomic_load_n(own + 1, __ATOMIC_RELAXED) == 1; }
  // A call was launched on that stream. A stream that is captured is not said.
  void say(const Driver& driver, CUstream stream) const {
    if (own == nullptr || __atomic_load_n(own + 1, __ATOMIC_RELAXED) != 2 || is_captured(driver, stream))
      return;
    __atomic_store_n(own + 2, reinterpret_cast<int64_t>(stream), __ATOMIC_RELEASE);
    __atomic_store_n(own + 1, 0, __ATOMIC_RELEASE);
  }
};

// What a cached call launches.
struct Entry {
  Shape result;  // of a call without `out`
  std::vector<Shape> temporaries;
  uint64_t workspace_bytes;              // of partial sums
  std::shared_ptr<Allocator> allocator;  // null: the launches share no memory
  std::array<uint64_t, 3> extents;       // bytes from the first element of a, b and c to the end of the last
  bool copies;  // whether the launches add to the result, which is a copy of the last auxiliary operand first
  int preactivations;  // matrices that the launches store for a backward, as the result lies: with a gate 2
  Derivative derivative;
  Activation activation;
  std::vector<Step> steps;
  std::shared_ptr<void> owner;  // Python's plan, which has the kernels, `calls` and its own `turns`
  int64_t* calls = nullptr;     // counts the launches of a stand-in; null: these are the call's own kernels
  Turns turns;
  int64_t stand_ins = 0;  // `State::stand_ins` when a stand-in was kept
};

// Calls by key, at most `capacity`: the oldest is given up first. Threads may share it. A forked child finds
// nothing in its parent's, because a thread of that may have held the lock; it makes tables of its own.
class Table {
 public:
  explicit Table(size_t capacity);
  std::shared_ptr<const Entry> find(const Key& key) const;
  void keep(const Key& key, std::shared_ptr<const Entry> entry);
  void clear();
  bool empty() const { return empty_.load(std::memory_order_acquire); }

 private:
  struct Kept {
    std::vector<int64_t> words;
    std::shared_ptr<const Entry> entry;
  };
  using Entries = std::unordered_multimap<uint64_t, Kept>;
  Entries::const_iterator position(const Key& key) const;

  bool is_of_parent() const;

  const size_t capacity_;
  const int forks_;
  std::atomic<bool> empty_ = true;
  mutable std::shared_mutex changing_;  // never held while an entry ends, which may run Python
  Entries entries_;
  std::deque<Entries::const_iterator>
      order_;  // the oldest first; valid, as what is reserved is never rehashed
};

}  // namespace triton_gemm
