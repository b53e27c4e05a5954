#pragma once

// Builds a RoutingTrace from rows, sequence after sequence, in the narrowest unsigned type that fits the ids: starts
// with U8 and widens once if necessary. Implements all rules for rows, so that importers agree: recorded gaps remain
// missing, rows with repeated ids become missing, ids out of range are errors. If more than 1 % of the rows repeat an
// id other than in all entries, finish() throws unless drop_repeating_rows is set: an engine that writes 0 for ids
// without weights would otherwise lose most routes.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/error.h"
#include "foremoe/rollout/importers/importer.h"

namespace foremoe {

inline constexpr std::int64_t kMaxImportedExperts = 65535;  // fits U16 with its sentinel
inline constexpr std::int64_t kMaxImportedLayers = 65535;

struct SequenceInfo {
  std::int64_t num_tokens = 0;
  std::int64_t num_layers = 0;
  std::int64_t top_k = 0;
  std::int64_t sentinel = -1;       // marks missing rows, as −1 does: largest value of an unsigned type
  std::int32_t prompt_length = -1;  // tokens; −1 unknown
  std::int32_t micro_step = -1;     // −1: no batching recorded
  std::int32_t rank = -1;
};

// What a sample changes, besides the vectors that grow with sequences and tokens.
struct AssembledSoFar {
  struct IdsOfRows {
    std::int64_t least = 0;  // 0: no row
    std::int64_t most = 0;
  };

  SequenceInfo sequence_;    // the current one
  std::int64_t row_ = 0;     // row index in the current sequence
  std::size_t written_ = 0;  // entries written
  std::int64_t max_id_ = -1;
  std::int64_t below_sentinel_ = -1;           // largest id besides the sentinel of an unsigned type
  std::vector<std::int64_t> routed_in_layer_;  // [layer], rows with a route
  std::vector<IdsOfRows> ids_in_layer_;        // [layer], of rows with a route
};

class TraceAssembler : AssembledSoFar {
 public:
  // model: Compared with the routes, if known.
  explicit TraceAssembler(const ImportOptions& options, std::optional<ModelShape> model = {});

  // Adds the next sample, with add(). If it throws InputError, skips the sample, unless options.strict.
  void add_sample(const std::function<void()>& add);

  // Returns the number of first tokens whose rows were omitted. Throws InputError if the rows contradict the tokens.
  std::int64_t omitted_rows(const DecodedSequence& sequence, std::int64_t rows) const;

  // Requires that the input contains num_tokens · num_layers · top_k entries, which limits memory to the input's size.
  // `where`: file and field of the sequence; rows add their index.
  void begin_sequence(Where where, const SequenceInfo& info);

  // Adds the next row of the sequence, in [token][layer] order. `ids`: top_k entries.
  void add_row(std::span<const std::int64_t> ids);
  void add_skipped_row();
  void add_omitted_rows(std::int64_t tokens);
  // Passes what else is known of the completed sequence.
  void sequence_was(const DecodedSequence& sequence);

  ImportReport& report() { return report_; }
  void set_layer_ids(std::vector<std::int32_t> ids) { layer_ids_ = std::move(ids); }

  std::size_t num_sequences() const { return report_.sequences.size(); }  // including the current one
  std::size_t num_samples() const { return num_sequences() + report_.skipped.size(); }

  // Requires at least one sample; all must be complete. Throws InputError if all were skipped.
  Imported finish() &&;

 private:
  struct CheckedRow {
    bool repeating = false;   // an id is in it twice
    std::int64_t absent = 0;  // entries without an expert
  };
  // Throws InputError for an id out of range.
  CheckedRow checked(std::span<const std::int64_t> ids);
  void check_shape(const SequenceInfo& info);
  bool is_missing(std::span<const std::int64_t> ids) const;
  bool is_absent(std::int64_t id) const;
  void expect_readable() const;
  void expect_few_repetitions() const;
  void expect_known_experts() const;
  RoutingTrace described();
  void choose(RoutingTrace& trace);
  void describe_layers(RoutingTrace& trace);
  void put_missing();
  void end_row(bool routed);
  void widen();
  bool is_filler(std::int64_t token, std::size_t layer) const;
  std::vector<bool> empty_layers() const;
  void keep_layers(const std::vector<bool>& kept, RoutingTrace& trace);
  Where where_of_row(std::size_t k = 0) const;

  const ImportOptions& options_;
  std::optional<ModelShape> model_;
  ImportReport report_;
  std::vector<std::byte> entries_;  // [tokens][layers][top_k], `width_` bytes each
  std::size_t width_ = 1;           // 1 or 2

  Where where_;                   // of the current sequence
  bool token_is_routed_ = false;  // in any layer so far
  Where first_where_;             // first sequence, which sets the shape
  std::size_t other_shapes_ = 0;  // samples of another shape
  std::int64_t num_layers_ = 0;
  std::int64_t top_k_ = 0;

  std::vector<std::uint64_t> seen_in_row_;  // [expert], stamp of the last row that contained it
  std::uint64_t stamp_ = 0;
  Where first_remapped_;

  std::vector<std::int64_t> cu_seqlens_{0};
  std::vector<std::int32_t> prompt_lengths_, micro_step_, rank_, layer_ids_;
};

}  // namespace foremoe
