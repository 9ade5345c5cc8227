// Matrix products with weights that were packed once: y = x W^T + b.
#pragma once

#include "crew.h"
#include "rows.h"

namespace rungway {

constexpr int PANEL = 64;  // outputs that are computed together, and lie together in memory

extern "C" {
// `kind` 0: codes of 8 bits plus 128, [panels][stride / 4][64 outputs][4]; W = (code - 128) * scales[output].
// `kind` 1: bfloat16, [panels][stride / 2][64 outputs][2]; no scales.
// `stride` = inputs, up to a multiple of 64. `bias` and `scales` have panels * 64 entries; `bias` may be null.
struct RwLinear {
  const void* weight;
  const float* scales;
  const float* bias;
  int32_t kind, outputs, inputs, stride;
};
}

// Rows of activations in the form that a layer wants.
struct Input {
  Codes codes;          // kind 0
  uint16_t* halves;     // kind 1, [rows, stride]
  size_t stride;
};

// Puts row `row` of `x` into the form that `layer` reads.
inline void take_in(const RwLinear& layer, const float* x, const Input& input, size_t row) {
  if (layer.kind == 0)
    encode(x, layer.inputs, Codes{input.codes.codes, input.codes.scales, input.codes.sums, static_cast<size_t>(layer.stride)}, row);
  else
    shorten(x, layer.inputs, input.halves + row * layer.stride, layer.stride);
}

// y[rows, outputs] = product (+ what stands in `y`, where `add`).
void product(Crew& crew, const RwLinear& layer, const Input& input, int rows, float* y, bool add);

// y[rows, outputs / 2] = swiglu of a product whose first half is the gate; outputs / 2 is a multiple of 64.
void gated_product(Crew& crew, const RwLinear& layer, const Input& input, int rows, float* y);

}  // namespace rungway
