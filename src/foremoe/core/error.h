#pragma once

// Errors in input. Every error that a caller or a file can cause is an `InputError` with the file, the field and the
// index at fault. Broken invariants are assertions.
//
//   throw InputError({.file = path}, "cannot be read");
//   throw InputError({.field = "guest_slots"}, "must be from 0 to 8");

#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "foremoe/core/debug_mode.h"

namespace foremoe {

struct Where {
  std::string file{};   // path as the user gave it; empty if the value is not from a file
  std::string field{};  // tensor, JSON key or line; without a file, an argument of the call, such as "guest_slots";
                        // empty for the whole file
  std::string index{};  // "[3, 0, 17]", "line 12"; empty for the whole field
};

// The problem may name further arguments in backquotes: "`tokens_per_rank` is too small for …".
class InputError : public std::runtime_error {
 public:
  InputError(Where where, const std::string& problem);  // what(): "file: field[index]: problem"

  const Where& where() const { return where_; }
  const std::string& problem() const { return problem_; }

 private:
  Where where_;
  std::string problem_;
};

// Returns the text with every argument in backquotes replaced by spell_argument(argument).
std::string spell_arguments(std::string_view text, const std::function<std::string(std::string_view)>& spell_argument);

// Returns the error's message with arguments spelt for its reader. Arguments are the names in backquotes and, if there
// is no file, the field. For example, the command line spells guest_slots as --guest-slots.
std::string message_of(const InputError& error, const std::function<std::string(std::string_view)>& spell_argument);

// Problem text for a number out of range: "must be 16", "must be an integer from 0 to 8".
std::string must_be_integer(long long low, long long high);

}  // namespace foremoe
