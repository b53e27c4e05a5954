#pragma once

// Detects the processes that a launcher (mpirun, mpiexec, srun) started together with this one.
//
// Launchers describe the job in environment variables. The innermost launcher has precedence. Since mpirun starts its
// daemons with srun, the variables of Open MPI and PMI (Hydra, `srun --mpi=pmi2`) override Slurm's.
//
// Slurm also sets SLURM_NTASKS and SLURM_PROCID for an sbatch script, which is one process. Only srun sets
// SLURM_STEP_NUM_TASKS. A script submitted from within a step inherits this variable, but has a step id reserved for
// scripts. An interactive shell (`srun --pty`) counts as one process, since only one process has the terminal.

namespace foremoe {

struct Launch {
  int processes = 1;          // number of processes that run this command, including this one
  const char* variable = "";  // the environment variable that gives this number
  bool joins = false;         // MPI_Init can connect the processes; false if srun started them without PMI or PMIx
};

Launch launch();

}  // namespace foremoe
