# FOREMOE_SANITIZE: every finding ends the program, so that a test with one fails.

if(FOREMOE_SANITIZE)
  add_compile_options(-fsanitize=${FOREMOE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${FOREMOE_SANITIZE})
endif()
