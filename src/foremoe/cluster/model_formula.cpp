#include "foremoe/cluster/model_formula.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <utility>
#include <vector>

namespace foremoe {
namespace {

// Weakest first. Each begins with those that others are the beginning of.
constexpr std::array<std::array<std::string_view, 7>, 6> kOperators{
    {{"??"}, {"||"}, {"&&"}, {"==", "!=", "<=", ">=", "<", ">", "in"}, {"+", "-"}, {"*", "//", "/", "%"}}};

// Parses a formula into functions, so that branches that are not chosen are not evaluated.
class Formula {
 public:
  Formula(std::string_view text, const std::string& file, const std::function<nlohmann::json(const std::string&)>& find)
      : text_{text}, file_{file}, find_{find} {}

  FormulaValue value() {
    const Value all = choice();
    if (skip_spaces() != '\0') syntax_error();
    nlohmann::json value = all();
    return {std::move(value), std::move(key_), std::move(keys_)};
  }

 private:
  using Value = std::function<nlohmann::json()>;

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

  double number(const nlohmann::json& value) const { return whole_number(value, {.file = file_, .field = key_}); }
  static bool truth(const nlohmann::json& v) {
    return !(v.is_null() || v == false || v == 0 || (v.is_structured() && v.empty()));
  }

  Value choice() {
    Value condition = binary(0);
    if (!take("?")) return condition;
    const Value yes = choice();
    expect(":");
    return [=, no = choice()] { return truth(condition()) ? yes() : no(); };
  }

  Value binary(std::size_t level) {
    if (level == kOperators.size()) return prefixed();
    const std::size_t begin = (skip_spaces(), at_);
    Value left = binary(level + 1);
    while (true) {
      std::string left_text(text_.substr(begin, at_ - begin));
      while (left_text.ends_with(' ')) left_text.pop_back();
      const auto* const op = std::ranges::find_if(kOperators[level], [&](auto o) { return !o.empty() && take(o); });
      if (op == kOperators[level].end()) return left;
      left = [=, this, right = binary(level + 1)] { return apply(*op, left, right, left_text); };
    }
  }

  nlohmann::json apply(std::string_view op, const Value& left, const Value& right, const std::string& left_text) const {
    nlohmann::json a = left();
    if (op == "??") return a.is_null() ? right() : a;
    if (op == "||") return truth(a) || truth(right());
    if (op == "&&") return truth(a) && truth(right());
    const Where left_where{.file = file_, .field = key_};
    const nlohmann::json b = right();
    if (op == "==") return a == b;
    if (op == "!=") return a != b;
    if (op == "in") return b.is_array() && std::ranges::find(b, a) != b.end();
    const double x = whole_number(a, left_where), y = number(b);
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
    if (std::fmod(x, y) != 0) fail(key_, fmt::format("{} does not divide {}, {}", y, left_text, x));
    return x / y;
  }

  Value prefixed() {
    if (take("!")) return [of = prefixed()] { return !truth(of()); };
    if (take("-")) return [this, of = prefixed()] { return -number(of()); };
    Value value = single();
    while (true) {
      if (take(".")) {
        value = [this, value, name = word()] {
          const nlohmann::json holder = value();
          key_ += "." + name;
          return holder.is_object() ? holder.value(name, nlohmann::json()) : nlohmann::json();
        };
      } else if (take("[")) {
        value = [this, value, index = choice()] {
          const nlohmann::json list = list_of(value());
          const std::string key = key_;
          const nlohmann::json i = index();
          key_ = key;
          return element(list, i);
        };
        expect("]");
      } else {
        return value;
      }
    }
  }

  static nlohmann::json list_of(const nlohmann::json& value) {  // a text's are its letters
    if (!value.is_string()) return value;
    nlohmann::json letters = nlohmann::json::array();
    for (const char c : value.get_ref<const std::string&>()) letters.push_back(std::string(1, c));
    return letters;
  }

  nlohmann::json element(const nlohmann::json& list, const nlohmann::json& index) const {
    if (!list.is_array()) return list;
    const double i = number(index);
    if (i < 0 || i >= static_cast<double>(list.size())) {
      fail(key_, fmt::format("has {} values, but number {} is needed", list.size(), i));
    }
    return list[static_cast<std::size_t>(i)];
  }

  Value single() {
    const char c = skip_spaces();
    if (take("(")) {
      Value inner = choice();
      expect(")");
      return inner;
    }
    if (c == '\'') {
      const std::size_t end = text_.find('\'', at_ + 1);
      if (end == std::string_view::npos) syntax_error();
      std::string quoted(text_.substr(at_ + 1, end - at_ - 1));
      at_ = end + 1;
      return [quoted = std::move(quoted)] { return quoted; };
    }
    const std::string name = word();
    if (name.empty()) syntax_error();
    if (std::isdigit(static_cast<unsigned char>(c)) != 0) return [n = std::stod(name)] { return n; };
    if (name == "null") return [] { return nullptr; };
    if (take("(")) return call(name);
    keys_.insert(name);
    return [this, name] {
      key_ = name;
      return find_(name);
    };
  }

  Value call(const std::string& function) {
    std::vector<Value> values;
    do values.push_back(choice());
    while (take(","));
    expect(")");
    if (function == "len") return [of = values[0]] { return static_cast<double>(list_of(of()).size()); };
    if (function != "same") syntax_error();
    return [=, this] { return same(values); };
  }

  nlohmann::json same(const std::vector<Value>& values) {
    nlohmann::json first;
    std::string key;  // of the first that is not missing, or else of the first
    for (const Value& value : values) {
      const nlohmann::json found = value();
      if (!first.is_null() && !found.is_null() && found != first) {
        fail(key_, fmt::format("is {}, but another key says {}", found.dump(), first.dump()));
      }
      if (first.is_null() && (key.empty() || !found.is_null())) key = key_, first = found;
    }
    key_ = key;
    return first;
  }

  std::string_view text_;
  const std::string& file_;
  const std::function<nlohmann::json(const std::string&)>& find_;
  std::size_t at_ = 0;
  std::string key_;
  std::set<std::string> keys_;
};

}  // namespace

FormulaValue evaluate_formula(std::string_view formula, const std::string& file,
                              const std::function<nlohmann::json(const std::string&)>& find) {
  return Formula(formula, file, find).value();
}

double whole_number(const nlohmann::json& value, const Where& where) {
  if (value.is_null()) throw InputError(where, "is missing");
  if (value.is_boolean()) return value.get<bool>() ? 1 : 0;
  const double number = value.is_number() ? value.get<double>() : NAN;
  if (number != std::floor(number)) throw InputError(where, "must be a whole number");  // also nan
  return number;
}

}  // namespace foremoe
