// Vectors of 16 floats and the conversions that all kernels share. AVX-512 with VNNI is required; its bfloat16 part is
// used where the processor has it.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace rungway {

constexpr int LANES = 16;
constexpr float LOG2E = 1.44269504088896341f;

inline __m512 from_bfloat16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// To the nearest, ties to even; NaN stays NaN.
inline __m256i to_bfloat16(__m512 value) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(value);
#else
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000)), 16));
#endif
}

// 32 of them, those of `low` first.
inline __m512i to_bfloat16(__m512 low, __m512 high) {
#ifdef __AVX512BF16__
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
#else
  return _mm512_inserti64x4(_mm512_castsi256_si512(to_bfloat16(low)), to_bfloat16(high), 1);
#endif
}

// sum + a[2i] b[2i] + a[2i+1] b[2i+1] for 16 pairs of bfloat16.
inline __m512 dot_pairs(__m512 sum, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512 odd_a = _mm512_castsi512_ps(_mm512_and_si512(a, high));
  const __m512 odd_b = _mm512_castsi512_ps(_mm512_and_si512(b, high));
  const __m512 even_a = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
  const __m512 even_b = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
  return _mm512_fmadd_ps(even_a, even_b, _mm512_fmadd_ps(odd_a, odd_b, sum));
#endif
}

// 2^x, relative error below 3e-7; 0 below the range, infinity above it.
inline __m512 exp2(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(x, whole);
  __m512 sum = _mm512_set1_ps(1.54035304e-4f);
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.33335581e-3f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(9.61812911e-3f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(5.55041087e-2f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(2.40226507e-1f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(6.93147181e-1f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(sum, whole);
}

// The same with a relative error below 1e-4, for what is rounded to bfloat16 next.
inline __m512 exp2_short(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(x, whole);
  __m512 sum = _mm512_set1_ps(0.0551716648f);
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(0.24261114f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(0.693260968f));
  sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(0.999928057f));
  return _mm512_scalef_ps(sum, whole);
}

// gate * sigmoid(gate) * up
inline __m512 swiglu(__m512 gate, __m512 up) {
  const __m512 grown = exp2(_mm512_mul_ps(gate, _mm512_set1_ps(-LOG2E)));
  return _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), grown)), up);
}

inline __mmask16 lanes(int count) {
  return count >= LANES ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << count) - 1u);
}

}  // namespace rungway
