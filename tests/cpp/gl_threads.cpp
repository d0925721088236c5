// csrc/gl under the sanitizers, without PyTorch: threads that share a context, close it and lose it, then forks.
// Arguments: "fork", and "race" for a planted data race that ThreadSanitizer has to find. Exit status 0: all texels were right.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "worker.h"

namespace gl = texvlm::gl;

namespace {

// Three levels of an n x n picture; whether each texel of the second is the mean of the four above it.
bool right(int n, int layers) {
  const int half = n / 2;
  std::vector<float> above(n * n * 4 * layers), below(half * half * 4 * layers), last(half * half * layers);
  for (size_t i = 0; i < above.size(); ++i) above[i] = static_cast<float>(i * 7919 % 1000) / 1000;
  gl::Job job;
  job.shape = {n, n, layers, 3, false};
  job.level[0] = {above.data(), n * n * 16};
  job.level[1] = {below.data(), half * half * 16};
  job.level[2] = {last.data(), half * half * 4};
  gl::reserve(-1, job.shape);
  gl::generate(-1, job);
  for (int z = 0; z < layers; ++z) {
    for (int i = 0; i < half * half * 4; ++i) {
      const int c = i % 4, x = i / 4 % half, y = i / 4 / half;
      const auto at = [&](int dy, int dx) { return above[((z * n + 2 * y + dy) * n + 2 * x + dx) * 4 + c]; };
      const float mean = (at(0, 0) + at(0, 1) + at(1, 0) + at(1, 1)) / 4;
      if (!(std::fabs(mean - below[z * half * half * 4 + i]) <= 1e-6f)) return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  bool fork_too = false, plant = false;
  for (int i = 1; i < argc; ++i) {
    fork_too = fork_too || std::string(argv[i]) == "fork";
    plant = plant || std::string(argv[i]) == "race";
  }
  std::atomic<int> wrong{0};
  int unguarded = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int turn = 0; turn < 8; ++turn) {
        wrong += !right(8 << (i % 3), 1 + i);
        if (i == 1 && turn == 4) gl::close();
        if (i == 2 && turn == 5) gl::simulate_loss(1);
        gl::status(-1);
        gl::statistics();
        if (plant) ++unguarded;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; fork_too && i < 2; ++i) {
    const pid_t child = fork();
    if (child == 0) _exit(right(16, 2) ? 0 : 1);
    int status = 1;
    waitpid(child, &status, 0);
    wrong += status != 0;
    wrong += !right(16, 2);
  }
  std::printf("%d wrong, %d\n", wrong.load(), unguarded);
  return wrong != 0;
}
