#pragma once

// Dense row-major arrays of fixed rank. `Array` owns its elements; `ArrayView` does not. Indices are integers or ids.
//
//   Array<Tokens, 2> load({num_ranks, num_experts});   // [rank][expert], tokens
//   load(RankId{3}, ExpertId{7}) += Tokens{1};
//   std::span<Tokens> of_rank = load.row(RankId{3});   // all experts of rank 3

#include <array>
#include <cassert>
#include <cstddef>
#include <functional>
#include <numeric>
#include <span>
#include <vector>

#include "foremoe/core/debug_mode.h"
#include "foremoe/core/ids.h"
#include "foremoe/core/memory_limit.h"

namespace foremoe {

template <class T>
concept IndexLike = std::integral<T> || requires(T t) {
  { t.index() } -> std::same_as<std::size_t>;
};

constexpr std::size_t to_index(IndexLike auto i) {
  if constexpr (std::integral<decltype(i)>) {
    return static_cast<std::size_t>(i);
  } else {
    return i.index();
  }
}

template <class T, std::size_t N>
class ArrayView {
 public:
  using Shape = std::array<std::size_t, N>;

  constexpr ArrayView() = default;
  constexpr ArrayView(T* data, Shape shape) : data_(data), shape_(shape) {}
  constexpr operator ArrayView<const T, N>() const { return {data_, shape_}; }

  constexpr T* data() const { return data_; }
  constexpr const Shape& shape() const { return shape_; }
  constexpr std::size_t extent(std::size_t axis) const { return shape_[axis]; }
  constexpr std::size_t size() const {
    return std::accumulate(shape_.begin(), shape_.end(), std::size_t{1}, std::multiplies<>{});
  }
  constexpr std::span<T> flat() const { return {data_, size()}; }

  // Returns the element with these indices, one per axis.
  template <IndexLike... I>
  requires(sizeof...(I) == N) constexpr T& operator()(I... i) const { return data_[offset(i...)]; }

  // Returns the row along the last axis with these indices, one for each earlier axis.
  template <IndexLike... I>
  requires(sizeof...(I) + 1 == N) constexpr std::span<T> row(I... i) const {
    return {data_ + offset(i...) * shape_[N - 1], shape_[N - 1]};
  }

  // Returns the sub-array at this index of the leading axis.
  constexpr ArrayView<T, N - 1> operator[](IndexLike auto i) const requires(N > 1) {
    assert(to_index(i) < shape_[0]);
    std::array<std::size_t, N - 1> rest{};
    std::copy(shape_.begin() + 1, shape_.end(), rest.begin());
    ArrayView<T, N - 1> sub{data_, rest};
    return {data_ + to_index(i) * sub.size(), rest};
  }

 private:
  template <IndexLike... I>
  constexpr std::size_t offset(I... i) const {
    std::size_t at = 0;
    std::size_t axis = 0;
    ((assert(to_index(i) < shape_[axis]), at = at * shape_[axis++] + to_index(i)), ...);
    return at;
  }

  T* data_ = nullptr;
  Shape shape_{};
};

template <class T, std::size_t N>
double bytes_of(const std::array<std::size_t, N>& shape) {
  return std::accumulate(shape.begin(), shape.end(), 1.0 * sizeof(T), std::multiplies<double>{});
}

template <class T, std::size_t N>
class Array {
 public:
  using Shape = std::array<std::size_t, N>;

  Array() = default;
  // Throws InputError if memory is insufficient (memory_limit.h).
  explicit Array(Shape shape, T fill = T{}) : shape_(shape) {
    expect_memory(bytes_of<T>(shape));
    values_.assign(view().size(), fill);
  }

  ArrayView<T, N> view() { return {values_.data(), shape_}; }
  ArrayView<const T, N> view() const { return {values_.data(), shape_}; }
  operator ArrayView<T, N>() { return view(); }
  operator ArrayView<const T, N>() const { return view(); }

  const Shape& shape() const { return shape_; }
  std::size_t extent(std::size_t axis) const { return shape_[axis]; }
  std::size_t size() const { return values_.size(); }
  bool empty() const { return values_.empty(); }
  std::span<T> flat() { return values_; }
  std::span<const T> flat() const { return values_; }

  template <IndexLike... I>
  T& operator()(I... i) {
    return view()(i...);
  }
  template <IndexLike... I>
  const T& operator()(I... i) const {
    return view()(i...);
  }
  template <IndexLike... I>
  std::span<T> row(I... i) {
    return view().row(i...);
  }
  template <IndexLike... I>
  std::span<const T> row(I... i) const {
    return view().row(i...);
  }
  ArrayView<T, N - 1> operator[](IndexLike auto i) requires(N > 1) { return view()[i]; }
  ArrayView<const T, N - 1> operator[](IndexLike auto i) const requires(N > 1) { return view()[i]; }

  friend bool operator==(const Array&, const Array&) = default;

 private:
  Shape shape_{};
  std::vector<T> values_;
};

}  // namespace foremoe
