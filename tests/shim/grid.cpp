#include "grid.h"

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "fibers.h"
#include "races.h"
#include "traffic.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace texvlm::shim {
namespace {

constexpr unsigned kLanes = 32;

struct Block;
struct Warp;

struct Thread {
  uint3 index;
  unsigned rank, lane;
  Block* block;
  Warp* warp;
  Fiber* fiber;  // while it has begun and not ended
  bool ended;
  const char* waits;  // for what: the kind of a barrier or of a warp operation, or null
  Where where;
  int votes;          // what a barrier returned
  unsigned gathered;  // what converged() returned
  uint64_t inbox[kLanes];
  void* identity;  // for the race checker
};

// An operation that lanes of one warp do together. It is known by its mask.
struct Meeting {
  unsigned mask, arrived;
  const char* kind;
  uint64_t values[kLanes];
};

struct Warp {
  Thread* lanes[kLanes];
  unsigned ended;  // a bit for each lane that has ended, or that the block does not have
  std::vector<Meeting> meetings;
  int id;
};

struct Block {
  uint3 index;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  unsigned live, waiting;
  int votes;
  const char* kind;  // of the barrier that threads wait at
  Where where;
  struct Shared {
    const void* key;
    char* memory;
    size_t bytes;
  };
  std::vector<Shared> shared;
  void* dynamic;
  char* orders;  // names for the race checker: the barrier, the fences of this block, then one for each lane
};

struct Random {
  uint64_t state;
  uint64_t below(uint64_t n) {  // xorshift64*, Vigna 2016
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (state * 0x2545F4914F6CDD1DULL >> 33) % n;
  }
};

struct Scheduler {
  const Launch* launch = nullptr;
  Settings how;
  Thread* current = nullptr;
  Fiber host;
  void* host_identity;
  std::vector<Fiber*> idle, used;
  std::vector<void*> names, used_names;
  int names_made = 0;
  std::vector<std::unique_ptr<Block>> blocks;  // resident, or free for the next
  std::vector<Block*> vacant;
  std::deque<Thread*> fresh, ready;
  uint64_t next_block, block_count;
  Random random;
  int starved;  // the id of a warp
  int warp_ids;
};
Scheduler& s = *new Scheduler;  // never destroyed: fibers outlive static destructors
std::mutex one_launch;          // at a time
std::atomic<Listener> listener_of_launches{nullptr};

bool is_fixed() { return s.how.schedule() == Schedule::fixed; }

// Memory of a block. The race checker shall not take the allocator's own accesses for the kernel's.
void* new_memory(size_t bytes) {
  const Unchecked unchecked;
  void* p = ::operator new(bytes);
  std::memset(p, 0xFF, bytes);
  return p;
}
void free_memory(void* p) {
  const Unchecked unchecked;
  ::operator delete(p);
}

// A name for the race checker, which takes its time to make one; it has 8128 in all. Kept between launches, as nothing in one
// happens at the same time as anything in the next.
void* new_name() {
  if (!kRaces) return nullptr;
  if (s.names.empty()) {
    if (++s.names_made > 8000)
      fail({s.launch->site->source, 0}, "more than 8000 threads in one launch: too many for the race checker");
    return new_identity();
  }
  void* const name = s.names.back();
  s.names.pop_back();
  assume_identity(name);
  acquire(s.launch);
  assume_identity(s.host_identity);
  return name;
}

// --- blocks
// -----------------------------------------------------------------------------------------------------------------------

void admit() {
  if (s.vacant.empty()) {
    s.blocks.push_back(std::make_unique<Block>());
    s.vacant.push_back(s.blocks.back().get());
  }
  Block& b = *s.vacant.back();
  s.vacant.pop_back();
  const dim3 g = s.launch->grid, d = s.launch->block;
  const uint64_t n = s.next_block++;
  b.index = {static_cast<unsigned>(n % g.x), static_cast<unsigned>(n / g.x % g.y), static_cast<unsigned>(n / g.x / g.y)};
  const unsigned count = d.x * d.y * d.z;
  {
    const Unchecked unchecked;  // kernels read what other lanes passed from here
    b.threads.resize(count);
  }
  b.warps.resize((count + kLanes - 1) / kLanes);
  b.live = count;
  b.waiting = 0;
  b.votes = 0;
  b.dynamic = s.launch->shared_bytes ? new_memory(s.launch->shared_bytes) : nullptr;
  b.orders = kRaces ? static_cast<char*>(new_memory(2 + count)) : nullptr;
  for (Warp& w : b.warps) {
    w.ended = ~0u;
    w.meetings.clear();
    w.id = s.warp_ids++;
  }
  for (unsigned i = 0; i < count; ++i) {
    Thread& t = b.threads[i];
    t.index = {i % d.x, i / d.x % d.y, i / d.x / d.y};
    t.rank = i;
    t.lane = i % kLanes;
    t.block = &b;
    t.warp = &b.warps[i / kLanes];
    t.warp->lanes[t.lane] = &t;
    t.warp->ended &= ~(1u << t.lane);
    t.fiber = nullptr;
    t.ended = false;
    t.waits = nullptr;
    t.identity = new_name();
    s.fresh.push_back(&t);
  }
}

void retire(Block& b) {
  for (const Block::Shared& each : b.shared) free_memory(each.memory);
  b.shared.clear();
  if (b.dynamic) free_memory(b.dynamic);
  if (b.orders) free_memory(b.orders);
  if (kRaces)
    for (Thread& t : b.threads) s.used_names.push_back(t.identity);
  s.vacant.push_back(&b);
}

// --- who runs next
// ------------------------------------------------------------------------------------------------------------------

void is_ready(Thread& t) {
  t.waits = nullptr;
  s.ready.push_back(&t);
}

Thread* take(std::deque<Thread*>& from, size_t i) {
  std::swap(from[i], from.back());
  Thread* const t = from.back();
  from.pop_back();
  return t;
}

Thread* take_first(std::deque<Thread*>& from) {
  Thread* const t = from.front();
  from.pop_front();
  return t;
}

Thread* choose() {
  const size_t fresh = s.fresh.size(), all = fresh + s.ready.size();
  if (all == 0) return nullptr;
  if (is_fixed()) return take_first(fresh ? s.fresh : s.ready);
  const auto at = [&](size_t i) -> Thread*& { return i < fresh ? s.fresh[i] : s.ready[i - fresh]; };
  size_t i = s.random.below(all);
  if (s.how.schedule() == Schedule::starve) {
    if (s.random.below(256) == 0) s.starved = -1;
    size_t tried = 0;
    while (tried < all && at(i)->warp->id == s.starved) i = (i + 1) % all, ++tried;
    if (tried == all || s.starved < 0) s.starved = at(s.random.below(all))->warp->id;
  }
  return i < fresh ? take(s.fresh, i) : take(s.ready, i - fresh);
}

// Lets lanes that asked which of them are converged go on, once nothing else can.
bool resolve_convergence() {
  bool any = false;
  for (const auto& b : s.blocks) {
    for (Thread& t : b->threads) {
      if (t.ended || t.waits == nullptr || std::strcmp(t.waits, "__activemask") != 0) continue;
      unsigned mask = 0;
      for (unsigned l = 0; l < kLanes; ++l) {
        if (t.warp->ended >> l & 1) continue;
        const Thread& other = *t.warp->lanes[l];
        if (other.waits == t.waits && other.where.line == t.where.line) mask |= 1u << l;
      }
      for (unsigned l = 0; l < kLanes; ++l) {
        if (!(mask >> l & 1)) continue;
        t.warp->lanes[l]->gathered = mask;
        is_ready(*t.warp->lanes[l]);
      }
      any = true;
    }
  }
  return any;
}

void print_where_all_wait() {
  for (const auto& b : s.blocks) {
    for (const Thread& t : b->threads) {
      if (t.ended || t.waits == nullptr) continue;
      const bool same =
          t.rank > 0 && b->threads[t.rank - 1].waits == t.waits && b->threads[t.rank - 1].where.line == t.where.line;
      if (!same)
        std::fprintf(stderr, "  block (%u, %u, %u), from thread %u on: waits at %s, %s:%d\n", b->index.x, b->index.y, b->index.z,
                     t.rank, t.waits, t.where.file, t.where.line);
    }
  }
}

Thread* pick() {
  for (;;) {
    const int resident = static_cast<int>(s.blocks.size() - s.vacant.size());
    if (resident < s.how.resident_blocks && s.next_block < s.block_count) {
      admit();
      continue;
    }
    if (Thread* const t = choose()) return t;
    if (resident == 0) return nullptr;
    if (resolve_convergence()) continue;
    fail({s.launch->site->source, 0}, "no thread can go on: a barrier or a warp operation that not all reach");
  }
}

// --- switching
// --------------------------------------------------------------------------------------------------------------------

void enter(Thread& t) {
  s.current = &t;
  threadIdx = t.index;
  blockIdx = t.block->index;
  assume_identity(t.identity);
}

void fiber_main();

Fiber* idle_fiber() {
  if (s.idle.empty()) return new_fiber(fiber_main);
  Fiber* const f = s.idle.back();
  s.idle.pop_back();
  return f;
}

void meet(Warp& w, Meeting& m);
void pass_barrier(Block& b);

void end(Thread& t) {
  release(s.launch);
  assume_identity(s.host_identity);
  t.ended = true;
  t.fiber = nullptr;
  Warp& w = *t.warp;
  w.ended |= 1u << t.lane;
  for (const Meeting& m : w.meetings)
    if (m.arrived && m.mask >> t.lane & 1)
      fail({s.launch->site->source, 0}, "lane %u of the warp of thread %u ended, and others wait for it in %s, mask %08x", t.lane,
           t.rank, m.kind, m.mask);
  Block& b = *t.block;
  if (--b.live == 0) return retire(b);
  if (b.waiting == b.live) pass_barrier(b);
}

void resume(Thread& t) {
  if (t.fiber == nullptr) t.fiber = idle_fiber();
  enter(t);
}

// A fiber runs threads from their beginning to their end, one after another, as long as none of them waits. For the race checker
// each thread of a launch has a stack of its own: what two of them have there at one address is not shared.
void fiber_main() {
  fiber_entered();
  for (;;) {
    Thread& t = *s.current;
    s.launch->thread(s.launch->arguments);
    Fiber* const self = t.fiber;
    end(t);
    Thread* const next = pick();
    if (next && next->fiber == nullptr && !kRaces) {
      next->fiber = self;
      enter(*next);
      continue;
    }
    (kRaces ? s.used : s.idle).push_back(self);
    if (next) resume(*next);
    switch_fiber(*self, next ? *next->fiber : s.host);
  }
}

// The current thread waits until somebody makes it ready.
void park() {
  Thread& t = *s.current;
  Thread& next = *pick();
  resume(next);
  if (&next != &t) switch_fiber(*t.fiber, *next.fiber);
}

// Everything that these threads did happens before everything that they will do.
template <class Each>
void order(const void* object, const Each& each) {
  if (!kRaces) return;
  each([&](Thread& t) {
    assume_identity(t.identity);
    release(object);
  });
  each([&](Thread& t) {
    assume_identity(t.identity);
    acquire(object);
  });
  assume_identity(s.host_identity);
}

void pass_barrier(Block& b) {
  b.waiting = 0;
  const int votes = std::exchange(b.votes, 0);
  order(b.orders, [&](const auto& with) {
    for (Thread& t : b.threads)
      if (!t.ended) with(t);
  });
  for (Thread& t : b.threads) {
    if (t.ended) continue;
    t.votes = votes;
    if (&t != s.current) is_ready(t);
  }
}

void meet(Warp& w, Meeting& m) {
  if (std::strcmp(m.kind, "__syncwarp") == 0) {
    const Thread& first = *w.lanes[__builtin_ctz(m.mask)];
    order(first.block->orders + 2 + first.rank, [&](const auto& with) {
      for (unsigned l = 0; l < kLanes; ++l)
        if (m.mask >> l & 1) with(*w.lanes[l]);
    });
  }
  m.arrived = 0;
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(m.mask >> l & 1)) continue;
    std::memcpy(w.lanes[l]->inbox, m.values, sizeof(m.values));
    if (w.lanes[l] != s.current) is_ready(*w.lanes[l]);
  }
}

// The thread that calls the scheduler, which acts under the name of the host: its own memory is no business of the race
// checker's.
Thread& calling() {
  assume_identity(s.host_identity);
  return *s.current;
}

void note(const char* what, const Site& site) {
  if (const char* path = std::getenv("TEXVLM_SHIM_LAUNCHES")) {
    if (FILE* file = std::fopen(path, "a")) {
      std::fprintf(file, "%s\t%s\t%s\n", what, site.source, site.kernel);
      std::fclose(file);
    }
  }
}

}  // namespace

Settings& settings() {
  static Settings from_environment = [] {
    const char *seed = std::getenv("TEXVLM_SHIM_SEED"), *blocks = std::getenv("TEXVLM_SHIM_BLOCKS");
    return Settings{seed ? std::strtoull(seed, nullptr, 10) : 0, blocks ? std::atoi(blocks) : 1};
  }();
  return from_environment;
}

void fail(Where where, const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "texvlm shim: %s", where.file);
  if (where.line) std::fprintf(stderr, ":%d", where.line);
  std::fputs(": ", stderr);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  va_end(arguments);
  if (const Thread* t = s.current) {
    std::fprintf(stderr, "  in block (%u, %u, %u), thread (%u, %u, %u), schedule %d with seed %llu\n", t->block->index.x,
                 t->block->index.y, t->block->index.z, t->index.x, t->index.y, t->index.z, static_cast<int>(s.how.schedule()),
                 static_cast<unsigned long long>(s.how.seed));
    std::fprintf(stderr, "  of %s\n", s.launch->site->kernel);
    print_where_all_wait();
  }
  std::abort();
}

Site::Site(const char* source, const char* kernel) : source(source), kernel(kernel) { note("linked", *this); }

extern "C" void texvlm_shim_tell(Listener listener) { listener_of_launches = listener; }

void run(const Launch& launch) {
  const std::lock_guard<std::mutex> guard(one_launch);
  if (!launch.site->launched) note("launched", *launch.site);
  launch.site->launched = true;
  const dim3 g = launch.grid, d = launch.block;
  if (d.x * d.y * d.z == 0 || d.x * d.y * d.z > 1024 || d.z > 64)
    fail({launch.site->source, 0}, "a block of %u x %u x %u threads", d.x, d.y, d.z);
  if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535)
    fail({launch.site->source, 0}, "a grid of %u x %u x %u blocks", g.x, g.y, g.z);
  blockDim = d;
  gridDim = g;
  s.launch = &launch;
  s.how = settings();
  s.next_block = 0;
  s.block_count = uint64_t{g.x} * g.y * g.z;
  s.random.state = s.how.seed * 0x9E3779B97F4A7C15ULL + 1;
  s.starved = -1;
  s.warp_ids = 0;
  s.host.stack = nullptr;  // this launch may come from another thread than the last
  s.host_identity = host_identity();
  release(&launch);
  if (listener_of_launches != nullptr) begin_traffic();
  Thread& first = *pick();
  resume(first);
  switch_fiber(s.host, *first.fiber);
  assume_identity(s.host_identity);
  s.current = nullptr;
  acquire(&launch);
  s.idle.insert(s.idle.end(), s.used.begin(), s.used.end());
  s.used.clear();
  s.names.insert(s.names.end(), s.used_names.begin(), s.used_names.end());
  s.used_names.clear();
  const Traffic moved = end_traffic();
  if (const Listener tell = listener_of_launches) tell(launch.site->source, launch.site->kernel, moved.read, moved.written);
}

int barrier(const char* kind, bool vote, Where where) {
  Thread& t = calling();
  Block& b = *t.block;
  if (b.waiting == 0) {
    b.kind = kind;
    b.where = where;
  } else if (b.where.line != where.line || std::strcmp(b.where.file, where.file) != 0 || std::strcmp(b.kind, kind) != 0) {
    fail(where, "divergent barrier: others wait at %s:%d", b.where.file, b.where.line);
  }
  b.votes += vote;
  t.waits = kind;
  t.where = where;
  if (++b.waiting == b.live) {
    pass_barrier(b);
    is_ready(t);
  }
  park();
  return t.votes;
}

const uint64_t* exchange(const char* kind, unsigned mask, uint64_t value, Where where) {
  Thread& t = calling();
  Warp& w = *t.warp;
  if (!(mask >> t.lane & 1)) fail(where, "bad mask: lane %u is not in the mask %08x that it passes to %s", t.lane, mask, kind);
  if (mask & w.ended) fail(where, "bad mask: %s with mask %08x names lanes that have ended (%08x)", kind, mask, mask & w.ended);
  Meeting* m = nullptr;
  for (Meeting& each : w.meetings)
    if (each.mask == mask) m = &each;
  if (m == nullptr) m = &w.meetings.emplace_back(Meeting{mask, 0, kind, {}});
  if (m->arrived == 0) m->kind = kind;
  if (std::strcmp(m->kind, kind) != 0) fail(where, "lanes of one mask (%08x) call %s and %s", mask, m->kind, kind);
  m->arrived |= 1u << t.lane;
  m->values[t.lane] = value;
  t.waits = kind;
  t.where = where;
  if (m->arrived == mask) {
    meet(w, *m);
    is_ready(t);
  }
  park();
  return t.inbox;
}

unsigned converged(Where where) {
  Thread& t = calling();
  t.waits = "__activemask";
  t.where = where;
  park();
  return t.gathered;
}

void yield() {
  if (s.current == nullptr) return;
  is_ready(calling());
  park();
}

void yield_sometimes() {
  if (s.current != nullptr && !is_fixed() && s.random.below(4) == 0) yield();
}

void fence(bool block) {
  if (s.current == nullptr) return;
  const void* object = block ? static_cast<const void*>(s.current->block->orders + 1) : s.launch->arguments;
  acquire(object);
  release(object);
  yield_sometimes();
}

void* shared(const void* key, size_t bytes) {
  Block& b = *s.current->block;
  for (const Block::Shared& each : b.shared)
    if (each.key == key) return each.memory;
  Thread& t = calling();
  void* const memory = new_memory(bytes);
  b.shared.push_back({key, static_cast<char*>(memory), bytes});
  assume_identity(t.identity);
  return memory;
}

void* dynamic_shared() { return s.current->block->dynamic; }

bool is_local(const void* p) {
  const auto in = [p](const void* begin, size_t bytes) {
    return reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(begin) < bytes;
  };
  const Thread& t = *s.current;
  if (in(t.fiber->stack, t.fiber->size) || in(t.block->dynamic, s.launch->shared_bytes)) return true;
  return std::any_of(t.block->shared.begin(), t.block->shared.end(),
                     [&](const Block::Shared& each) { return in(each.memory, each.bytes); });
}

unsigned lane() { return s.current->lane; }

}  // namespace texvlm::shim
