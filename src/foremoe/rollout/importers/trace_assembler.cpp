#include "foremoe/rollout/importers/trace_assembler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <iterator>
#include <numeric>
#include <utility>

#include "foremoe/rollout/importers/layer_choice.h"
#include "foremoe/rollout/importers/prompt_prefixes.h"

namespace foremoe {

namespace {

constexpr std::int64_t kMaxOmittedTokens = std::int64_t{1} << 20;  // of a sequence
constexpr std::int64_t kLeastFiller = 16;                          // rows 0, 1, … of a layer; fewer may be routes
constexpr std::string_view kOtherShape = ", but the first sequence (";
constexpr std::size_t kNamedSamples = 3;

std::string describe_skipped(const std::vector<SkippedSample>& skipped, std::size_t samples) {
  std::string places;
  for (std::size_t i = 0; i < std::min(skipped.size(), kNamedSamples); ++i) {
    const InputError error(skipped[i].where, skipped[i].problem);
    places += fmt::format("{}sample {} ({})", i == 0 ? "" : "; ", skipped[i].sample, error.what());
  }
  return fmt::format("{} of {} samples were skipped: {}{}; with --strict, the first ends the import", skipped.size(),
                     samples, places, skipped.size() > kNamedSamples ? "; …" : "");
}

std::int64_t sentinel_of_width(std::size_t width) { return width == 1 ? 0xFF : 0xFFFF; }

std::int64_t read_entry(const std::byte* at, std::size_t width) {
  std::uint16_t value = 0;  // little-endian hosts only, as in all of the project's files
  std::memcpy(&value, at, width);
  return value;
}

void write_entry(std::byte* at, std::size_t width, std::int64_t value) {
  const auto narrow = static_cast<std::uint16_t>(value);
  std::memcpy(at, &narrow, width);
}

}  // namespace

TraceAssembler::TraceAssembler(const ImportOptions& options, std::optional<ModelShape> model)
    : options_(options),
      model_(std::move(model)),
      width_(options.num_experts + options.weightless_experts > 0xFF ? 2 : 1),
      seen_in_row_(kMaxImportedExperts, 0) {
  assert(options.num_experts >= 0 && options.num_experts <= kMaxImportedExperts);
}

void TraceAssembler::add_sample(const std::function<void()>& add) {
  if (options_.strict) return add();
  const AssembledSoFar before = *this;
  const RowCounts counts = report_;
  const std::size_t sequences = num_sequences();
  try {
    add();
  } catch (const InsufficientMemory&) {
    throw;
  } catch (const InputError& error) {
    static_cast<AssembledSoFar&>(*this) = before;
    static_cast<RowCounts&>(report_) = counts;
    entries_.resize(written_ * width_);
    cu_seqlens_.resize(sequences + 1);
    for (std::vector<std::int32_t>* of : {&prompt_lengths_, &micro_step_, &rank_}) of->resize(sequences);
    report_.sequences.resize(sequences);
    report_.skipped.push_back({static_cast<int>(num_samples()), error.where(), error.problem()});
  }
}

std::int64_t TraceAssembler::omitted_rows(const DecodedSequence& sequence, std::int64_t rows) const {
  if (!sequence.num_tokens) return 0;
  const std::int64_t tokens = *sequence.num_tokens;
  const auto fits = [&](std::int64_t n) { return n == tokens || n == tokens - 1; };  // the last token may have no row
  if (fits(rows)) return 0;
  const std::int64_t omitted = sequence.omitted_rows;
  if (omitted > 0 && omitted <= kMaxOmittedTokens && fits(rows + omitted)) return omitted;
  if (options_.keep_invalid_rows) return 0;
  throw InputError(sequence.where,
                   fmt::format("has {} rows for {} tokens (by {}); expected {} or {}", rows, tokens,
                               sequence.counted_in.empty() ? "the response" : sequence.counted_in, tokens - 1, tokens));
}

void TraceAssembler::begin_sequence(Where where, const SequenceInfo& info) {
  assert(row_ == sequence_.num_tokens * sequence_.num_layers && "the sequence before is complete");
  where_ = std::move(where);
  check_shape(info);
  sequence_ = info;
  row_ = 0;
  const std::size_t bytes = entries_.size() + static_cast<std::size_t>(info.num_tokens * num_layers_ * top_k_) * width_;
  if (bytes > entries_.capacity()) expect_memory(static_cast<double>(std::max(bytes, 2 * entries_.size())), where_);
  entries_.resize(bytes);
  cu_seqlens_.push_back(cu_seqlens_.back() + info.num_tokens);
  prompt_lengths_.push_back(info.prompt_length);
  micro_step_.push_back(info.micro_step);
  rank_.push_back(info.rank);
  report_.sequences.push_back({.sample = static_cast<int>(num_samples())});
}

void TraceAssembler::check_shape(const SequenceInfo& info) {
  const auto fail = [&](const std::string& what) { throw InputError(where_, what); };
  const bool first = cu_seqlens_.size() == 1;
  if (first) {
    if (info.num_layers < 1 || info.num_layers > kMaxImportedLayers) {
      fail(fmt::format("has {} layers; expected 1 to {}", info.num_layers, kMaxImportedLayers));
    }
    const bool known = options_.num_experts > 0 && !options_.keep_invalid_rows;
    const std::int64_t max_top_k = known ? options_.num_experts : kMaxImportedExperts;
    if (info.top_k < 1 || info.top_k > max_top_k) {
      fail(fmt::format("has {} experts per token; expected 1 to {}", info.top_k, max_top_k));
    }
    if (!options_.keep_invalid_rows && options_.num_layers > 0 && info.num_layers != options_.num_layers) {
      fail(fmt::format("has {} layers, but {} were asked for", info.num_layers, options_.num_layers));
    }
    if (!options_.keep_invalid_rows && options_.top_k > 0 && info.top_k != options_.top_k) {
      fail(fmt::format("has {} experts per token, but {} were asked for", info.top_k, options_.top_k));
    }
    if (model_ && info.top_k != model_->top_k) {
      fail(fmt::format("has {} experts per token, but {} has {}{}", info.top_k, model_->name, model_->top_k,
                       info.top_k > model_->top_k ? ": shared experts may have been recorded too" : ""));
    }
    first_where_ = where_;
    num_layers_ = info.num_layers;
    top_k_ = info.top_k;
    routed_in_layer_.assign(static_cast<std::size_t>(num_layers_), 0);
    ids_in_layer_.assign(static_cast<std::size_t>(num_layers_), {});
  } else if (info.num_layers != num_layers_ || info.top_k != top_k_) {
    ++other_shapes_;
    fail(fmt::format("has {} layers and top-{}{}{}) has {} layers and top-{}", info.num_layers, info.top_k, kOtherShape,
                     first_where_.file, num_layers_, top_k_));
  }
}

void TraceAssembler::add_row(std::span<const std::int64_t> ids) {
  assert(static_cast<std::int64_t>(ids.size()) == top_k_);
  ++report_.rows;
  if (is_missing(ids)) {
    ++report_.rows_recorded_missing;
    return put_missing();
  }
  const auto [repeating, absent] = checked(ids);
  if (repeating) {
    ++report_.rows_repeating;
    if (std::ranges::count(ids, ids[0]) < std::ssize(ids) && report_.rows_remapped++ == 0)
      first_remapped_ = where_of_row();
    if (!options_.keep_invalid_rows) return put_missing();
  }
  for (const std::int64_t id : ids) {
    if (is_absent(id)) continue;
    max_id_ = std::max(max_id_, id);
    if (id != sequence_.sentinel) below_sentinel_ = std::max(below_sentinel_, id);
  }
  if (max_id_ >= sentinel_of_width(width_)) widen();
  for (const std::int64_t id : ids)
    write_entry(&entries_[written_++ * width_], width_, id < 0 || is_absent(id) ? sentinel_of_width(width_) : id);
  if (absent > 0) ++report_.rows_partial;
  auto& [least, most] = ids_in_layer_[static_cast<std::size_t>(row_ % num_layers_)];
  least = least == 0 ? top_k_ - absent : std::min(least, top_k_ - absent);
  most = std::max(most, top_k_ - absent);
  end_row(!repeating || std::ranges::any_of(ids, [](std::int64_t id) { return id != 0; }));  // zeros: no route
}

TraceAssembler::CheckedRow TraceAssembler::checked(std::span<const std::int64_t> ids) {
  const bool known = options_.num_experts > 0 && !options_.keep_invalid_rows;
  const std::int64_t num_ids = known ? options_.num_experts + options_.weightless_experts : kMaxImportedExperts;
  CheckedRow row;
  ++stamp_;
  for (std::size_t k = 0; k < ids.size(); ++k) {
    if (is_absent(ids[k])) {
      ++row.absent;
      continue;
    }
    if (ids[k] < 0 && options_.keep_invalid_rows) continue;
    if (ids[k] < 0 || ids[k] >= num_ids) {
      throw InputError(where_of_row(k),
                       known ? fmt::format("expert {} is out of range; there are {} experts", ids[k], num_ids)
                             : fmt::format("expert {} is out of range; at most {} experts are read", ids[k], num_ids));
    }
    auto& seen = seen_in_row_[static_cast<std::size_t>(ids[k])];
    row.repeating |= std::exchange(seen, stamp_) == stamp_;
  }
  return row;
}

void TraceAssembler::add_skipped_row() {
  ++report_.rows_skipped;
  put_missing();
}

void TraceAssembler::add_omitted_rows(std::int64_t tokens) {
  report_.rows += tokens * num_layers_;
  report_.rows_omitted += tokens * num_layers_;
  for (std::int64_t row = 0; row < tokens * num_layers_; ++row) put_missing();
}

void TraceAssembler::sequence_was(const DecodedSequence& sequence) {
  if (sequence.num_tokens == sequence_.num_tokens + 1) ++report_.last_tokens_without_route;
  SampleFacts& facts = report_.sequences.back();
  facts = {facts.sample, sequence.num_tokens, sequence.counted_in, sequence.prompt, sequence.weight_versions};
}

bool TraceAssembler::is_missing(std::span<const std::int64_t> ids) const {
  const auto all = [&](std::int64_t value) {
    return std::all_of(ids.begin(), ids.end(), [=](auto id) { return id == value; });
  };
  // At top-1, the largest value of an unsigned type may be an expert, if num_experts includes it.
  return all(-1) ||
         (sequence_.sentinel >= options_.num_experts + options_.weightless_experts && all(sequence_.sentinel));
}

// A single entry without an expert. The largest value of an unsigned type may be an expert if num_experts is unknown.
bool TraceAssembler::is_absent(std::int64_t id) const {
  return id == -1 || (id == sequence_.sentinel && options_.num_experts > 0 &&
                      id >= options_.num_experts + options_.weightless_experts);
}

void TraceAssembler::put_missing() {
  for (std::int64_t k = 0; k < top_k_; ++k) {
    write_entry(&entries_[written_++ * width_], width_, sentinel_of_width(width_));
  }
  end_row(false);
}

void TraceAssembler::end_row(bool routed) {
  const auto layer = row_ % num_layers_;
  token_is_routed_ = routed || (layer > 0 && token_is_routed_);
  if (routed) ++routed_in_layer_[static_cast<std::size_t>(layer)];
  if (++row_ == sequence_.num_tokens * num_layers_ && !token_is_routed_) ++report_.last_tokens_without_route;
}

void TraceAssembler::widen() {
  const std::size_t bytes = entries_.size() / width_ * 2;
  expect_memory(static_cast<double>(bytes), where_);
  std::vector<std::byte> wide(bytes);
  for (std::size_t i = 0; i < written_; ++i) {
    const std::int64_t value = read_entry(&entries_[i * width_], width_);
    write_entry(&wide[i * 2], 2, value == sentinel_of_width(width_) ? sentinel_of_width(2) : value);
  }
  entries_ = std::move(wide);
  width_ = 2;
}

Where TraceAssembler::where_of_row(std::size_t k) const {
  Where where = where_;
  where.index +=
      fmt::format("{}[{}, {}, {}]", where.index.empty() ? "" : " ", row_ / num_layers_, row_ % num_layers_, k);
  return where;
}

void TraceAssembler::expect_few_repetitions() const {
  constexpr std::int64_t kFew = 8;
  const std::int64_t routed = report_.rows - report_.rows_recorded_missing;
  if (options_.keep_invalid_rows || options_.drop_repeating_rows) return;
  if (report_.rows_remapped <= std::max(kFew, routed / 100)) return;
  throw InputError(first_remapped_,
                   fmt::format("{} of {} rows with a route repeat an id, this is the first: the engine writes one id "
                               "for experts without weights (LongCat), or its buffer was not filled; record the "
                               "router's own ids, with --weightless-experts, or drop these rows with "
                               "--drop-repeating-rows",
                               report_.rows_remapped, routed));
}

// Sets the lists per layer: those of the model, or the numbers of ids if some rows have fewer than others.
void TraceAssembler::describe_layers(RoutingTrace& trace) {
  const auto known = [&](const std::vector<int>& of_layer) { return std::ssize(of_layer) == trace.num_layers; };
  if (known(options_.experts_of_layer)) trace.experts_of_layer = options_.experts_of_layer;
  if (known(options_.top_k_of_layer)) trace.top_k_of_layer = options_.top_k_of_layer;
  if (report_.rows_partial == 0) return;
  const bool constant = std::ranges::all_of(ids_in_layer_, [](const IdsOfRows& of) { return of.least == of.most; });
  if (constant && trace.top_k_of_layer.empty()) {
    for (const IdsOfRows& of : ids_in_layer_) {
      trace.top_k_of_layer.push_back(static_cast<int>(of.most > 0 ? of.most : top_k_));
    }
  }
  report_.notes.push_back(fmt::format("{} rows have fewer than {} experts{}", report_.rows_partial, top_k_,
                                      constant ? ", always the same number in a layer" : ""));
}

void TraceAssembler::expect_readable() const {
  if (num_sequences() == 0) {
    const SkippedSample& first = report_.skipped.at(0);
    const std::size_t n = report_.skipped.size();
    throw InputError(first.where,
                     n == 1 ? first.problem : fmt::format("{}; none of the {} samples can be read", first.problem, n));
  }
  if (other_shapes_ >= num_sequences()) {
    const auto is_other = [](const SkippedSample& of) { return of.problem.find(kOtherShape) != std::string::npos; };
    const SkippedSample& first = *std::ranges::find_if(report_.skipped, is_other);
    throw InputError(first.where, first.problem);
  }
}

// Throws InputError if the ids do not say how many experts there are.
void TraceAssembler::expect_known_experts() const {
  if (options_.num_experts != 0 || options_.keep_invalid_rows) return;
  if (max_id_ < 0) {
    throw InputError(
        first_where_,
        "no row has a route, so nothing was recorded: switch recording on in the engine that samples (vLLM "
        "and SGLang: --enable-return-routed-experts), or keep the rows as missing with the number of "
        "`experts`");
  }
  const std::int64_t largest = sequence_.sentinel;
  if (max_id_ == largest && below_sentinel_ < largest * 3 / 4) {
    throw InputError(first_where_,
                     fmt::format("{} is the largest value of the type, and other ids end at {}: it may mark "
                                 "entries without an expert; give the number of `experts`",
                                 largest, below_sentinel_));
  }
}

// Returns the trace, without its routes.
RoutingTrace TraceAssembler::described() {
  RoutingTrace trace;
  const bool inferred = options_.num_experts == 0;
  trace.num_experts = inferred ? static_cast<int>(std::max(max_id_ + 1, std::int64_t{1})) : options_.num_experts;
  trace.weightless_experts = options_.weightless_experts;
  trace.type = width_ == 1 ? RouteType::kU8 : RouteType::kU16;
  trace.num_tokens = cu_seqlens_.back();
  trace.num_layers = static_cast<int>(num_layers_);
  trace.top_k = static_cast<int>(top_k_);
  trace.cu_seqlens = std::move(cu_seqlens_);
  const auto known = [](const std::vector<std::int32_t>& values) {
    return std::find(values.begin(), values.end(), -1) == values.end();
  };
  if (known(prompt_lengths_)) trace.prompt_lengths = std::move(prompt_lengths_);
  if (known(micro_step_)) {
    trace.micro_step = std::move(micro_step_);
    trace.rank = std::move(rank_);
    trace.ranks = *std::max_element(trace.rank.begin(), trace.rank.end()) + 1;
    trace.ranks_per_node = options_.ranks_per_node > 0 ? options_.ranks_per_node : std::min(8, trace.ranks);
  }
  trace.layer_ids = layer_ids_;
  if (layer_ids_.empty()) {
    trace.layer_ids.resize(static_cast<std::size_t>(num_layers_));
    std::iota(trace.layer_ids.begin(), trace.layer_ids.end(), 0);
  }
  trace.name = first_where_.file;
  trace.model = options_.model;
  return trace;
}

// Removes the layers without experts, and notes which these are.
void TraceAssembler::choose(RoutingTrace& trace) {
  const std::vector<bool> empty = empty_layers();
  const std::string hash_layers = model_ ? "" : find_hash_layers(empty, trace.num_experts, trace.top_k);
  const bool drop_empty = options_.drop_empty_layers && (hash_layers.empty() || !options_.keep_invalid_rows);
  LayerChoice choice = choose_layers(empty, model_, drop_empty, first_where_, hash_layers);
  std::ranges::move(choice.notes, std::back_inserter(report_.notes));
  if (!choice.numbers.empty() && layer_ids_.empty()) trace.layer_ids = std::move(choice.numbers);
  keep_layers(choice.kept, trace);
}

Imported TraceAssembler::finish() && {
  assert(row_ == sequence_.num_tokens * sequence_.num_layers && "the last sequence is complete");
  expect_readable();
  expect_few_repetitions();
  expect_known_experts();
  if (options_.fill_prefixes) {
    const auto token_bytes = static_cast<std::size_t>(num_layers_ * top_k_) * width_;
    const FilledPrefixes filled =
        foremoe::fill_prefixes(entries_, token_bytes, cu_seqlens_, prompt_lengths_, report_.sequences);
    report_.rows_filled = filled.tokens * num_layers_;
    report_.notes.push_back(describe(filled));
  }

  RoutingTrace trace = described();
  const bool inferred = options_.num_experts == 0;
  std::string ids = inferred && !options_.keep_invalid_rows ? find_weightless_experts(trace) : "";
  choose(trace);
  if (!report_.skipped.empty()) report_.notes.push_back(describe_skipped(report_.skipped, num_samples()));
  if (report_.rows_omitted > 0) {
    report_.notes.push_back(
        fmt::format("{} rows of first tokens were in a prefix cache, as the token counts say", report_.rows_omitted));
  }
  describe_layers(trace);
  if (inferred) {
    report_.num_experts_inferred = ids.empty();
    if (ids.empty())
      ids = fmt::format("num_experts = {} is the largest id + 1, ids without weights included", trace.num_experts);
    report_.notes.push_back(ids);
  }
  if (report_.last_tokens_without_route > 0) {
    report_.notes.push_back(
        fmt::format("{} last tokens have no route: the model does not process the last token that it generates",
                    report_.last_tokens_without_route));
  }
  auto storage = std::make_shared<std::vector<std::byte>>(std::move(entries_));
  trace.routes = storage->data();
  trace.storage = std::move(storage);
  return {std::move(trace), std::move(report_)};
}

// Whether a row is missing, or 0, 1, …
bool TraceAssembler::is_filler(std::int64_t token, std::size_t layer) const {
  const auto row = (static_cast<std::size_t>(token * num_layers_) + layer) * static_cast<std::size_t>(top_k_);
  bool missing = true;
  bool ascending = true;
  for (std::int64_t k = 0; k < top_k_; ++k) {
    const std::int64_t id = read_entry(&entries_[(row + static_cast<std::size_t>(k)) * width_], width_);
    missing &= id == sentinel_of_width(width_);
    ascending &= id == k;
  }
  return missing || ascending;
}

// [layers], layers without routes: all rows are missing, or all of so many that it is no coincidence are 0, 1, ….
std::vector<bool> TraceAssembler::empty_layers() const {
  const auto tokens = static_cast<std::int64_t>(written_) / (num_layers_ * top_k_);
  std::vector<bool> missing;
  for (const std::int64_t routed : routed_in_layer_) missing.push_back(routed == 0);
  std::vector<bool> empty = missing;
  for (std::size_t l = 0; l < empty.size() && top_k_ <= max_id_; ++l) {
    if (empty[l] || routed_in_layer_[l] < kLeastFiller) continue;
    std::int64_t t = 0;
    while (t < tokens && is_filler(t, l)) ++t;
    empty[l] = t == tokens;
  }
  return std::ranges::find(empty, false) == empty.end() ? missing : empty;
}

// Compacts rows in place. Rows move only towards the front, so unread rows are never overwritten.
void TraceAssembler::keep_layers(const std::vector<bool>& kept, RoutingTrace& trace) {
  if (std::ranges::find(kept, false) == kept.end()) return;
  const std::size_t row_bytes = static_cast<std::size_t>(top_k_) * width_;
  std::byte* to = entries_.data();
  const std::byte* from = entries_.data();
  for (std::int64_t row = 0; row < trace.num_tokens * num_layers_; ++row, from += row_bytes) {
    if (!kept[static_cast<std::size_t>(row % num_layers_)]) continue;
    std::memmove(to, from, row_bytes);
    to += row_bytes;
  }
  entries_.resize(static_cast<std::size_t>(to - entries_.data()));
  const auto keep = [&](auto& of_layer) {
    std::size_t l = 0;
    std::erase_if(of_layer, [&](const auto&) { return !kept[l++]; });
  };
  keep(trace.layer_ids);
  keep(ids_in_layer_);
  trace.num_layers = static_cast<int>(trace.layer_ids.size());
}

}  // namespace foremoe
