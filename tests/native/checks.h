// Checks that end the process where they fail, in any thread.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#define CHECK(what)                                                       \
  do {                                                                    \
    if (!(what)) {                                                        \
      std::fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #what); \
      std::_Exit(1);                                                      \
    }                                                                     \
  } while (false)

#define CHECK_THROWS(body, Error, text)                                           \
  do {                                                                            \
    try {                                                                         \
      body;                                                                       \
    } catch (const Error& thrown) {                                               \
      CHECK(std::strcmp(thrown.what(), text) == 0);                               \
      break;                                                                      \
    }                                                                             \
    std::fprintf(stderr, "%s:%d: no error from %s\n", __FILE__, __LINE__, #body); \
    std::_Exit(1);                                                                \
  } while (false)

// The tests of a program, which run one after another.
struct Named {
  const char* name;
  void (*run)();
};
inline std::vector<Named> tests;

#define TEST(name)                                                                      \
  void name();                                                                          \
  [[maybe_unused]] const bool name##_is_known = (tests.push_back({#name, name}), true); \
  void name()

int main() {
  for (const Named& test : tests) {
    std::fprintf(stderr, "%s\n", test.name);
    test.run();
  }
}

// Runs `body` in `count` threads at once, and passes each its number.
template <typename Body>
void in_threads(int count, const Body& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}
