# Compiles through ccache where it is installed, unless the user chose a launcher.

find_program(FOREMOE_CCACHE ccache)
mark_as_advanced(FOREMOE_CCACHE)
if(FOREMOE_CCACHE AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${FOREMOE_CCACHE})
endif()
