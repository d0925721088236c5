// The shim itself: barriers, operations of a warp, atomics and bits against known answers, under every schedule that is asked for.
#include "../expect.h"

#include "../../../csrc/cuda/launch.cuh"

namespace texvlm::cuda {
namespace {

constexpr unsigned kAll = 0xffffffffu;

struct Answers {
  int up[32], down[32], exclusive[32], segment[32], any[32], all[32], equal[32], most[32], first_of_four[32], active[32];
  unsigned ballot, odd;
};

__global__ void warp_operations(Answers* a) {
  const int lane = static_cast<int>(threadIdx.x);
  a->up[lane] = __shfl_up_sync(kAll, lane, 3);
  a->down[lane] = __shfl_down_sync(kAll, lane, 3);
  a->exclusive[lane] = __shfl_xor_sync(kAll, lane, 5);
  a->segment[lane] = __shfl_sync(kAll, lane, 2, 8);
  a->first_of_four[lane] = __shfl_down_sync(kAll, lane, 1, 4);
  a->any[lane] = __any_sync(kAll, lane == 7);
  a->all[lane] = __all_sync(kAll, lane < 31);
  a->equal[lane] = static_cast<int>(__match_any_sync(kAll, lane % 4));
  a->most[lane] = __reduce_max_sync(kAll, lane * 7 % 32);
  const unsigned ballot = __ballot_sync(kAll, lane % 3 == 0);
  if (lane == 0) a->ballot = ballot;
  if (lane % 2) {  // a part of the warp, by itself
    const unsigned odd = __ballot_sync(0xaaaaaaaau, 1);
    if (lane == 1) a->odd = odd;
    a->active[lane] = static_cast<int>(__activemask());
  }
}

__global__ void block_operations(int* counted, int* either, int* both, unsigned long long* sum, float4* wide, float* most,
                                 unsigned* ring) {
  const int i = static_cast<int>(threadIdx.x);
  TEXVLM_SHARED(own, int);
  if (i == 0) own = 0;
  __syncthreads();
  atomicAdd(&own, i);
  __syncthreads();
  counted[i] = __syncthreads_count(i % 4 == 0) + own;
  either[i] = __syncthreads_or(i == 3);
  both[i] = __syncthreads_and(i != 3);
  atomicAdd(sum, 1ull << 33);
  atomicAdd(wide, make_float4(1, 2, 3, 4));
  atomicMax(reinterpret_cast<int*>(most), __float_as_int(static_cast<float>(i)));
  atomicInc(ring, 9);
}

// A list that all threads push to, by compare and swap.
__global__ void push(int* head, int* next) {
  const int me = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  int old = atomicAdd(head, 0);
  for (int seen; (next[me] = old, seen = atomicCAS(head, old, me)) != old; old = seen) __nanosleep(20);
}

}  // namespace
}  // namespace texvlm::cuda

int main() {
  using namespace texvlm::cuda;
  Answers a{};
  launch(warp_operations, 1, 32, 0, nullptr, &a);
  for (int lane = 0; lane < 32; ++lane) {
    EXPECT(a.up[lane] == (lane < 3 ? lane : lane - 3));
    EXPECT(a.down[lane] == (lane > 28 ? lane : lane + 3));
    EXPECT(a.exclusive[lane] == (lane ^ 5));
    EXPECT(a.segment[lane] == lane / 8 * 8 + 2);
    EXPECT(a.first_of_four[lane] == (lane % 4 == 3 ? lane : lane + 1));
    EXPECT(a.any[lane] == 1 && a.all[lane] == 0);
    EXPECT(a.equal[lane] == static_cast<int>(0x11111111u << lane % 4));
    EXPECT(a.most[lane] == 31);
    EXPECT(lane % 2 == 0 || a.active[lane] == static_cast<int>(0xaaaaaaaau));
  }
  EXPECT(a.ballot == 0x49249249u && a.odd == 0xaaaaaaaau);

  constexpr int kThreads = 96;
  int counted[kThreads], either[kThreads], both[kThreads];
  unsigned long long sum = 0;
  float4 wide{0, 0, 0, 0};
  float most = 0;
  unsigned ring = 0;
  launch(block_operations, 1, kThreads, 0, nullptr, &counted[0], &either[0], &both[0], &sum, &wide, &most, &ring);
  for (int i = 0; i < kThreads; ++i)
    EXPECT(counted[i] == 24 + kThreads * (kThreads - 1) / 2 && either[i] == 1 && both[i] == 0);
  EXPECT(sum == (96ull << 33) && wide.x == 96 && wide.w == 384 && most == 95 && ring == 6);

  constexpr int kPushers = 4 * 40;
  int head = -1, next[kPushers], length = 0;
  bool seen[kPushers] = {};
  launch(push, 4, 40, 0, nullptr, &head, &next[0]);
  for (int i = head; i >= 0 && !seen[i]; i = next[i]) seen[i] = true, ++length;
  EXPECT(length == kPushers);
  return done();
}
