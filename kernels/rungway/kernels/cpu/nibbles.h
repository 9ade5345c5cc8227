// Products with weights of 4 bits, a scale for each group of inputs, and activations of 8: unpacked in registers, so that half
// the bytes of 8-bit weights come from memory. Codes of a group are summed as integers, exactly; groups are added up in
// float32 from first to last, whatever the number of rows.
//
// A panel is one block after the other, a block for each group of inputs:
//   64 scales, float16 | 64 times 8 - zero, int8 (ZEROED only) | [group / 4][2 halves][16 outputs][4 inputs] bytes
// whose low half is code - 8, with its sign, of output 32 * half + n, and whose high half that of output 32 * half + 16 + n.
// Codes are used 16 times as large: a shift and a mask make them of a byte. Activations are unsigned (code + 128): what that
// adds to a sum is the same for every row, and in `offsets`.
#pragma once

#include "sums.h"

namespace rungway {

inline int head_bytes(const RwLinear& layer) { return 2 * PANEL + (layer.kind == ZEROED ? PANEL : 0); }

inline size_t block_bytes(const RwLinear& layer) { return head_bytes(layer) + static_cast<size_t>(layer.group) * PANEL / 2; }

// 64 bytes of packed codes as two vectors of weights.
inline void unpack(const uint8_t* from, __m512i& low, __m512i& high) {
  const __m512i both = _mm512_loadu_si512(from), mask = _mm512_set1_epi8(static_cast<char>(0xf0));
  low = _mm512_and_si512(_mm512_slli_epi16(both, 4), mask);
  high = _mm512_and_si512(both, mask);
}

// _mm512_dpbusd_epi32 in place: compilers were seen to copy and to spill sums on each use of the function.
inline void add_products(__m512i& sum, __m512i bytes, __m512i weights) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(weights));
}

// As many bytes on their way from memory as are computed with meanwhile; those without a use (a step of 0) cost little.
template <int W>
inline void fetch_line(const char*& from, int step) {
  _mm_prefetch(from, W == WIDE ? _MM_HINT_T0 : _MM_HINT_T1);
  from += step;
}

// 16 signed bytes of zeros as they go into sums: 16 times as large, one in the lower half of each 32 bits.
inline __m512i widened(const uint8_t* zeros) {
  return _mm512_slli_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros))), 4);
}

// W vectors of outputs from `half` of the panel on. `x` [rows, stride], `groups` [rows, inputs / group] sums of x by group. On its
// own in a function, or its many sums do not stay in registers.
template <int R, int W, bool ZEROS>
__attribute__((noinline)) void sums_of_nibbles(const RwLinear& layer, const uint8_t* x, const int32_t* groups, const uint8_t* block,
                                               int half, Ahead ahead, __m512 (&sums)[R][W]) {
  const size_t stride = layer.stride, bytes = block_bytes(layer);
  const int head = head_bytes(layer), step = ahead.step * 2 / W, count = layer.inputs / layer.group;
  const char* from = ahead.from;
  for (int row = 0; row < R; ++row)
    for (int wide = 0; wide < W; ++wide) sums[row][wide] = _mm512_setzero_ps();
  for (int group = 0; group < count; ++group, block += bytes, x += layer.group) {
    for (int line = 0; line < (ZEROS ? 3 : 2) * W / WIDE; ++line) fetch_line<W>(from, step);
    __m512i whole[R][W];
    for (int wide = 0; wide < W; ++wide) {
      __m512i zeros;
      if constexpr (ZEROS) zeros = widened(block + 2 * PANEL + half * 32 + wide * LANES);
      for (int row = 0; row < R; ++row) {
        if constexpr (ZEROS)
          whole[row][wide] = _mm512_madd_epi16(zeros, _mm512_set1_epi32(groups[row * count + group]));
        else
          whole[row][wide] = _mm512_setzero_si512();
      }
    }
    const uint8_t *codes = block + head + half * 64, *end = block + bytes;
    for (const uint8_t* four = x; codes < end; four += 4, codes += 128) {
      __m512i w[W];
      for (int wide = 0; wide < W; wide += 2) unpack(codes + wide * 32, w[wide], w[wide + 1]);
      for (int line = 0; line < W / 2; ++line) fetch_line<W>(from, step);
      for (int row = 0; row < R; ++row) {
        int32_t inputs;
        std::memcpy(&inputs, four + row * stride, sizeof inputs);
        const __m512i value = _mm512_set1_epi32(inputs);
        for (int wide = 0; wide < W; ++wide) add_products(whole[row][wide], value, w[wide]);
      }
    }
    for (int wide = 0; wide < W; ++wide) {
      const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 2 * (half * 32 + wide * LANES))));
      for (int row = 0; row < R; ++row) sums[row][wide] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[row][wide]), scale, sums[row][wide]);
    }
  }
}

}  // namespace rungway
