// Checks of the table of cached calls and of its keys.
#include "table.h"

#include <sys/wait.h>
#include <unistd.h>

#include "checks.h"

namespace triton_gemm {
namespace {

Key key_of(const std::vector<int64_t>& words) {
  Key key;
  for (const int64_t word : words) key.add(word);
  return key;
}

// An entry that can be told from others, which does something when it ends.
template <typename AtEnd>
std::shared_ptr<const Entry> entry_of(uint64_t number, AtEnd at_end) {
  auto entry = std::make_shared<Entry>();
  entry->extents[0] = number;
  entry->owner = std::shared_ptr<void>(entry.get(), [at_end](void*) { at_end(); });
  return entry;
}
std::shared_ptr<const Entry> entry_of(uint64_t number) {
  return entry_of(number, [] {});
}

uint64_t number_at(const Table& table, const Key& key) {  // 0: there is none
  const auto found = table.find(key);
  return found == nullptr ? 0 : found->extents[0];
}

TEST(equal_words_are_one_key) {
  Table table(8);
  CHECK(table.empty() && table.find(key_of({1, 2, 3})) == nullptr);
  table.keep(key_of({1, 2, 3}), entry_of(7));
  CHECK(!table.empty());
  CHECK(key_of({1, 2, 3}).hash == key_of({1, 2, 3}).hash && number_at(table, key_of({1, 2, 3})) == 7);
  for (const auto& words : {std::vector<int64_t>{1, 2}, {1, 2, 3, 0}, {1, 2, 4}, {1, 3, 2}, {0, 2, 3}, {}})
    CHECK(number_at(table, key_of(words)) == 0);
  Key longer = key_of({1, 2, 3, 4});
  longer.hash = key_of({1, 2, 3}).hash;
  CHECK(number_at(table, longer) == 0);
  longer.size = 3;
  CHECK(number_at(table, longer) == 7);
}

TEST(every_word_and_its_place_change_the_hash) {
  const Key zeros = key_of(std::vector<int64_t>(20, 0));
  for (size_t place = 0; place < 20; ++place)
    for (int bit = 0; bit < 64; ++bit) {
      std::vector<int64_t> words(20, 0);
      words[place] = static_cast<int64_t>(uint64_t{1} << bit);
      CHECK(key_of(words).hash != zeros.hash);
    }
  CHECK(key_of({1, 2}).hash != key_of({2, 1}).hash);
}

TEST(equal_hashes_are_told_apart) {
  Table table(3);
  std::vector<Key> keys;
  for (int64_t i = 0; i < 5; ++i) {
    keys.push_back(key_of({i, 1}));
    keys.back().hash = 42;
  }
  for (size_t i = 0; i < 3; ++i) table.keep(keys[i], entry_of(i + 1));
  for (size_t i = 0; i < 3; ++i) CHECK(number_at(table, keys[i]) == i + 1);
  CHECK(number_at(table, keys[3]) == 0);
  for (size_t i = 3; i < 5; ++i) table.keep(keys[i], entry_of(i + 1));
  for (size_t i = 0; i < 5; ++i) CHECK(number_at(table, keys[i]) == (i < 2 ? 0 : i + 1));
}

TEST(a_key_that_is_full_is_nobody_s) {
  Table table(4);
  const Key most = key_of(std::vector<int64_t>(kMaxWords, 1)),
            more = key_of(std::vector<int64_t>(kMaxWords + 1, 1));
  CHECK(!most.full() && more.full());
  table.keep(most, entry_of(1));
  table.keep(more, entry_of(2));
  CHECK(number_at(table, most) == 1 && number_at(table, more) == 0);
}

TEST(calls_of_a_plan_are_counted) {
  int64_t own[3] = {5, 0, -1};
  const Turns none, turns{own, nullptr};
  CHECK(!none.take_one() && !none.report_one());
  for (int i = 0; i < 5; ++i) CHECK(!turns.take_one());
  CHECK(turns.take_one() && own[0] == -1 && !turns.report_one());
  own[1] = 1;
  CHECK(turns.report_one() && turns.report_one());
  own[0] = 4000;
  std::atomic<int> taken = 0;
  in_threads(4, [&](int thread) {
    for (int i = 0; i < 2000; ++i) {
      taken += turns.take_one();
      if (thread == 0) __atomic_store_n(own + 1, i % 2, __ATOMIC_RELAXED);
      turns.report_one();
    }
  });
  CHECK(taken == 4000 && own[0] == -4000);
}

TEST(a_call_says_its_stream_once_and_none_that_is_captured) {
  static bool captured;
  Driver driver{};
  driver.is_capturing = [](CUstream, CUstreamCaptureStatus* status) {
    *status = captured ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
  };
  int64_t own[3] = {5, 0, -1};
  const Turns none, turns{own, nullptr};
  const auto say = [&](uint64_t stream) { turns.say(driver, reinterpret_cast<CUstream>(stream)); };
  none.say(driver, nullptr);
  for (const int64_t wish : {0, 1}) {
    own[1] = wish;
    say(7);
    CHECK(own[1] == wish && own[2] == -1);
  }
  own[1] = 2;
  captured = true;
  say(7);
  CHECK(own[1] == 2 && own[2] == -1 && !turns.report_one());
  captured = false;
  say(8);
  say(9);
  CHECK(own[0] == 5 && own[1] == 0 && own[2] == 8);
}

TEST(the_oldest_is_given_up) {
  Table table(3);
  for (int round = 0; round < 3; ++round) {
    for (int64_t i = 1; i <= 5; ++i) table.keep(key_of({i}), entry_of(i));
    for (int64_t i = 1; i <= 5; ++i)
      CHECK(number_at(table, key_of({i})) == (i < 3 ? 0 : static_cast<uint64_t>(i)));
    table.clear();
    CHECK(table.empty());
    for (int64_t i = 1; i <= 5; ++i) CHECK(number_at(table, key_of({i})) == 0);
  }
}

TEST(what_is_kept_again_is_the_newest) {
  Table table(3);
  for (int64_t i = 1; i <= 2; ++i) table.keep(key_of({i}), entry_of(i));
  table.keep(key_of({1}), entry_of(10));
  CHECK(number_at(table, key_of({1})) == 10 && number_at(table, key_of({2})) == 2);
  for (int64_t i = 3; i <= 4; ++i) table.keep(key_of({i}), entry_of(i));
  CHECK(number_at(table, key_of({1})) == 10 && number_at(table, key_of({2})) == 0);
}

// An entry's end may run Python, which may call the table.
TEST(entries_end_without_the_lock) {
  Table table(2);
  int ended = 0;
  const auto make = [&](uint64_t number) {
    return entry_of(number, [&] {
      ++ended;
      CHECK(number_at(table, key_of({99})) == 0);
    });
  };
  table.keep(key_of({1}), make(1));
  table.keep(key_of({1}), make(2));
  CHECK(ended == 1);
  table.keep(key_of({2}), make(3));
  table.keep(key_of({3}), make(4));
  CHECK(ended == 2);
  table.clear();
  CHECK(ended == 4);
}

TEST(an_entry_outlives_its_place_while_it_runs) {
  Table table(1);
  std::atomic<int> ended = 0;
  table.keep(key_of({1}), entry_of(1, [&] { ++ended; }));
  std::atomic<bool> runs = false, given_up = false;
  std::thread runner([&] {
    const auto found = table.find(key_of({1}));
    CHECK(found != nullptr);
    runs = true;
    while (!given_up) std::this_thread::yield();
    CHECK(found->extents[0] == 1 && ended == 0);
  });
  while (!runs) std::this_thread::yield();
  table.keep(key_of({2}), entry_of(2));
  CHECK(number_at(table, key_of({1})) == 0);
  table.clear();
  given_up = true;
  runner.join();
  CHECK(ended == 1);
}

TEST(threads_find_what_is_theirs) {
  Table table(16);
  std::atomic<int> alive = 0;
  in_threads(6, [&](int thread) {
    for (int64_t i = 0; i < 2000; ++i) {
      const int64_t number = 1 + (i * 7 + thread) % 24;
      Key key = key_of({number});
      key.hash %= 5;  // many collide
      const uint64_t found = number_at(table, key);
      CHECK(found == 0 || found == static_cast<uint64_t>(number));
      if (found == 0) {
        ++alive;
        table.keep(key, entry_of(number, [&] { --alive; }));
      }
      if (i % 500 == 499 && thread == 0) table.clear();
    }
  });
  CHECK(alive <= 16);
  table.clear();
  CHECK(alive == 0 && table.empty());
}

// What the child does must not wait for a lock that a thread of its parent may have held.
int in_child(void (*body)(Table&), Table& table) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    body(table);
    std::_Exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  return status;
}

void finds_nothing(Table& of_parent) {
  CHECK(!of_parent.empty() && number_at(of_parent, key_of({1})) == 0);
  of_parent.keep(key_of({2}), entry_of(2));
  of_parent.clear();
  CHECK(!of_parent.empty() && number_at(of_parent, key_of({2})) == 0);
  Table own(2);
  own.keep(key_of({3}), entry_of(3));
  CHECK(number_at(own, key_of({3})) == 3);
}

TEST(a_forked_child_has_tables_of_its_own) {
  Table table(2);
  table.keep(key_of({1}), entry_of(1));
  CHECK(in_child(finds_nothing, table) == 0);
  CHECK(in_child(
            [](Table& of_parent) {
              Table own(2);
              own.keep(key_of({1}), entry_of(1));
              CHECK(in_child(finds_nothing, of_parent) == 0 && in_child(finds_nothing, own) == 0);
            },
            table) == 0);
  CHECK(number_at(table, key_of({1})) == 1);
}

#ifndef __SANITIZE_ADDRESS__  // its allocator may hold a lock during a fork: the child would wait for ever
TEST(a_child_waits_for_no_thread_of_its_parent) {
  Table table(2);
  std::atomic<bool> ends = false;
  std::thread keeper([&] {
    for (int64_t i = 0; !ends; ++i) table.keep(key_of({i % 4}), entry_of(i));
  });
  while (table.empty()) std::this_thread::yield();
  for (int i = 0; i < 20; ++i) CHECK(in_child(finds_nothing, table) == 0);
  ends = true;
  keeper.join();
}
#endif

}  // namespace
}  // namespace triton_gemm
