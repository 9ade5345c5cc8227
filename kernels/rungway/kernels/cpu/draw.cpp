// Draws one token a row by inverse CDF. The rules, and why their result does not depend on how it is found, are in draw.py.
#include <algorithm>
#include <cmath>
#include <functional>
#include <new>
#include <vector>

#include "crew.h"
#include "simd.h"

// Mirrors draw.ASK.
struct RwAsk {
  int64_t row;      // of the logits
  uint64_t point;   // the random number, in units of 2^-64
  uint64_t share;   // top-p in units of 2^-53; 2^53 = off
  int64_t most;     // top-k; 0 = off
  double drop;      // ln(min-p) * temperature; -infinity = off
  float heat;       // log2(e) / temperature
  int32_t pad;
};

namespace rungway {
namespace {

constexpr float FAR = 60.0f;        // halvings below the largest logit from which on a weight is surely 0
constexpr float RANGE = 45.0f;      // and those that buckets divide
constexpr int UNIT = 44;            // the largest logit weighs 2^44
constexpr int BUCKETS = 2048;
constexpr int CHUNK = 1024;         // tokens
constexpr int BLOCK = 128;          // tokens of which the largest logit is kept in mind

// The order of draw: by falling logit, equal ones by rising id.
struct Entry {
  uint64_t key;
  int64_t weight;
};

struct Scratch {
  std::vector<int64_t> masses;
  std::vector<int32_t> counts;
  std::vector<Entry> found;
  std::vector<float> tops;  // of blocks
};

thread_local Scratch scratch;

// Halvings of weight below the largest logit, at most FAR; FAR also for what is no number.
inline __m512 below(__m512 x, __m512 top, __m512 heat) {
  return _mm512_min_ps(_mm512_mul_ps(_mm512_sub_ps(top, x), heat), _mm512_set1_ps(FAR));
}

// 2^(44 - down) as a float with 24 significant bits, from products and sums that are rounded one by one.
inline __m512 weight(__m512 down) {
  const __m512 up = _mm512_sub_ps(_mm512_setzero_ps(), down);
  const __m512 whole = _mm512_roundscale_ps(up, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(up, whole);
  __m512 sum = _mm512_set1_ps(1.54035304e-4f);
  for (const float next : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
    sum = _mm512_add_ps(_mm512_mul_ps(sum, part), _mm512_set1_ps(next));
  return _mm512_scalef_ps(sum, _mm512_add_ps(whole, _mm512_set1_ps(UNIT)));
}

inline __m512i low_units(__m512 weights) { return _mm512_cvttps_epi64(_mm512_castps512_ps256(weights)); }
inline __m512i high_units(__m512 weights) { return _mm512_cvttps_epi64(_mm512_extractf32x8_ps(weights, 1)); }

inline uint32_t falling(float x) {
  x += 0.0f;  // -0 equals 0
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

struct Row {
  const float* x;
  int size;
  float top, heat, bound;  // below `bound` no token is kept

  __m512 down(int at, __mmask16& mask) const {
    mask = lanes(size - at);
    const __m512 value = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), mask, x + at);
    mask = _mm512_mask_cmp_ps_mask(mask, value, _mm512_set1_ps(bound), _CMP_GE_OQ);
    return below(value, _mm512_set1_ps(top), _mm512_set1_ps(heat));
  }

  __m512i units(int at, int end) const {  // eight partial sums
    __m512i sum = _mm512_setzero_si512();
    for (; at < end; at += LANES) {
      __mmask16 mask;
      const __m512 weights = weight(down(at, mask));
      sum = _mm512_add_epi64(sum, _mm512_add_epi64(low_units(weights), high_units(weights)));
    }
    return sum;
  }
};

inline int64_t share_of(uint64_t part, int64_t whole, int bits) {
  return static_cast<int64_t>(static_cast<unsigned __int128>(part) * static_cast<uint64_t>(whole) >> bits);
}

// The first token, by id, at which the running weight passes `point` of the whole.
int64_t draw_whole(const Row& row, const RwAsk& ask) {
  std::vector<int64_t>& masses = scratch.masses;
  masses.resize((row.size + CHUNK - 1) / CHUNK);
  int64_t total = 0;
  for (size_t at = 0; at < masses.size(); ++at) {
    const int from = static_cast<int>(at) * CHUNK;
    total += masses[at] = _mm512_reduce_add_epi64(row.units(from, std::min(from + CHUNK, row.size)));
  }
  if (total <= 0) return -1;
  int64_t left = share_of(ask.point, total, 64);
  size_t chunk = 0;
  while (masses[chunk] <= left) left -= masses[chunk++];
  for (int at = static_cast<int>(chunk) * CHUNK;; at += LANES) {
    __mmask16 mask;
    const __m512 weights = weight(row.down(at, mask));
    alignas(64) int64_t parts[LANES];
    _mm512_store_si512(parts, low_units(weights));
    _mm512_store_si512(parts + 8, high_units(weights));
    for (int lane = 0; lane < LANES; ++lane)
      if ((left -= parts[lane]) < 0) return at + lane;
  }
}

// Kept tokens, roughly sorted: bucket b holds those whose weight was halved b / scale times. From `limit` halvings on tokens
// are only weighed: no filter ends, and no draw falls, among them.
class Buckets {
 public:
  Buckets(const Row& row, float limit, float scale) : row(row), limit(_mm512_set1_ps(limit)), scale(_mm512_set1_ps(scale)) {
    __m512i rest = _mm512_setzero_si512();
    scratch.masses.assign(BUCKETS, 0);
    scratch.counts.assign(BUCKETS, 0);
    for (int at = 0; at < row.size; at += LANES) {
      __mmask16 mask;
      const __m512 down = row.down(at, mask);
      const __m512 weights = _mm512_maskz_mov_ps(mask, weight(down));
      mask = _mm512_mask_cmp_ps_mask(mask, down, this->limit, _CMP_LT_OQ);
      const __m512 quiet = _mm512_mask_mov_ps(weights, mask, _mm512_setzero_ps());
      rest = _mm512_add_epi64(rest, _mm512_add_epi64(low_units(quiet), high_units(quiet)));
      if (!mask) continue;
      alignas(64) int64_t parts[LANES];
      alignas(64) int32_t places[LANES];
      _mm512_store_si512(parts, low_units(weights));
      _mm512_store_si512(parts + 8, high_units(weights));
      _mm512_store_si512(places, place(down));
      for (uint32_t left = mask; left; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        scratch.masses[places[lane]] += parts[lane];
        ++scratch.counts[places[lane]];
      }
    }
    kept = _mm512_reduce_add_epi64(rest);
    for (const int64_t mass : scratch.masses) kept += mass;
  }

  // Only the first `most` tokens stay.
  void keep_count(int64_t most) {
    int64_t seen = 0, mass = 0;
    for (int bucket = 0; bucket < BUCKETS; mass += scratch.masses[bucket++]) {
      if (seen + scratch.counts[bucket] < most) {
        seen += scratch.counts[bucket];
        continue;
      }
      sort(bucket);
      for (int64_t at = 0; at < most - seen; ++at) mass += scratch.found[at].weight;
      kept = mass;
      return;
    }
  }

  // Only the fewest first tokens stay whose weight is at least `target`.
  void keep_mass(int64_t target) {
    int64_t mass = 0;
    const size_t at = reach(target - 1, mass);
    kept = mass + scratch.found[at].weight;
  }

  int64_t draw(int64_t target) {
    int64_t mass = 0;
    return static_cast<int64_t>(scratch.found[reach(target, mass)].key & 0xffffffffu);
  }

  int64_t kept;

 private:
  __m512i place(__m512 down) const {
    return _mm512_min_epi32(_mm512_cvttps_epi32(_mm512_mul_ps(down, scale)), _mm512_set1_epi32(BUCKETS - 1));
  }

  // The entry, in its sorted bucket, at which the running weight passes `target`; `mass` is what is before it.
  size_t reach(int64_t target, int64_t& mass) {
    int bucket = 0;
    while (mass + scratch.masses[bucket] <= target) mass += scratch.masses[bucket++];
    sort(bucket);
    size_t at = 0;
    while (mass + scratch.found[at].weight <= target) mass += scratch.found[at++].weight;
    return at;
  }

  void sort(int bucket) {
    if (bucket == sorted) return;
    sorted = bucket;
    scratch.found.clear();
    const __m512i wanted = _mm512_set1_epi32(bucket);
    for (int at = 0; at < row.size; at += LANES) {
      __mmask16 mask;
      const __m512 down = row.down(at, mask);
      mask = _mm512_mask_cmp_ps_mask(mask, down, limit, _CMP_LT_OQ);
      mask = _mm512_mask_cmpeq_epi32_mask(mask, place(down), wanted);
      if (!mask) continue;
      alignas(64) float weights[LANES];
      _mm512_store_ps(weights, weight(down));
      for (uint32_t left = mask; left; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        const uint64_t key = static_cast<uint64_t>(falling(row.x[at + lane])) << 32 | static_cast<uint32_t>(at + lane);
        scratch.found.push_back(Entry{key, static_cast<int64_t>(weights[lane])});
      }
    }
    std::sort(scratch.found.begin(), scratch.found.end(), [](const Entry& a, const Entry& b) { return a.key < b.key; });
  }

  const Row& row;
  const __m512 limit, scale;
  int sorted = -1;
};

// Halvings below which all tokens together weigh less than half of what top-p leaves out.
float limit_of(const Row& row, const RwAsk& ask) {
  if (ask.most > 0 || ask.share >= uint64_t{1} << 53) return RANGE;
  const double spare = static_cast<double>((uint64_t{1} << 53) - ask.share) / static_cast<double>(uint64_t{1} << 53);
  return std::min(RANGE, static_cast<float>(std::log2(row.size / spare)) + 1.1f);
}

// Where top-k is at most the number of blocks, the k-th largest of their largest is not above the k-th largest logit.
float bound_by_count(float bound, int64_t most) {
  std::vector<float>& tops = scratch.tops;
  if (most <= 0 || most > static_cast<int64_t>(tops.size())) return bound;
  std::nth_element(tops.begin(), tops.begin() + (most - 1), tops.end(), std::greater<float>());
  return std::max(bound, tops[most - 1]);
}

int64_t draw_kept(const Row& row, float lowest, const RwAsk& ask) {
  const float limit = limit_of(row, ask);
  const float range = std::min(limit, (row.top - std::max(lowest, row.bound)) * row.heat);
  Buckets buckets(row, limit, range > 0.0f ? BUCKETS / std::max(range, 1e-6f) : 0.0f);
  if (buckets.kept <= 0) return -1;
  if (ask.most > 0) buckets.keep_count(ask.most);
  if (ask.share < uint64_t{1} << 53) {
    const unsigned __int128 target = static_cast<unsigned __int128>(ask.share) * static_cast<uint64_t>(buckets.kept) + ((uint64_t{1} << 53) - 1);
    buckets.keep_mass(std::max<int64_t>(static_cast<int64_t>(target >> 53), 1));
  }
  return buckets.draw(share_of(ask.point, buckets.kept, 64));
}

int64_t draw(const float* x, int size, const RwAsk& ask) {
  float top = -INFINITY;
  __m512 smallest = _mm512_set1_ps(INFINITY);
  scratch.tops.clear();
  for (int block = 0; block < size; block += BLOCK) {
    __m512 largest = _mm512_set1_ps(-INFINITY);
    for (int at = block; at < std::min(block + BLOCK, size); at += LANES) {
      const __m512 value = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), lanes(size - at), x + at);
      largest = _mm512_max_ps(value, largest);  // the second one where the first is no number
      smallest = _mm512_mask_min_ps(smallest, _mm512_cmp_ps_mask(value, _mm512_set1_ps(-INFINITY), _CMP_GT_OQ), value, smallest);
    }
    scratch.tops.push_back(_mm512_reduce_max_ps(largest));
    top = std::max(top, scratch.tops.back());
  }
  if (!std::isfinite(top)) return -1;
  const float bound = static_cast<float>(static_cast<double>(top) + ask.drop);
  if (ask.most <= 0 && ask.share >= uint64_t{1} << 53 && !std::isfinite(ask.drop)) return draw_whole(Row{x, size, top, ask.heat, bound}, ask);
  return draw_kept(Row{x, size, top, ask.heat, bound_by_count(bound, ask.most)}, _mm512_reduce_min_ps(smallest), ask);
}

}  // namespace
}  // namespace rungway

// tokens [count]: what each ask draws from its row of x [*, size]; -1 where the row has no distribution. 1 = no memory.
extern "C" __attribute__((visibility("default"))) int rw_draw(const float* x, int32_t size, const RwAsk* asks, int32_t count,
                                                              int64_t* tokens, int32_t threads) {
  const auto draw_one = [&](int at) {
    try {
      tokens[at] = rungway::draw(x + static_cast<size_t>(asks[at].row) * size, size, asks[at]);
    } catch (const std::bad_alloc&) {  // on whatever thread
      tokens[at] = -2;
    }
  };
  rungway::run(threads, [&](rungway::Crew& crew) { crew.each(count, draw_one); });
  return std::find(tokens, tokens + count, -2) != tokens + count;
}
