#pragma once

// The parts of the page, each from a report to a section. One that has nothing to show has an empty body and is left
// out.

#include <string_view>

#include "foremoe/sim/report/chart.h"
#include "foremoe/sim/report/html_page.h"
#include "foremoe/sim/report/report.h"

namespace foremoe::report {

HtmlSection policies_section(const Report& report);  // the table
HtmlSection load_section(const Report& report);      // heat maps before and after
HtmlSection balance_section(const Report& report);   // distribution of ρ
HtmlSection shares_section(const Report& report);    // the review's buckets of ρ
HtmlSection time_section(const Report& report);      // phase times, stacked
HtmlSection ablation_section(const Report& report);
HtmlSection memory_section(const Report& report);
HtmlSection traffic_section(const Report& report);
HtmlSection timeline_section(const Report& report);

// A chart in both widths with its caption.
template <class Chart>
std::string figure(const Chart& chart, std::string_view caption) {
  return "<figure>\n<figcaption>" + paragraph(caption) + "</figcaption>\n" + draw(chart, Width::kWide) +
         draw(chart, Width::kNarrow) + "</figure>\n";
}

// Side by side where there is room.
std::string side_by_side(std::string_view first, std::string_view second);

// Those that were planned.
std::vector<const PolicyResult*> planned(const Report& report);

}  // namespace foremoe::report
