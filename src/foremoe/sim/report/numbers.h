#pragma once

// Numbers as a reader wants to see them: three digits that count, a unit that fits, and a space that no line breaks at.

#include <cstdint>
#include <string>

namespace foremoe::report {

std::string seconds_text(double seconds);      // "12.3 s", "3.40 ms", "78.0 µs", "0 s"
std::string bytes_text(double bytes);          // "1.23 GB", in powers of 1000
std::string times_text(double factor);         // "1.42×"
std::string percent_text(double fraction);     // "99.1 %"
std::string counted_text(std::int64_t count);  // "12,345"
std::string ratio_text(double ratio);          // "1.017"; "17.2" where that is enough
std::string tick_text(double value);           // as short as exact: "0.5", "20"

}  // namespace foremoe::report
