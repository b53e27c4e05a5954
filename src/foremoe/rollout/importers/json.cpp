// Responses of inference servers, one JSON document or one per line. Each choice (or output) is one sequence:
//
//   vLLM ≥ 0.22   choices[i].routed_experts = base64 of .npy: prompt and generation
//   vLLM 0.21     prompt_routed_experts and choices[i].routed_experts = nested lists, −1 where prefix-cached
//   SGLang        meta_info.routed_experts or choices[i].sgl_ext.routed_experts = base64 of int32; of its
//                 OpenAI-compatible endpoints sglext.routed_experts, which is the first choice's
//   NeMo-RL       routed_experts = nrlre1 envelope
//
// A document may also be the choice itself, or a list of documents.
//
// vLLM has no row for the token that it generated last. Where a response tells its tokens (token_ids, or usage of a
// single choice) and they are one more than the rows, the report counts that token.

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "foremoe/rollout/importers/formats.h"
#include "foremoe/rollout/importers/text.h"

namespace foremoe {

namespace {

using nlohmann::json;

constexpr std::uint64_t kMaxTokens = std::uint64_t{1} << 53;  // that a response may claim
constexpr std::string_view kNpyInBase64 = "k05VTVBZ";         // of "\x93NUMPY"

const json* member(const json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

std::optional<std::int64_t> count_in(const json& object, const char* key) {
  const json* const found = member(object, key);
  if (!found) return std::nullopt;
  if (found->is_array()) return static_cast<std::int64_t>(found->size());
  if (!found->is_number_unsigned() || found->get<std::uint64_t>() > kMaxTokens) return std::nullopt;
  return found->get<std::int64_t>();
}

std::optional<std::int64_t> sum(std::optional<std::int64_t> a, std::optional<std::int64_t> b) {
  return a && b ? std::optional(*a + *b) : std::nullopt;
}

// Of prompt and generation, where the response tells.
std::optional<std::int64_t> num_tokens(const json& document, const json& choice, bool only_choice) {
  const auto prompt = count_in(choice, "prompt_token_ids");
  if (const auto ids = sum(prompt ? prompt : count_in(document, "prompt_token_ids"), count_in(choice, "token_ids"))) {
    return ids;
  }
  const json* const usage = only_choice ? member(document, "usage") : nullptr;
  return usage ? sum(count_in(*usage, "prompt_tokens"), count_in(*usage, "completion_tokens")) : std::nullopt;
}

// Lists of lists of lists: [tokens][layers][top_k].
struct NestedRows {
  const json* rows = nullptr;  // none when not recorded
  Where where;

  std::size_t num_tokens() const { return rows ? rows->size() : 0; }
};

const json& list(const json& value, const Where& where, std::string_view index) {
  if (!value.is_array())
    throw InputError(with_index(where, index), fmt::format("should be a list, not {}", value.type_name()));
  return value;
}

void add_rows(TraceAssembler& assembler, const NestedRows& nested, std::size_t layers, std::size_t top_k) {
  std::vector<std::int64_t> ids(top_k);
  for (std::size_t t = 0; t < nested.num_tokens(); ++t) {
    const json& token = list((*nested.rows)[t], nested.where, fmt::format("[{}]", t));
    if (token.size() != layers) {
      throw InputError(with_index(nested.where, fmt::format("[{}]", t)),
                       fmt::format("has {} layers instead of {}", token.size(), layers));
    }
    for (std::size_t l = 0; l < layers; ++l) {
      const auto index = [&] { return with_index(nested.where, fmt::format("[{}, {}]", t, l)); };
      const json& row = token[l];
      if (!row.is_array() || row.size() != top_k)
        throw InputError(index(), fmt::format("should be a list of {} experts", top_k));
      for (std::size_t k = 0; k < top_k; ++k) {
        // The place costs more than the entry: it is named only when needed.
        ids[k] = row[k].is_number_integer() ? row[k].get<std::int64_t>() : integer_entry(row[k], index());
      }
      assembler.add_row(ids);
    }
  }
}

void add_nested(TraceAssembler& assembler, const NestedRows& prompt, const NestedRows& generated) {
  const NestedRows& shaped = prompt.num_tokens() > 0 ? prompt : generated;
  if (shaped.num_tokens() == 0) throw InputError(generated.where, "is empty");
  const json& layers = list(shaped.rows->front(), shaped.where, "[0]");
  if (layers.empty()) throw InputError(with_index(shaped.where, "[0]"), "is empty");
  const json& top_k = list(layers.front(), shaped.where, "[0, 0]");
  assembler.begin_sequence(generated.where,
                           {.num_tokens = static_cast<std::int64_t>(prompt.num_tokens() + generated.num_tokens()),
                            .num_layers = static_cast<std::int64_t>(layers.size()),
                            .top_k = static_cast<std::int64_t>(top_k.size()),
                            .prompt_length = prompt.rows ? static_cast<std::int32_t>(prompt.num_tokens()) : -1});
  add_rows(assembler, prompt, layers.size(), top_k.size());
  add_rows(assembler, generated, layers.size(), top_k.size());
}

void add_encoded(TraceAssembler& assembler, const Where& where, std::string_view text, const ImportOptions& options) {
  if (text.starts_with("nrlre1:")) return add_nrlre1(assembler, where, text);
  const std::vector<std::byte> bytes = decode_base64(text, where);
  if (text.starts_with(kNpyInBase64)) return add_npy(assembler, where, bytes);
  add_flat_int32(assembler, where, bytes, options);
}

class Responses {
 public:
  Responses(const ImportOptions& options, TraceAssembler& assembler) : options_(options), assembler_(assembler) {}

  void add_document(const json& document, const Where& where) {
    if (document.is_array()) {
      for (std::size_t i = 0; i < document.size(); ++i)
        add_document(document[i], with_field(where, fmt::format("[{}]", i)));
      return;
    }
    if (!document.is_object())
      throw InputError(where, fmt::format("should be an object, not {}", document.type_name()));
    const json* prompt = member(document, "prompt_routed_experts");
    const NestedRows prompt_rows{prompt, with_field(where, "prompt_routed_experts")};
    if (prompt) list(*prompt, prompt_rows.where, "");
    for (const char* key : {"choices", "outputs"}) {
      const json* choices = member(document, key);
      if (!choices) continue;
      list(*choices, with_field(where, key), "");
      for (std::size_t i = 0; i < choices->size(); ++i) {
        const json& choice = (*choices)[i];
        add_choice(choice, prompt_rows, with_field(where, fmt::format("{}[{}]", key, i)),
                   beside_choices(document, *choices, where));
        assembler_.sequence_had_tokens(num_tokens(document, choice, choices->size() == 1));
      }
      return;
    }
    add_choice(document, prompt_rows, where, nullptr);
    assembler_.sequence_had_tokens(num_tokens(document, document, true));
  }

 private:
  // Routes that a response has beside its choices; none when it has none.
  static const json* beside_choices(const json& document, const json& choices, const Where& where) {
    const json* const extension = member(document, "sglext");
    const json* const routes = extension ? member(*extension, "routed_experts") : nullptr;
    if (routes && choices.size() > 1) {
      throw InputError(with_field(where, "sglext.routed_experts"),
                       fmt::format("is of the first of {} choices alone", choices.size()));
    }
    return routes;
  }

  void add_choice(const json& choice, const NestedRows& prompt, const Where& where, const json* beside) {
    const json* routes = member(choice, "routed_experts");
    for (const char* holder : {"meta_info", "sgl_ext"}) {
      if (routes) break;
      if (const json* inner = member(choice, holder)) routes = member(*inner, "routed_experts");
    }
    if (!routes) routes = beside;
    const Where place = with_field(where, "routed_experts");
    if (!routes) throw InputError(place, "is missing");
    if (routes->is_array()) return add_nested(assembler_, prompt, {routes, place});
    if (!routes->is_string())
      throw InputError(place, fmt::format("should be a string or a list, not {}", routes->type_name()));
    add_encoded(assembler_, place, routes->get_ref<const std::string&>(), options_);
  }

  const ImportOptions& options_;
  TraceAssembler& assembler_;
};

}  // namespace

void import_payload(const ImportSource& payload, const ImportOptions& options, TraceAssembler& assembler) {
  const Where where{.file = payload.name, .field = "routed_experts"};
  const std::string_view text = text_of(payload);
  if (text.starts_with("\x93NUMPY")) return add_npy(assembler, where, payload.bytes);
  if (!text.starts_with('[')) return add_encoded(assembler, where, text, options);
  const json rows = parse_json(text, where);
  add_nested(assembler, {}, {&rows, where});
}

void import_json(const ImportSource& source, const ImportOptions& options, TraceAssembler& assembler) {
  const std::string_view text = trimmed(text_of(source));
  Responses responses(options, assembler);
  const auto line_end = text.find('\n');
  const bool one_per_line = line_end != std::string_view::npos && json::accept(text.substr(0, line_end));
  if (!one_per_line) return responses.add_document(parse_json(text, {.file = source.name}), {.file = source.name});
  for_each_line(text_of(source), [&](std::string_view line, const std::string& number) {
    const Where where{.file = source.name, .field = number};
    responses.add_document(parse_json(line, where), where);
  });
}

}  // namespace foremoe
