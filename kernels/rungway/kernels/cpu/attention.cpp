#include "attention.h"

#include <algorithm>

#include "attention_chunk.h"

namespace rungway {
namespace {

// The chunk of a sequence that begins at key `start`, `end` keys being visible to anybody.
Chunk chunk_at(const Cache& cache, const int64_t* table, int kv_head, int dim, int64_t start, int64_t end) {
  Chunk chunk{{}, {}, start, static_cast<int>(std::min<int64_t>(CHUNK, end - start))};
  for (int at = 0; at < GROUPS; ++at) {
    const int64_t key = start + (at * LANES < chunk.seen ? at * LANES : 0);
    const int64_t slot = table[key / cache.block_tokens] * cache.block_tokens + key % cache.block_tokens;
    const size_t offset = cache.place(slot, kv_head, dim).group;
    chunk.keys[at] = cache.keys + offset;
    chunk.values[at] = cache.values + offset;
  }
  return chunk;
}

// Tokens [from, from + tokens) of a stretch, for the query heads of one key head.
void attend_tile(const Heads& shape, const uint16_t* q, const Cache& cache, const Stretch& stretch, int kv_head, int from, int tokens,
                 float* out) {
  const int group = shape.heads / shape.kv_heads, rows = tokens * group, dim = shape.dim;
  alignas(64) float mixed[TILE_ROWS * DIM_MAX];
  const uint16_t* queries[TILE_ROWS];
  int64_t positions[TILE_ROWS];
  Seen seen[TILE_ROWS];
  std::fill_n(mixed, rows * dim, 0.0f);
  for (int row = 0; row < rows; ++row) {
    const int token = from + row / group;
    const size_t head = static_cast<size_t>(stretch.first + token) * shape.heads + kv_head * group + row % group;
    queries[row] = q + head * dim;
    positions[row] = stretch.position + token;
    seen[row] = Seen{_mm512_setzero_ps(), -INFINITY, -INFINITY, mixed + row * dim};
  }
  const int64_t end = positions[rows - 1] + 1;
  Chunk chunk = chunk_at(cache, stretch.table, kv_head, dim, 0, end);
  for (int64_t start = 0; start < end; start += CHUNK) {
    const Chunk next = start + CHUNK < end ? chunk_at(cache, stretch.table, kv_head, dim, start + CHUNK, end) : chunk;
    int row = 0;
    while (row < rows && positions[row] < start) ++row;  // tokens before this chunk see none of it
    const int first = row;
    for (int count; row < rows; row += count) {
      const int left = rows - row;
      count = left <= ROWS ? left : left < 2 * ROWS ? (left + 1) / 2 : ROWS;
      const auto through = row == first ? chunk_of<true> : chunk_of<false>;
      through(count, queries + row, positions + row, chunk, next, dim, shape.scale * LOG2E, seen + row);
    }
    chunk = next;
  }
  for (int row = 0; row < rows; ++row) {
    const size_t head = static_cast<size_t>(stretch.first + from + row / group) * shape.heads + kv_head * group + row % group;
    const __m512 by = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(seen[row].total));
    for (int at = 0; at < dim; at += LANES)
      _mm512_storeu_ps(out + head * dim + at, _mm512_mul_ps(_mm512_load_ps(seen[row].mixed + at), by));
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
