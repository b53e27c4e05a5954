# Several folders as one static library, for programs outside the repository:
#
#   foremoe_bundle(libforemoe EXPORT foremoe FOLDERS core cluster … [LIBRARIES targets] [HEADERS files])
#
# makes libforemoe.a of all objects of the folders (and of other libraries of ours), as target libforemoe with the alias
# foremoe::foremoe. Its headers are those of the folders, without
# - tests, their builders and suites,
# - sim/report and sim/reproduce, which serve the command alone,
# - what includes MPI or the JSON library: a program need not have them.

set(FOREMOE_NOT_INSTALLED
    "/(testing|conformance|report|reproduce|mpi|no_mpi)/"
    "/(test_[^/]*|[^/]*_testing|[^/]*_conformance|[^/]*json[^/]*|megatron_records)\\.h$")
list(JOIN FOREMOE_NOT_INSTALLED "|" FOREMOE_NOT_INSTALLED)

# The files of the libraries that linking `library` means: of a path itself, of an imported target those behind it.
function(foremoe_linked_files library found)
  set(files ${${found}})
  if(library STREQUAL fmt::fmt OR library STREQUAL Threads::Threads)
    # bundled_fmt.cpp; foremoeConfig.cmake
  elseif(TARGET ${library})
    get_target_property(type ${library} TYPE)
    if(NOT type STREQUAL INTERFACE_LIBRARY)
      get_target_property(file ${library} LOCATION)
      list(APPEND files ${file})
    endif()
    get_target_property(further ${library} INTERFACE_LINK_LIBRARIES)
    foreach(name ${further})
      foremoe_linked_files(${name} files)
    endforeach()
  elseif(IS_ABSOLUTE "${library}")
    list(APPEND files ${library})
  endif()
  list(REMOVE_DUPLICATES files)
  set(${found} ${files} PARENT_SCOPE)
endfunction()

function(foremoe_bundle target)
  cmake_parse_arguments(ARG "" "EXPORT" "FOLDERS;LIBRARIES;HEADERS" ${ARGN})
  add_library(${target} STATIC)
  add_library(foremoe::${ARG_EXPORT} ALIAS ${target})
  set(headers ${ARG_HEADERS})
  set(files "")
  foreach(folder ${ARG_FOLDERS})
    list(APPEND ARG_LIBRARIES foremoe_${folder})
    file(GLOB_RECURSE of_folder CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.h)
    list(FILTER of_folder EXCLUDE REGEX ${FOREMOE_NOT_INSTALLED})
    list(APPEND headers ${of_folder})
  endforeach()
  foreach(library ${ARG_LIBRARIES})
    get_target_property(type ${library} TYPE)
    if(NOT type STREQUAL INTERFACE_LIBRARY)
      target_sources(${target} PRIVATE $<TARGET_OBJECTS:${library}>)
    endif()
    get_target_property(of_library ${library} FOREMOE_LINKED_FILES)
    list(APPEND files ${of_library})
  endforeach()
  list(REMOVE_DUPLICATES files)
  target_sources(${target} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}/src FILES ${headers})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_link_libraries(${target} PUBLIC Threads::Threads PRIVATE $<BUILD_INTERFACE:${files}>)
  # FOREMOE_LINKED_FILES: for foremoeConfig.cmake, which looks for the same libraries where the archive is linked.
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX POSITION_INDEPENDENT_CODE ON PREFIX ""
    EXPORT_NAME ${ARG_EXPORT} FOREMOE_LINKED_FILES "${files}")
endfunction()
