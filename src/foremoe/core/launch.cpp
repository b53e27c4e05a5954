#include "foremoe/core/launch.h"

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string_view>

namespace foremoe {
namespace {

bool is_set(const char* variable) {
  return std::getenv(variable) != nullptr;  // NOLINT(concurrency-mt-unsafe): nothing sets the environment here
}

std::optional<std::uint32_t> number_in(const char* variable) {
  const char* const value = std::getenv(variable);  // NOLINT(concurrency-mt-unsafe): as above
  if (value == nullptr) return {};
  const std::string_view text(value);
  std::uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

// From this step id on, Slurm reserves ids for steps that srun did not start, such as an sbatch script or salloc shell.
constexpr std::uint32_t kFirstReservedStep = 0xffff'fff0;

std::optional<std::uint32_t> tasks_of_srun() {
  const auto step = number_in("SLURM_STEP_ID");
  if (!step || *step >= kFirstReservedStep || is_set("SLURM_PTY_PORT")) return {};
  return number_in("SLURM_STEP_NUM_TASKS");
}

}  // namespace

Launch launch() {
  const bool joins = is_set("OMPI_COMM_WORLD_SIZE") || is_set("PMI_RANK") || is_set("PMIX_RANK");
  const struct {
    const char* variable;
    std::optional<std::uint32_t> processes;
  } launchers[] = {{"OMPI_COMM_WORLD_SIZE", number_in("OMPI_COMM_WORLD_SIZE")},
                   {"PMI_SIZE", number_in("PMI_SIZE")},
                   {"SLURM_STEP_NUM_TASKS", tasks_of_srun()}};
  for (const auto& [variable, processes] : launchers) {
    if (processes) return {.processes = static_cast<int>(*processes), .variable = variable, .joins = joins};
  }
  return {.joins = joins};
}

}  // namespace foremoe
