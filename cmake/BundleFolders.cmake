# Several folders as one static library, for programs outside the repository:
#
#   foremoe_bundle(libforemoe EXPORT foremoe FOLDERS core cluster … [LIBRARIES targets] [HEADERS files])
#
# makes libforemoe.a, the target libforemoe with the alias foremoe::foremoe, of all objects of the folders, of the
# libraries of ours that these link (policy/clp, runtime/mpi), and of LIBRARIES. What is in a bundle made before is
# not put into another one. Headers are those of the folders, without
# - what serves tests: test_*.h, *_conformance.h, conformance/,
# - folders that are libraries of their own: they implement a header above them, or serve the command alone,
# - what includes nlohmann's JSON: a program need not have it.

# Follows what `library` links. Libraries of ours go into the list named `own_list`, those of others, as
# files or names, into the one named `file_list`.
function(foremoe_collect library own_list file_list)
  if(NOT TARGET ${library})
    if(IS_ABSOLUTE "${library}" OR library MATCHES "^[a-z0-9_]+$")  # a file, or dl
      list(APPEND ${file_list} ${library})
    endif()
    set(${file_list} ${${file_list}} PARENT_SCOPE)
    return()
  endif()
  get_target_property(aliased ${library} ALIASED_TARGET)
  if(aliased)
    set(library ${aliased})
  endif()
  get_property(bundled GLOBAL PROPERTY FOREMOE_BUNDLED)
  # fmt is in bundled_fmt.cpp.
  if(library IN_LIST bundled OR library IN_LIST ${own_list} OR library STREQUAL fmt::fmt)
    return()
  endif()
  get_target_property(type ${library} TYPE)
  get_target_property(imported ${library} IMPORTED)
  if(NOT imported)
    list(APPEND ${own_list} ${library})
  elseif(NOT type STREQUAL INTERFACE_LIBRARY)
    get_target_property(file ${library} LOCATION)
    list(APPEND ${file_list} ${file})
  endif()
  foreach(property LINK_LIBRARIES INTERFACE_LINK_LIBRARIES)
    get_target_property(further ${library} ${property})
    if(further)
      list(TRANSFORM further REPLACE "^\\$<LINK_ONLY:(.*)>$" "\\1")
      foreach(name ${further})
        foremoe_collect(${name} ${own_list} ${file_list})
      endforeach()
    endif()
  endforeach()
  set(${own_list} ${${own_list}} PARENT_SCOPE)
  set(${file_list} ${${file_list}} PARENT_SCOPE)
endfunction()

# Appends the installed headers of a folder, relative to src/foremoe.
function(foremoe_collect_headers folder header_list)
  file(GLOB_RECURSE found RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS ${folder}/*.h)
  list(FILTER found EXCLUDE REGEX "/test_[^/]*$|_(testing|conformance)\\.h$|/(testing|conformance)/")
  file(GLOB_RECURSE libraries RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} ${folder}/*/CMakeLists.txt)
  foreach(library ${libraries})
    get_filename_component(library ${library} DIRECTORY)
    list(FILTER found EXCLUDE REGEX "^${library}/")
  endforeach()
  foreach(header ${found})
    file(STRINGS ${header} json REGEX "#include <nlohmann/" LIMIT_COUNT 1)
    if(NOT json)
      list(APPEND ${header_list} ${header})
    endif()
  endforeach()
  set(${header_list} ${${header_list}} PARENT_SCOPE)
endfunction()

function(foremoe_bundle target)
  cmake_parse_arguments(ARG "" "EXPORT" "FOLDERS;LIBRARIES;HEADERS" ${ARGN})
  set(headers ${ARG_HEADERS})
  foreach(folder ${ARG_FOLDERS})
    foremoe_collect_headers(${folder} headers)
  endforeach()
  set(own "")
  set(files "")
  list(TRANSFORM ARG_FOLDERS PREPEND foremoe_)
  foreach(library ${ARG_FOLDERS} ${ARG_LIBRARIES})
    foremoe_collect(${library} own files)
  endforeach()
  list(REMOVE_DUPLICATES files)
  set_property(GLOBAL APPEND PROPERTY FOREMOE_BUNDLED ${own})

  add_library(${target} STATIC)
  add_library(foremoe::${ARG_EXPORT} ALIAS ${target})
  foreach(library ${own})
    get_target_property(type ${library} TYPE)
    if(NOT type STREQUAL INTERFACE_LIBRARY)
      target_sources(${target} PRIVATE $<TARGET_OBJECTS:${library}>)
    endif()
  endforeach()
  target_sources(${target} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}/src FILES ${headers})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_link_libraries(${target} PUBLIC Threads::Threads PRIVATE $<BUILD_INTERFACE:${files}>)
  # FOREMOE_LINKED_FILES: for foremoeConfig.cmake, which looks for the same libraries where the archive is linked.
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX POSITION_INDEPENDENT_CODE ON PREFIX ""
    EXPORT_NAME ${ARG_EXPORT} FOREMOE_LINKED_FILES "${files}")
endfunction()
