#pragma once

// The little that these tests need: checks that report and go on, and an exit code.

#include <functional>
#include <iostream>
#include <random>
#include <source_location>
#include <string>

#include "epiloq/error.h"

namespace test {

inline int failures = 0;

inline void report(char const* file, int line, std::string const& what) {
  std::cerr << file << ":" << line << ": " << what << "\n";
  ++failures;
}

template <class A, class B>
void equal(char const* file, int line, A const& got, B const& expected) {
  if (got == expected) return;
  std::cerr << file << ":" << line << ": expected " << expected << ", got " << got << "\n";
  ++failures;
}

// The call must throw an E whose message holds each of the parts.
template <class E>
void throws(char const* file, int line, std::function<void()> const& call, std::initializer_list<std::string> parts) {
  try {
    call();
  } catch (E const& error) {
    std::string const message = error.what();
    for (std::string const& part : parts) {
      if (message.find(part) == std::string::npos) report(file, line, "\"" + part + "\" is not in: " + message);
    }
    return;
  } catch (std::exception const& error) {
    return report(file, line, std::string("another exception: ") + error.what());
  }
  report(file, line, "nothing was thrown");
}

// The call of fresh operands with one change must be refused with a message that holds each of the parts.
template <class Operands, class Change>
void refused(Change change, std::initializer_list<std::string> parts,
             std::source_location at = std::source_location::current()) {
  Operands operands;
  change(operands.call);
  throws<epiloq::InvalidArgument>(at.file_name(), static_cast<int>(at.line()), [&] { check(operands.call); }, parts);
}

// A fresh generator; its seed is printed, for a failure to be repeated.
inline std::mt19937 generator() {
  auto const seed = std::random_device{}();
  std::cerr << "seed " << seed << "\n";
  return std::mt19937(seed);
}

}  // namespace test

#define CHECK(condition) \
  if (!(condition)) test::report(__FILE__, __LINE__, #condition)
#define CHECK_EQUAL(got, expected) test::equal(__FILE__, __LINE__, got, expected)
#define CHECK_THROWS(Error, call, ...) test::throws<Error>(__FILE__, __LINE__, [&] { call; }, {__VA_ARGS__})
