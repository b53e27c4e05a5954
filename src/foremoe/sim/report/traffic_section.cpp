// What crosses between nodes, or inside the node where there is but one.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "foremoe/sim/report/bar_chart.h"
#include "foremoe/sim/report/heat_map.h"
#include "foremoe/sim/report/numbers.h"
#include "foremoe/sim/report/sections.h"

namespace foremoe::report {
namespace {

constexpr std::size_t kMostNodes = 64;  // of a matrix that one can read
constexpr std::string_view kNetwork = "network";

LinkBytes bytes_over(const PolicyResult& p, std::string_view link) {
  LinkBytes all{.link = std::string(link)};
  for (const LinkBytes& l : p.links) {
    if (l.link != link) continue;
    all.rows += l.rows;
    all.copies += l.copies;
    all.gradients += l.gradients;
    all.busiest_use = std::max(all.busiest_use, l.busiest_use);
  }
  return all;
}

struct Unit {
  double bytes = 1;
  std::string name;
};

Unit unit_of(double most) {
  constexpr std::array<std::string_view, 5> kNames{"B", "kB", "MB", "GB", "TB"};
  Unit unit{.bytes = 1, .name = "B"};
  for (std::size_t i = 1; i < kNames.size() && most >= 2000 * unit.bytes; ++i) {
    unit = {.bytes = unit.bytes * 1000, .name = std::string(kNames.at(i))};
  }
  return unit;
}

std::string bars(const Report& report, std::string_view link) {
  double most = 0;
  for (const PolicyResult* p : planned(report)) {
    const LinkBytes b = bytes_over(*p, link);
    most = std::max(most, b.rows + b.copies + b.gradients);
  }
  const Unit unit = unit_of(most);
  BarChart chart{.text = {.id = "traffic-bars",
                          .title = fmt::format("Bytes over links to {}, by policy", link),
                          .description = {}},
                 .axis = fmt::format("{} in a step, all ranks", unit.name),
                 .series = {{.name = "tokens", .css = "s1"},
                            {.name = "copies", .css = "s5"},
                            {.name = "gradients of guests", .css = "s7"}},
                 .bars = {},
                 .value_text = [](double v) { return bytes_text(v); },
                 .tick_text = [unit](double v) { return tick_text(v / unit.bytes); },
                 .reference = {},
                 .axis_end = {}};
  for (const PolicyResult* p : planned(report)) {
    const LinkBytes b = bytes_over(*p, link);
    const double sum = b.rows + b.copies + b.gradients;
    chart.bars.push_back({.row = {.name = p->policy, .text = bytes_text(sum), .strong = p->policy == report.after},
                          .values = {b.rows, b.copies, b.gradients}});
    chart.text.description += fmt::format("{}: {}. ", p->policy, bytes_text(sum));
  }
  return figure(chart, link == kNetwork ? "Between nodes, in a whole step: all ranks together."
                                        : "There is one node: what its ranks send to each other in a whole step.");
}

HtmlTable table_of_links(const Report& report) {
  HtmlTable table{.caption = "bytes by link, all ranks, whole step",
                  .head = {"policy", "link", "tokens", "copies", "gradients", "busiest link's use"},
                  .rows = {}};
  for (const PolicyResult* p : planned(report)) {
    for (const LinkBytes& l : p->links) {
      table.rows.push_back({p->policy, l.link, bytes_text(l.rows), bytes_text(l.copies), bytes_text(l.gradients),
                            percent_text(l.busiest_use)});
    }
  }
  return table;
}

// Five equal steps up to a round number above the most.
std::vector<double> bounds_of(const std::vector<NodeTraffic>& traffic) {
  double most = 0;
  for (const NodeTraffic& t : traffic) {
    for (const double b : t.bytes.flat()) most = std::max(most, b);
  }
  const double top = rounded({.begin = 0, .end = most}, 6).end;
  std::vector<double> bounds{1};
  for (const double share : {0.2, 0.4, 0.6, 0.8}) bounds.push_back(std::max(2.0, share * top));
  return bounds;
}

std::string matrix(const NodeTraffic& traffic, std::size_t index, const std::vector<double>& bounds) {
  const auto flat = traffic.bytes.flat();
  double sum = 0;
  for (const double b : flat) sum += b;
  HeatMap map{.text = {.id = fmt::format("nodes-{}", index),
                       .title = fmt::format("Bytes from node to node, {}", traffic.policy),
                       .description = fmt::format("{} in all.", bytes_text(sum))},
              .rows = {.label = "from node"},
              .columns = {.label = "to node"},
              .bin = Array<int, 2>(traffic.bytes.shape()),
              .bounds = {},
              .least = "nothing",
              .most = "much",
              .colours = "f",
              .cell_text =
                  [&traffic](std::size_t from, std::size_t to) {
                    return fmt::format("node {} to node {}: {}", from, to, bytes_text(traffic.bytes(from, to)));
                  },
              .square = true};
  for (std::size_t i = 0; i < bounds.size(); ++i) map.bounds.push_back(i == 0 ? "0" : bytes_text(bounds[i]));
  std::transform(flat.begin(), flat.end(), map.bin.flat().begin(), [&](double v) { return bin_of(v, bounds); });
  HtmlTable table{.caption = fmt::format("bytes from node to node, {}", traffic.policy), .head = {"from"}, .rows = {}};
  for (std::size_t to = 0; to < traffic.bytes.extent(1); ++to) table.head.push_back(fmt::format("to {}", to));
  for (std::size_t from = 0; from < traffic.bytes.extent(0); ++from) {
    std::vector<std::string> row{fmt::format("node {}", from)};
    for (const double b : traffic.bytes.row(from)) row.push_back(bytes_text(b));
    table.rows.push_back(std::move(row));
  }
  return "<div>\n" + figure(map, fmt::format("{}: {} in all", traffic.policy, bytes_text(sum))) + folded(table) +
         "</div>\n";
}

}  // namespace

HtmlSection traffic_section(const Report& report) {
  const bool many_nodes = report.num_nodes() > 1;
  bool any = false;
  for (const PolicyResult* p : planned(report)) any = any || !p->links.empty();
  if (!any) return {};
  std::string body =
      "<div>\n" + bars(report, many_nodes ? kNetwork : "peers") + folded(table_of_links(report)) + "</div>\n";
  const auto readable = [](const NodeTraffic& t) {
    return t.bytes.extent(0) > 1 && t.bytes.extent(0) <= kMostNodes && !t.bytes.empty();
  };
  if (report.traffic.size() == 2 && std::all_of(report.traffic.begin(), report.traffic.end(), readable)) {
    const std::vector<double> bounds = bounds_of(report.traffic);
    body = side_by_side(
        body, "<div>" + side_by_side(matrix(report.traffic[0], 0, bounds), matrix(report.traffic[1], 1, bounds)) +
                  "</div>\n");
  }
  return {.id = "traffic",
          .heading = many_nodes ? "Traffic between nodes" : "Traffic inside the node",
          .body = std::move(body),
          .wide = many_nodes};
}

}  // namespace foremoe::report
