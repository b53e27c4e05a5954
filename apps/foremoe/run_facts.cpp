#include "run_facts.h"

#include <fmt/format.h>

#include "foremoe/core/sha256.h"

namespace foremoe::cli {
namespace {

// Shortens a digest to enough digits to distinguish two files.
std::string short_digest(const std::string& hex) { return fmt::format("sha256 {}", hex.substr(0, 16)); }

std::string digest_of(const StepPlan& plan) {
  Sha256 hash;
  hash.update(std::as_bytes(plan.slot_expert.flat()));
  hash.update(std::as_bytes(plan.slot_tokens.flat()));
  hash.update(std::as_bytes(plan.home.flat()));
  hash.update(std::as_bytes(std::span(plan.event_micro_step)));
  hash.update(std::as_bytes(std::span(plan.event_pass)));
  return short_digest(hash.hex());
}

std::string digest_of(const RoutingTrace& trace, const Batching& batching) {
  const auto bytes = static_cast<std::size_t>(trace.num_tokens * trace.num_layers * trace.top_k) * size_of(trace.type);
  Sha256 hash;
  hash.update({trace.routes, bytes});
  hash.update(std::as_bytes(std::span(trace.cu_seqlens)));
  hash.update(std::as_bytes(std::span(batching.micro_step)));
  hash.update(std::as_bytes(std::span(batching.rank)));
  return short_digest(hash.hex());
}

}  // namespace

Facts facts_of(const RunArguments& arguments) {
  Facts facts = arguments.given.texts();
  for (const char* name : {"threads", "input", "plan", "homes", "previous", "previous_load"}) facts.erase(name);
  return facts;
}

Facts facts_of(const RunInput& input) {
  const Workload& step = input.step;
  Facts facts{{"input", short_digest(load_digest(step.load))},
              {"homes", short_digest(sha256_hex(std::as_bytes(step.homes.flat())))}};
  if (step.tokens) facts["routes of the input"] = digest_of(step.tokens->trace, step.tokens->batching);
  if (input.plan) facts["plan"] = digest_of(*input.plan);
  if (step.previous) facts["previous"] = digest_of(*step.previous);
  if (step.previous_load) facts["previous_load"] = short_digest(load_digest(*step.previous_load));
  return facts;
}

}  // namespace foremoe::cli
