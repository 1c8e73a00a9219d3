#include "threads.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace eyas {

namespace {

constexpr int kSpins = 2000;   // some 30 microseconds: the phases of a forward are shorter
constexpr int kYields = 4000;  // about a millisecond on an idle machine: the pause between two forwards is shorter

void relax() {
#ifdef __x86_64__
    _mm_pause();
#endif
}

// Spins, then lets others have the core: two threads that only spin collapse when another process takes one core.
template <typename Done>
bool wait_awake(const Done &done, int yields) {
    for (int i = 0; i < kSpins; ++i) {
        if (done()) return true;
        relax();
    }
    for (int i = 0; yields < 0 || i < yields; ++i) {
        if (done()) return true;
        std::this_thread::yield();
    }
    return false;
}

}  // namespace

Team::Team(int size) : size_(size) {
    for (int number = 1; number < size; ++number) threads_.emplace_back([this, number] { serve(number); });
}

Team::~Team() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        over_ = true;
        job_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread &thread : threads_) thread.join();
}

void Team::run(const std::function<void(int)> &work) {
    work_ = &work;
    if (size_ > 1) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            job_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
    }
    work(0);
    barrier();
}

void Team::barrier() {
    const unsigned phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    wait_awake([&] { return phase_.load(std::memory_order_acquire) != phase; }, -1);
}

void Team::serve(int number) {
    for (unsigned seen = 0;;) {
        const auto called = [&] { return job_.load(std::memory_order_acquire) != seen; };
        if (!wait_awake(called, kYields)) {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, called);
        }
        ++seen;
        if (over_) return;
        (*work_)(number);
        barrier();
    }
}

}  // namespace eyas
