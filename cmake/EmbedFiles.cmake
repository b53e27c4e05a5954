# Files of the repository inside the program:
#   foremoe_embed(foremoe_cluster cluster_presets FILES data/clusters/a.toml …)
# adds to a target a source that defines, in namespace foremoe,
#   std::span<const EmbeddedFile> cluster_presets();   // {name without folder and ending, text}, by name
# as core/mapped_file.h declares the type; the user declares the function.

function(foremoe_embed target function)
  cmake_parse_arguments(ARG "" "" "FILES" ${ARGN})
  set(source ${CMAKE_CURRENT_BINARY_DIR}/${function}.cpp)
  add_custom_command(
    OUTPUT ${source}
    COMMAND ${CMAKE_COMMAND} "-DFUNCTION=${function}" "-DFILES=${ARG_FILES}" "-DOUT=${source}" -P
            ${PROJECT_SOURCE_DIR}/cmake/WriteEmbedded.cmake
    DEPENDS ${ARG_FILES} ${PROJECT_SOURCE_DIR}/cmake/WriteEmbedded.cmake
    VERBATIM)
  target_sources(${target} PRIVATE ${source})
endfunction()
