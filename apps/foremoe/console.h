#pragma once

// Terminal output of the commands. Results go to stdout, in tables that fit the terminal; everything else goes to
// stderr. Also checks that output files can be created before the work begins.

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "foremoe/core/message_text.h"

namespace foremoe::cli {

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

// Prints one line on stderr about an automatic decision: "foremoe: … batched again …".
void note(std::string_view text);
void note_all(const std::vector<std::string>& texts);

// Turns notes and progress off. If several processes do the same work, all but one of them call be_quiet().
void be_quiet();
bool is_quiet();

bool is_terminal(std::FILE* stream);
int terminal_columns();  // of stdout; 100 if it is not a terminal
bool wants_color();      // stdout is a terminal with colours and NO_COLOR is not set

std::size_t text_columns(std::string_view text);  // number of code points of UTF-8 text

// A table with columns as wide as needed, the first left-aligned, the others right-aligned. If the terminal is too
// narrow, the remaining columns are printed in further blocks. Each block repeats the first column.
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

// Throws InputError, field `option`, if `out` cannot be created, is one of the inputs (by any name or link), or is "-"
// (outputs are whole files). Ignores empty names, which are options that were not given. Notes if `out` is a link.
void expect_output(const std::string& out, const std::vector<std::string>& inputs = {}, const char* option = "out");

}  // namespace foremoe::cli
