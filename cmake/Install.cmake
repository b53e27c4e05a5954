# cmake --install installs the command, both libraries, the public headers, and the package for find_package(foremoe).
# The target `installed` builds only what is installed. The installed tree is relocatable.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Public headers: the headers named in docs/users/library.md, and the headers that they include. All others are private.
set(public_headers
  cluster/cluster.h cluster/cost_model.h cluster/model_shape.h cluster/topology.h core/array.h
  core/debug_mode.h core/error.h
  core/ids.h core/memory_limit.h core/option.h core/parallel.h core/safetensors.h core/timeline.h core/units.h evaluate/evaluate.h
  evaluate/plan_choice.h
  evaluate/running_plan.h evaluate/workload.h foremoe.h homes/choose_homes.h homes/home_search.h homes/token_sets.h
  plan/check_plan.h plan/homes_file.h plan/plan_figures.h plan/plan_file.h
  plan/assign_rows.h plan/rank_dispatch.h plan/route_tokens.h plan/row_choice.h plan/step_plan.h planner/planner.h
  planner/planner_options.h
  cluster/online_work.h policy/policy.h rollout/batching.h rollout/collector.h rollout/count_routes.h
  rollout/file_kind.h rollout/load_file.h rollout/load_table.h rollout/packing.h rollout/rollout_follower.h rollout/routing_trace.h
  rollout/synthesis/synthesis.h rollout/trace_file.h sim/simulation.h transfer/checksum.h transfer/copy_link.h
  transfer/expert_layout.h transfer/host_arena.h transfer/rank_turns.h transfer/shared_memory.h
  transfer/transfer_engine.h transfer/transfer_schedule.h transfer/turn_order.h)
set(public_runtime_headers
  runtime/communicator.h runtime/cpu/experts.h runtime/cpu/multiply.h runtime/cpu/row_tiles.h
  runtime/phase_executor.h runtime/process_group.h runtime/threads/thread_group.h)
function(install_library target)
  list(TRANSFORM ARGN PREPEND ${PROJECT_SOURCE_DIR}/src/foremoe/)
  target_sources(${target} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}/src FILES ${ARGN})
  install(TARGETS ${target} EXPORT foremoeTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
endfunction()
install_library(foremoe ${public_headers})
install_library(foremoe_runtime ${public_runtime_headers})
install(TARGETS foremoe_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
add_custom_target(installed DEPENDS foremoe_command foremoe foremoe_runtime)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/foremoe)
install(EXPORT foremoeTargets NAMESPACE foremoe:: DESTINATION ${package_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/foremoeConfig.cmake.in
  ${PROJECT_BINARY_DIR}/foremoeConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/foremoeConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/foremoeConfig.cmake ${PROJECT_BINARY_DIR}/foremoeConfigVersion.cmake
  DESTINATION ${package_dir})
