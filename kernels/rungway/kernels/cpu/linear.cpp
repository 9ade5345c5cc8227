#include "linear.h"

namespace rungway {
namespace {

constexpr int ROWS = 4;   // 4 rows by 4 vectors of outputs: more sums at once spill registers and are slower
constexpr int WIDE = PANEL / LANES;

// The next weights on their way from memory while these are computed with, `step` bytes for each 256 of these. `near`: into
// the first cache.
struct Ahead {
  const char* from;
  int step;
  bool near;

  void fetch() {
    if (near)
      for (int at = 0; at < step; at += 64) _mm_prefetch(from + at, _MM_HINT_T0);
    else
      for (int at = 0; at < step; at += 64) _mm_prefetch(from + at, _MM_HINT_T1);
    from += step;
  }
};

// Integer sums are exact: in which order they are taken, and beside which rows, changes nothing.
template <int R>
inline void sums_of_codes(const int8_t* x, size_t stride, const uint8_t* weight, Ahead ahead, __m512i (&sums)[R][WIDE]) {
  for (int row = 0; row < R; ++row)
    for (int wide = 0; wide < WIDE; ++wide) sums[row][wide] = _mm512_setzero_si512();
  for (size_t at = 0; at < stride; at += 4, weight += 4 * PANEL) {
    __m512i w[WIDE];
    for (int wide = 0; wide < WIDE; ++wide) w[wide] = _mm512_loadu_si512(weight + wide * 64);
    ahead.fetch();
    for (int row = 0; row < R; ++row) {
      int32_t four;
      std::memcpy(&four, x + row * stride + at, sizeof four);
      const __m512i value = _mm512_set1_epi32(four);
      for (int wide = 0; wide < WIDE; ++wide) sums[row][wide] = _mm512_dpbusd_epi32(sums[row][wide], w[wide], value);
    }
  }
}

// Every sum runs over the inputs from first to last, whatever the number of rows.
template <int R>
inline void sums_of_halves(const uint16_t* x, size_t stride, const uint16_t* weight, Ahead ahead, __m512 (&sums)[R][WIDE]) {
  for (int row = 0; row < R; ++row)
    for (int wide = 0; wide < WIDE; ++wide) sums[row][wide] = _mm512_setzero_ps();
  for (size_t at = 0; at < stride; at += 2, weight += 2 * PANEL) {
    __m512i w[WIDE];
    for (int wide = 0; wide < WIDE; ++wide) w[wide] = _mm512_loadu_si512(weight + wide * 32);
    ahead.fetch();
    for (int row = 0; row < R; ++row) {
      int32_t two;
      std::memcpy(&two, x + row * stride + at, sizeof two);
      const __m512i value = _mm512_set1_epi32(two);
      for (int wide = 0; wide < WIDE; ++wide) sums[row][wide] = dot_pairs(sums[row][wide], w[wide], value);
    }
  }
}

// Calls finish(row, wide, y) for R rows from `first` on and the outputs of one panel.
template <int R, class Finish>
inline void tile(const RwLinear& layer, const Input& input, int first, int panel, Ahead ahead, Finish finish) {
  const size_t stride = layer.stride;
  const float* bias = layer.bias ? layer.bias + panel * PANEL : nullptr;
  const auto biased = [&](__m512 y, int wide) {
    return bias ? _mm512_add_ps(y, _mm512_loadu_ps(bias + wide * LANES)) : y;
  };
  if (layer.kind == 0) {
    __m512i sums[R][WIDE];
    const uint8_t* weight = static_cast<const uint8_t*>(layer.weight) + panel * stride * PANEL;
    sums_of_codes<R>(input.codes.codes + first * stride, stride, weight, ahead, sums);
    const float* scales = layer.scales + panel * PANEL;
    for (int row = 0; row < R; ++row) {
      const __m512i offset = _mm512_set1_epi32(128 * input.codes.sums[first + row]);
      const __m512 scale = _mm512_set1_ps(input.codes.scales[first + row]);
      for (int wide = 0; wide < WIDE; ++wide) {
        const __m512 whole = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[row][wide], offset));
        const __m512 y = _mm512_mul_ps(_mm512_mul_ps(whole, scale), _mm512_loadu_ps(scales + wide * LANES));
        finish(first + row, wide, biased(y, wide));
      }
    }
  } else {
    __m512 sums[R][WIDE];
    const uint16_t* weight = static_cast<const uint16_t*>(layer.weight) + panel * stride * PANEL;
    sums_of_halves<R>(input.halves + first * stride, stride, weight, ahead, sums);
    for (int row = 0; row < R; ++row)
      for (int wide = 0; wide < WIDE; ++wide) finish(first + row, wide, biased(sums[row][wide], wide));
  }
}

template <class Finish>
inline void tile_of(int rows, const RwLinear& layer, const Input& input, int first, int panel, Ahead ahead, Finish finish) {
  switch (rows) {
    case 1: return tile<1>(layer, input, first, panel, ahead, finish);
    case 2: return tile<2>(layer, input, first, panel, ahead, finish);
    case 3: return tile<3>(layer, input, first, panel, ahead, finish);
    case 4: return tile<4>(layer, input, first, panel, ahead, finish);
    case 5: return tile<5>(layer, input, first, panel, ahead, finish);
    default: return tile<ROWS>(layer, input, first, panel, ahead, finish);
  }
}

// Where one tile is all, a little ahead of it; else a later panel, in equal parts by the first four of `tiles`. All measured.
inline Ahead ahead_of(const Crew& crew, const RwLinear& layer, int panel, int rows, int tile, int tiles) {
  const int step = tiles == 1 ? 256 : tiles < 4 ? 128 : 64;
  const size_t bytes = static_cast<size_t>(layer.stride) * PANEL * (layer.kind == 0 ? 1 : 2);
  const char* next = static_cast<const char*>(layer.weight) + (tiles == 1 ? panel * bytes + 4096 : (panel + crew.size) * bytes);
  return Ahead{next + bytes / 256 * step * tile, tile < 256 / step ? step : 0, tiles == 1 && rows > 1};
}

// Calls work(first, count, tile, tiles) for rows in tiles of about the same height.
template <class Work>
inline void in_tiles(int rows, Work work) {
  const int tiles = (rows + ROWS - 1) / ROWS;
  for (int at = 0, first = 0; at < tiles; ++at) {
    const int count = (rows - first) / (tiles - at) + ((rows - first) % (tiles - at) != 0);
    work(first, count, at, tiles);
    first += count;
  }
}

}  // namespace

void product(Crew& crew, const RwLinear& layer, const Input& input, int rows, float* y, bool add) {
  const size_t outputs = layer.outputs;
  crew.each((layer.outputs + PANEL - 1) / PANEL, [&](int panel) {
    in_tiles(rows, [&](int first, int count, int at, int tiles) {
      tile_of(count, layer, input, first, panel, ahead_of(crew, layer, panel, count, at, tiles), [&](int row, int wide, __m512 value) {
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
    in_tiles(rows, [&](int first, int count, int at, int tiles) {
      alignas(64) float gates[ROWS][PANEL];
      tile_of(count, layer, input, first, panel, ahead_of(crew, layer, panel, count, at, tiles), [&](int row, int wide, __m512 value) {
        _mm512_store_ps(&gates[row - first][wide * LANES], value);
      });
      tile_of(count, layer, input, first, half + panel, ahead_of(crew, layer, half + panel, count, at, tiles), [&](int row, int wide, __m512 value) {
        const __m512 gate = _mm512_load_ps(&gates[row - first][wide * LANES]);
        _mm512_storeu_ps(y + static_cast<size_t>(row) * size + panel * PANEL + wide * LANES, swiglu(gate, value));
      });
    });
  });
}

}  // namespace rungway
