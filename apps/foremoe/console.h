#pragma once

// How commands speak to people: results on stdout in tables that fit, everything else on stderr, and files that are
// looked at before the work begins.

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

// The text with control characters as escapes ("\\x1b", "\\n"): names come from files that strangers wrote, and may not
// move the cursor or begin a line that looks like ours.
std::string printable(std::string_view text);

// fmt::print() to stdout with every text among the values made printable.
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

// "foremoe: … batched anew …": one line on stderr that the user did not ask for but should know.
void note(std::string_view text);
void note_all(const std::vector<std::string>& texts);

// From now on notes and progress are off: of several processes that do the same, one speaks.
void be_quiet();

// Long work in progress: while it lives, a line on stderr says what is done and for how long; only on a terminal, only
// after the first second. The line is removed at the end.
class Activity {
 public:
  explicit Activity(std::string what);

 private:
  std::jthread line_;
};

// A progress callback: each text ends the activity before it. The last one ends with this object.
class Progress {
 public:
  void operator()(const std::string& what);
  void end() { activity_.reset(); }

 private:
  std::optional<Activity> activity_;
};

bool is_terminal(std::FILE* stream);
int terminal_columns();  // of stdout; 100 when it is not a terminal
bool wants_color();      // stdout is a terminal that can, and NO_COLOR is not set

std::size_t text_columns(std::string_view text);  // columns of UTF-8 text: its code points

// Columns as wide as they need to be, the first to the left, all others to the right. On a terminal that is too narrow
// the columns that do not fit follow in a second block, each with the first column again.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> head) : rows_{std::move(head)} {}

  // Fewer cells than columns: the last one may run over the rest of the line. Cells are made printable.
  void add(std::vector<std::string> cells);

  std::string to_string() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// Two columns, both to the left: a name, and what there is to say of it.
class FactList {
 public:
  void add(std::string name, std::string_view fact) { facts_.emplace_back(std::move(name), printable(fact)); }
  std::string to_string() const;

 private:
  std::vector<std::pair<std::string, std::string>> facts_;
};

// Throws InputError, field `option`, when no file can be made at `out`, when it would replace one of the inputs, by
// whatever name or link, and for "-": outputs are whole files. Empty names are options that were not given.
void expect_output(const std::string& out, const std::vector<std::string>& inputs = {}, const char* option = "out");

}  // namespace foremoe::cli
