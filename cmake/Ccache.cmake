# Compiles through ccache where it is installed, unless the user chose a launcher. Paths below the source folder are
# hashed relative to it and the folder itself is not hashed, so that every clone shares one cache. Debug information and
# assertions then name files relative to the clone as well: src/foremoe/core/error.cpp.

find_program(FOREMOE_CCACHE ccache)
mark_as_advanced(FOREMOE_CCACHE)
if(FOREMOE_CCACHE AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
    CCACHE_SLOPPINESS=time_macros ${FOREMOE_CCACHE})
  # ccache hands sources to the compiler relative to the build folder: ../../src/…
  file(RELATIVE_PATH source_from_build ${CMAKE_BINARY_DIR} ${PROJECT_SOURCE_DIR})
  add_compile_options(-ffile-prefix-map=${PROJECT_SOURCE_DIR}/= -ffile-prefix-map=${source_from_build}=)
endif()
