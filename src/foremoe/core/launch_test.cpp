#include "foremoe/core/launch.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

namespace foremoe {
namespace {

// Calls launch() with these launcher variables and no others in the environment.
Launch launch_with(const std::map<std::string, std::string>& variables) {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "SLURM_STEP_ID",
                           "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_PTY_PORT"}) {
    unsetenv(name);
  }
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  const Launch found = launch();
  for (const auto& [name, value] : variables) unsetenv(name.c_str());
  return found;
}

TEST(Launch, CountsTheProcessesOfMpirunAndSrun) {
  const std::map<std::string, std::string> step{
      {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "3"}};
  auto step_of_pmix = step;
  step_of_pmix["PMIX_RANK"] = "3";
  auto mpirun_on_four_nodes = step;  // its daemons are a Slurm step
  mpirun_on_four_nodes["OMPI_COMM_WORLD_SIZE"] = "32";
  const struct {
    const char* launcher;
    std::map<std::string, std::string> variables;
    int processes;
    bool joins;
  } cases[] = {{"Open MPI", {{"OMPI_COMM_WORLD_SIZE", "8"}}, 8, true},
               {"Open MPI, one process", {{"OMPI_COMM_WORLD_SIZE", "1"}}, 1, true},
               {"Hydra, srun --mpi=pmi2", {{"PMI_SIZE", "8"}, {"PMI_RANK", "0"}}, 8, true},
               {"srun", step, 4, false},
               {"srun --mpi=pmix", step_of_pmix, 4, true},
               {"mpirun by srun", mpirun_on_four_nodes, 32, true}};
  for (const auto& c : cases) {
    const Launch found = launch_with(c.variables);
    EXPECT_EQ(found.processes, c.processes) << c.launcher;
    EXPECT_EQ(found.joins, c.joins) << c.launcher;
  }
}

TEST(Launch, IsOneProcessWithoutALauncher) {
  const std::map<std::string, std::string> of_job{{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}};
  auto script_of_a_step = of_job;  // submitted from within a step of four tasks
  script_of_a_step["SLURM_STEP_NUM_TASKS"] = "4";
  script_of_a_step["SLURM_STEP_ID"] = "4294967291";
  const std::map<std::string, std::map<std::string, std::string>> cases{
      {"no launcher", {}},
      {"sbatch", of_job},
      {"sbatch in a step", script_of_a_step},
      {"salloc", {{"SLURM_NTASKS", "4"}}},
      {"srun --pty", {{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_PTY_PORT", "41234"}}},
      {"nonsense", {{"OMPI_COMM_WORLD_SIZE", "many"}}}};
  for (const auto& [launcher, variables] : cases) EXPECT_EQ(launch_with(variables).processes, 1) << launcher;
}

}  // namespace
}  // namespace foremoe
