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

#define RUN(check)                        \
  do {                                    \
    std::fprintf(stderr, "%s\n", #check); \
    check();                              \
  } while (false)

// Runs this in so many threads at once, each with its number.
template <typename Body>
void in_threads(int count, const Body& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}
