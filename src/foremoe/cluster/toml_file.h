#pragma once

// What readers of TOML files share: clusters, models and families of models. Only for sources of this folder, since
// programs that link the library need no toml++.

// toml++ reports every error of a file, but first asserts (or with Clang assumes) that there is none, such as a key
// that begins with "<".
#include <toml++/impl/preprocessor.h>
#undef TOML_ASSERT
#undef TOML_ASSERT_ASSUME
#define TOML_ASSERT(condition) static_assert(true)
#define TOML_ASSERT_ASSUME(condition) static_assert(true)

#include <toml++/toml.h>
#include <string>
#include <string_view>

namespace foremoe {

toml::table parse_toml(std::string_view text, const std::string& file);        // throws InputError with file and line
std::string line_of(const toml::node& node);                                   // "line 12", for errors
bool is_control(char c);                                                       // a terminal could interpret it
std::string read_toml_name(const toml::table& root, const std::string& file);  // key `name`, without control characters

}  // namespace foremoe
