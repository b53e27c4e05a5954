#pragma once

// Remarks on options that were given but have no effect. Each is a sentence that names the option in backquotes.

#include <set>
#include <span>
#include <string>
#include <vector>

#include "foremoe/evaluate/step_input.h"

namespace foremoe {

using GivenNames = std::set<std::string, std::less<>>;

// Options that have no effect on this input or, if only one policy is asked, on that policy. (Each of several policies
// uses the options that it has.) Whether a policy supports the residency is checked when it plans.
std::vector<std::string> remarks_on_unused(const StepInput& input, const std::vector<const Policy*>& policies,
                                           const PolicyInput& asked, const GivenNames& given);

// Batching options, which have no effect on a load nor on a trace that recorded its batches.
std::vector<std::string> remarks_on_batching(const StepInput& input, const GivenNames& given);

// A remark on each of these options that was given: "`sequence_tokens` has no effect without a cluster".
std::vector<std::string> remarks_on_all(std::span<const Option> options, const GivenNames& given, std::string_view why);

}  // namespace foremoe
