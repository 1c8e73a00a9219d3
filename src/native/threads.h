// A team of threads for work of microseconds: it waits by spinning briefly, then by yielding, then asleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace eyas {

class Team {
public:
    explicit Team(int size);
    ~Team();
    Team(const Team &) = delete;
    Team &operator=(const Team &) = delete;

    int size() const { return size_; }

    // Runs `work(number)` on every member, number 0 being the caller; returns when all are done.
    void run(const std::function<void(int)> &work);

    // Within `run`: nobody goes on before everybody has come here.
    void barrier();

private:
    void serve(int number);

    const int size_;
    std::vector<std::thread> threads_;
    const std::function<void(int)> *work_ = nullptr;
    std::atomic<unsigned> job_{0};      // counts calls of run
    std::atomic<unsigned> phase_{0};    // counts barriers
    std::atomic<int> arrived_{0};
    std::atomic<bool> over_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
};

}  // namespace eyas
