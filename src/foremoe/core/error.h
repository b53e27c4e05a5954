#pragma once

// Bad input. Whatever a caller or a file can get wrong is an `InputError` that says where: the file, the field in it
// and the index that is at fault. Broken invariants are assertions.
//
//   throw InputError({.file = path}, "cannot be read");
//   throw InputError({.field = "guest_slots"}, "must be from 0 to 8");

#include <stdexcept>
#include <string>

namespace foremoe {

struct Where {
  std::string file{};   // path as the user gave it; empty when the value never was in a file
  std::string field{};  // tensor, JSON key or line; without a file, the argument: "guest_slots" (the command line makes
                        // --guest-slots of it). Empty when the file as a whole is meant.
  std::string index{};  // "[3, 0, 17]", "line 12"; empty when the field as a whole is meant
};

class InputError : public std::runtime_error {
 public:
  InputError(Where where, const std::string& problem);  // what(): "file: field[index]: problem"

  const Where& where() const { return where_; }
  const std::string& problem() const { return problem_; }

 private:
  Where where_;
  std::string problem_;
};

// How a number that is out of range is refused: "must be 16", "must be an integer from 0 to 8".
std::string must_be_integer(long long low, long long high);

}  // namespace foremoe
