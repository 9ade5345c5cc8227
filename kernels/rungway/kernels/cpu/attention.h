// Attention over a cache of keys and values in blocks, read in place through a block table.
#pragma once

#include "crew.h"
#include "rows.h"

namespace rungway {

// One layer's cache: [2, kv_heads, blocks, block_tokens, dim] of bfloat16, laid out inside a block as rows.h says.
struct Cache {
  uint16_t* keys;
  uint16_t* values;
  int64_t blocks;
  int block_tokens;  // a multiple of 16

  // Where slot (block * block_tokens + offset) of a head lies.
  Place place(int64_t slot, int kv_head, int dim) const {
    const size_t token = static_cast<size_t>(kv_head) * blocks * block_tokens + slot;
    return Place{token / LANES * LANES * dim, static_cast<int>(token % LANES)};
  }
};

// Rows `first`.. of a step that are consecutive tokens of one sequence, at positions `position`..
struct Stretch {
  int first, count;
  int64_t position;
  const int64_t* table;  // block table of the sequence
};

// out[tokens, heads * dim] = softmax(scale q K^T) V, each token seeing the positions up to its own. Every sum of a token
// runs over its positions in one order that nothing else decides: not the batch, nor where a prompt was cut into chunks.
// `q` [tokens, heads, dim] in bfloat16.
struct Heads {
  int heads, kv_heads, dim;
  float scale;
};

void attend(Crew& crew, const Heads& heads, const uint16_t* q, const Cache& cache, const Stretch* stretches, int count,
            float* out);

constexpr int TILE_ROWS = 64;  // most (token, head) pairs that share one reading of the keys
constexpr int DIM_MAX = 256;

}  // namespace rungway
