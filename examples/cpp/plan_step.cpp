// plan_step LOAD PLAN reads a load, plans a step, checks the plan, prints its imbalance ρ and writes it.

#include <foremoe/foremoe.h>

#include <cstdio>

int main(int argc, char** argv) try {
  if (argc != 3) return std::fputs("usage: plan_step LOAD PLAN\n", stderr), 2;
  const foremoe::LoadTable load = foremoe::read_load(argv[1]);
  const foremoe::StepPlan plan = foremoe::plan_step(load, {.guest_slots = 1}).plan;
  const foremoe::CheckReport report = foremoe::check_plan(plan, load);
  for (const foremoe::Violation& violation : report.violations) std::fprintf(stderr, "%s\n", violation.message.c_str());
  if (!report.ok()) return 1;
  const foremoe::PlanFigures& figures = *report.figures;
  std::printf("  imbalance ρ   mean %.4f, p99 %.4f, max %.4f; 1 is perfect, whole tokens permit %.4f\n",
              figures.rho.mean, figures.rho.p99, figures.rho.max, figures.rho_lower_bound_mean);
  foremoe::write_plan(plan, argv[2]);
} catch (const foremoe::InputError& error) {
  return std::fprintf(stderr, "plan_step: %s\n", error.what()), 2;
}
