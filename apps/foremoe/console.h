#pragma once

// Terminal output of the commands: results on stdout in tables that fit the terminal, everything else on stderr. Also
// checks output files before the work begins.

#include <fmt/format.h>

#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace foremoe::cli {

// Escapes control characters ("\\x1b", "\\n"). Names come from untrusted files and must not move the cursor or imitate
// our output.
std::string printable(std::string_view text);

// fmt::print() to stdout with all text values made printable.
template <class T>
auto shown(const T& value) {
  if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    return printable(value);
  } else {
    return value;
  }
}
template <class T>
using Shown = decltype(shown(std::declval<const T&>()));
template <class... T>
void print_values(fmt::format_string<Shown<T>...> format, const T&... values) {
  fmt::print(format, shown(values)...);
}

// Prints one line on stderr about a decision that the program made by itself: "foremoe: … batched again …".
void note(std::string_view text);
void note_all(const std::vector<std::string>& texts);

// Turns notes and progress off. If several processes do the same work, all but one call this.
void be_quiet();

// If stderr is a terminal, shows a line there with the activity and the elapsed time. The line appears after one
// second, and the destructor removes it.
class Activity {
 public:
  explicit Activity(std::string what);

 private:
  std::jthread line_;
};

// A progress callback. Each text ends the previous activity and starts one; the destructor ends the last.
class Progress {
 public:
  void operator()(const std::string& what);
  void end() { activity_.reset(); }

 private:
  std::optional<Activity> activity_;
};

bool is_terminal(std::FILE* stream);
int terminal_columns();  // of stdout; 100 if it is not a terminal
bool wants_color();      // stdout is a terminal with colours and NO_COLOR is not set

std::size_t text_columns(std::string_view text);  // number of code points of UTF-8 text

// A table with columns as wide as needed, the first left-aligned, the others right-aligned. If the terminal is too
// narrow, the remaining columns follow in further blocks, each of which repeats the first column.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> head) : rows_{std::move(head)} {}

  // If there are fewer cells than columns, the last cell may extend to the end of the line. Makes cells printable.
  void add(std::vector<std::string> cells);

  std::string to_string() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// Two left-aligned columns: name and value.
class FactList {
 public:
  void add(std::string name, std::string_view fact) { facts_.emplace_back(std::move(name), printable(fact)); }
  std::string to_string() const;

 private:
  std::vector<std::pair<std::string, std::string>> facts_;
};

// Throws InputError with field `option` if no file can be created at `out`, if `out` is one of the inputs (by any name
// or link), or if it is "-", since outputs are whole files. Ignores empty names: options that were not given.
void expect_output(const std::string& out, const std::vector<std::string>& inputs = {}, const char* option = "out");

}  // namespace foremoe::cli
