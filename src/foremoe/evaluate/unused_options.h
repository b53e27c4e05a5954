#pragma once

// Options that were given and have no effect, in sentences that name options in backquotes: nobody should believe that
// an option did something that it did not.

#include <set>
#include <span>
#include <string>
#include <vector>

#include "foremoe/evaluate/step_input.h"

namespace foremoe {

using GivenNames = std::set<std::string, std::less<>>;

// On the input and, where one policy alone is asked, on it; of several policies each uses what it can. Whether the
// residency can be is for the plan to say.
std::vector<std::string> remarks_on_unused(const StepInput& input, const std::vector<const Policy*>& policies,
                                           const PolicyInput& asked, const GivenNames& given);

// On how an input is batched, where it is a load or was recorded in batches.
std::vector<std::string> remarks_on_batching(const StepInput& input, const GivenNames& given);

// On each of the options that was given: "`sequence_tokens` has no effect without a cluster".
std::vector<std::string> remarks_on_all(std::span<const Option> options, const GivenNames& given, std::string_view why);

}  // namespace foremoe
