// The extension module foremoe._core, for use by the package foremoe.

#include "bindings.h"
#include "foremoe/core/error.h"

namespace {

namespace nb = nanobind;

// Converts a path to Python. Paths need not be UTF-8.
nb::object text(const std::string& bytes) {
  return nb::steal(PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "surrogateescape"));
}

// Translates InputError to Python's, with file, field and index as attributes.
void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const foremoe::InputError& error) {
    const nb::object raised = nb::module_::import_("foremoe._errors").attr("InputError");
    const auto as_keyword = [](std::string_view field) { return std::string(field); };
    const auto& where = error.where();
    const nb::object value =
        raised(text(foremoe::message_of(error, as_keyword)), text(where.file), text(where.field), text(where.index));
    value.attr("problem") = text(error.problem());
    PyErr_SetObject(raised.ptr(), value.ptr());
  }
}

}  // namespace

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // daemon threads that are inside a call when the interpreter ends keep objects
  m.doc() = "The C++ library of ForeMoE. Use the package foremoe.";
  nb::register_exception_translator(&translate);
  foremoe::python::note_end_of_interpreter();
  m.attr("__version__") = FOREMOE_VERSION;
  foremoe::python::bind_rollout(m);
  foremoe::python::bind_collector(m);
  foremoe::python::bind_inputs(m);
  foremoe::python::bind_homes(m);
  foremoe::python::bind_eplb(m);
  foremoe::python::bind_plan(m);
  foremoe::python::bind_planning(m);
  foremoe::python::bind_evaluation(m);
  foremoe::python::bind_evaluated_plan(m);
  foremoe::python::bind_options(m);
  foremoe::python::bind_turns(m);
  foremoe::python::bind_arena(m);
}
