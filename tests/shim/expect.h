// For the drivers: EXPECT(condition) counts and prints what does not hold; `return done();` ends main.
#pragma once

#include <cstdio>

inline int failures = 0;

#define EXPECT(condition)                                                                                        \
  do {                                                                                                           \
    if (!(condition) && ++failures <= 10) std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
  } while (false)

inline int done() {
  std::puts(failures ? "wrong" : "right");
  return failures ? 1 : 0;
}
