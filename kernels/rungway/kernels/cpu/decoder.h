// A whole step of a decoder of the Llama shape in one call: no allocation, no dispatch between its parts.
#pragma once

#include "attention.h"
#include "linear.h"

extern "C" {

struct RwLayer {
  const float* attention_norm;  // [hidden]
  const float* mlp_norm;        // [hidden]
  const float* head_norms;      // [heads + kv_heads, dim], of each query and key before the rotation; null = none
  rungway::RwLinear qkv, out, gate_up, down;
};

struct RwModel {
  const uint16_t* embedding;  // [vocabulary, hidden] bfloat16
  const float* norm;          // [hidden]
  rungway::RwLinear head;
  const RwLayer* layers;
  float eps, scale;           // scale: of attention scores
  int32_t count, hidden, heads, kv_heads, dim, intermediate;
};

// One step. `tokens` rows; row i is token ids[i] at positions[i], kept at slots[i]; cosines and sines [tokens, dim / 2].
// `stretches` cover all rows in order; `caches` has one pointer per layer; logits [outputs, vocabulary] of output_rows.
struct RwStep {
  const int64_t* ids;
  const int64_t* slots;
  const int64_t* output_rows;
  const float* cos;
  const float* sin;
  const rungway::Stretch* stretches;
  uint16_t* const* caches;
  float* logits;
  int64_t* best;    // [outputs], the first of the largest logits
  float* log_sums;  // [outputs], log(sum(exp(logits)))
  int64_t blocks;
  int32_t block_tokens, tokens, outputs, stretch_count, threads;
};

}
