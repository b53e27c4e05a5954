# FOREMOE_SANITIZE: every finding ends the program, so that a test with one fails.

if(FOREMOE_SANITIZE)
  add_compile_options(-fsanitize=${FOREMOE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  # ubsan checks every use of a pointer, which takes a third of the time to compile and of the time to run; beside asan,
  # which sees most of the same faults, these checks are off. `ubsan` (scripts/check_thoroughly) has all of them.
  if(FOREMOE_SANITIZE STREQUAL "address,undefined")
    add_compile_options(-fno-sanitize=null,alignment,object-size,vptr,pointer-overflow)
  endif()
  # Instrumented code makes GCC see uninitialised values where there are none (its manual says so of -fsanitize);
  # the builds without sanitizers keep the warning.
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  add_link_options(-fsanitize=${FOREMOE_SANITIZE})
endif()
