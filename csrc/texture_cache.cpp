#include "texture_cache.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <list>
#include <mutex>
#include <optional>

#include "launch.h"
#include "tensor.h"

namespace texvlm {

void check_hardware_dtype(const char* op, const at::Tensor& data) {
  const at::ScalarType dtype = data.scalar_type();
  TEXVLM_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, op, "data",
               "float32, float16 or bfloat16 (texture hardware has no float64)", at::toString(dtype));
}

namespace {

int64_t byte_limit() {
  const char* mb = std::getenv("TEXVLM_TEXTURE_CACHE_MB");
  return (mb ? std::max<int64_t>(0, std::atoll(mb)) : 1024) << 20;
}

#if defined(TEXVLM_WITH_CUDA)

// What an array holds.
struct Content {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const void* data;
  std::optional<int64_t> version;
  at::ScalarType dtype;
  int64_t channels;

  bool same_place(const Content& o) const { return storage == o.storage && data == o.data; }
  bool serves(const Content& o) const {
    return version && version == o.version && same_place(o) && dtype == o.dtype && channels == o.channels;
  }
};

Content content_of(const at::Tensor& data) {
  return {data.storage().getWeakStorageImpl(), data.const_data_ptr(),
          data.is_inference() ? std::nullopt : std::optional<int64_t>(data._version()), data.scalar_type(), data.size(2)};
}

struct Entry {
  std::unique_ptr<cuda::MipArray> array;
  std::optional<Content> content;  // none: anything

  bool free_for(const cuda::ArrayShape& shape) const { return !array->held() && array->shape() == shape; }
};

struct Cache {
  const pid_t process = getpid();
  std::mutex mutex;
  std::list<Entry> entries;  // the most recently used first
  std::vector<std::unique_ptr<cuda::MipArray>> retired;
  int64_t hits = 0, fills = 0, created = 0, evicted = 0;

  int64_t bytes() const {
    int64_t total = 0;
    for (const Entry& e : entries) total += e.array->shape().bytes();
    return total;
  }

  void empty() {
    entries.remove_if([](const Entry& e) { return !e.array->held(); });
    retired.erase(std::remove_if(retired.begin(), retired.end(), [](const auto& a) { return !a->held(); }), retired.end());
  }

  Entry& used(std::list<Entry>::iterator entry) {
    entries.splice(entries.begin(), entries, entry);
    return entries.front();
  }

  // The least recently used entry that passes.
  template <class Passes>
  std::list<Entry>::iterator oldest(const Passes& passes) {
    auto found = std::find_if(entries.rbegin(), entries.rend(), passes);
    return found == entries.rend() ? entries.end() : std::prev(found.base());
  }

  Entry& for_capture(const char* op, const cuda::ArrayShape& shape, const std::vector<cuda::SamplerState>& samplers,
                     const cuda::Stream& stream) {
    auto found =
        oldest([&](const Entry& e) { return e.array->held_by(stream) && e.array->shape() == shape && e.array->has(samplers); });
    if (found == entries.end()) found = oldest([&](const Entry& e) { return e.free_for(shape) && e.array->has(samplers); });
    TORCH_CHECK(
        found != entries.end(), "texvlm::", op,
        ": no texture array of this shape and sampler is free, and none can be created while a CUDA graph is captured; make "
        "the same call once before each capture");
    found->array->hold(stream);
    return used(found);
  }

  Entry& for_content(const cuda::ArrayShape& shape, const Content& wanted) {
    const auto first = [&](const auto& passes) {
      return std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.free_for(shape) && passes(e); });
    };
    auto found = first([&](const Entry& e) { return e.content && e.content->serves(wanted); });
    if (found == entries.end()) found = first([&](const Entry& e) { return e.content && e.content->same_place(wanted); });
    if (found == entries.end()) found = first([&](const Entry& e) { return !e.content || e.content->storage.expired(); });
    const int64_t limit = byte_limit();
    if (found == entries.end() && bytes() + shape.bytes() > limit) {
      found = oldest([&](const Entry& e) { return e.free_for(shape); });
      while (found == entries.end() && bytes() + shape.bytes() > limit) {
        const auto victim = oldest([](const Entry& e) { return !e.array->held(); });
        if (victim == entries.end()) break;
        entries.erase(victim);
        ++evicted;
      }
    }
    if (found != entries.end()) return used(found);
    entries.push_front({new_array(shape, [this] { empty(); }), std::nullopt});
    ++created;
    return entries.front();
  }
};

// Never destroyed. A forked child gets a cache of its own: the arrays belong to the parent's context, which the child may not
// touch.
Cache& cache() {
  static std::atomic<Cache*> current{new Cache};
  Cache* found = current.load();
  if (found->process == getpid()) return *found;
  Cache* fresh = new Cache;
  if (current.compare_exchange_strong(found, fresh)) return *fresh;
  delete fresh;
  return *found;
}

// Registered after CUDA has been used, so it runs before CUDA's own exit handlers.
void release_at_exit() {
  static const int registered = std::atexit([] {
    Cache& c = cache();
    const std::unique_lock<std::mutex> lock(c.mutex, std::try_to_lock);
    if (!lock.owns_lock()) return;
    c.entries.clear();
    c.retired.clear();
  });
  (void)registered;
}

#endif

}  // namespace

#if defined(TEXVLM_WITH_CUDA)

std::unique_ptr<cuda::MipArray> new_array(const cuda::ArrayShape& shape, const std::function<void()>& give_back) {
  try {
    return std::make_unique<cuda::MipArray>(shape);
  } catch (const cuda::OutOfMemory&) {
    give_back();
    if (shape.device >= 0) at::getDeviceAllocator(c10::kCUDA)->emptyCache();
    return std::make_unique<cuda::MipArray>(shape);
  }
}

cuda::ArrayShape array_shape(const char* op, const at::Tensor& data, const Levels& table, int channels) {
  const int device = data.device().index();
  const int64_t height = table.height[0], width = table.width[0],
                layers = data.size(0) * ((data.size(2) + channels - 1) / channels);
  const cuda::ArrayLimits limits = cuda::array_limits(device);
  TEXVLM_CHECK(height <= limits.height && width <= limits.width, op, "height and width",
               "at most " + std::to_string(limits.height) + " x " + std::to_string(limits.width) +
                   " (maxTexture2DLayered and maxSurface2DLayered of this device)",
               height, " x ", width);
  TEXVLM_CHECK(layers <= limits.layers, op, "data",
               "at most " + std::to_string(limits.layers) + " layers (maxTexture2DLayered of this device) of " +
                   std::to_string(channels) + " channels",
               layers, " layers for ", data.size(0), " pictures of ", data.size(2), " channels");
  return {device, height, width, layers, table.count, channels, data.scalar_type() == at::kHalf};
}

void fill_array(cuda::MipArray& array, const at::Tensor& data, const Levels& table, const cuda::Stream& stream) {
  const auto fill = [&](auto tag) {
    array.fill(texture_view<const typename decltype(tag)::type>(data, table), data.size(0), stream);
  };
  if (data.scalar_type() == at::kHalf) return fill(Tag<Half>{});
  if (data.scalar_type() == at::kBFloat16) return fill(Tag<BFloat16>{});
  fill(Tag<float>{});
}

void with_array(const char* op, const at::Tensor& data, const Levels& table, const std::vector<cuda::SamplerState>& samplers,
                const UseArray& body) {
  const c10::DeviceGuard guard(data.device());
  const cuda::Stream stream = cuda::stream_of(current_stream(data.device()));
  const cuda::ArrayShape shape = array_shape(op, data, table, 4);
  const Content wanted = content_of(data);
  Cache& c = cache();
  const std::lock_guard<std::mutex> lock(c.mutex);
  c.retired.erase(std::remove_if(c.retired.begin(), c.retired.end(), [](const auto& a) { return !a->held(); }), c.retired.end());
  Entry& entry = stream.capture ? c.for_capture(op, shape, samplers, stream) : c.for_content(shape, wanted);
  if (!stream.capture) {
    release_at_exit();
    entry.array->create(samplers);
  }
  if (!stream.capture && entry.content && entry.content->serves(wanted)) {
    ++c.hits;
  } else {
    entry.content.reset();
    fill_array(*entry.array, data, table, stream);
    if (!stream.capture) entry.content = wanted;
    ++c.fills;
  }
  body(*entry.array, stream);
}

void retire(std::unique_ptr<cuda::MipArray> array) {
  if (!array || !array->held()) return;
  Cache& c = cache();
  const std::lock_guard<std::mutex> lock(c.mutex);
  c.retired.push_back(std::move(array));
}

TextureCacheStats texture_cache_stats() {
  Cache& c = cache();
  const std::lock_guard<std::mutex> lock(c.mutex);
  const auto held = std::count_if(c.entries.begin(), c.entries.end(), [](const Entry& e) { return e.array->held(); });
  return {static_cast<int64_t>(c.entries.size()), c.bytes(), byte_limit(), held, c.hits, c.fills, c.created, c.evicted};
}

void empty_texture_cache() {
  Cache& c = cache();
  const std::lock_guard<std::mutex> lock(c.mutex);
  c.empty();
}

#else

TextureCacheStats texture_cache_stats() { return {0, 0, byte_limit(), 0, 0, 0, 0, 0}; }
void empty_texture_cache() {}

#endif

}  // namespace texvlm
