#pragma once

// The page around the charts: a document that needs nothing but itself, sections, tables.

#include <string>
#include <string_view>
#include <vector>

namespace foremoe::report {

// Cells are text, whatever is in them. The first column names the row; a row may have fewer cells than the head, the
// last of which then spans the rest.
struct HtmlTable {
  std::string caption;
  std::vector<std::string> head;
  std::vector<std::vector<std::string>> rows;
  int strong_row = -1;  // that the reader came for; -1: none
};

std::string to_html(const HtmlTable& table);  // in a box of its own that scrolls, so that the page need not
std::string folded(const HtmlTable& table);   // the same, to be unfolded: the numbers of a plot
std::string paragraph(std::string_view text, std::string_view css = {});

struct HtmlSection {
  std::string id;
  std::string heading;
  std::string body;   // HTML
  bool wide = false;  // takes the whole width of a wide screen
};
std::string to_html(const HtmlSection& section);

struct HtmlDocument {
  std::string title;
  std::string header;  // HTML above the sections
  std::vector<HtmlSection> sections;
  std::string footer;  // HTML
};

// With a content security policy that permits the one style sheet of the program, by its hash, and nothing else.
std::string to_html(const HtmlDocument& document);

}  // namespace foremoe::report
