// Work on one row of activations: normalise, put into codes, rotate.
#pragma once

#include "simd.h"

namespace rungway {

// A row in 8 bits: value = code * scale. `sum` of the codes is what the offset of the weights' codes costs.
struct Codes {
  int8_t* codes;   // [rows, stride], beyond the row's length 0
  float* scales;   // [rows]
  int32_t* sums;   // [rows]
  size_t stride;   // a multiple of 64
};

// h = x / sqrt(mean(x^2) + eps) * weight
void normalise(const float* x, const float* weight, float eps, int size, float* h);

// codes = round(x / scale), scale = max |x| / 127
void encode(const float* x, int size, const Codes& out, size_t row);

// The same with codes + 128, for x[order[i]] where there is an order, and their sums by groups: [rows, size / group].
void encode_unsigned(const float* x, const int32_t* order, int size, int group, const Codes& out, int32_t* groups, size_t row);

// bfloat16 of x, beyond the row's length 0
void shorten(const float* x, int size, uint16_t* out, size_t stride);

// Rotates the pairs (x[i], x[i + dim/2]) by the angles whose cosines and sines are given [dim/2]; result in bfloat16.
void rotate(const float* x, const float* cos, const float* sin, int dim, uint16_t* out);

// The first of the largest values, and log(sum(exp(x))): what choosing a token needs. Not finite where the row is not.
struct Peak {
  int64_t at;
  float log_sum;
};

Peak peak_of(const float* x, int size);

// Where in a layer's cache a token's keys and values lie. Per group of 16 tokens, keys are [dim/2][16 tokens][2] and
// values [8 pairs of tokens][dim][2]: the products of attention read both in order, pairs side by side.
struct Place {
  size_t group;  // offset of the token's group of 16
  int token;     // within it
};

void store_key(const uint16_t* key, int dim, Place place, uint16_t* keys);
void store_value(const float* value, int dim, Place place, uint16_t* values);

}  // namespace rungway
