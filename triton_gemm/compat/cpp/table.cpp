#include "table.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>

namespace triton_gemm {
namespace {

std::atomic<int> forks = 0;  // of the process and those that it was forked from
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

Table::Table(size_t capacity) : capacity_(capacity), forks_(forks) { entries_.reserve(capacity); }

bool Table::is_of_parent() const { return forks_ != forks.load(std::memory_order_relaxed); }

Table::Entries::const_iterator Table::position(const Key& key) const {
  const auto [begin, end] = entries_.equal_range(key.hash);
  const auto found = std::find_if(begin, end, [&](const auto& one) {
    const std::vector<int64_t>& words = one.second.words;
    return words.size() == static_cast<size_t>(key.size) &&
           std::memcmp(words.data(), key.words, sizeof(int64_t) * words.size()) == 0;
  });
  return found == end ? entries_.end() : found;
}

std::shared_ptr<const Entry> Table::find(const Key& key) const {
  if (empty_.load(std::memory_order_acquire) || key.full() || is_of_parent()) return nullptr;
  const std::shared_lock lock(changing_);
  const auto found = position(key);
  return found == entries_.end() ? nullptr : found->second.entry;
}

void Table::keep(const Key& key, std::shared_ptr<const Entry> entry) {
  if (key.full() || is_of_parent()) return;
  std::vector<Entries::node_type> given_up;  // they end after the lock
  const std::unique_lock lock(changing_);
  while (order_.size() >= capacity_) {
    given_up.push_back(entries_.extract(order_.front()));
    order_.pop_front();
  }
  const auto before = position(key);
  if (before != entries_.end()) {
    order_.erase(std::find(order_.begin(), order_.end(), before));
    given_up.push_back(entries_.extract(before));
  }
  order_.push_back(entries_.emplace(key.hash, Kept{{key.words, key.words + key.size}, std::move(entry)}));
  empty_.store(false, std::memory_order_release);
}

void Table::clear() {
  if (is_of_parent()) return;
  Entries given_up;
  given_up.reserve(capacity_);
  const std::unique_lock lock(changing_);
  empty_.store(true, std::memory_order_release);
  given_up.swap(entries_);
  order_.clear();
}

}  // namespace triton_gemm
