#include "rows.h"

#include <cmath>

namespace rungway {

void normalise(const float* x, const float* weight, float eps, int size, float* h) {
  __m512 squares = _mm512_setzero_ps();
  for (int at = 0; at < size; at += LANES) {
    const __m512 value = _mm512_maskz_loadu_ps(lanes(size - at), x + at);
    squares = _mm512_fmadd_ps(value, value, squares);
  }
  const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(size);
  const __m512 by = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + eps));
  for (int at = 0; at < size; at += LANES) {
    const __mmask16 mask = lanes(size - at);
    const __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + at), by);
    _mm512_mask_storeu_ps(h + at, mask, _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, weight + at)));
  }
}

namespace {

// `take(at, mask)`: 16 values from `at` on, 0 where the mask has none. `flip`: what codes are xored with.
template <class Take>
inline void put_into_codes(Take take, int size, uint8_t flip, const Codes& out, size_t row) {
  // as integers, magnitudes keep their order and NaN is above all: a row that is not finite gets a scale that is not
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i largest = _mm512_setzero_si512();
  for (int at = 0; at < size; at += LANES) {
    const __m512i bits = _mm512_castps_si512(take(at, lanes(size - at)));
    largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, magnitude));
  }
  const int bits = _mm512_reduce_max_epi32(largest);
  float peak;
  std::memcpy(&peak, &bits, sizeof peak);
  const __m512 by = _mm512_set1_ps(peak == 0.0f ? 0.0f : 127.0f / peak);
  const __m128i flipped = _mm_set1_epi8(static_cast<char>(flip));
  int8_t* codes = out.codes + row * out.stride;
  __m512i sum = _mm512_setzero_si512();
  size_t at = 0;
  for (; at < static_cast<size_t>(size); at += LANES) {
    const __m512 value = take(static_cast<int>(at), lanes(size - static_cast<int>(at)));
    const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(value, by));
    sum = _mm512_add_epi32(sum, code);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + at), _mm_xor_si128(_mm512_cvtsepi32_epi8(code), flipped));
  }
  for (; at < out.stride; at += LANES) _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + at), _mm_setzero_si128());
  out.scales[row] = peak / 127.0f;
  out.sums[row] = _mm512_reduce_add_epi32(sum);
}

}  // namespace

void encode(const float* x, int size, const Codes& out, size_t row) {
  put_into_codes([&](int at, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x + at); }, size, 0, out, row);
}

void encode_unsigned(const float* x, const int32_t* order, int size, int group, const Codes& out, int32_t* groups, size_t row) {
  const auto plain = [&](int at, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x + at); };
  const auto picked = [&](int at, __mmask16 mask) {
    return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, _mm512_maskz_loadu_epi32(mask, order + at), x, sizeof(float));
  };
  if (order)
    put_into_codes(picked, size, 0x80, out, row);
  else
    put_into_codes(plain, size, 0x80, out, row);
  const int8_t* codes = out.codes + row * out.stride;
  int32_t* to = groups + row * (size / group);
  for (int first = 0; first < size; first += group) {
    __m256i sum = _mm256_setzero_si256();
    for (int at = first; at < first + group; at += 32)
      sum = _mm256_add_epi64(sum, _mm256_sad_epu8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + at)), _mm256_setzero_si256()));
    const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    *to++ = _mm_cvtsi128_si32(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two)));
  }
}

void shorten(const float* x, int size, uint16_t* out, size_t stride) {
  for (size_t at = 0; at < stride; at += LANES) {
    const int left = size - static_cast<int>(at);
    const __m512 value = left > 0 ? _mm512_maskz_loadu_ps(lanes(left), x + at) : _mm512_setzero_ps();
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + at), to_bfloat16(value));
  }
}

void rotate(const float* x, const float* cos, const float* sin, int dim, uint16_t* out) {
  const int half = dim / 2;
  for (int at = 0; at < half; at += LANES) {
    const __m512 c = _mm512_loadu_ps(cos + at), s = _mm512_loadu_ps(sin + at);
    const __m512 first = _mm512_loadu_ps(x + at), second = _mm512_loadu_ps(x + half + at);
    const __m512 low = _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s));
    const __m512 high = _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + at), to_bfloat16(low));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + half + at), to_bfloat16(high));
  }
}

Peak peak_of(const float* x, int size) {
  __m512 largest = _mm512_set1_ps(-INFINITY);
  __m512i where = _mm512_setzero_si512(), here = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int at = 0; at < size; at += LANES) {
    const __m512 value = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), lanes(size - at), x + at);
    const __mmask16 larger = _mm512_cmp_ps_mask(value, largest, _CMP_GT_OQ);
    largest = _mm512_mask_mov_ps(largest, larger, value);
    where = _mm512_mask_mov_epi32(where, larger, here);
    here = _mm512_add_epi32(here, _mm512_set1_epi32(LANES));
  }
  const float peak = _mm512_reduce_max_ps(largest);
  const __mmask16 first = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(peak), _CMP_EQ_OQ);
  const int at = _mm512_mask_reduce_min_epi32(first, where);
  __m512 total = _mm512_setzero_ps();
  for (int from = 0; from < size; from += LANES) {
    const __mmask16 mask = lanes(size - from);
    const __m512 behind = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, x + from), _mm512_set1_ps(peak));
    total = _mm512_add_ps(total, _mm512_maskz_mov_ps(mask, exp2(_mm512_mul_ps(behind, _mm512_set1_ps(LOG2E)))));
  }
  return Peak{at, peak + std::log(_mm512_reduce_add_ps(total))};
}

void store_key(const uint16_t* key, int dim, Place place, uint16_t* keys) {
  uint16_t* to = keys + place.group + place.token * 2;
  for (int at = 0; at < dim; at += 2) std::memcpy(to + at * LANES, key + at, 2 * sizeof(uint16_t));
}

void store_value(const float* value, int dim, Place place, uint16_t* values) {
  uint16_t* to = values + place.group + (place.token / 2) * dim * 2 + place.token % 2;
  alignas(32) uint16_t bits[LANES];
  for (int at = 0; at < dim; at += LANES) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(bits), to_bfloat16(_mm512_loadu_ps(value + at)));
    for (int lane = 0; lane < LANES; ++lane) to[(at + lane) * 2] = bits[lane];
  }
}

}  // namespace rungway
