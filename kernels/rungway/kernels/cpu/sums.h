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

  void fetch() { fetch(step); }

  void fetch(int bytes) {
    if (near)
      for (int at = 0; at < bytes; at += 64) _mm_prefetch(from + at, _MM_HINT_T0);
    else
      for (int at = 0; at < bytes; at += 64) _mm_prefetch(from + at, _MM_HINT_T1);
    from += bytes;
  }
};

// Integer sums are exact: in which order they are taken, and beside which rows, changes nothing.
template <int R>
[[gnu::always_inline]] inline void sums_of_codes(const int8_t* x, size_t stride, const uint8_t* weight, Ahead ahead, __m512i (&sums)[R][WIDE]) {
  for (int row = 0; row < R; ++row)
    for (int wide = 0; wide < WIDE; ++wide) sums[row][wide] = _mm512_setzero_si512();
  for (size_t at = 0; at < stride; at += 4, weight += 4 * PANEL) {
    __m512i w[WIDE];
    for (int wide = 0; wide < WIDE; ++wide) w[wide] = _mm512_loadu_si512(weight + wide * 64);
    ahead.fetch();
    for (int row = 0; row < R; ++row) {
      int32_t four;
      std::memcpy(&four, x + row * stride + at, sizeof four);
      const __m512i value = _mm512_set1_epi32(four);
      for (int wide = 0; wide < WIDE; ++wide) sums[row][wide] = _mm512_dpbusd_epi32(sums[row][wide], w[wide], value);
    }
  }
}

// Every sum runs over the inputs from first to last, whatever the number of rows.
template <int R>
[[gnu::always_inline]] inline void sums_of_halves(const uint16_t* x, size_t stride, const uint16_t* weight, Ahead ahead, __m512 (&sums)[R][WIDE]) {
  for (int row = 0; row < R; ++row)
    for (int wide = 0; wide < WIDE; ++wide) sums[row][wide] = _mm512_setzero_ps();
  for (size_t at = 0; at < stride; at += 2, weight += 2 * PANEL) {
    __m512i w[WIDE];
    for (int wide = 0; wide < WIDE; ++wide) w[wide] = _mm512_loadu_si512(weight + wide * 32);
    ahead.fetch();
    for (int row = 0; row < R; ++row) {
      int32_t two;
      std::memcpy(&two, x + row * stride + at, sizeof two);
      const __m512i value = _mm512_set1_epi32(two);
      for (int wide = 0; wide < WIDE; ++wide) sums[row][wide] = dot_pairs(sums[row][wide], w[wide], value);
    }
  }
}

}  // namespace rungway
