#pragma once

// Formulas of a config.json's keys, with which data/families describes models.
//
//   choice   any ? choice : choice
//   any      ?? (the first that is not missing), ||, &&, == != <= >= < > in, + -, * / % //, ! -, weakest first
//   value    a number, 'text', null, a key, value.key, value[index], f(any, …), (choice)
//   f        len(list), same(…): the first that is not missing; all others must equal it
//
// A missing key is null, and null is an error where a number is needed. `/` must leave no remainder. An index of a
// number returns it, so that key[layer] reads a number for all layers or a list with one for each.

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace foremoe {

struct FormulaValue {
  nlohmann::json value;
  std::string key;  // the last one that was read, for errors
};

// find(key, used) returns a key's value, or null. used: false in a branch that is not chosen; the value is ignored.
// Throws InputError with `file` and the key at fault.
FormulaValue evaluate_formula(std::string_view formula, const std::string& file,
                              const std::function<nlohmann::json(const std::string& key, bool used)>& find);

// The number, with true as 1. Throws InputError with file and key if the value is not a whole number.
double whole_number(const nlohmann::json& value, const std::string& file, const std::string& key);

}  // namespace foremoe
