#include "linear.h"

#include "nibbles.h"
#include "sums.h"

#include <algorithm>

namespace rungway {
namespace {

constexpr int ROWS = 4;       // 4 rows by 4 vectors of outputs: more sums at once spill registers and are slower
constexpr int FEW_ROWS = 3;   // of 4 bits, sums of integers and of floats: up to 3 rows by 4 vectors
constexpr int MANY_ROWS = 6;  // or up to 6 rows by 2 vectors, each panel in two passes

// Where in the work on one panel: how many passes there are over its weights, and which one this is.
struct Pass {
  int at, count;
};

inline size_t panel_bytes(const RwLinear& layer) {
  const size_t stride = layer.stride;
  return layer.kind == CODES ? stride * PANEL : layer.kind == HALVES ? 2 * stride * PANEL : layer.inputs / layer.group * block_bytes(layer);
}

inline const char* panel_of(const RwLinear& layer, int panel) { return static_cast<const char*>(layer.weight) + panel * panel_bytes(layer); }

// `whole`: bytes of weights for each fetch in a single pass. In a single pass a little ahead of it; else a later panel, in equal
// parts by the first four of the passes. All measured.
inline Ahead ahead_of(const Crew& crew, const RwLinear& layer, int panel, bool near, Pass pass, int whole) {
  const int step = pass.count == 1 ? whole : pass.count < 4 ? whole / 2 : std::max(64, whole / 4);
  const char* next = pass.count == 1 ? panel_of(layer, panel) + 4096 : panel_of(layer, panel + crew.size);
  return Ahead{next + panel_bytes(layer) / whole * step * pass.at, pass.at < whole / step ? step : 0, pass.count == 1 && near};
}

inline __m512 biased(const RwLinear& layer, int panel, int wide, __m512 y) {
  return layer.bias ? _mm512_add_ps(y, _mm512_loadu_ps(layer.bias + panel * PANEL + wide * LANES)) : y;
}

// Calls finish(row, wide, y) for R rows from `first` on and the outputs of one panel. A function of its own for each height and
// kind: in one that holds them all, the compiler stops inlining and the sums go through memory.
template <int R, class Finish>
[[gnu::noinline]] void tile(const Crew& crew, const RwLinear& layer, const Input& input, int first, int panel, Pass pass, Finish finish) {
  const size_t stride = layer.stride;
  const Ahead ahead = ahead_of(crew, layer, panel, R > 1, pass, 256);
  if (layer.kind == CODES) {
    CodeSums::Sum sums[R][WIDE];
    sums_of<CodeSums>(input.codes.codes + first * stride, stride, reinterpret_cast<const uint8_t*>(panel_of(layer, panel)), ahead, sums);
    const float* scales = layer.scales + panel * PANEL;
    for (int row = 0; row < R; ++row) {
      const __m512i offset = _mm512_set1_epi32(128 * input.codes.sums[first + row]);
      const __m512 scale = _mm512_set1_ps(input.codes.scales[first + row]);
      for (int wide = 0; wide < WIDE; ++wide) {
        const __m512 whole = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[row][wide], offset));
        const __m512 y = _mm512_mul_ps(_mm512_mul_ps(whole, scale), _mm512_loadu_ps(scales + wide * LANES));
        finish(first + row, wide, biased(layer, panel, wide, y));
      }
    }
  } else {
    HalfSums::Sum sums[R][WIDE];
    sums_of<HalfSums>(input.halves + first * stride, stride, reinterpret_cast<const uint16_t*>(panel_of(layer, panel)), ahead, sums);
    for (int row = 0; row < R; ++row)
      for (int wide = 0; wide < WIDE; ++wide) finish(first + row, wide, biased(layer, panel, wide, sums[row][wide]));
  }
}

// The same for weights of 4 bits, W vectors of outputs at a time.
template <int R, int W, bool ZEROS, class Finish>
[[gnu::noinline]] void nibble_tile(const Crew& crew, const RwLinear& layer, const Input& input, int first, int panel, Pass pass, Finish finish) {
  constexpr int PARTS = WIDE / W;
  const size_t stride = layer.stride;
  const uint8_t* x = reinterpret_cast<const uint8_t*>(input.codes.codes) + first * stride;
  const uint8_t* weight = reinterpret_cast<const uint8_t*>(panel_of(layer, panel));
  const int32_t* groups = input.groups + first * static_cast<size_t>(layer.inputs / layer.group);
  const float *scales = layer.scales + panel * PANEL, *offsets = layer.offsets + panel * PANEL;
  for (int part = 0; part < PARTS; ++part) {
    __m512 sums[R][W];
    const Ahead ahead = ahead_of(crew, layer, panel, R > 1, Pass{pass.at * PARTS + part, pass.count * PARTS}, 128);
    sums_of_nibbles<R, W, ZEROS>(layer, x, groups, weight, part, ahead, sums);
    for (int row = 0; row < R; ++row) {
      const __m512 scale = _mm512_set1_ps(input.codes.scales[first + row]);
      for (int at = 0; at < W; ++at) {
        const int wide = part * W + at;
        const __m512 sum = _mm512_sub_ps(sums[row][at], _mm512_loadu_ps(offsets + wide * LANES));
        const __m512 y = _mm512_mul_ps(_mm512_mul_ps(sum, scale), _mm512_loadu_ps(scales + wide * LANES));
        finish(first + row, wide, biased(layer, panel, wide, y));
      }
    }
  }
}

template <int R, class Finish>
inline void tile_of_kind(const Crew& crew, const RwLinear& layer, const Input& input, int first, int panel, Pass pass, Finish finish) {
  constexpr int W = R <= FEW_ROWS ? WIDE : WIDE / 2;
  if (layer.kind == ZEROED) return nibble_tile<R, W, true>(crew, layer, input, first, panel, pass, finish);
  if (layer.kind == MIDDLED) return nibble_tile<R, W, false>(crew, layer, input, first, panel, pass, finish);
  if constexpr (R <= ROWS) tile<R>(crew, layer, input, first, panel, pass, finish);
}

template <class Finish>
inline void tile_of(int rows, const Crew& crew, const RwLinear& layer, const Input& input, int first, int panel, Pass pass, Finish finish) {
  switch (rows) {
    case 1: return tile_of_kind<1>(crew, layer, input, first, panel, pass, finish);
    case 2: return tile_of_kind<2>(crew, layer, input, first, panel, pass, finish);
    case 3: return tile_of_kind<3>(crew, layer, input, first, panel, pass, finish);
    case 4: return tile_of_kind<4>(crew, layer, input, first, panel, pass, finish);
    case 5: return tile_of_kind<5>(crew, layer, input, first, panel, pass, finish);
    default: return tile_of_kind<MANY_ROWS>(crew, layer, input, first, panel, pass, finish);
  }
}

// Calls work(first, count, pass) for rows in tiles of about the same height.
template <class Work>
inline void in_tiles(const RwLinear& layer, int rows, Work work) {
  const int height = layer.kind >= MIDDLED ? MANY_ROWS : ROWS, tiles = (rows + height - 1) / height;
  for (int at = 0, first = 0; at < tiles; ++at) {
    const int count = (rows - first) / (tiles - at) + ((rows - first) % (tiles - at) != 0);
    work(first, count, Pass{at, tiles});
    first += count;
  }
}

}  // namespace

void product(Crew& crew, const RwLinear& layer, const Input& input, int rows, float* y, bool add) {
  const size_t outputs = layer.outputs;
  crew.each((layer.outputs + PANEL - 1) / PANEL, [&](int panel) {
    in_tiles(layer, rows, [&](int first, int count, Pass pass) {
      tile_of(count, crew, layer, input, first, panel, pass, [&](int row, int wide, __m512 value) {
        const int from = panel * PANEL + wide * LANES;
        const __mmask16 mask = from < layer.outputs ? lanes(layer.outputs - from) : 0;
        float* to = y + row * outputs + from;
        if (add) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, to));
        _mm512_mask_storeu_ps(to, mask, value);
      });
    });
  });
}

void gated_product(Crew& crew, const RwLinear& layer, const Input& input, int rows, float* y) {
  const int size = layer.outputs / 2, half = size / PANEL;
  crew.each(half, [&](int panel) {
    in_tiles(layer, rows, [&](int first, int count, Pass pass) {
      alignas(64) float gates[MANY_ROWS][PANEL];
      tile_of(count, crew, layer, input, first, panel, pass, [&](int row, int wide, __m512 value) {
        _mm512_store_ps(&gates[row - first][wide * LANES], value);
      });
      tile_of(count, crew, layer, input, first, half + panel, pass, [&](int row, int wide, __m512 value) {
        const __m512 gate = _mm512_load_ps(&gates[row - first][wide * LANES]);
        _mm512_storeu_ps(y + static_cast<size_t>(row) * size + panel * PANEL + wide * LANES, swiglu(gate, value));
      });
    });
  });
}

}  // namespace rungway
