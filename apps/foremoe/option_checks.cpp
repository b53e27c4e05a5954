#include "option_checks.h"

#include <fmt/format.h>

#include <cmath>

namespace foremoe::cli {
namespace {

// A check that shows nothing in the help: the description of the option says what values mean.
CLI::Validator check(std::function<std::string(const std::string&)> test) {
  return {[test = std::move(test)](std::string& value) { return test(value); }, std::string{}};
}

constexpr double kMostNumber = 1e9;  // of any unit that an option has; in 10⁹ bytes, what 64 bits count

CLI::Validator number_check(bool zero) {
  return check([=](const std::string& text) -> std::string {
    double value = 0;
    if (!CLI::detail::lexical_cast(text, value) || !std::isfinite(value)) return fmt::format("'{}' is no number", text);
    if (value < 0 || (value == 0 && !zero)) return fmt::format("{} is not {}", text, zero ? "0 or more" : "above 0");
    if (value > kMostNumber) return fmt::format("{} is more than {:g}", text, kMostNumber);
    return {};
  });
}

}  // namespace

CLI::Validator in_range(std::int64_t least, std::int64_t most) {
  return check([=](const std::string& text) -> std::string {
    std::int64_t value = 0;
    if (!CLI::detail::lexical_cast(text, value)) return fmt::format("'{}' is not a whole number", text);
    if (value < least) return fmt::format("{} is less than {}", value, least);
    if (value > most) return fmt::format("{} is more than {}", value, most);
    return {};
  });
}

CLI::Validator at_least(std::int64_t least) { return in_range(least, std::numeric_limits<std::int32_t>::max()); }

CLI::Validator positive_number() { return number_check(false); }

CLI::Validator number_from_zero() { return number_check(true); }

CLI::Validator fraction(double most) {
  return check([=](const std::string& text) -> std::string {
    double value = 0;
    if (!CLI::detail::lexical_cast(text, value) || !std::isfinite(value)) return fmt::format("'{}' is no number", text);
    if (value < 0 || value > most) return fmt::format("{} is not in [0, {}]", value, most);
    return {};
  });
}

}  // namespace foremoe::cli
