// Fuzzes foremoe.plan/1: every readable plan can be checked against any load, and evaluated if the check accepts it.

#include <array>

#include "foremoe/plan/check_plan.h"
#include "foremoe/plan/plan_figures.h"
#include "foremoe/plan/plan_file.h"
#include "fuzzed_input.h"

namespace {

// The load for which make_seeds.py writes plans.
foremoe::LoadTable load_of_seeds() {
  constexpr std::array kLoad{5, 1, 0, 2, 3, 3, 1, 1, 0, 0, 7, 1, 2, 2, 2, 2};
  foremoe::LoadTable table{
      .load = foremoe::Array<foremoe::Tokens, 4>({2, 1, 2, 4}), .top_k = 2, .ranks_per_node = 2, .name = ""};
  for (std::size_t i = 0; i < kLoad.size(); ++i) table.load.flat()[i] = foremoe::Tokens{kLoad[i]};
  return table;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace foremoe;
  static const LoadTable load = load_of_seeds();
  return read_or_refuse(data, size, [](std::span<const std::byte> bytes) {
    const StepPlan plan = read_plan(Safetensors::parse(bytes, kFuzzedInput));
    const CheckReport report = check_plan(plan, load);
    if (report.ok()) {
      const PlanFigures figures = plan_figures(plan, load);
      if (!check_plan(plan, load, {.reported = &figures}).ok()) found("figures differ from the recomputed ones");
    } else if (inputs_are_seeds()) {
      found(report.violations.front().message.c_str());
    }
  });
}
