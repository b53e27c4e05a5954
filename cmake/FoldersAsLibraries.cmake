# One folder, one library: foremoe_folder(plan DEPENDS rollout cluster LINKS fmt::fmt) makes the library
# foremoe_plan of every source in this folder that is not a test, and the test program plan_test of every
# *_test.cpp beside them. A folder of headers alone becomes an interface library. DEPENDS are folders: the arrows
# of docs/architecture.md, kept by the linker. A folder beneath it that has a CMakeLists.txt is a library of its own.
# Sources may use fmt and nlohmann's JSON; public headers must not, so that a consumer needs neither.

add_library(foremoe_warnings INTERFACE)
# Scores are floats and decide ties: no fused multiply-add may make them differ from one processor to the next.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)

target_compile_options(foremoe_warnings INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Wno-missing-field-initializers
  $<$<BOOL:${FOREMOE_WERROR}>:-Werror>)

function(foremoe_folder name)
  cmake_parse_arguments(ARG "" "" "DEPENDS;LINKS;TEST_LINKS" ${ARGN})
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
  else()
    set(scope INTERFACE)
    add_library(foremoe_${name} INTERFACE)
  endif()
  target_include_directories(foremoe_${name} ${scope} ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(foremoe_${name} ${scope} ${ARG_DEPENDS} ${ARG_LINKS})
  set(files "")
  foreach(library ${ARG_LINKS})
    foremoe_linked_files(${library} files)
  endforeach()
  set_target_properties(foremoe_${name} PROPERTIES FOREMOE_LINKED_FILES "${files}")  # for cmake/BundleFolders.cmake

  if(FOREMOE_TESTS AND tests)
    find_package(GTest REQUIRED)
    include(GoogleTest)
    add_executable(${name}_test ${tests})
    target_link_libraries(${name}_test PRIVATE foremoe_${name} ${ARG_TEST_LINKS} GTest::gtest GTest::gmock
      GTest::gtest_main foremoe_warnings fmt::fmt nlohmann_json::nlohmann_json)
    gtest_discover_tests(${name}_test DISCOVERY_TIMEOUT 60 WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  endif()
endfunction()
