# FOREMOE_SANITIZE: every finding ends the program, so that a test with one fails.

if(FOREMOE_SANITIZE)
  add_compile_options(-fsanitize=${FOREMOE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  # Instrumented code makes GCC see uninitialised values where there are none (its manual says so of -fsanitize);
  # the builds without sanitizers keep the warning.
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  add_link_options(-fsanitize=${FOREMOE_SANITIZE})
endif()
