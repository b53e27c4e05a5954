#include "foremoe/core/safetensors_header.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <utility>

#include "foremoe/core/error.h"

namespace foremoe {

namespace {

constexpr std::size_t kMaxAxes = 32;

// Follows the parser's events with a small state machine instead of building a document: memory stays in
// proportion to what is kept, depth is bounded by the grammar, and repeated keys are seen.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(SafetensorsHeader& header, const std::string& file) : header_(header), file_(file) {}

  bool start_object(std::size_t) override {
    switch (state_) {
      case State::kStart:
        state_ = State::kTop;
        return true;
      case State::kName:
        state_ = is_metadata() ? State::kMetadata : State::kTensor;
        return true;
      default:
        fail("an object where none belongs");
    }
  }

  bool key(string_t& key) override {
    switch (state_) {
      case State::kTop:
        if (!names_.insert(key).second) fail_at(key, "appears twice");
        name_ = key;
        seen_ = 0;
        if (!is_metadata()) header_.tensors.push_back({.name = key, .dtype = {}, .shape = {}});
        state_ = State::kName;
        return true;
      case State::kMetadata:
        if (header_.metadata.contains(key)) fail_at("__metadata__." + key, "appears twice");
        key_ = key;
        return true;
      default:
        start_field(key);
        return true;
    }
  }

  bool string(string_t& text) override {
    if (state_ == State::kMetadata) {
      header_.metadata.emplace(key_, text);
    } else if (state_ == State::kDType) {
      header_.tensors.back().dtype = text;
      state_ = State::kTensor;
    } else {
      fail("a string where none belongs");
    }
    return true;
  }

  bool start_array(std::size_t) override {
    if (in_list_ || (state_ != State::kShape && state_ != State::kOffsets)) fail("a list where none belongs");
    in_list_ = true;
    offsets_ = 0;
    return true;
  }

  bool number_unsigned(number_unsigned_t number) override {
    if (!in_list_) fail("a number where none belongs");
    TensorEntry& tensor = header_.tensors.back();
    if (state_ == State::kShape) {
      if (tensor.shape.size() == kMaxAxes) fail(fmt::format("more than {} axes", kMaxAxes));
      tensor.shape.push_back(number);
    } else {
      if (offsets_ == 2) fail("data_offsets must be two numbers");
      (offsets_ == 0 ? tensor.begin : tensor.end) = number;
      ++offsets_;
    }
    return true;
  }

  bool end_array() override {
    if (state_ == State::kOffsets && offsets_ != 2) fail("data_offsets must be two numbers");
    in_list_ = false;
    state_ = State::kTensor;
    return true;
  }

  bool end_object() override {
    if (state_ == State::kTensor && seen_ != kAllFields) fail("needs dtype, shape and data_offsets");
    state_ = state_ == State::kTop ? State::kEnd : State::kTop;
    return true;
  }

  bool number_integer(number_integer_t) override { fail("a negative number where none belongs"); }
  bool number_float(number_float_t, const string_t& text) override { fail(text + " is not a count"); }
  bool boolean(bool) override { fail("a truth value where none belongs"); }
  bool null() override { fail("a null where none belongs"); }
  bool binary(binary_t&) override { fail("binary data where none belongs"); }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception& error) override {
    throw InputError({.file = file_, .field = "header", .index = fmt::format("byte {}", position)}, error.what());
  }

 private:
  enum class State { kStart, kTop, kName, kMetadata, kTensor, kDType, kShape, kOffsets, kEnd };
  enum Field : unsigned { kDTypeField = 1, kShapeField = 2, kOffsetsField = 4, kAllFields = 7 };

  bool is_metadata() const { return name_ == "__metadata__"; }

  void start_field(const std::string& key) {
    const auto [state, field] = key == "dtype"          ? std::pair(State::kDType, kDTypeField)
                                : key == "shape"        ? std::pair(State::kShape, kShapeField)
                                : key == "data_offsets" ? std::pair(State::kOffsets, kOffsetsField)
                                                        : throw_unknown(key);
    if ((seen_ & field) != 0) fail(key + " appears twice");
    seen_ |= field;
    state_ = state;
  }

  [[noreturn]] std::pair<State, Field> throw_unknown(const std::string& key) const {
    fail("unknown key '" + key + "'");
  }
  [[noreturn]] void fail(const std::string& what) const {
    fail_at(name_.empty() ? "header" : is_metadata() && !key_.empty() ? name_ + "." + key_ : name_, what);
  }
  [[noreturn]] void fail_at(const std::string& field, const std::string& what) const {
    throw InputError({.file = file_, .field = field, .index = {}}, what);
  }

  SafetensorsHeader& header_;
  const std::string& file_;
  State state_ = State::kStart;
  std::set<std::string> names_;
  std::string name_;  // of the entry being read
  std::string key_;   // of the metadata being read
  unsigned seen_ = 0;
  bool in_list_ = false;
  int offsets_ = 0;  // numbers read of data_offsets
};

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view text, const std::string& file) {
  if (!text.starts_with('{')) {
    throw InputError({.file = file, .field = "header", .index = {}},
                     "does not begin with '{'; is it a safetensors file?");
  }
  SafetensorsHeader header;
  HeaderReader reader(header, file);
  nlohmann::json::sax_parse(text, &reader);
  return header;
}

}  // namespace foremoe
