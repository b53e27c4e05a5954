# One program contains the conformance tests on MPI processes. mpirun starts it with the ranks that a test needs.
set(folder ${PROJECT_SOURCE_DIR}/src/foremoe/runtime/mpi/under_mpirun)
add_executable(mpi_conformance ${folder}/mpi_main_test.cpp ${folder}/mpi_conformance_test.cpp ${folder}/peer_messages_test.cpp)
target_link_libraries(mpi_conformance PRIVATE foremoe_runtime GTest::gtest GTest::gmock MPI::MPI_CXX foremoe_warnings)
add_executable(dying_rank ${folder}/dying_rank.cpp)
target_link_libraries(dying_rank PRIVATE foremoe_runtime MPI::MPI_CXX foremoe_warnings)

set(FOREMOE_MPIRUN_FLAGS --oversubscribe --bind-to none CACHE STRING "flags of mpirun: tests start more ranks than cores")
# Containers run as root, and their processes may not read each other's memory. Open MPI's plugins are already unloaded
# when the sanitizer looks for leaks, so only a complete stack attributes a leak to them.
set(mpirun_environment OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_vader_single_copy_mechanism=none
  ASAN_OPTIONS=fast_unwind_on_malloc=0
  LSAN_OPTIONS=suppressions=${folder}/open_mpi_leaks.supp:print_suppressions=0
  TSAN_OPTIONS=suppressions=${folder}/open_mpi_races.supp:print_suppressions=0)

# Adds a test that expects a job to end by itself with exit status `status`.
function(mpirun_test name ranks status program)
  add_test(NAME mpirun.${name}_on_${ranks} COMMAND sh -c "\"$@\"; test $? -eq ${status}" sh
    ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} ${FOREMOE_MPIRUN_FLAGS} $<TARGET_FILE:${program}> ${ARGN})
  set_tests_properties(mpirun.${name}_on_${ranks} PROPERTIES TIMEOUT 120 PROCESSORS 2 ENVIRONMENT "${mpirun_environment}")
endfunction()
mpirun_test(conformance 1 0 mpi_conformance)
mpirun_test(conformance 2 0 mpi_conformance)
mpirun_test(conformance 4 0 mpi_conformance)
mpirun_test(killed_rank_ends_the_job 3 137 dying_rank killed)
mpirun_test(rank_that_stops_ends_the_job 3 3 dying_rank stops)
mpirun_test(rank_that_gives_up_ends_the_job 3 3 dying_rank gives_up)
