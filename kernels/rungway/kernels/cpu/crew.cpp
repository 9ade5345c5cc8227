#include "crew.h"

#include <immintrin.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace rungway {
namespace {

constexpr int SPINS = 600;  // about 10 microseconds: phases follow each other faster, and a thread without work is soon asleep
constexpr int ITEM_BITS = 18;
constexpr uint64_t ITEM_MASK = (1u << ITEM_BITS) - 1;

void wait_while(std::atomic<int>& value, int old) {
  for (int spin = 0; spin < SPINS; ++spin) {
    if (value.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

struct Pool {
  std::mutex busy;
  // number of the phase, its items, the next one that nobody has taken: in one word, so that a late helper cannot mix two
  // phases up
  std::atomic<uint64_t> claims{0};
  std::atomic<const std::function<void(int)>*> work{nullptr};
  std::atomic<int> left{0};    // items of this phase that are not done
  std::atomic<int> phases{0};  // what helpers wait on
  std::atomic<int> size{1};
  int helpers = 0;
  pid_t owner = 0;

  // Takes items until there are none.
  void help() {
    for (uint64_t seen = claims.load(std::memory_order_acquire);;) {
      const uint64_t item = seen & ITEM_MASK, items = seen >> ITEM_BITS & ITEM_MASK;
      if (item >= items) return;
      // of the phase in `seen`: it cannot end, nor the next begin, unless the exchange below fails
      const std::function<void(int)>* mine = work.load(std::memory_order_relaxed);
      if (!claims.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      (*mine)(static_cast<int>(item));
      if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) left.notify_one();
      seen = claims.load(std::memory_order_acquire);
    }
  }

  void serve(int index) {
    for (int seen = 0;;) {
      if (index < size.load(std::memory_order_relaxed)) help();
      wait_while(phases, seen);
      seen = phases.load(std::memory_order_acquire);
    }
  }

  void hire(int wanted) {
    if (owner != getpid()) {  // threads do not survive a fork
      owner = getpid();
      helpers = 0;
    }
    try {
      for (; helpers + 1 < wanted; ++helpers) std::thread(&Pool::serve, this, helpers + 1).detach();
    } catch (const std::system_error&) {  // no more threads to be had: the job runs on fewer
    }
  }
};

Pool& pool() {
  static Pool* const made = new Pool();  // never destroyed: its threads live as long as the process
  return *made;
}

}  // namespace

void Crew::share(int items, const std::function<void(int)>& work) {
  Pool& shared = pool();
  const uint64_t phase = (shared.claims.load(std::memory_order_relaxed) >> 2 * ITEM_BITS) + 1;
  shared.work.store(&work, std::memory_order_relaxed);
  shared.left.store(items, std::memory_order_relaxed);
  shared.claims.store(phase << 2 * ITEM_BITS | static_cast<uint64_t>(items) << ITEM_BITS, std::memory_order_release);
  shared.phases.fetch_add(1, std::memory_order_release);
  shared.phases.notify_all();
  shared.help();
  for (int left; (left = shared.left.load(std::memory_order_acquire)) != 0;) wait_while(shared.left, left);
}

void run(int threads, const std::function<void(Crew&)>& job) {
  Pool& shared = pool();
  std::unique_lock<std::mutex> mine(shared.busy, std::defer_lock);
  int size = 1;
  if (threads > 1 && mine.try_lock()) {
    shared.hire(std::min(threads, CREW_MAX));
    size = std::min({threads, CREW_MAX, shared.helpers + 1});
    shared.size.store(size, std::memory_order_relaxed);
  }
  Crew crew(size);
  job(crew);
}

}  // namespace rungway
