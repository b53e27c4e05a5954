# Writes OUT, see EmbedFiles.cmake. Characters one by one, for compilers limit the length of a literal.
list(SORT FILES)
set(arrays "")
set(entries "")
set(index 0)
foreach(file ${FILES})
  get_filename_component(name ${file} NAME_WE)
  file(READ ${file} hex HEX)
  string(REGEX REPLACE "(..)" "'\\\\x\\1'," characters "${hex}")
  string(APPEND arrays "constexpr char kText${index}[] = {${characters}};\n")
  string(APPEND entries "    {\"${name}\", {kText${index}, sizeof(kText${index})}},\n")
  math(EXPR index "${index} + 1")
endforeach()
file(WRITE ${OUT} "#include <span>\n\n#include \"foremoe/core/mapped_file.h\"\n
namespace foremoe {
namespace {
${arrays}}  // namespace

std::span<const EmbeddedFile> ${FUNCTION}();
std::span<const EmbeddedFile> ${FUNCTION}() {
  static constexpr EmbeddedFile kFiles[] = {
${entries}  };
  return kFiles;
}

}  // namespace foremoe
")
