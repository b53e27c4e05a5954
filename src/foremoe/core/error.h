#pragma once

// Bad input. Whatever a caller or a file can get wrong is an `InputError` that says where: the file, the field in it
// and the index that is at fault. Broken invariants are assertions.
//
//   throw InputError({.file = path}, "cannot be read");
//   throw InputError({.field = "guest_slots"}, "must be from 0 to 8");

#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace foremoe {

struct Where {
  std::string file{};   // path as the user gave it; empty when the value never was in a file
  std::string field{};  // tensor, JSON key or line; without a file, an argument of the caller, such as "guest_slots";
                        // empty when the file as a whole is meant
  std::string index{};  // "[3, 0, 17]", "line 12"; empty when the field as a whole is meant
};

// A problem may name further arguments in backquotes: "`tokens_per_rank` is too small for …".
class InputError : public std::runtime_error {
 public:
  InputError(Where where, const std::string& problem);  // what(): "file: field[index]: problem"

  const Where& where() const { return where_; }
  const std::string& problem() const { return problem_; }

 private:
  Where where_;
  std::string problem_;
};

// The text with every argument in backquotes spelt as its reader knows it.
std::string spell_arguments(std::string_view text, const std::function<std::string(std::string_view)>& spell_argument);

// What the error says, with every argument spelt as the reader of the message knows it: the field where there is no
// file, and whatever the problem names in backquotes. The command line turns guest_slots into --guest-slots.
std::string message_of(const InputError& error, const std::function<std::string(std::string_view)>& spell_argument);

// How a number that is out of range is refused: "must be 16", "must be an integer from 0 to 8".
std::string must_be_integer(long long low, long long high);

}  // namespace foremoe
