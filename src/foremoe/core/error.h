#pragma once

// Bad input. Everything that a caller or a file can get wrong is reported as an `InputError` that names
// where: the file (or option), the field in it, and the offending index. Broken invariants are assertions.

#include <stdexcept>
#include <string>

namespace foremoe {

struct Where {
  std::string file;   // path or option as the user gave it; empty when the value never was in a file
  std::string field;  // tensor, JSON key or line; empty when the file as a whole is meant
  std::string index;  // "[3, 0, 17]", "line 12"; empty when the field as a whole is meant
};

class InputError : public std::runtime_error {
 public:
  InputError(Where where, const std::string& what);  // message "file: field[index]: what"
  const Where& where() const { return where_; }

 private:
  Where where_;
};

}  // namespace foremoe
