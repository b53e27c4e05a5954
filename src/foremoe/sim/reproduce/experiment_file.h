#pragma once

// Experiments as TOML files: those of the repository's folder reproduce/, which are part of the program, and one's own.

#include <string>
#include <string_view>
#include <vector>

#include "foremoe/sim/reproduce/experiment.h"

namespace foremoe {

// Of the program, in the order in which they are told: docs/results.md has the same.
std::vector<std::string> experiment_names();

// One of the program by name, else a TOML file by that path. Throws InputError naming file and key; when there is
// neither, it lists the names.
Experiment find_experiment(const std::string& name_or_path);

// `file` is what messages call it; its name without folder and ending is the experiment's.
Experiment parse_experiment(std::string_view toml, const std::string& file);

}  // namespace foremoe
