#pragma once

// The processes that a launcher (mpirun, mpiexec, srun) started together with this one.
//
// A launcher describes the job to each process in environment variables. The innermost launcher counts: mpirun starts
// its own daemons by srun, so the variables of Open MPI and PMI (Hydra, `srun --mpi=pmi2`) are read before Slurm's.
//
// Slurm sets SLURM_NTASKS and SLURM_PROCID for the script of an sbatch too, which is one process. Only srun sets
// SLURM_STEP_NUM_TASKS. A script that was submitted from within a step inherits it, but has the step id of a script. Of
// `srun --pty`, an interactive shell, one process has the terminal, whatever the number of tasks.

namespace foremoe {

struct Launch {
  int processes = 1;          // that run this command, this one included
  const char* variable = "";  // of the environment, which says so
  bool joins = false;         // can MPI_Init join them? Not those that srun started without PMI or PMIx
};

Launch launch();

}  // namespace foremoe
