#pragma once

// An option declares its name, type, range, default, help and the variable that it sets. The command line is generated
// from lists of options. Keys of TOML files and Python keywords use the same names.
//
//   std::vector<Option> options_of(PlannerOptions& o) {
//     return {integer_option({.name = "guest_slots", .value = "G", .help = "…"}, o.guest_slots, {0, 512}), …};
//   }
//
// Values are strings, as a user types them. Setting an invalid value throws InputError with the option's name as its
// field and a message that describes the valid values.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "foremoe/core/debug_mode.h"

namespace foremoe {

struct Option {
  std::string name;        // guest_slots; on a command line --guest-slots
  char letter = 0;         // short form: 'G' is -G; 0: none
  std::string value = {};  // placeholder for the value in help: "G", "TOKENS"; empty for a flag
  std::string help = {};
  std::string initial = {};  // the default as text; if empty, the default is the variable's value, or there is none
  std::string group = {};    // heading in the full help
  std::string former = {};   // previous name; using it is an error that names the new one
  bool main = false;         // listed in the short help, too
  bool required = false;
  bool positional = false;

  // Set by the functions below.
  std::string type = {};                // "integer", "number", "word", "flag", "text", "list", "values"
  std::string range = {};               // "0 … 512"
  std::vector<std::string> words = {};  // the valid words; for a number, words accepted besides numbers
  std::function<void(const std::string& text)> set = {};
};

struct IntegerRange {
  std::int64_t least = 0;
  std::int64_t most = 0;
};
inline constexpr int kUnlimited = 1 << 30;  // an upper bound for values without limit

struct NumberRange {
  double least = 0;
  double most = 1e9;
  bool above = false;  // excludes `least`
};

Option integer_option(Option option, int& variable, IntegerRange range);
Option integer_option(Option option, std::int64_t& variable, IntegerRange range);
Option integer_option(Option option, std::optional<int>& variable, IntegerRange range);
Option integer_option(Option option, bool& variable);        // 0 or 1
Option seed_option(Option option, std::uint64_t& variable);  // any 64-bit value
Option number_option(Option option, double& variable, NumberRange range);
Option number_option(Option option, std::optional<double>& variable, NumberRange range);
Option flag_option(Option option, bool& variable, bool value = true);  // if given, sets the variable to `value`
Option text_option(Option option, std::string& variable);
Option list_option(Option option, std::vector<std::string>& variable);    // "a,b,c"
Option values_option(Option option, std::vector<std::string>& variable);  // may be repeated or have several values

// Accepts a count, or a word such as "none" for no limit.
Option integer_or_word_option(Option option, IntegerRange range, std::vector<std::string> words,
                              std::function<void(std::optional<std::int64_t> number, const std::string& word)> set);

// Accepts one of several words and passes its index to `set`.
Option word_option(Option option, std::vector<std::string> words, std::function<void(std::size_t index)> set);

template <class T>
Option word_option(Option option, T& variable, const std::vector<std::pair<std::string, T>>& choices) {
  std::vector<std::string> words;
  for (const auto& [word, value] : choices) {
    words.push_back(word);
    if (option.initial.empty() && !option.required && value == variable) option.initial = word;
  }
  return word_option(std::move(option), std::move(words),
                     [&variable, choices](std::size_t index) { variable = choices[index].second; });
}

// Parses a whole number. Throws InputError, field `name`, if the text is not a number or is out of range.
std::int64_t parse_integer(const std::string& name, const std::string& text, IntegerRange range);
std::vector<std::string> split_list(const std::string& text);  // at commas; an empty text has no parts

// Throws InputError if no option has this name.
Option& option_named(std::vector<Option>& options, std::string_view name);

// "--guest-slots".
std::string command_line_name(std::string_view name);

}  // namespace foremoe
