#include "attention.h"

#include <algorithm>
#include <cmath>

namespace rungway {
namespace {

constexpr int GROUPS = 4;                // of 16 keys: what is weighed at once
constexpr int CHUNK = GROUPS * LANES;

// The keys and values of one chunk.
struct Chunk {
  const uint16_t* keys[GROUPS];
  const uint16_t* values[GROUPS];
  int64_t start;  // position of its first key
  int seen;       // keys that any row of the tile sees
};

// scores[row][key] = q k for R rows and N groups of keys
template <int R, int N>
inline void scores_of(const uint16_t* const* q, const uint16_t* const* keys, int dim, float (*scores)[CHUNK], int group) {
  __m512 sums[R][N];
  for (int row = 0; row < R; ++row)
    for (int at = 0; at < N; ++at) sums[row][at] = _mm512_setzero_ps();
  for (int part = 0; part < dim; part += 2) {
    __m512i k[N];
    for (int at = 0; at < N; ++at) k[at] = _mm512_loadu_si512(keys[group + at] + part * LANES);
    for (int row = 0; row < R; ++row) {
      int32_t two;
      std::memcpy(&two, q[row] + part, sizeof two);
      const __m512i value = _mm512_set1_epi32(two);
      for (int at = 0; at < N; ++at) sums[row][at] = dot_pairs(sums[row][at], k[at], value);
    }
  }
  for (int row = 0; row < R; ++row)
    for (int at = 0; at < N; ++at) _mm512_storeu_ps(&scores[row][(group + at) * LANES], sums[row][at]);
}

template <int R>
inline void scores_of_rows(const uint16_t* const* q, const Chunk& chunk, int dim, float (*scores)[CHUNK]) {
  constexpr int N = R <= 4 ? 4 : 2;
  const int groups = (chunk.seen + LANES - 1) / LANES;
  int group = 0;
  for (; group + N <= groups; group += N) scores_of<R, N>(q, chunk.keys, dim, scores, group);
  for (; group < groups; ++group) scores_of<R, 1>(q, chunk.keys, dim, scores, group);
}

// What a row has seen so far: the largest score, the sum of the weights, the mixed values.
struct Seen {
  float peak, total;
};

// Scores to weights in bfloat16, 0 where a key is not visible; returns by what the mixed values have to shrink. Scores are
// in units of log 2.
inline float weigh(const float* scores, int groups, int visible, float scale, Seen& seen, uint16_t* weights) {
  const __m512 by = _mm512_set1_ps(scale);
  const __m512 nothing = _mm512_set1_ps(-INFINITY);
  __m512 s[GROUPS], peaks = nothing;
  for (int group = 0; group < GROUPS; ++group) {
    const __mmask16 mask = group < groups && visible > group * LANES ? lanes(visible - group * LANES) : 0;
    s[group] = _mm512_mask_mul_ps(nothing, mask, _mm512_maskz_loadu_ps(mask, scores + group * LANES), by);
    peaks = _mm512_max_ps(s[group], peaks);
  }
  const float peak = std::max(seen.peak, _mm512_reduce_max_ps(peaks));
  const __m512 top = _mm512_set1_ps(peak);
  __m512 total = _mm512_setzero_ps();
  for (int group = 0; group < GROUPS; ++group) {
    const __mmask16 mask = group < groups && visible > group * LANES ? lanes(visible - group * LANES) : 0;
    const __m256i weight = to_bfloat16(_mm512_maskz_mov_ps(mask, exp2(_mm512_sub_ps(s[group], top))));
    total = _mm512_add_ps(total, from_bfloat16(weight));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + group * LANES), weight);
  }
  float shrink = 0.0f;
  if (seen.total > 0.0f) shrink = _mm512_cvtss_f32(exp2(_mm512_set1_ps(seen.peak - peak)));
  if (std::isnan(seen.total)) shrink = seen.total;
  seen.total = seen.total * shrink + _mm512_reduce_add_ps(total);
  seen.peak = peak;
  return shrink;
}

// mixed[row][from ..] = mixed * shrink + weights V for R rows and N vectors of the head's dimension
template <int R, int N>
inline void mix(const uint16_t (*weights)[CHUNK], const Chunk& chunk, int dim, int from, const float* shrink, float* const* mixed) {
  __m512 sums[R][N];
  for (int row = 0; row < R; ++row)
    for (int at = 0; at < N; ++at)
      sums[row][at] = _mm512_mul_ps(_mm512_loadu_ps(mixed[row] + from + at * LANES), _mm512_set1_ps(shrink[row]));
  const int whole = chunk.seen / 2;
  const auto pair = [&](int index, __m512i keep) {
    const uint16_t* values = chunk.values[index / 8] + (index % 8) * dim * 2 + from * 2;
    __m512i v[N];
    for (int at = 0; at < N; ++at) v[at] = _mm512_and_si512(_mm512_loadu_si512(values + at * 2 * LANES), keep);
    for (int row = 0; row < R; ++row) {
      int32_t two;
      std::memcpy(&two, &weights[row][index * 2], sizeof two);
      const __m512i value = _mm512_set1_epi32(two);
      for (int at = 0; at < N; ++at) sums[row][at] = dot_pairs(sums[row][at], v[at], value);
    }
  };
  for (int index = 0; index < whole; ++index) pair(index, _mm512_set1_epi32(-1));
  // the other half of the last pair may hold anything, even NaN, which a weight of 0 would not hide
  if (chunk.seen % 2) pair(whole, _mm512_set1_epi32(0xffff));
  for (int row = 0; row < R; ++row)
    for (int at = 0; at < N; ++at) _mm512_storeu_ps(mixed[row] + from + at * LANES, sums[row][at]);
}

template <int R>
inline void mix_rows(const uint16_t (*weights)[CHUNK], const Chunk& chunk, int dim, const float* shrink, float* const* mixed) {
  int from = 0;
  for (; from + 4 * LANES <= dim; from += 4 * LANES) mix<R, 4>(weights, chunk, dim, from, shrink, mixed);
  for (; from < dim; from += LANES) mix<R, 1>(weights, chunk, dim, from, shrink, mixed);
}

template <int R>
inline void chunk_of_rows(const uint16_t* const* q, const int64_t* positions, const Chunk& chunk, int dim, float scale, Seen* seen,
                          float* const* mixed) {
  alignas(64) float scores[R][CHUNK];
  alignas(64) uint16_t weights[R][CHUNK];
  float shrink[R];
  const int groups = (chunk.seen + LANES - 1) / LANES;
  scores_of_rows<R>(q, chunk, dim, scores);
  for (int row = 0; row < R; ++row) {
    const int64_t visible = std::min<int64_t>(positions[row] + 1 - chunk.start, chunk.seen);
    shrink[row] = weigh(scores[row], groups, static_cast<int>(visible), scale, seen[row], weights[row]);
  }
  mix_rows<R>(weights, chunk, dim, shrink, mixed);
}

inline void chunk_of(int rows, const uint16_t* const* q, const int64_t* positions, const Chunk& chunk, int dim, float scale, Seen* seen,
                     float* const* mixed) {
  switch (rows) {
    case 1: return chunk_of_rows<1>(q, positions, chunk, dim, scale, seen, mixed);
    case 2: return chunk_of_rows<2>(q, positions, chunk, dim, scale, seen, mixed);
    case 3: return chunk_of_rows<3>(q, positions, chunk, dim, scale, seen, mixed);
    case 4: return chunk_of_rows<4>(q, positions, chunk, dim, scale, seen, mixed);
    case 5: return chunk_of_rows<5>(q, positions, chunk, dim, scale, seen, mixed);
    default: return chunk_of_rows<6>(q, positions, chunk, dim, scale, seen, mixed);
  }
}

constexpr int ROWS = 6;

// Tokens [from, from + tokens) of a stretch, for the query heads of one key head.
void attend_tile(const Heads& shape, const uint16_t* q, const Cache& cache, const Stretch& stretch, int kv_head, int from, int tokens,
                 float* out) {
  const int group = shape.heads / shape.kv_heads, rows = tokens * group, dim = shape.dim;
  alignas(64) float mixed[TILE_ROWS * DIM_MAX];
  float* mixed_rows[TILE_ROWS];
  const uint16_t* queries[TILE_ROWS];
  int64_t positions[TILE_ROWS];
  Seen seen[TILE_ROWS];
  std::fill_n(mixed, rows * dim, 0.0f);
  for (int row = 0; row < rows; ++row) {
    const int token = from + row / group;
    const size_t head = static_cast<size_t>(stretch.first + token) * shape.heads + kv_head * group + row % group;
    queries[row] = q + head * dim;
    positions[row] = stretch.position + token;
    mixed_rows[row] = mixed + row * dim;
    seen[row] = Seen{-INFINITY, 0.0f};
  }
  const int64_t end = positions[rows - 1] + 1;
  for (Chunk chunk{{}, {}, 0, 0}; chunk.start < end; chunk.start += CHUNK) {
    chunk.seen = static_cast<int>(std::min<int64_t>(CHUNK, end - chunk.start));
    for (int at = 0; at * LANES < chunk.seen; ++at) {
      const int64_t key = chunk.start + at * LANES;
      const int64_t slot = stretch.table[key / cache.block_tokens] * cache.block_tokens + key % cache.block_tokens;
      const size_t offset = cache.place(slot, kv_head, dim).group;
      chunk.keys[at] = cache.keys + offset;
      chunk.values[at] = cache.values + offset;
    }
    int row = 0;
    while (row < rows && positions[row] < chunk.start) ++row;  // tokens before this chunk see none of it
    for (int count; row < rows; row += count) {
      const int left = rows - row;
      count = left <= ROWS ? left : left < 2 * ROWS ? (left + 1) / 2 : ROWS;
      chunk_of(count, queries + row, positions + row, chunk, dim, shape.scale * LOG2E, seen + row, mixed_rows + row);
    }
  }
  for (int row = 0; row < rows; ++row) {
    const size_t head = static_cast<size_t>(stretch.first + from + row / group) * shape.heads + kv_head * group + row % group;
    const __m512 by = _mm512_set1_ps(1.0f / seen[row].total);
    for (int at = 0; at < dim; at += LANES)
      _mm512_storeu_ps(out + head * dim + at, _mm512_mul_ps(_mm512_load_ps(mixed_rows[row] + at), by));
  }
}

}  // namespace

void attend(Crew& crew, const Heads& shape, const uint16_t* q, const Cache& cache, const Stretch* stretches, int count, float* out) {
  const int per_tile = std::max(1, 48 / (shape.heads / shape.kv_heads));
  int tiles = 0;
  for (int at = 0; at < count; ++at) tiles += (stretches[at].count + per_tile - 1) / per_tile;
  crew.each(tiles * shape.kv_heads, [&](int item) {
    int tile = item / shape.kv_heads, at = 0;
    for (int here; tile >= (here = (stretches[at].count + per_tile - 1) / per_tile); ++at) tile -= here;
    const int from = tile * per_tile;
    attend_tile(shape, q, cache, stretches[at], item % shape.kv_heads, from, std::min(per_tile, stretches[at].count - from), out);
  });
}

}  // namespace rungway
