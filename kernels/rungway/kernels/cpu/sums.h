// Sums of one panel's outputs over all inputs, for a few rows at once.
#pragma once

#include "linear.h"

namespace rungway {

constexpr int WIDE = PANEL / LANES;

// The next weights on their way from memory while these are computed with, `step` bytes for each 256 of these. `near`: into
// the first cache.
struct Ahead {
  const char* from;
  int step;
  bool near;

  void fetch() {
    if (near)
      for (int at = 0; at < step; at += 64) _mm_prefetch(from + at, _MM_HINT_T0);
    else
      for (int at = 0; at < step; at += 64) _mm_prefetch(from + at, _MM_HINT_T1);
    from += step;
  }
};

// Integer sums are exact: in which order they are taken, and beside which rows, changes nothing.
struct CodeSums {
  using Input = int8_t;
  using Weight = uint8_t;
  using Sum = __m512i;
  static Sum zero() { return _mm512_setzero_si512(); }
  static Sum add(Sum sum, __m512i weights, __m512i inputs) { return _mm512_dpbusd_epi32(sum, weights, inputs); }
};

// Every sum runs over the inputs from first to last, whatever the number of rows.
struct HalfSums {
  using Input = uint16_t;
  using Weight = uint16_t;
  using Sum = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum add(Sum sum, __m512i weights, __m512i inputs) { return dot_pairs(sum, weights, inputs); }
};

// As many inputs at a time as fill 32 bits.
template <class Kind, int R>
[[gnu::always_inline]] inline void sums_of(const typename Kind::Input* x, size_t stride, const typename Kind::Weight* weight, Ahead ahead,
                                           typename Kind::Sum (&sums)[R][WIDE]) {
  constexpr size_t TOGETHER = 4 / sizeof(typename Kind::Input), VECTOR = 64 / sizeof(typename Kind::Weight);
  for (int row = 0; row < R; ++row)
    for (int wide = 0; wide < WIDE; ++wide) sums[row][wide] = Kind::zero();
  for (size_t at = 0; at < stride; at += TOGETHER, weight += TOGETHER * PANEL) {
    __m512i w[WIDE];
    for (int wide = 0; wide < WIDE; ++wide) w[wide] = _mm512_loadu_si512(weight + wide * VECTOR);
    ahead.fetch();
    for (int row = 0; row < R; ++row) {
      int32_t inputs;
      std::memcpy(&inputs, x + row * stride + at, sizeof inputs);
      const __m512i value = _mm512_set1_epi32(inputs);
      for (int wide = 0; wide < WIDE; ++wide) sums[row][wide] = Kind::add(sums[row][wide], w[wide], value);
    }
  }
}

}  // namespace rungway
