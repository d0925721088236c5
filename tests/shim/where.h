// Places in the source, and how the shim gives up.
#pragma once

namespace texvlm::shim {

// Where in the source something happened: as a default argument, where the call is.
struct Where {
  const char* file;
  int line;
  constexpr Where(const char* file = __builtin_FILE(), int line = __builtin_LINE()) : file(file), line(line) {}
};

// Prints what is wrong, and where, and aborts.
[[noreturn]] void fail(Where where, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace texvlm::shim
