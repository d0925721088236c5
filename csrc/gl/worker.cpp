#include "worker.h"

#include <pthread.h>

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

namespace texvlm::gl {
namespace {

using Work = std::function<void(Device&)>;

void end();  // for good, when the process ends

class Worker {
 public:
  explicit Worker(int cuda_device) : cuda_device_(cuda_device), thread_([this] { loop(); }) {}
  ~Worker() { stop(); }

  // Waits until the work is done; what it throws is thrown here. False: the worker has been stopped, nothing was done.
  bool run(const Work& work) {
    Request request{&work, false, nullptr};
    std::unique_lock<std::mutex> lock(mutex_);
    if (stopping_) return false;
    queue_.push_back(&request);
    wake_.notify_one();
    done_.wait(lock, [&] { return request.done; });
    if (request.error) std::rethrow_exception(request.error);
    return true;
  }

  // Finishes what was posted, destroys the context and ends the thread.
  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      wake_.notify_one();
    }
    const std::lock_guard<std::mutex> lock(join_);
    if (thread_.joinable()) thread_.join();
  }

 private:
  struct Request {
    const Work* work;
    bool done;
    std::exception_ptr error;
  };

  void loop() {
    std::optional<Device> device;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) break;
      Request* request = queue_.front();
      queue_.pop_front();
      lock.unlock();
      try {
        execute(device, *request->work);
      } catch (...) {
        request->error = std::current_exception();
      }
      lock.lock();
      request->done = true;
      done_.notify_all();
    }
    lock.unlock();
    device.reset();
  }

  // A lost context is made again once, and the work repeated in it: it only reads its input.
  void execute(std::optional<Device>& device, const Work& work) {
    if (device) {
      try {
        return work(*device);
      } catch (const Lost&) {
        device.reset();
      }
    }
    try {
      device.emplace(cuda_device_);
      static const int registered = std::atexit(end);  // after the driver's own handlers, so it runs before them
      static_cast<void>(registered);
      work(*device);
    } catch (const Lost&) {
      device.reset();
      throw;
    }
  }

  const int cuda_device_;
  std::mutex mutex_, join_;
  std::condition_variable wake_, done_;
  std::deque<Request*> queue_;
  bool stopping_ = false;
  std::thread thread_;  // the last member: it uses the others
};

// Never destroyed: other threads may still call while the process ends.
struct Registry {
  std::mutex mutex;
  std::map<int, std::shared_ptr<Worker>> workers;
  bool at_exit = false;

  void stop_all() {
    for (auto& [device, worker] : workers) worker->stop();
    workers.clear();
  }
};

Registry& registry() {
  static Registry* const one = [] {
    auto* made = new Registry;
    // Threads do not survive a fork, in the child neither ours nor the driver's. So everything is ended before it, and both
    // processes start anew when they need it. The lock is held across the fork, so that nothing starts in between.
    pthread_atfork(
        [] {
          registry().mutex.lock();
          registry().stop_all();
          terminate_software_display();
        },
        [] { registry().mutex.unlock(); }, [] { registry().mutex.unlock(); });
    return made;
  }();
  return *one;
}

void end() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().at_exit = true;
  registry().stop_all();
}

void post(int cuda_device, const Work& work) {
  for (;;) {
    std::shared_ptr<Worker> worker;
    {
      const std::lock_guard<std::mutex> lock(registry().mutex);
      if (registry().at_exit) throw std::runtime_error("texvlm: no OpenGL any more: the process is ending");
      auto& entry = registry().workers[cuda_device];
      if (!entry) entry = std::make_shared<Worker>(cuda_device);
      worker = entry;
    }
    if (worker->run(work)) return;  // otherwise it was stopped between the two: by close() or by a fork
  }
}

}  // namespace

void close() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().stop_all();
}

Status status(int cuda_device) {
  Status s;
  post(cuda_device, [&](Device& d) {
    s = {d.context.vendor,   d.context.renderer,   d.context.version, d.context.platform,
         d.context.max_size, d.context.max_layers, d.filter};
  });
  return s;
}

void reserve(int cuda_device, const Shape& shape) {
  post(cuda_device, [&](Device& d) { d.reserve(shape); });
}

void generate(int cuda_device, const Job& job) {
  post(cuda_device, [&](Device& d) { d.generate(job); });
}

}  // namespace texvlm::gl
