// What rows of queries do with 64 keys and their values: scores, weights, mixed values. A row's arithmetic is the same
// whatever rows are beside it.
#pragma once

#include <algorithm>
#include <cmath>

#include "rows.h"

namespace rungway {

constexpr int GROUPS = 4;  // of 16 keys
constexpr int CHUNK = GROUPS * LANES;
constexpr int ROWS = 6;  // that go through a chunk together: with 4 vectors each, their sums fill the registers

// The weights are relative to a peak that follows the largest score only when that is this much above it, in units of log 2:
// few chunks have to shrink what was mixed before. Weights stay below 2^8, where bfloat16 and the sums have room.
constexpr float SLACK = 8.0f;

// The keys and values of one chunk, and those to fetch meanwhile. `keys` and `values` are set for the groups that have a
// key that somebody sees; the others' addresses are valid.
struct Chunk {
  const uint16_t* keys[GROUPS];
  const uint16_t* values[GROUPS];
  int64_t start;  // position of its first key
  int seen;       // keys that any row of the tile sees
};

// What a row has seen so far: its peak, the sum of the weights by lanes, the mixed values.
struct Seen {
  __m512 total;
  float peak, limit;  // beyond the limit the peak moves
  float* mixed;
};

// Into the second-level cache: the first one is full of what the rows need now.
inline void fetch(const uint16_t* address) { _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T1); }

// scores[row][key] = q k for R rows and N groups of keys; with FETCH also asks for the next chunk's keys
template <int R, int N, bool FETCH>
inline void scores_of(const uint16_t* const* q, const Chunk& chunk, const Chunk& next, int dim, float (*scores)[CHUNK]) {
  __m512 sums[R][N];
  for (int row = 0; row < R; ++row)
    for (int at = 0; at < N; ++at) sums[row][at] = _mm512_setzero_ps();
  for (int part = 0; part < dim; part += 2) {
    __m512i k[N];
    for (int at = 0; at < N; ++at) k[at] = _mm512_loadu_si512(chunk.keys[at] + part * LANES);
    if constexpr (FETCH)
      for (int at = 0; at < N; ++at) fetch(next.keys[at] + part * LANES);
    for (int row = 0; row < R; ++row) {
      int32_t two;
      std::memcpy(&two, q[row] + part, sizeof two);
      const __m512i value = _mm512_set1_epi32(two);
      for (int at = 0; at < N; ++at) sums[row][at] = dot_pairs(sums[row][at], k[at], value);
    }
  }
  for (int row = 0; row < R; ++row)
    for (int at = 0; at < N; ++at) _mm512_store_ps(&scores[row][at * LANES], sums[row][at]);
}

// The peak moves to the largest score, and what was added up relative to the old one shrinks.
inline void renew(Seen& seen, __m512 largest, int dim) {
  const float peak = std::max(seen.peak, _mm512_reduce_max_ps(largest));
  const __m512 shrink = seen.peak == -INFINITY ? _mm512_setzero_ps() : exp2(_mm512_set1_ps(seen.peak - peak));
  seen.total = _mm512_mul_ps(seen.total, shrink);
  for (int at = 0; at < dim; at += LANES) _mm512_store_ps(seen.mixed + at, _mm512_mul_ps(_mm512_load_ps(seen.mixed + at), shrink));
  seen.peak = peak;
  seen.limit = peak + SLACK;
}

// Scores to weights in bfloat16, 0 where a key is not visible. `scale` brings scores into units of log 2.
inline void weigh(const float* scores, int visible, float scale, int dim, Seen& seen, uint16_t* weights) {
  const __m512 by = _mm512_set1_ps(scale), none = _mm512_set1_ps(-INFINITY);
  __mmask16 masks[GROUPS];
  __m512 s[GROUPS], largest = none;
  for (int group = 0; group < GROUPS; ++group) {
    masks[group] = visible > group * LANES ? lanes(visible - group * LANES) : 0;
    s[group] = _mm512_mask_loadu_ps(none, masks[group], scores + group * LANES);
    largest = _mm512_max_ps(s[group], largest);
  }
  largest = _mm512_mul_ps(largest, by);
  if (_mm512_cmp_ps_mask(largest, _mm512_set1_ps(seen.limit), _CMP_GT_OQ)) renew(seen, largest, dim);
  const __m512 peak = _mm512_set1_ps(seen.peak);
  for (int group = 0; group < GROUPS; ++group)
    s[group] = _mm512_maskz_mov_ps(masks[group], exp2_short(_mm512_fmsub_ps(s[group], by, peak)));
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);
  for (int pair = 0; pair < GROUPS; pair += 2) {
    const __m512i two = to_bfloat16(s[pair], s[pair + 1]);
    seen.total = dot_pairs(seen.total, two, ones);  // of the weights as they are used
    _mm512_store_si512(weights + pair * LANES, two);
  }
}

// mixed[row][from ..] += weights V for R rows and N vectors of the head's dimension
template <int R, int N, bool FETCH>
inline void mix(const uint16_t (*weights)[CHUNK], const Chunk& chunk, const Chunk& next, int dim, int from, const Seen* seen) {
  __m512 sums[R][N];
  for (int row = 0; row < R; ++row)
    for (int at = 0; at < N; ++at) sums[row][at] = _mm512_load_ps(seen[row].mixed + from + at * LANES);
  const auto pair = [&](int index, auto&& kept) {
    const int offset = (index % 8 * dim + from) * 2;
    const uint16_t* values = chunk.values[index / 8] + offset;
    __m512i v[N];
    for (int at = 0; at < N; ++at) v[at] = kept(_mm512_loadu_si512(values + at * 2 * LANES));
    if constexpr (FETCH)
      for (int at = 0; at < N; ++at) fetch(next.values[index / 8] + offset + at * 2 * LANES);
    for (int row = 0; row < R; ++row) {
      int32_t two;
      std::memcpy(&two, &weights[row][index * 2], sizeof two);
      const __m512i value = _mm512_set1_epi32(two);
      for (int at = 0; at < N; ++at) sums[row][at] = dot_pairs(sums[row][at], v[at], value);
    }
  };
  const int whole = chunk.seen / 2;
  for (int index = 0; index < whole; ++index) pair(index, [](__m512i v) { return v; });
  // the other half of the last pair may hold anything, even NaN, which a weight of 0 would not hide
  if (chunk.seen % 2) pair(whole, [](__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi32(0xffff)); });
  for (int row = 0; row < R; ++row)
    for (int at = 0; at < N; ++at) _mm512_store_ps(seen[row].mixed + from + at * LANES, sums[row][at]);
}

template <int R, bool FETCH>
inline void chunk_of_rows(const uint16_t* const* q, const int64_t* positions, const Chunk& chunk, const Chunk& next, int dim,
                          float scale, Seen* seen) {
  alignas(64) float scores[R][CHUNK];
  alignas(64) uint16_t weights[R][CHUNK];
  switch ((chunk.seen + LANES - 1) / LANES) {
    case 1: scores_of<R, 1, FETCH>(q, chunk, next, dim, scores); break;
    case 2: scores_of<R, 2, FETCH>(q, chunk, next, dim, scores); break;
    case 3: scores_of<R, 3, FETCH>(q, chunk, next, dim, scores); break;
    default: scores_of<R, 4, FETCH>(q, chunk, next, dim, scores);
  }
  for (int row = 0; row < R; ++row) {
    const int64_t visible = std::min<int64_t>(positions[row] + 1 - chunk.start, chunk.seen);
    weigh(scores[row], static_cast<int>(visible), scale, dim, seen[row], weights[row]);
  }
  int from = 0;
  for (; from + 4 * LANES <= dim; from += 4 * LANES) mix<R, 4, FETCH>(weights, chunk, next, dim, from, seen);
  if (from < dim) mix<R, 2, FETCH>(weights, chunk, next, dim, from, seen);  // dim is a multiple of 32
}

template <bool FETCH>
inline void chunk_of(int rows, const uint16_t* const* q, const int64_t* positions, const Chunk& chunk, const Chunk& next, int dim,
                     float scale, Seen* seen) {
  switch (rows) {
    case 1: return chunk_of_rows<1, FETCH>(q, positions, chunk, next, dim, scale, seen);
    case 2: return chunk_of_rows<2, FETCH>(q, positions, chunk, next, dim, scale, seen);
    case 3: return chunk_of_rows<3, FETCH>(q, positions, chunk, next, dim, scale, seen);
    case 4: return chunk_of_rows<4, FETCH>(q, positions, chunk, next, dim, scale, seen);
    case 5: return chunk_of_rows<5, FETCH>(q, positions, chunk, next, dim, scale, seen);
    default: return chunk_of_rows<6, FETCH>(q, positions, chunk, next, dim, scale, seen);
  }
}

}  // namespace rungway
