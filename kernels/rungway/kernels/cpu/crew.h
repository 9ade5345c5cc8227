// Threads that help with one job after the other. The caller walks through the phases of its job; in each, items are taken
// by whoever is there. Nobody waits for a helper that has no core: what it has not taken, others do.
#pragma once

#include <functional>

namespace rungway {

class Crew {
 public:
  explicit Crew(int size) : size(size) {}

  // Calls work(item) for every item below `items`, on any of the threads; returns when all are done. Who does what does not
  // matter to the results: no item reads what another one of the same phase writes.
  template <class Work>
  void each(int items, Work work) {
    if (size == 1 || items <= 1 || items > ITEMS_MAX) {
      for (int item = 0; item < items; ++item) work(item);
    } else {
      share(items, std::function<void(int)>(std::ref(work)));
    }
  }

  const int size;  // threads, the caller among them

 private:
  static constexpr int ITEMS_MAX = (1 << 18) - 1;
  void share(int items, const std::function<void(int)>& work);
};

// At most this many threads run one job, the caller among them.
constexpr int CREW_MAX = 64;

// Runs `job` with `threads` threads; with the caller's alone while another job runs in this process.
void run(int threads, const std::function<void(Crew&)>& job);

}  // namespace rungway
