#include "crew.h"

#include <immintrin.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <system_error>
#include <thread>

namespace rungway {
namespace {

constexpr int SPINS = 2000;  // about 30 microseconds

void wait_while(std::atomic<int>& value, int old) {
  for (int spin = 0; spin < SPINS; ++spin) {
    if (value.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

struct Pool {
  std::mutex busy;
  std::atomic<int> jobs{0};
  std::atomic<int> left{0};
  Meeting meeting;
  const std::function<void(Crew&)>* job = nullptr;
  int size = 1;
  int workers = 0;
  pid_t owner = 0;

  void serve(int index, int seen) {
    for (;;) {
      wait_while(jobs, seen);
      seen = jobs.load(std::memory_order_acquire);
      if (index < size) {
        Crew crew(index, size, &meeting);
        (*job)(crew);
      }
      if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) left.notify_one();
    }
  }

  void hire(int wanted) {
    if (owner != getpid()) {  // threads do not survive a fork
      owner = getpid();
      workers = 0;
    }
    try {
      for (; workers + 1 < wanted; ++workers)
        std::thread(&Pool::serve, this, workers + 1, jobs.load(std::memory_order_relaxed)).detach();
    } catch (const std::system_error&) {  // no more threads to be had: the job runs on fewer
    }
  }
};

Pool& pool() {
  static Pool* const made = new Pool();  // never destroyed: its threads live as long as the process
  return *made;
}

}  // namespace

void Crew::meet() {
  const int phase = meeting_->phase.load(std::memory_order_relaxed);
  if (meeting_->arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
    meeting_->arrived.store(0, std::memory_order_relaxed);
    meeting_->next.store(0, std::memory_order_relaxed);
    meeting_->phase.store(phase + 1, std::memory_order_release);
    meeting_->phase.notify_all();
  } else {
    wait_while(meeting_->phase, phase);
  }
}

void run(int threads, const std::function<void(Crew&)>& job) {
  Pool& shared = pool();
  std::unique_lock<std::mutex> mine(shared.busy, std::defer_lock);
  if (threads > 1 && mine.try_lock()) {
    shared.hire(std::min(threads, CREW_MAX));
    shared.size = std::min({threads, CREW_MAX, shared.workers + 1});
  }
  if (!mine.owns_lock() || shared.size == 1) {
    Crew alone(0, 1, nullptr);
    job(alone);
    return;
  }
  shared.job = &job;
  shared.left.store(shared.workers, std::memory_order_relaxed);
  shared.jobs.fetch_add(1, std::memory_order_release);
  shared.jobs.notify_all();
  Crew crew(0, shared.size, &shared.meeting);
  job(crew);
  for (int left; (left = shared.left.load(std::memory_order_acquire)) != 0;) wait_while(shared.left, left);
}

}  // namespace rungway
