#include "foremoe/sim/report/html_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "foremoe/core/mapped_file.h"
#include "foremoe/core/sha256.h"
#include "foremoe/sim/report/html_text.h"

namespace foremoe {

std::span<const EmbeddedFile> report_files();  // data/report, see cmake/EmbedFiles.cmake

}  // namespace foremoe

namespace foremoe::report {
namespace {

std::string_view style_sheet() { return report_files().front().text; }

// Of 64 hex digits.
std::string base64_of_hex(const std::string& hex) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::vector<std::uint32_t> bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::uint32_t>(std::stoul(hex.substr(i, 2), nullptr, 16)));
  }
  std::string out;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const std::size_t n = std::min<std::size_t>(3, bytes.size() - i);
    const std::uint32_t three = bytes[i] << 16U | (n > 1 ? bytes[i + 1] : 0U) << 8U | (n > 2 ? bytes[i + 2] : 0U);
    for (std::size_t d = 0; d < 4; ++d) out += d <= n ? kDigits[three >> (18U - 6U * d) & 63U] : '=';
  }
  return out;
}

std::string security_policy() {
  const std::string hash = base64_of_hex(sha256_hex(std::as_bytes(std::span(style_sheet()))));
  return fmt::format("default-src 'none'; style-src 'sha256-{}'; img-src data:; base-uri 'none'; form-action 'none'",
                     hash);
}

std::string table_row(const std::vector<std::string>& cells, std::size_t columns, bool strong) {
  std::string out = strong ? "<tr class=\"strong\">" : "<tr>";
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const bool spans = i + 1 == cells.size() && cells.size() < columns;
    const std::string more =
        spans ? fmt::format(" colspan=\"{}\" class=\"words\"", columns - cells.size() + 1) : std::string();
    out += i == 0 ? fmt::format("<th scope=\"row\"{}>{}</th>", more, escaped(cells[i]))
                  : fmt::format("<td{}>{}</td>", more, escaped(cells[i]));
  }
  return out + "</tr>\n";
}

}  // namespace

std::string to_html(const HtmlTable& table) {
  std::string out = fmt::format("<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{}\">\n<table>",
                                escaped(table.caption));
  out += fmt::format("<caption>{}</caption>\n<thead><tr>", escaped(table.caption));
  for (const std::string& cell : table.head) out += fmt::format("<th scope=\"col\">{}</th>", escaped(cell));
  out += "</tr></thead>\n<tbody>\n";
  for (std::size_t i = 0; i < table.rows.size(); ++i) {
    out += table_row(table.rows[i], table.head.size(), static_cast<int>(i) == table.strong_row);
  }
  return out + "</tbody></table>\n</div>\n";
}

std::string folded(const HtmlTable& table) {
  return fmt::format("<details><summary>Numbers: {}</summary>\n{}</details>\n", escaped(table.caption), to_html(table));
}

std::string paragraph(std::string_view text, std::string_view css) {
  const std::string look = css.empty() ? std::string() : fmt::format(" class=\"{}\"", css);
  return fmt::format("<p{}>{}</p>\n", look, escaped(text));
}

std::string to_html(const HtmlSection& section) {
  return fmt::format("<section id=\"{0}\" aria-labelledby=\"{0}-h\"{1}>\n<h2 id=\"{0}-h\">{2}</h2>\n{3}</section>\n",
                     escaped(section.id), section.wide ? " class=\"whole\"" : "", escaped(section.heading),
                     section.body);
}

std::string to_html(const HtmlDocument& document) {
  std::string body;
  for (const HtmlSection& section : document.sections) body += to_html(section);
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"{}\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n<meta name=\"referrer\" content=\"no-referrer\">\n"
      "<link rel=\"icon\" href=\"data:,\">\n<title>{}</title>\n<style>{}</style>\n</head>\n<body>\n"
      "<header>\n{}</header>\n<main>\n{}</main>\n<footer>\n{}</footer>\n</body>\n</html>\n",
      security_policy(), escaped(document.title), style_sheet(), document.header, body, document.footer);
}

}  // namespace foremoe::report
