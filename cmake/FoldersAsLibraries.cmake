# One folder, one library: foremoe_folder(plan DEPENDS rollout cluster LINKS fmt::fmt) makes the library
# foremoe_plan of every source in this folder that is not a test, and the test program plan_test of every
# *_test.cpp beside them. A folder of headers alone becomes an interface library. DEPENDS are folders: the arrows
# of docs/developers/architecture.md, kept by the linker. A folder beneath it that has a CMakeLists.txt is a library of
# its own. Sources may use fmt and nlohmann's JSON; public headers must not, so that a consumer needs neither.

include(TestPrograms)

add_library(foremoe_warnings INTERFACE)
# Scores are floats and decide ties: no fused multiply-add may make them differ from one processor to the next.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)

target_compile_options(foremoe_warnings INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Wno-missing-field-initializers
  $<$<BOOL:${FOREMOE_WERROR}>:-Werror>)

# What only parses and prints is compiled with -O1 in a release: a third less time, and nobody waits for it.
set(foremoe_light_optimisation $<$<CONFIG:Release>:-O1>)

function(foremoe_folder name)
  cmake_parse_arguments(ARG "PARSES_AND_PRINTS" "TEST_SHARDS" "DEPENDS;LINKS;TEST_LINKS" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS *.cpp)
  file(GLOB own_libraries RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} */CMakeLists.txt)
  foreach(library ${own_libraries})
    get_filename_component(library ${library} DIRECTORY)
    list(FILTER sources EXCLUDE REGEX "^${CMAKE_CURRENT_SOURCE_DIR}/${library}/")
  endforeach()
  set(tests ${sources})
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$")
  list(FILTER tests INCLUDE REGEX "_test\\.cpp$")
  list(TRANSFORM ARG_DEPENDS PREPEND foremoe_)

  if(sources)
    set(scope PUBLIC)
    add_library(foremoe_${name} STATIC ${sources})
    target_link_libraries(foremoe_${name} PRIVATE foremoe_warnings fmt::fmt nlohmann_json::nlohmann_json)
    # Position-independent, for shared libraries and Python modules to link. Nobody replaces a function of ours at load
    # time, so calls inside a source may still be inlined.
    set_target_properties(foremoe_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON
      ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR})
    target_compile_options(foremoe_${name} PRIVATE -fno-semantic-interposition)
    if(ARG_PARSES_AND_PRINTS)
      target_compile_options(foremoe_${name} PRIVATE ${foremoe_light_optimisation})
    endif()
  else()
    set(scope INTERFACE)
    add_library(foremoe_${name} INTERFACE)
  endif()
  target_include_directories(foremoe_${name} ${scope} ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(foremoe_${name} ${scope} ${ARG_DEPENDS} ${ARG_LINKS})

  if(FOREMOE_TESTS AND tests)
    foremoe_test_program(${name}_test SOURCES ${tests} LINKS foremoe_${name} ${ARG_TEST_LINKS} SHARDS "${ARG_TEST_SHARDS}")
  endif()
endfunction()
