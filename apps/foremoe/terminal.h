#pragma once

// What the terminal can show.

#include <cstdio>

namespace foremoe::cli {

bool is_terminal(std::FILE* stream);

// Columns of the terminal that stdout is; 100 when it is none.
int terminal_columns();

// May stdout be coloured? Only on a terminal that can, unless NO_COLOR is set.
bool wants_color();

}  // namespace foremoe::cli
