// Matrix products with weights that were packed once: y = x W^T + b.
#pragma once

#include "crew.h"
#include "rows.h"

namespace rungway {

constexpr int GROUP_MIN = 32;  // inputs that share a scale, of 4 bits
constexpr int PANEL = 64;  // outputs that are computed together, and lie together in memory

// Kinds of weights. What the last two look like: nibbles.h.
enum { CODES = 0, HALVES = 1, MIDDLED = 2, ZEROED = 3 };

extern "C" {
// CODES: codes of 8 bits plus 128, [panels][stride / 4][64 outputs][4]; W = (code - 128) * scales[output].
// HALVES: bfloat16, [panels][stride / 2][64 outputs][2]; no scales.
// MIDDLED, ZEROED: codes of 4 bits with a scale for each `group` of inputs, 32 to 128 of them by steps of 32, that divides `inputs`;
// zeros in the middle of the codes, or one for each group. y = (sum over groups - offsets[output]) * scales[output].
// `stride` = inputs, up to a multiple of 64. `bias`, `scales` and `offsets` have panels * 64 entries; `bias` may be null.
// `order` [inputs], or null: which entry of a row of activations the n-th input is; of 4 bits only.
struct RwLinear {
  const void* weight;
  const float* scales;
  const float* bias;
  int32_t kind, outputs, inputs, stride, group;
  const float* offsets;
  const int32_t* order;
};
}

// Rows of activations in the form that a layer wants.
struct Input {
  Codes codes;          // of all kinds but HALVES
  uint16_t* halves;     // [rows, stride]
  int32_t* groups;      // of 4 bits, [rows, inputs / group]: sums of the codes
};

// Puts row `row` of `x` into the form that `layer` reads.
inline void take_in(const RwLinear& layer, const float* x, const Input& input, size_t row) {
  if (layer.kind == HALVES)
    return shorten(x, layer.inputs, input.halves + row * layer.stride, layer.stride);
  const Codes to{input.codes.codes, input.codes.scales, input.codes.sums, static_cast<size_t>(layer.stride)};
  if (layer.kind == CODES)
    encode(x, layer.inputs, to, row);
  else
    encode_unsigned(x, layer.order, layer.inputs, layer.group, to, input.groups, row);
}

// y[rows, outputs] = product (+ what stands in `y`, where `add`).
void product(Crew& crew, const RwLinear& layer, const Input& input, int rows, float* y, bool add);

// y[rows, outputs / 2] = swiglu of a product whose first half is the gate; outputs / 2 is a multiple of 64.
void gated_product(Crew& crew, const RwLinear& layer, const Input& input, int rows, float* y);

}  // namespace rungway
