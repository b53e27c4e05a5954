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
#include <set>
#include <string>
#include <string_view>

#include "foremoe/core/error.h"

namespace foremoe {

struct FormulaValue {
  nlohmann::json value;
  std::string key;             // the last one that was read, for errors
  std::set<std::string> keys;  // that the formula contains
};

// find(key) returns a key's value, or null; not called for keys in branches that are not chosen. Throws InputError with
// `file` and the key at fault.
FormulaValue evaluate_formula(std::string_view formula, const std::string& file,
                              const std::function<nlohmann::json(const std::string& key)>& find);

// The number, with true as 1. Throws InputError if the value is not a whole number.
double whole_number(const nlohmann::json& value, const Where& where);

}  // namespace foremoe
