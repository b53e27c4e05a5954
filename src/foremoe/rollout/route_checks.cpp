#include "foremoe/rollout/route_checks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/core/memory_limit.h"
#include "foremoe/rollout/count_routes.h"
#include "foremoe/rollout/importers/layer_choice.h"
#include "foremoe/rollout/route_entry.h"

namespace foremoe {
namespace {

constexpr double kBitsOfUniqueRoutes = 100;  // two tokens with the same route are then no coincidence
constexpr double kBitsOfRoutes = 10;
constexpr std::int64_t kRepeatedRows = 8;  // consecutive tokens with equal routes, with fewer bits
constexpr std::int64_t kLeastRows = 16;    // whole sequences of fewer tokens are not compared
constexpr double kBitsOfBlock = 40;
constexpr std::int64_t kShortBlock = 16;       // consecutive tokens with the routes of as many earlier ones
constexpr std::int64_t kLongBlock = 32;        // with fewer bits
constexpr std::int64_t kUniqueBlock = 8;       // if two tokens with the same route are no coincidence
constexpr int kFillerLayers = 4;               // a token with the same row in so many layers, and in all, is filler
constexpr std::int64_t kSampledTokens = 1024;  // of the trace
constexpr std::int64_t kSampledInSequence = 64;
constexpr double kEqualLayers = 0.9;  // of the sampled tokens

// Consecutive tokens with equal routes in one layer: all of a sequence, or so many.
struct ConstantRows {
  std::int64_t least;  // tokens of the sequence
  std::int64_t most;
};
constexpr ConstantRows kOrderedByWeight{kLeastRows, 64};
constexpr ConstantRows kAscending{256, 512};

enum class Row : std::uint8_t { kRoute, kMissing, kZero, kFaulty };

class Checks {
 public:
  Checks(const RoutingTrace& trace, const RouteExpectations& expected)
      : trace_(trace), expected_(expected), shape_(shape_of(trace)) {
    if (expected.experts > 0) shape_.num_experts = expected.experts;
    if (expected.weightless_experts > 0) shape_.weightless_experts = expected.weightless_experts;
    expect_memory(sizeof rows_[0] * static_cast<double>(trace.num_tokens) * trace.num_layers, {.file = trace.name});
    rows_.resize(static_cast<std::size_t>(trace.num_tokens) * layers());
    for (int k = 0; k < shape_.top_k && shape_.top_k < shape_.num_experts; ++k)
      bits_ += std::log2(static_cast<double>(shape_.num_experts - k) / (k + 1));
    bits_ *= static_cast<double>(layers());
  }

  RouteReport report() && {
    find_shared_expert();
    classify();
    check_shape();
    if (std::ranges::find(empty_, false) == empty_.end()) {
      add({"missing-rows", -1, -1, -1, "no row has a route: nothing was recorded",
           "switch the recording of routes on, in the engine that samples"});
      return {std::move(found_), {}};
    }
    check_layers();
    for (int s = 0; s < trace_.num_sequences(); ++s) {
      check_sequence(s);
      check_repeated_block(s);
    }
    check_repeated_sequences();
    check_equal_layers(0, trace_.num_tokens, kSampledTokens, -1);
    const bool everywhere = std::ranges::find(found_, "equal-layers", &RouteFinding::check) != found_.end();
    for (int s = 0; s < trace_.num_sequences() && !everywhere; ++s) {
      check_equal_layers(trace_.cu_seqlens[s], trace_.cu_seqlens[s + 1], kSampledInSequence, s);
    }
    check_versions();
    note_short_sequences();
    return {std::move(found_), std::move(remarks_)};
  }

 private:
  std::size_t layers() const { return static_cast<std::size_t>(trace_.num_layers); }
  Row kind(std::int64_t t, std::size_t l) const { return rows_[static_cast<std::size_t>(t) * layers() + l]; }
  const std::byte* row(std::int64_t t, std::size_t l) const {
    return trace_.routes + static_cast<std::size_t>(t) * shape_.token_bytes() + l * shape_.row_bytes();
  }
  bool equal_rows(std::int64_t t, std::size_t l, std::int64_t u, std::size_t m) const {
    return kind(t, l) == Row::kRoute && std::memcmp(row(t, l), row(u, m), shape_.row_bytes()) == 0;
  }
  bool is_padding(std::int64_t t) const {
    return !expected_.attention_mask.empty() && expected_.attention_mask[static_cast<std::size_t>(t)] == 0;
  }
  bool all(std::int64_t t, Row of) const {
    for (std::size_t l = 0; l < layers(); ++l) {
      if (!empty_[l] && kind(t, l) != of) return false;
    }
    return true;
  }
  bool same_route(std::int64_t t, std::int64_t u) const {
    return all(t, Row::kRoute) && std::memcmp(row(t, 0), row(u, 0), shape_.token_bytes()) == 0;
  }

  int number(int s) const { return expected_.samples.empty() ? s : expected_.samples[static_cast<std::size_t>(s)]; }
  bool unique_routes() const { return bits_ >= kBitsOfUniqueRoutes && (shape_.top_k == 1 || !ascending_); }

  void add(RouteFinding finding) {
    if (finding.sequence >= 0) finding.sequence = number(finding.sequence);
    const auto known = std::ranges::find(found_, finding.check, &RouteFinding::check);
    if (known == found_.end()) {
      found_.push_back(std::move(finding));
    } else {
      known->count += finding.count;
    }
  }

  // Sets ids_ to the entries of a row, −1 for the sentinel.
  void load_ids(std::int64_t t, std::size_t l) {
    visit_route_type(shape_.type, [&]<class Id>(std::type_identity<Id>) {
      ids_.resize(static_cast<std::size_t>(shape_.top_k));
      for (std::size_t k = 0; k < ids_.size(); ++k) {
        const Id id = load_entry<Id>(row(t, l), k);
        ids_[k] = id == kSentinel<Id> ? -1 : static_cast<std::int64_t>(id);
      }
    });
  }
  bool has_no_ids() const { return std::ranges::count(ids_, -1) == shape_.top_k; }
  bool has_only_zeros() const { return shape_.top_k > 1 && std::ranges::count(ids_, 0) == shape_.top_k; }  // no route

  // Finds the layers whose rows may have fewer ids than top_k: all rows have the same number, or some ids are
  // weightless.
  void find_partial_layers() {
    std::int64_t partial = 0;
    may_be_partial_.assign(layers(), true);
    for (std::size_t l = 0; l < layers(); ++l) {
      std::int64_t usual = 0;  // ids of the first row with a route
      for (std::int64_t t = 0; t < trace_.num_tokens; ++t) {
        load_ids(t, l);
        if (has_no_ids() || has_only_zeros()) continue;
        const std::int64_t ids = shape_.top_k - std::ranges::count(ids_, -1);
        if (usual == 0) usual = ids;
        if (ids != usual && shape_.weightless_experts == 0) may_be_partial_[l] = false;
        partial += ids < shape_.top_k ? 1 : 0;
      }
    }
    if (partial > 0) remarks_.push_back(fmt::format("{} rows have fewer than {} experts", partial, shape_.top_k));
  }

  void classify() {
    find_partial_layers();
    empty_.assign(layers(), true);
    for (int s = 0; s < trace_.num_sequences(); ++s) {
      for (std::int64_t t = trace_.cu_seqlens[s]; t < trace_.cu_seqlens[s + 1]; ++t) {
        for (std::size_t l = 0; l < layers(); ++l) {
          const Row of = classify_row(s, t, l);
          rows_[static_cast<std::size_t>(t) * layers() + l] = of;
          if (of == Row::kFaulty || (of == Row::kRoute && empty_[l] && !has_first_experts(t, l))) empty_[l] = false;
        }
      }
    }
    // Few zeros of top-1, and zeros in all layers that have routes, may be routes.
    if (shape_.top_k > 1) return;
    for (std::size_t l = 0; l < layers() && trace_.num_tokens < kLeastRows; ++l) {
      for (std::int64_t t = 0; t < trace_.num_tokens; ++t) empty_[l] = empty_[l] && kind(t, l) != Row::kRoute;
    }
  }

  // Finds an entry that is the same expert in all rows.
  void find_shared_expert() {
    visit_route_type(shape_.type, [&]<class Id>(std::type_identity<Id>) {
      for (std::size_t k = 0; k < static_cast<std::size_t>(shape_.top_k) && 1 < shape_.top_k; ++k) {
        std::int64_t rows = 0;
        Id expert = kSentinel<Id>;
        bool same = true;
        for (std::int64_t i = 0; i < trace_.num_tokens * trace_.num_layers && same; ++i) {
          const std::byte* const ids = trace_.routes + static_cast<std::size_t>(i) * shape_.row_bytes();
          const Id id = load_entry<Id>(ids, k);
          if (id == kSentinel<Id> || load_entry<Id>(ids, 0) == load_entry<Id>(ids, 1)) continue;  // no route
          same = rows++ == 0 || id == expert;
          expert = id;
        }
        if (!same || rows < kLeastRows * trace_.num_layers) continue;
        shared_ = fmt::format("entry {} is expert {} in every row: a shared expert was recorded", k, expert);
        return;
      }
    });
  }

  // Whether a row is 0, 1, …, which is filler if all rows of a layer are.
  bool has_first_experts(std::int64_t t, std::size_t l) {
    load_ids(t, l);
    bool first = shape_.top_k < shape_.num_experts;
    for (std::size_t k = 0; k < ids_.size() && first; ++k) first = ids_[k] == static_cast<std::int64_t>(k);
    return first;
  }

  Row classify_row(int s, std::int64_t t, std::size_t l) {
    load_ids(t, l);
    if (has_only_zeros()) return Row::kZero;
    if (has_no_ids()) return Row::kMissing;
    if (is_padding(t)) return Row::kRoute;  // check_sequence() reports routes of padding
    const std::int64_t token = t - trace_.cu_seqlens[s];
    if (std::erase(ids_, -1) > 0 && !may_be_partial_[l]) {
      add({"top-k-differs", static_cast<int>(l), s, token, "a row has fewer experts than the others",
           "record the same number of experts for every token of a layer, or give --weightless-experts if the "
           "others have no weights"});
      return Row::kFaulty;
    }
    const int experts = shape_.experts_of_layer.empty() ? shape_.num_experts : shape_.experts_of_layer[l];
    for (const std::int64_t id : ids_) {
      if (id >= 0 && id < experts) continue;
      if (id >= shape_.num_experts && id < shape_.num_experts + shape_.weightless_experts) continue;
      add({"expert-range", static_cast<int>(l), s, token,
           !shared_.empty() ? shared_
                            : fmt::format("expert {}, but there are {}: physical slots (of EPLB) or shared experts "
                                          "were recorded, or another model's routes",
                                          id, experts),
           "record logical expert ids before load balancing maps them to slots, or give --weightless-experts for ids "
           "without weights"});
      return Row::kFaulty;
    }
    const bool ascends = std::ranges::is_sorted(ids_);
    std::ranges::sort(ids_);
    if (const auto twice = std::ranges::adjacent_find(ids_); twice != ids_.end()) {
      add({"duplicate-experts", static_cast<int>(l), s, token,
           fmt::format("expert {} appears twice in a row: the buffer was not filled or was read while written, or the "
                       "engine writes one id for experts without weights",
                       *twice),
           "copy routes after the forward pass has ended, and mark rows without routes with -1"});
      return Row::kFaulty;
    }
    ascending_ &= ascends;
    return Row::kRoute;
  }

  void check_shape() {
    const bool differs = expected_.top_k > 0 && expected_.top_k != shape_.top_k;
    if (differs || !shared_.empty()) {
      add({"top-k-differs", -1, -1, -1,
           differs ? fmt::format("{} experts per token, expected {}{}{}", shape_.top_k, expected_.top_k,
                                 shared_.empty() ? "" : ": ", shared_)
                   : shared_,
           "record the routed experts only (no shared experts), of the model that is trained"});
    }
    for (std::size_t s = 0; s < expected_.lengths.size(); ++s) {
      const std::int64_t rows = trace_.sequence_length(static_cast<int>(s));
      const std::int64_t tokens = expected_.lengths[s];
      if (tokens < 0 || rows == tokens || rows == tokens - 1) continue;  // the last token may have no row
      const std::string in = expected_.counted_in.empty() ? "" : expected_.counted_in[s];
      add({"row-count", -1, static_cast<int>(s), std::min(rows, tokens),
           fmt::format("{} rows for {} tokens{}: {}", rows, tokens, in.empty() ? "" : fmt::format(" (by {})", in),
                       rows < tokens ? "the prompt or a part of the response was not recorded"
                                     : "padding, another sequence's or an aborted request's rows were recorded too"),
           rows < tokens ? "concatenate the routes of prompt and response, and of all continuations"
                         : "cut the routes to the sequence's tokens"});
    }
  }

  void check_layers() {
    if (expected_.layer_kinds.size() == layers()) return check_layer_kinds();
    if (std::string lost = find_hash_layers(empty_, shape_.num_experts, shape_.top_k);
        expected_.layers == 0 && !lost.empty()) {
      return add({"empty-layer", static_cast<int>(std::ranges::find(empty_, true) - empty_.begin()), -1, -1,
                  std::move(lost), kRecordThem, std::ranges::count(empty_, true)});
    }
    const auto first_routed = static_cast<int>(std::ranges::find(empty_, false) - empty_.begin());
    for (std::size_t l = static_cast<std::size_t>(first_routed); l < layers(); ++l) {
      if (!empty_[l]) continue;
      add({"empty-layer", static_cast<int>(l), -1, -1,
           "no token has a route in this layer: it is dense, routed by hash, or not recorded",
           "set --model, which decides; drop dense layers (--drop-empty-layers), and record every pipeline stage"});
    }
    if (expected_.layers == 0) {
      if (first_routed == 0) return;
      remarks_.push_back(
          fmt::format("no token has a route in the first {}of {} layers: they are dense, or routed by hash "
                      "(DeepSeek-V4), and then have experts. Set --model, which decides, and checks the others",
                      first_routed == 1 ? "" : fmt::format("{} ", first_routed), trace_.num_layers));
      return;
    }
    check_number_of_layers(first_routed);
  }

  // Compares the layers with those of the model. first_routed: the first layer with routes.
  void check_number_of_layers(int first_routed) {
    const int moe = expected_.layers;
    const int dense = expected_.dense_layers;
    const int counted = trace_.num_layers - first_routed;  // layers from the first with routes
    const bool as_expected = first_routed == 0 || first_routed == dense;
    if (as_expected && counted > moe && !(first_routed == 0 && dense > 0 && counted == moe + dense)) {
      add({"mtp-layers", first_routed + moe, -1, -1,
           fmt::format("{} layers with experts, of a model with {}: layers of multi-token prediction, or of a draft "
                       "model, were recorded",
                       counted, moe),
           "drop the last layers, which the trainer does not replay", counted - moe});
    } else if (!as_expected || counted != moe) {
      add({"layer-shift", first_routed, -1, -1,
           fmt::format("{} layers, the first with routes is {}; the model has {} layers with experts{}: {}",
                       trace_.num_layers, first_routed, moe,
                       dense > 0 ? fmt::format(" after {} dense ones", dense) : "",
                       first_routed == 0 && counted < moe ? "some were not recorded"
                       : first_routed == 0 && dense > 0 && counted == moe + dense
                           ? "a draft model wrote into the first, or counting dense layers shifts every route"
                           : "counting dense layers shifts every route (verl#5037)"),
           counted < moe ? "record every layer with experts, of every pipeline stage, and index routes by these layers"
                         : "index routes by layers with experts, and drop dense layers (--drop-empty-layers)"});
    } else if (dense > 0) {
      const auto extra = std::ranges::find_if(trace_.layer_ids, [&](int id) { return id >= moe + dense; });
      if (extra == trace_.layer_ids.end()) return;
      add({"mtp-layers", static_cast<int>(extra - trace_.layer_ids.begin()), -1, -1,
           fmt::format("layer {} of a model with {} layers", *extra, moe + dense),
           "drop the layers of multi-token prediction"});
    }
  }

  // Compares all decoder layers, or all with experts, with the model's.
  void check_layer_kinds() {
    for (std::size_t l = 0; l < layers(); ++l) {
      const LayerKind kind = expected_.layer_kinds[l];
      const bool has_experts = kind == LayerKind::kMoe || kind == LayerKind::kHashMoe;
      if (has_experts && empty_[l]) {
        add({"empty-layer", static_cast<int>(l), -1, -1,
             kind == LayerKind::kHashMoe
                 ? "no token has a route in this layer, whose experts a hash of the token determines: not dense"
                 : "no token has a route in this layer, which has experts in the model",
             kind == LayerKind::kHashMoe ? "do not drop it: its routes are tid2eid[token] of the checkpoint"
                                         : "record every layer with experts, of every pipeline stage"});
      } else if (!has_experts && !empty_[l]) {
        add({"layer-shift", static_cast<int>(l), -1, -1,
             "tokens have routes in this layer, which has no experts in the model: layers are shifted, or a draft "
             "model wrote into it",
             "index routes by the model's layers"});
      }
    }
  }

  // Finds a run of tokens with the routes of as many earlier ones, at one distance: routes of an aborted request that
  // are followed by the whole sequence.
  void check_repeated_block(int s) {
    if (bits_ < kBitsOfRoutes) return;
    const std::int64_t least = unique_routes() ? kUniqueBlock : bits_ >= kBitsOfBlock ? kShortBlock : kLongBlock;
    std::unordered_map<std::string_view, std::int64_t> first;  // token with this route
    std::int64_t run = 0;
    std::int64_t distance = 0;
    for (std::int64_t t = trace_.cu_seqlens[s]; t < trace_.cu_seqlens[s + 1]; ++t) {
      if (is_padding(t) || !all(t, Row::kRoute)) continue;
      const auto [known, is_new] =
          first.try_emplace({reinterpret_cast<const char*>(row(t, 0)), shape_.token_bytes()}, t);
      run = is_new ? 0 : t - known->second == distance ? run + 1 : 1;
      distance = is_new ? 0 : t - known->second;
      if (run != least || distance < 2) continue;
      const std::int64_t begin = t + 1 - least - trace_.cu_seqlens[s];
      add({"repeated-block", -1, s, begin,
           fmt::format("from here on, {} or more tokens have the routes of tokens {} and following", least,
                       begin - distance),
           "keep the routes of the last request if several were made for a sequence, as after an abort"});
    }
  }

  // Checks one token that has routes or should have them.
  void check_token(int s, std::int64_t t) {
    const std::int64_t place = t - trace_.cu_seqlens[s];
    if (all(t, Row::kZero)) {
      return add({"padding", -1, s, place, "a row of zeros: padding, or a buffer that was not filled",
                  "write -1 for padding, and cut the buffer to the recorded tokens"});
    }
    for (std::size_t l = 0; l < layers(); ++l) {
      if (empty_[l] || (kind(t, l) != Row::kMissing && kind(t, l) != Row::kZero)) continue;
      add({"missing-rows", static_cast<int>(l), s, place, "a token has no route in this layer",
           "record every pipeline stage and chunk of the prefill"});
    }
    if (is_filler(t)) {
      add({"padding", -1, s, place, "a token has the same experts in all layers: filler of padding",
           "write -1 for padding, or remove it"});
    }
  }

  // Checks padding and the cached prefix. Returns the first token that should have a route, and the end of such tokens.
  std::pair<std::int64_t, std::int64_t> check_ends(int s) {
    const std::int64_t begin = trace_.cu_seqlens[s];
    std::int64_t end = trace_.cu_seqlens[s + 1];
    for (std::int64_t t = begin; t < end; ++t) {
      if (is_padding(t) && !all(t, Row::kMissing)) {
        add({"padding", -1, s, t - begin, "a token outside the attention mask has a route, which counts as load",
             "write -1 for padding, or remove it"});
      }
    }
    const auto unrouted = [&](std::int64_t t) { return all(t, Row::kMissing) || all(t, Row::kZero); };
    if (end > begin && unrouted(end - 1)) --end;  // the last token has no route
    std::int64_t first = begin;
    while (first < end && is_padding(first)) ++first;
    std::int64_t routed = first;
    while (routed < end && all(routed, Row::kMissing)) ++routed;
    if (routed > first) {
      add({"prefix-missing", -1, s, first - begin,
           fmt::format("the first {} tokens have no route: they were in the prefix cache", routed - first),
           "return the routes of cached tokens, or switch prefix caching off; otherwise routers choose for them",
           routed - first});
    }
    return {routed, end};
  }

  void check_sequence(int s) {
    const std::int64_t begin = trace_.cu_seqlens[s];
    const auto [routed, end] = check_ends(s);
    const ConstantRows limits = ascending_ ? kAscending : kOrderedByWeight;
    std::int64_t repeated = 0;
    std::vector<std::int64_t> constant(layers(), 0);
    for (std::int64_t t = routed; t < end; ++t) {
      if (is_padding(t)) continue;
      check_token(s, t);
      if (all(t, Row::kZero)) continue;
      if (t == routed || is_padding(t - 1)) continue;
      repeated = same_route(t, t - 1) ? repeated + 1 : 0;
      const std::int64_t most = unique_routes() ? 1 : bits_ >= kBitsOfRoutes ? kRepeatedRows - 1 : 1 << 20;
      if (repeated >= most) {
        add({"repeated-rows", -1, s, t - begin, "a token has the route of the token before it in all layers",
             "record every decoding step once: do not reuse the buffer of the previous step"});
      }
      for (std::size_t l = 0; l < layers(); ++l) {
        constant[l] = equal_rows(t, l, t - 1, l) ? constant[l] + 1 : 0;
        if (empty_[l] || constant[l] + 1 != std::min(limits.most, std::max(limits.least, end - routed))) continue;
        add({"constant-rows", static_cast<int>(l), s, t - begin - constant[l],
             fmt::format("{} consecutive tokens have the same route in this layer", constant[l] + 1),
             "check that the capture of this layer advances with the tokens"});
      }
    }
  }

  bool is_filler(std::int64_t t) const {
    const auto first = static_cast<std::size_t>(std::ranges::find(empty_, false) - empty_.begin());
    if (std::ranges::count(empty_, false) < kFillerLayers || bits_ < kBitsOfRoutes * kFillerLayers) return false;
    for (std::size_t l = first; l < layers(); ++l) {
      if (!empty_[l] && !equal_rows(t, l, t, first)) return false;
    }
    return true;
  }

  // Finds sequences that begin with all rows of another one. Sorted by their rows, such sequences are neighbours.
  // Prompts of a GRPO group may be equal, responses not. A turn may begin with the turns before it, so that sequences
  // of different lengths are compared only if the prompts are known.
  void check_repeated_sequences() {
    if (bits_ < kBitsOfRoutes) return;
    struct Rows {
      int sequence;
      std::int64_t tokens;
      std::int64_t prompt;
      std::string_view bytes;
    };
    std::vector<Rows> all_rows;
    for (int s = 0; s < trace_.num_sequences(); ++s) {
      const std::int64_t begin = trace_.cu_seqlens[s];
      std::int64_t tokens = trace_.sequence_length(s);
      if (tokens > 0 && !all(begin + tokens - 1, Row::kRoute)) --tokens;  // the last token
      const std::int64_t prompt =
          trace_.prompt_lengths.empty() ? 0 : trace_.prompt_lengths[static_cast<std::size_t>(s)];
      if (tokens < prompt + kLeastRows || !all(begin, Row::kRoute)) continue;
      const auto* const bytes = reinterpret_cast<const char*>(row(begin, 0));
      all_rows.push_back({s, tokens, prompt, {bytes, static_cast<std::size_t>(tokens) * shape_.token_bytes()}});
    }
    // As a heap: unlike std::sort, it stays in bounds if others change the routes meanwhile.
    const auto key = [](const Rows& of) { return std::pair(of.bytes, of.sequence); };
    std::ranges::make_heap(all_rows, {}, key);
    std::ranges::sort_heap(all_rows, {}, key);
    std::vector<const Rows*> prefixes;  // of the rows before, each begins with the one before it
    for (const Rows& of : all_rows) {
      while (!prefixes.empty() && !of.bytes.starts_with(prefixes.back()->bytes)) prefixes.pop_back();
      const bool prompts_are_known = !trace_.prompt_lengths.empty();
      if (!prefixes.empty() && (prefixes.back()->tokens == of.tokens ||
                                (prompts_are_known && prefixes.back()->tokens >= of.prompt + kLeastRows))) {
        const Rows& other = *prefixes.back();
        add({"repeated-sequence", -1, of.sequence, 0,
             of.tokens == other.tokens
                 ? fmt::format("all {} rows equal those of sequence {}, as only samples with the same tokens do",
                               of.tokens, number(other.sequence))
                 : fmt::format("the first {} rows are all those of sequence {}", other.tokens, number(other.sequence)),
             "copy the routes of each request before its buffer is used again"});
      }
      prefixes.push_back(&of);
    }
  }

  bool same_experts(std::int64_t t, std::size_t l, std::size_t m) const {
    if (equal_rows(t, l, t, m)) return true;
    return visit_route_type(shape_.type, [&]<class Id>(std::type_identity<Id>) {
      const auto k = static_cast<std::size_t>(shape_.top_k);
      for (std::size_t i = 0; i < k; ++i) {
        std::size_t j = 0;
        while (j < k && load_entry<Id>(row(t, m), j) != load_entry<Id>(row(t, l), i)) ++j;
        if (j == k) return false;
      }
      return true;
    });
  }

  // Compares the layers in a sample of the tokens [begin, end).
  void check_equal_layers(std::int64_t begin, std::int64_t end, std::int64_t samples, int sequence) {
    if (bits_ < kBitsOfRoutes) return;
    const std::int64_t step = std::max<std::int64_t>(1, (end - begin) / samples);
    const double others = (1 - kEqualLayers) * static_cast<double>(samples);
    for (std::size_t l = 1; l < layers(); ++l) {
      for (std::size_t m = 0; m < l && !empty_[l]; ++m) {
        std::int64_t rows = 0;
        std::int64_t equal = 0;
        for (std::int64_t t = begin; t < end && static_cast<double>(rows - equal) <= others && !empty_[m]; t += step) {
          if (is_padding(t) || kind(t, l) != Row::kRoute || kind(t, m) != Row::kRoute) continue;
          ++rows;
          equal += same_experts(t, l, m) ? 1 : 0;
        }
        if (rows < kLeastRows || static_cast<double>(equal) < kEqualLayers * static_cast<double>(rows)) continue;
        add({"equal-layers", static_cast<int>(l), sequence, -1,
             fmt::format("has the routes of layer {} in {} of {} tokens", m, equal, rows),
             "record each layer into its own part of the buffer"});
        break;
      }
    }
  }

  void check_versions() {
    const auto& versions = expected_.weight_versions;
    const auto known = std::ranges::find_if(versions, [](const auto& of) { return !of.empty(); });
    for (auto of = known; of != versions.end(); ++of) {
      if (of->empty() || *of == std::vector{known->front()}) continue;
      const std::string others =
          of == known ? ""
                      : fmt::format(", but sequence {} with {}", number(static_cast<int>(known - versions.begin())),
                                    fmt::join(*known, " and "));
      add({"weight-versions", -1, static_cast<int>(of - versions.begin()), -1,
           fmt::format("sampled with weights {}{}", fmt::join(*of, " and "), others),
           "wait for running requests before updating weights, or drop routes of older weights"});
    }
  }

  void note_short_sequences() {
    int num_short = 0;
    for (int s = 0; s < trace_.num_sequences(); ++s) num_short += trace_.sequence_length(s) < kLeastRows ? 1 : 0;
    if (num_short == 0) return;
    remarks_.push_back(
        fmt::format("{} of {} sequences have fewer than {} tokens, too few to compare them or their layers", num_short,
                    trace_.num_sequences(), kLeastRows));
  }

  const RoutingTrace& trace_;
  const RouteExpectations& expected_;
  RouteShape shape_;
  double bits_ = 0;                   // information of a token's route
  std::vector<Row> rows_;             // [tokens][layers]
  std::vector<bool> empty_;           // [layers], without any route other than filler
  bool ascending_ = true;             // in every row
  std::vector<bool> may_be_partial_;  // [layers]
  std::string shared_;                // describes a shared expert that was recorded; empty: none
  std::vector<std::int64_t> ids_;
  std::vector<RouteFinding> found_;
  std::vector<std::string> remarks_;
};

void expect_size(const char* field, std::size_t given, std::int64_t expected, const char* of) {
  if (given == 0 || given == static_cast<std::size_t>(expected)) return;
  throw InputError({.field = field}, fmt::format("has {} values, but there are {} {}", given, expected, of));
}

}  // namespace

RouteReport find_route_faults(const RoutingTrace& trace, const RouteExpectations& expected) {
  expect_size("lengths", expected.lengths.size(), trace.num_sequences(), "sequences");
  expect_size("weight_versions", expected.weight_versions.size(), trace.num_sequences(), "sequences");
  expect_size("attention_mask", expected.attention_mask.size(), trace.num_tokens, "tokens");
  return Checks(trace, expected).report();
}

}  // namespace foremoe
