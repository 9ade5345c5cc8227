// Threads that walk through the phases of one job together. They stay between jobs: a phase lasts microseconds, waking a
// thread takes tens of them. Waiting is first a short spin, then sleep, so that a peer without a core costs no core.
#pragma once

#include <atomic>
#include <functional>

namespace rungway {

struct Meeting {
  std::atomic<int> next{0};     // item of the current phase that nobody has taken yet
  std::atomic<int> arrived{0};
  std::atomic<int> phase{0};
};

// What one thread sees of a job.
class Crew {
 public:
  Crew(int index, int size, Meeting* meeting) : index(index), size(size), meeting_(meeting) {}

  // Calls work(item) for every item below `items`, shared among the threads; returns when all are done. Who does what does
  // not matter to the results: no item reads what another one of the same phase writes.
  template <class Work>
  void each(int items, Work work) {
    if (size == 1) {
      for (int item = 0; item < items; ++item) work(item);
      return;
    }
    for (int item; (item = meeting_->next.fetch_add(1, std::memory_order_relaxed)) < items;) work(item);
    meet();
  }

  const int index, size;

 private:
  void meet();
  Meeting* meeting_;
};

// At most this many threads run one job, the caller among them.
constexpr int CREW_MAX = 64;

// Runs `job` on `threads` threads; on the caller's alone while another job runs in this process.
void run(int threads, const std::function<void(Crew&)>& job);

}  // namespace rungway
