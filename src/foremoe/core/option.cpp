#include "foremoe/core/option.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <type_traits>

#include "foremoe/core/did_you_mean.h"
#include "foremoe/core/error.h"

namespace foremoe {
namespace {

[[noreturn]] void reject(const std::string& name, const std::string& what) { throw InputError({.field = name}, what); }

bool is_whole_number(std::string_view text) {
  if (!text.empty() && (text.front() == '-' || text.front() == '+')) text.remove_prefix(1);
  return !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

// Returns nullopt if the number does not fit T.
template <class T>
std::optional<T> whole_number(const std::string& name, std::string_view text) {
  if (!is_whole_number(text)) reject(name, fmt::format("'{}' is not a whole number", text));
  if (text.front() == '+') text.remove_prefix(1);
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string range_text(IntegerRange range) {
  if (range.least == range.most) return fmt::format("{}", range.least);
  if (range.most == std::numeric_limits<std::int64_t>::max()) return fmt::format("{} or more", range.least);
  return fmt::format("{} … {}", range.least, range.most);
}

std::string range_text(NumberRange range) {
  if (range.above) return fmt::format("above {:g}, at most {:g}", range.least, range.most);
  return fmt::format("{:g} … {:g}", range.least, range.most);
}

double parse_number(const std::string& name, const std::string& text, NumberRange range) {
  double value = 0;
  const char* const begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), value);
  const bool whole = end == text.data() + text.size() && !text.empty();
  if (error == std::errc::result_out_of_range && whole) value = std::numeric_limits<double>::infinity();
  if ((error != std::errc{} && error != std::errc::result_out_of_range) || !whole || std::isnan(value)) {
    reject(name, fmt::format("'{}' is not a number", text));
  }
  if (value < range.least || (range.above && value == range.least) || value > range.most) {
    reject(name, fmt::format("{} is not {}{}", text, range.above ? "" : "in ", range_text(range)));
  }
  return value;
}

// Binds an option to a variable of type T or std::optional<T>.
template <class T, class Variable, class Range>
Option bound(Option option, Variable& variable, Range range) {
  option.type = std::is_integral_v<T> ? "integer" : "number";
  option.range = range_text(range);
  option.set = [&variable, range, name = option.name](const std::string& text) {
    if constexpr (std::is_integral_v<T>) {
      variable = static_cast<T>(parse_integer(name, text, range));
    } else {
      variable = parse_number(name, text, range);
    }
  };
  return option;
}

Option with_default(Option option, const std::string& value) {
  if (option.initial.empty() && !option.required) option.initial = value;
  return option;
}

std::string list_of(const std::vector<std::string>& words) {
  std::string list;
  for (std::size_t i = 0; i < words.size(); ++i) {
    list += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + words[i];
  }
  return list;
}

}  // namespace

std::int64_t parse_integer(const std::string& name, const std::string& text, IntegerRange range) {
  const auto value = whole_number<std::int64_t>(name, text);
  if (!value || *value < range.least || *value > range.most) {
    const bool one = range.least == range.most;
    reject(name, fmt::format("{} is not {}{}", text, one ? "" : "in ", range_text(range)));
  }
  return *value;
}

Option integer_option(Option option, int& variable, IntegerRange range) {
  return bound<int>(with_default(std::move(option), fmt::format("{}", variable)), variable, range);
}

Option integer_option(Option option, std::int64_t& variable, IntegerRange range) {
  return bound<std::int64_t>(with_default(std::move(option), fmt::format("{}", variable)), variable, range);
}

Option integer_option(Option option, std::optional<int>& variable, IntegerRange range) {
  return bound<int>(std::move(option), variable, range);
}

Option integer_option(Option option, bool& variable) {
  return bound<int>(with_default(std::move(option), variable ? "1" : "0"), variable, IntegerRange{0, 1});
}

Option seed_option(Option option, std::uint64_t& variable) {
  option.initial = fmt::format("{}", variable);
  option.type = "integer";
  option.range = fmt::format("0 … {}", std::numeric_limits<std::uint64_t>::max());
  option.set = [&variable, name = option.name, range = option.range](const std::string& text) {
    const auto value = whole_number<std::uint64_t>(name, text);
    if (!value) reject(name, fmt::format("{} is not in {}", text, range));
    variable = *value;
  };
  return option;
}

Option number_option(Option option, double& variable, NumberRange range) {
  return bound<double>(with_default(std::move(option), fmt::format("{:g}", variable)), variable, range);
}

Option number_option(Option option, std::optional<double>& variable, NumberRange range) {
  return bound<double>(std::move(option), variable, range);
}

Option flag_option(Option option, bool& variable, bool value) {
  option.type = "flag";
  option.set = [&variable, value](const std::string&) { variable = value; };
  return option;
}

Option text_option(Option option, std::string& variable) {
  option = with_default(std::move(option), variable);
  option.type = "text";
  option.set = [&variable](const std::string& text) { variable = text; };
  return option;
}

Option list_option(Option option, std::vector<std::string>& variable) {
  option = with_default(std::move(option), fmt::format("{}", fmt::join(variable, ",")));
  option.type = "list";
  option.set = [&variable](const std::string& text) { variable = split_list(text); };
  return option;
}

Option values_option(Option option, std::vector<std::string>& variable) {
  option.type = "values";
  option.set = [&variable](const std::string& text) { variable.push_back(text); };
  return option;
}

Option integer_or_word_option(Option option, IntegerRange range, std::vector<std::string> words,
                              std::function<void(std::optional<std::int64_t> number, const std::string& word)> set) {
  option.type = "integer";
  option.range = range_text(range);
  option.words = std::move(words);
  option.set = [range, name = option.name, words = option.words, set = std::move(set)](const std::string& text) {
    if (std::ranges::find(words, text) != words.end()) return set(std::nullopt, text);
    if (!is_whole_number(text)) {
      reject(name, fmt::format("'{}' is not a whole number in {}, nor {}{}", text, range_text(range), list_of(words),
                               did_you_mean(text, words)));
    }
    set(parse_integer(name, text, range), {});
  };
  return option;
}

Option word_option(Option option, std::vector<std::string> words, std::function<void(std::size_t index)> set) {
  option.type = "word";
  option.words = std::move(words);
  option.set = [name = option.name, words = option.words, set = std::move(set)](const std::string& text) {
    const auto at = std::ranges::find(words, text);
    if (at == words.end())
      reject(name, fmt::format("'{}', expected {}{}", text, list_of(words), did_you_mean(text, words)));
    set(static_cast<std::size_t>(at - words.begin()));
  };
  return option;
}

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> parts;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    parts.push_back(text.substr(at, comma - at));
    at = comma + 1;
  }
  return parts;
}

Option& option_named(std::vector<Option>& options, std::string_view name) {
  const auto at = std::ranges::find(options, name, &Option::name);
  if (at == options.end()) reject(std::string(name), "is not an option");
  return *at;
}

std::string command_line_name(std::string_view name) {
  std::string option = "--" + std::string(name);
  std::ranges::replace(option, '_', '-');
  return option;
}

}  // namespace foremoe
