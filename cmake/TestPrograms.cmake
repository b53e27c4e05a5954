# foremoe_test_program(plan_test SOURCES … LINKS … SHARDS 2): a GoogleTest program and its entries in ctest. ctest
# starts one process per shard, not one per test: a thousand processes, each of which registers all its tests anew, cost
# minutes under sanitizers. scripts/test_summary counts the tests in what the processes print.
#
# Programs in which a test or its fixture has Thread in its name get the label `threads`, and the target `thread_tests`
# builds them. policy and sim get none: they only hand a pool to the planner (scripts/check_thoroughly runs them too).
#
# Under sanitizers, test sources are compiled without optimisation and without ubsan, which takes half of the time:
# what they are to find is in the libraries.

if(FOREMOE_TESTS)
  find_package(GTest REQUIRED)
  add_custom_target(thread_tests)
endif()

function(foremoe_test_program name)
  cmake_parse_arguments(ARG "" "SHARDS" "SOURCES;LINKS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LINKS} GTest::gtest GTest::gmock GTest::gtest_main foremoe_warnings
    fmt::fmt nlohmann_json::nlohmann_json)
  if(FOREMOE_SANITIZE)
    target_compile_options(${name} PRIVATE -O0 -fno-sanitize=undefined)
  endif()

  set(labels "")
  foreach(source ${ARG_SOURCES})
    file(STRINGS ${source} with_threads REGEX "^(TYPED_)?TEST(_F|_P)?\\(.*Thread|^INSTANTIATE.*\\(.*Thread" LIMIT_COUNT 1)
    if(with_threads)
      set(labels threads)
    endif()
  endforeach()
  if(name MATCHES "^(policy|sim)_test$")
    set(labels "")
  endif()
  if(labels)
    add_dependencies(thread_tests ${name})
  endif()

  if(NOT ARG_SHARDS)
    set(ARG_SHARDS 1)
  endif()
  math(EXPR last "${ARG_SHARDS} - 1")
  foreach(shard RANGE ${last})
    set(entry ${name})
    if(ARG_SHARDS GREATER 1)
      math(EXPR ordinal "${shard} + 1")
      set(entry ${name}.${ordinal}_of_${ARG_SHARDS})
    endif()
    add_test(NAME ${entry} COMMAND ${name} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    set_tests_properties(${entry} PROPERTIES LABELS "${labels}" COST ${ARG_SHARDS}
      ENVIRONMENT "GTEST_TOTAL_SHARDS=${ARG_SHARDS};GTEST_SHARD_INDEX=${shard}")
  endforeach()
endfunction()
