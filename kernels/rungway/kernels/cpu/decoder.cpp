#include "decoder.h"

#include <algorithm>
#include <memory>
#include <new>

namespace rungway {
namespace {

// Room for the rows of a step, kept between steps and only ever grown. One per calling thread: an engine has one.
struct Scratch {
  size_t rows = 0, width = 0;
  std::unique_ptr<float[]> x, wide, mixed;
  std::unique_ptr<uint16_t[]> q, halves;
  std::unique_ptr<int8_t[]> codes;
  std::unique_ptr<float[]> scales, heights;
  std::unique_ptr<int32_t[]> sums, groups;

  // `width`: of the widest row of anything.
  void fit(size_t wanted_rows, size_t wanted_width) {
    if (wanted_rows <= rows && wanted_width <= width) return;
    const size_t r = std::max(wanted_rows, rows), w = std::max(wanted_width, width);
    rows = width = 0;  // nothing is promised while this may throw
    for (auto* part : {&x, &wide, &mixed, &heights}) part->reset(new float[r * w]);
    for (auto* part : {&q, &halves}) part->reset(new uint16_t[r * w]);
    codes.reset(new int8_t[r * w]);
    scales.reset(new float[r]);
    sums.reset(new int32_t[r]);
    groups.reset(new int32_t[r * w / GROUP_MIN]);
    rows = r;
    width = w;
  }

  Input input() { return Input{Codes{codes.get(), scales.get(), sums.get(), 0}, halves.get(), groups.get()}; }
};

thread_local Scratch scratch;

size_t widest(const RwModel& model) {
  size_t most = std::max(model.hidden, model.intermediate);
  const auto see = [&](const RwLinear& layer) { most = std::max<size_t>({most, static_cast<size_t>(layer.outputs), static_cast<size_t>(layer.stride)}); };
  for (int at = 0; at < model.count; ++at)
    for (const RwLinear* layer : {&model.layers[at].qkv, &model.layers[at].out, &model.layers[at].down}) see(*layer);
  return (most + 63) / 64 * 64;
}

void embed(const RwModel& model, int64_t id, float* x) {
  const uint16_t* row = model.embedding + id * model.hidden;
  for (int at = 0; at < model.hidden; at += LANES) {
    const __mmask16 mask = lanes(model.hidden - at);
    _mm512_mask_storeu_ps(x + at, mask, from_bfloat16(_mm256_maskz_loadu_epi16(mask, row + at)));
  }
}

// Rotates one token's queries and keys, keeps its keys and values.
void place(const RwModel& model, const RwStep& step, const float* head_norms, const Cache& cache, int row, float* qkv, uint16_t* q) {
  const int dim = model.dim;
  for (int head = 0; head_norms && head < model.heads + model.kv_heads; ++head)
    normalise(qkv + head * dim, head_norms + head * dim, model.eps, dim, qkv + head * dim);
  const float *cos = step.cos + static_cast<size_t>(row) * dim / 2, *sin = step.sin + static_cast<size_t>(row) * dim / 2;
  for (int head = 0; head < model.heads; ++head) rotate(qkv + head * dim, cos, sin, dim, q + head * dim);
  alignas(64) uint16_t key[DIM_MAX];
  for (int head = 0; head < model.kv_heads; ++head) {
    const Place at = cache.place(step.slots[row], head, dim);
    rotate(qkv + (model.heads + head) * dim, cos, sin, dim, key);
    store_key(key, dim, at, cache.keys);
    store_value(qkv + (model.heads + model.kv_heads + head) * dim, dim, at, cache.values);
  }
}

struct Buffers {
  float *x, *wide, *mixed, *heights;
  uint16_t* q;
  Input input;
};

void norm_in(Crew& crew, const RwModel& model, const float* weight, const RwLinear& into, int rows, const Buffers& at) {
  crew.each(rows, [&](int row) {
    float* h = at.heights + static_cast<size_t>(row) * model.hidden;
    normalise(at.x + static_cast<size_t>(row) * model.hidden, weight, model.eps, model.hidden, h);
    take_in(into, h, at.input, row);
  });
}

void take_rows(Crew& crew, const RwLinear& into, int rows, const float* x, const Input& input) {
  crew.each(rows, [&](int row) { take_in(into, x + static_cast<size_t>(row) * into.inputs, input, row); });
}

void through_layer(Crew& crew, const RwModel& model, const RwLayer& layer, const RwStep& step, uint16_t* stored, const Buffers& at) {
  const int rows = step.tokens;
  const size_t half = static_cast<size_t>(model.kv_heads) * step.blocks * step.block_tokens * model.dim;
  const Cache cache{stored, stored + half, step.blocks, step.block_tokens};
  norm_in(crew, model, layer.attention_norm, layer.qkv, rows, at);
  product(crew, layer.qkv, at.input, rows, at.wide, false);
  crew.each(rows, [&](int row) {
    place(model, step, layer.head_norms, cache, row, at.wide + static_cast<size_t>(row) * layer.qkv.outputs,
          at.q + static_cast<size_t>(row) * model.heads * model.dim);
  });
  attend(crew, Heads{model.heads, model.kv_heads, model.dim, model.scale}, at.q, cache, step.stretches, step.stretch_count, at.mixed);
  take_rows(crew, layer.out, rows, at.mixed, at.input);
  product(crew, layer.out, at.input, rows, at.x, true);
  norm_in(crew, model, layer.mlp_norm, layer.gate_up, rows, at);
  gated_product(crew, layer.gate_up, at.input, rows, at.wide);
  take_rows(crew, layer.down, rows, at.wide, at.input);
  product(crew, layer.down, at.input, rows, at.x, true);
}

void forward(Crew& crew, const RwModel& model, const RwStep& step, const Buffers& at) {
  const size_t hidden = model.hidden;
  crew.each(step.tokens, [&](int row) { embed(model, step.ids[row], at.x + row * hidden); });
  for (int layer = 0; layer < model.count; ++layer)
    through_layer(crew, model, model.layers[layer], step, step.caches[layer], at);
  crew.each(step.outputs, [&](int row) {
    float* h = at.heights + row * hidden;
    normalise(at.x + step.output_rows[row] * hidden, model.norm, model.eps, model.hidden, h);
    take_in(model.head, h, at.input, row);
  });
  product(crew, model.head, at.input, step.outputs, step.logits, false);
  crew.each(step.outputs, [&](int row) {
    const Peak peak = peak_of(step.logits + static_cast<size_t>(row) * model.head.outputs, model.head.outputs);
    step.best[row] = peak.at;
    step.log_sums[row] = peak.log_sum;
  });
}

}  // namespace
}  // namespace rungway

using namespace rungway;

#define RUNGWAY_API extern "C" __attribute__((visibility("default")))

// 0, or 1 where there is no memory for the rows.
RUNGWAY_API int rw_forward(const RwModel* model, const RwStep* step) {
  try {
    scratch.fit(std::max(step->tokens, step->outputs), widest(*model));
    const Buffers at{scratch.x.get(), scratch.wide.get(), scratch.mixed.get(), scratch.heights.get(), scratch.q.get(), scratch.input()};
    run(step->threads, [&](Crew& crew) { forward(crew, *model, *step, at); });
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

// y [rows, outputs] = x W^T + b (+ y, where `add`); x [rows, inputs].
RUNGWAY_API int rw_linear(const RwLinear* layer, const float* x, int32_t rows, float* y, int32_t add, int32_t threads) {
  try {
    scratch.fit(rows, layer->stride);
    const Input input = scratch.input();
    run(threads, [&](Crew& crew) {
      take_rows(crew, *layer, rows, x, input);
      product(crew, *layer, input, rows, y, add != 0);
    });
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

// y [rows, outputs / 2] = swiglu(x W^T + b)
RUNGWAY_API int rw_gated_linear(const RwLinear* layer, const float* x, int32_t rows, float* y, int32_t threads) {
  try {
    scratch.fit(rows, layer->stride);
    const Input input = scratch.input();
    run(threads, [&](Crew& crew) {
      take_rows(crew, *layer, rows, x, input);
      gated_product(crew, *layer, input, rows, y);
    });
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

// h [rows, size] = x / rms(x) * weight, and its codes [rows, stride] with scales [rows] and sums [rows].
RUNGWAY_API void rw_norm_codes(const float* x, const float* weight, float eps, int32_t rows, int32_t size, int32_t stride, float* h,
                               int8_t* codes, float* scales, int32_t* sums) {
  for (int row = 0; row < rows; ++row) {
    normalise(x + static_cast<size_t>(row) * size, weight, eps, size, h + static_cast<size_t>(row) * size);
    encode(h + static_cast<size_t>(row) * size, size, Codes{codes, scales, sums, static_cast<size_t>(stride)}, row);
  }
}

// best [rows] and log_sums [rows] of x [rows, size]; see peak_of.
RUNGWAY_API void rw_peaks(const float* x, int32_t rows, int32_t size, int64_t* best, float* log_sums) {
  for (int row = 0; row < rows; ++row) {
    const Peak peak = peak_of(x + static_cast<size_t>(row) * size, size);
    best[row] = peak.at;
    log_sums[row] = peak.log_sum;
  }
}

// Rotates and keeps the tokens of one layer: qkv [tokens, heads + 2 kv_heads, dim] float32, q [tokens, heads, dim] out. Of
// `model` only the shape is read, of `step` what says where.
RUNGWAY_API void rw_place(const RwModel* model, const RwStep* step, uint16_t* stored, float* qkv, uint16_t* q) {
  const size_t half = static_cast<size_t>(model->kv_heads) * step->blocks * step->block_tokens * model->dim;
  const Cache cache{stored, stored + half, step->blocks, step->block_tokens};
  for (int row = 0; row < step->tokens; ++row)
    place(*model, *step, nullptr, cache, row, qkv + static_cast<size_t>(row) * (model->heads + 2 * model->kv_heads) * model->dim,
          q + static_cast<size_t>(row) * model->heads * model->dim);
}

// out [tokens, heads * dim] float32: attention of the step's stretches over one layer.
RUNGWAY_API void rw_attend(const RwModel* model, const RwStep* step, uint16_t* stored, const uint16_t* q, float* out) {
  const size_t half = static_cast<size_t>(model->kv_heads) * step->blocks * step->block_tokens * model->dim;
  const Cache cache{stored, stored + half, step->blocks, step->block_tokens};
  run(step->threads, [&](Crew& crew) {
    attend(crew, Heads{model->heads, model->kv_heads, model->dim, model->scale}, q, cache, step->stretches, step->stretch_count, out);
  });
}
