# Provides the libraries of which only headers are needed, from folders of headers, in place of find_package(): a build
# for another system cannot use the packages of this one. Used by scripts/build_wheels.
#
#   -DCMAKE_PROJECT_TOP_LEVEL_INCLUDES=cmake/header_libraries.cmake -DFOREMOE_HEADERS=FOLDER;...
set(FOREMOE_HEADERS "" CACHE STRING "folders with the headers of fmt, nlohmann-json, toml++, CLI11 and Eigen")

macro(foremoe_provide_headers method package)
  foreach(target fmt::fmt nlohmann_json::nlohmann_json tomlplusplus::tomlplusplus CLI11::CLI11 Eigen3::Eigen)
    if(target MATCHES "^${package}::" AND NOT TARGET ${target})
      add_library(${target} INTERFACE IMPORTED)
      target_include_directories(${target} SYSTEM INTERFACE ${FOREMOE_HEADERS})
      set(${package}_FOUND TRUE)
    endif()
  endforeach()
  if("${package}" STREQUAL "fmt")
    target_compile_definitions(fmt::fmt INTERFACE FMT_HEADER_ONLY)
  endif()
endmacro()
cmake_language(SET_DEPENDENCY_PROVIDER foremoe_provide_headers SUPPORTED_METHODS FIND_PACKAGE)
