#pragma once

// --out of a command (or another option that names a file to be written), looked at before the work begins.

#include <string>
#include <vector>

namespace foremoe::cli {

// Throws InputError when no file can be made there, or it would replace one of the inputs, by whatever name or link.
// Empty names are options that were not given.
void expect_output(const std::string& out, const std::vector<std::string>& inputs = {}, const char* option = "--out");

}  // namespace foremoe::cli
