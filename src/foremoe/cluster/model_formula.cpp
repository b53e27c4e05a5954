#include "foremoe/cluster/model_formula.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <vector>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

using nlohmann::json;

// Weakest first. Each begins with those that others are the beginning of.
constexpr std::array<std::array<std::string_view, 7>, 6> kOperators{
    {{"??"}, {"||"}, {"&&"}, {"==", "!=", "<=", ">=", "<", ">", "in"}, {"+", "-"}, {"*", "//", "/", "%"}}};

class Formula {
 public:
  Formula(std::string_view text, const std::string& file, const std::function<json(const std::string&, bool)>& find)
      : text_{text}, file_{file}, find_{find} {}

  FormulaValue value() {
    json all = choice();
    if (skip_spaces() != '\0') syntax_error();
    return {std::move(all), key_};
  }

 private:
  [[noreturn]] void fail(const std::string& key, const std::string& what) const {
    throw InputError({.file = file_, .field = key}, what);
  }
  [[noreturn]] void syntax_error() const { fail(std::string(text_), fmt::format("is no formula from {}", at_)); }

  char skip_spaces() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  static bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }
  bool take(std::string_view token) {
    skip_spaces();
    if (!text_.substr(at_).starts_with(token)) return false;
    const std::size_t end = at_ + token.size();
    if (is_word(token.back()) && end < text_.size() && is_word(text_[end])) return false;
    if (token == "?" && text_.substr(at_).starts_with("??")) return false;
    at_ = end;
    return true;
  }
  void expect(std::string_view token) {
    if (!take(token)) syntax_error();
  }
  std::string word() {
    const std::size_t begin = at_;
    while (at_ < text_.size() && is_word(text_[at_])) ++at_;
    return std::string(text_.substr(begin, at_ - begin));
  }

  double number(const json& value) const { return whole_number(value, file_, key_); }
  static bool truth(const json& v) {
    return !(v.is_null() || v == false || v == 0 || (v.is_structured() && v.empty()));
  }

  json choice() {
    const json condition = binary(0);
    if (!take("?")) return condition;
    const bool live = live_, yes = truth(condition);
    live_ = live && yes;
    json first = choice();
    expect(":");
    live_ = live && !yes;
    json second = choice();
    live_ = live;
    return yes ? first : second;
  }

  json binary(std::size_t level) {
    if (level == kOperators.size()) return prefixed();
    const std::size_t begin = (skip_spaces(), at_);
    json left = binary(level + 1);
    while (true) {
      std::string left_text(text_.substr(begin, at_ - begin));
      while (left_text.ends_with(' ')) left_text.pop_back();
      const auto* const op = std::ranges::find_if(kOperators[level], [&](auto o) { return !o.empty() && take(o); });
      if (op == kOperators[level].end()) return left;
      const bool live = live_;
      if (*op == "??") live_ = live && left.is_null();
      if (*op == "||") live_ = live && !truth(left);
      if (*op == "&&") live_ = live && truth(left);
      const json right = binary(level + 1);
      if (live) left = apply(*op, left, right, left_text);
      live_ = live;
    }
  }

  json apply(std::string_view op, const json& a, const json& b, const std::string& a_text) const {
    if (op == "??") return a.is_null() ? b : a;
    if (op == "||") return truth(a) || truth(b);
    if (op == "&&") return truth(a) && truth(b);
    if (op == "==") return a == b;
    if (op == "!=") return a != b;
    if (op == "in") return b.is_array() && std::ranges::find(b, a) != b.end();
    const double x = number(a), y = number(b);
    if (op == "<=") return x <= y;
    if (op == ">=") return x >= y;
    if (op == "<") return x < y;
    if (op == ">") return x > y;
    if (op == "+") return x + y;
    if (op == "-") return x - y;
    if (op == "*") return x * y;
    if (y == 0) fail(key_, "is 0");
    if (op == "//") return std::floor(x / y);
    if (op == "%") return std::fmod(x, y);
    if (std::fmod(x, y) != 0) fail(key_, fmt::format("{} does not divide {}, {}", y, a_text, x));
    return x / y;
  }

  json prefixed() {
    if (take("!")) return !truth(prefixed());
    if (take("-")) return live_ ? -number(prefixed()) : (prefixed(), 0.0);
    json value = single();
    while (true) {
      if (take(".")) {
        const std::string name = word();
        key_ += "." + name;
        value = value.is_object() && value.contains(name) ? json(value[name]) : json();
      } else if (take("[")) {
        const std::string key = key_;
        const json index = choice();
        expect("]");
        key_ = key;
        if (live_) value = element(value, index);
      } else {
        return value;
      }
    }
  }

  json element(const json& value, const json& index) const {
    if (!value.is_array() && !value.is_string()) return value;
    const double i = number(index);
    const std::size_t size = value.is_array() ? value.size() : value.get_ref<const std::string&>().size();
    if (i < 0 || i >= static_cast<double>(size)) {
      fail(key_, fmt::format("has {} values, but number {} is needed", size, i));
    }
    const auto n = static_cast<std::size_t>(i);
    return value.is_array() ? value[n] : json(std::string(1, value.get_ref<const std::string&>()[n]));
  }

  json single() {
    const char c = skip_spaces();
    if (take("(")) {
      json inner = choice();
      expect(")");
      return inner;
    }
    if (c == '\'') {
      const std::size_t end = text_.find('\'', at_ + 1);
      if (end == std::string_view::npos) syntax_error();
      const std::string quoted(text_.substr(at_ + 1, end - at_ - 1));
      at_ = end + 1;
      return quoted;
    }
    const std::string name = word();
    if (name.empty()) syntax_error();
    if (std::isdigit(static_cast<unsigned char>(c)) != 0) return std::stod(name);
    if (name == "null") return nullptr;
    if (take("(")) return call(name);
    key_ = name;
    json found = find_(name, live_);
    return live_ ? found : json(0);
  }

  json call(const std::string& function) {
    std::vector<json> values;
    std::vector<std::string> keys;
    do {
      values.push_back(choice());
      keys.push_back(key_);
    } while (take(","));
    expect(")");
    if (!live_) return 0;
    if (function == "len") return static_cast<double>(values[0].is_null() ? 0 : values[0].size());
    if (function != "same") syntax_error();
    json first;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (!first.is_null() && !values[i].is_null() && values[i] != first) {
        fail(keys[i], fmt::format("is {}, but another key says {}", values[i].dump(), first.dump()));
      }
      if (first.is_null() && !values[i].is_null()) key_ = keys[i], first = values[i];
    }
    if (first.is_null()) key_ = keys[0];
    return first;
  }

  std::string_view text_;
  const std::string& file_;
  const std::function<json(const std::string&, bool)>& find_;
  std::size_t at_ = 0;
  bool live_ = true;  // false in a branch that is not chosen
  std::string key_;
};

}  // namespace

FormulaValue evaluate_formula(std::string_view formula, const std::string& file,
                              const std::function<json(const std::string&, bool)>& find) {
  return Formula(formula, file, find).value();
}

double whole_number(const json& value, const std::string& file, const std::string& key) {
  const Where where{.file = file, .field = key};
  if (value.is_null()) throw InputError(where, "is missing");
  if (value.is_boolean()) return value.get<bool>() ? 1 : 0;
  const double number = value.is_number() ? value.get<double>() : NAN;
  if (number != std::floor(number)) throw InputError(where, "must be a whole number");  // also nan
  return number;
}

}  // namespace foremoe
