#include "textures.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

namespace texvlm::gl {
namespace {

std::mutex statistics_lock;
Statistics counted;
bool profiling = false;

template <class F>
void count(const F& f) {
  const std::lock_guard<std::mutex> guard(statistics_lock);
  f(counted);
}

// Adds the time of one step to the statistics while the profile is on: the driver, or the stream, is waited for then.
template <class F>
void step(const Context& context, const Job& job, double Statistics::* seconds, const F& body) {
  bool timed = false;
  count([&](Statistics&) { timed = profiling; });
  const auto start = std::chrono::steady_clock::now();
  body();
  if (!timed) return;
  context.f.glFinish();
  if (job.on_cuda) cuda::stream_wait(job.stream);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  count([&](Statistics& s) { s.*seconds += took.count(); });
}

int64_t cache_limit() {
  const char* megabytes = std::getenv("TEXVLM_GL_CACHE_MB");
  return (megabytes != nullptr ? std::max<int64_t>(0, std::atoll(megabytes)) : 1024) << 20;
}

std::string text(const Shape& s) {
  return std::to_string(s.layers) + " layers of " + std::to_string(s.height) + " x " + std::to_string(s.width) +
         (s.half ? " RGBA16F texels" : " RGBA32F texels");
}

// Calls body(layer, layers, y, rows, bytes, data) for boxes of one level that together cover it: whole layers that lie one after
// another go together, and no box is larger than the 32-bit byte counts of GL.
template <class Body>
void each_box(const Job& job, int level, const Body& body) {
  const Levels table = make_levels(job.shape.height, job.shape.width, job.shape.levels);
  const int64_t row = table.width[level] * job.shape.texel_bytes(), height = table.height[level];
  const int64_t stride = job.level[level].layer_bytes, layer = row * height;
  const int64_t together = stride == layer ? std::max<int64_t>(1, INT_MAX / layer) : 1;
  const int64_t rows = std::min(height, INT_MAX / row);
  for (int64_t z = 0; z < job.shape.layers; z += together) {
    const int64_t layers = std::min(together, job.shape.layers - z);
    for (int64_t y = 0; y < height; y += rows) {
      const int64_t some = std::min(rows, height - y);
      body(static_cast<int>(z), static_cast<int>(layers), static_cast<int>(y), static_cast<int>(some),
           static_cast<int>(layers * some * row), static_cast<char*>(job.level[level].data) + z * stride + y * row);
    }
  }
}

}  // namespace

Statistics statistics() {
  Statistics now;
  count([&](Statistics& s) { now = s; });
  return now;
}

void profile(bool on) {
  count([&](Statistics&) { profiling = on; });
}

Device::Device(int cuda_device) : context(cuda_device), cuda_device_(cuda_device), limit_(cache_limit()) {
  count([](Statistics& s) { ++s.contexts; });
  // Once in the life of the process: a context that is made again has the same driver.
  static std::mutex lock;
  static std::map<int, Filter> known;
  {
    const std::lock_guard<std::mutex> guard(lock);
    if (const auto found = known.find(cuda_device); found != known.end()) {
      filter = found->second;
      return;
    }
  }
  filter = probe();
  const std::lock_guard<std::mutex> guard(lock);
  known[cuda_device] = filter;
}

Device::~Device() { shrink(0); }

void Device::release(std::list<Texture>::iterator t) {
  const bool registered = t->image.resource != nullptr, layered = t->image.layered;
  if (registered) cuda::gl_unregister(t->image);
  context.f.glDeleteTextures(1, &t->name);
  const int64_t bytes = t->shape.bytes();
  held_ -= bytes;
  count([&](Statistics& s) { --s.textures, s.texture_bytes -= bytes, s.registered -= registered, s.layered -= layered; });
  textures_.erase(t);
}

// Gives back what was not used for longest, until at most `bytes` are held.
void Device::shrink(int64_t bytes) {
  while (!textures_.empty() && held_ > bytes) release(std::prev(textures_.end()));
}

Device::Texture& Device::texture(const Shape& shape) {
  const auto known = std::find_if(textures_.begin(), textures_.end(), [&](const Texture& t) { return t.shape == shape; });
  if (known != textures_.end()) {
    textures_.splice(textures_.begin(), textures_, known);
    return textures_.front();
  }
  const auto refuse = [&](const std::string& why) {
    throw std::runtime_error("texvlm: OpenGL has no texture of " + text(shape) + ": " + why);
  };
  if (std::max(shape.width, shape.height) > context.max_size)
    refuse("a side is at most " + std::to_string(context.max_size) + " (GL_MAX_TEXTURE_SIZE)");
  if (shape.layers > context.max_layers)
    refuse("at most " + std::to_string(context.max_layers) +
           " layers (GL_MAX_ARRAY_TEXTURE_LAYERS), 4 channels of a picture each");
  const int64_t bytes = shape.bytes();
  shrink(std::max<int64_t>(0, limit_ - bytes));
  Texture made{shape, 0, {}};
  for (bool again = false;; again = true) {
    try {
      context.f.glGenTextures(1, &made.name);
      context.f.glBindTexture(kTexture2DArray, made.name);
      context.f.glTexStorage3D(kTexture2DArray, shape.levels, shape.half ? kRgba16F : kRgba32F, static_cast<int>(shape.width),
                               static_cast<int>(shape.height), static_cast<int>(shape.layers));
      context.check("glTexStorage3D");
      break;
    } catch (const OutOfMemory&) {
      context.f.glDeleteTextures(1, &made.name);
      if (again || textures_.empty()) refuse("out of memory (" + std::to_string(bytes >> 20) + " MB)");
      shrink(0);
    } catch (...) {
      context.f.glDeleteTextures(1, &made.name);
      throw;
    }
  }
  textures_.push_front(made);
  held_ += bytes;
  count([&](Statistics& s) { ++s.textures_made, ++s.textures, s.texture_bytes += bytes; });
  return textures_.front();
}

void Device::upload(const Job& job, unsigned name) {
  context.f.glBindTexture(kTexture2DArray, name);
  each_box(job, 0, [&](int z, int layers, int y, int rows, int, const void* data) {
    context.f.glTexSubImage3D(kTexture2DArray, 0, 0, y, z, static_cast<int>(job.shape.width), rows, layers, kRgba,
                              job.shape.half ? kHalfFloat : kFloat, data);
  });
}

void Device::read(const Job& job, unsigned name, int level) {
  const int width = static_cast<int>(std::max<int64_t>(1, job.shape.width >> level));
  each_box(job, level, [&](int z, int layers, int y, int rows, int bytes, void* data) {
    context.f.glGetTextureSubImage(name, level, 0, y, z, width, rows, layers, kRgba, job.shape.half ? kHalfFloat : kFloat, bytes,
                                   data);
  });
}

void Device::generate(const Job& job) {
  Texture& t = texture(job.shape);
  if (job.on_cuda) return generate_on_cuda(job, t);
  step(context, job, &Statistics::upload_seconds, [&] { upload(job, t.name); });
  step(context, job, &Statistics::generate_seconds, [&] { context.f.glGenerateMipmap(kTexture2DArray); });
  step(context, job, &Statistics::read_seconds, [&] {
    for (int level = 1; level < job.shape.levels; ++level) read(job, t.name, level);
  });
  context.check("glGenerateMipmap");
  count([](Statistics& s) { ++s.generated; });
}

// Nothing waits for the GPU here: mapping and unmapping order GL and the stream. The texture is registered when it is first used,
// because that is slow, and mapped only while CUDA touches it, because what GL does with a mapped texture is undefined.
void Device::generate_on_cuda(const Job& job, Texture& t) {
  const Levels table = make_levels(job.shape.height, job.shape.width, job.shape.levels);
  const auto box = [&](int level) {
    return cuda::GlLevel{
        level, table.width[level], table.height[level], job.shape.layers, job.shape.texel_bytes(), job.level[level].layer_bytes};
  };
  const auto mapped = [&](const auto& body) {
    cuda::gl_map(t.image, job.stream);
    try {
      body();
    } catch (...) {
      try {
        cuda::gl_unmap(t.image, job.stream);
      } catch (const std::runtime_error&) {  // the first error is the one to tell
      }
      throw;
    }
    cuda::gl_unmap(t.image, job.stream);
  };
  if (t.image.resource == nullptr) {
    t.image = cuda::gl_register(t.name, kTexture2DArray, job.shape.layers, job.stream);
    count([&](Statistics& s) { ++s.registered, s.layered += t.image.layered; });
  }
  step(context, job, &Statistics::upload_seconds,
       [&] { mapped([&] { cuda::gl_write(t.image, box(0), job.level[0].data, job.stream); }); });
  step(context, job, &Statistics::generate_seconds, [&] {
    context.f.glBindTexture(kTexture2DArray, t.name);
    context.f.glGenerateMipmap(kTexture2DArray);
  });
  context.check("glGenerateMipmap");
  step(context, job, &Statistics::read_seconds, [&] {
    mapped([&] {
      for (int level = 1; level < job.shape.levels; ++level)
        cuda::gl_read(t.image, box(level), job.level[level].data, job.stream);
    });
  });
  count([](Statistics& s) { ++s.generated; });
}

namespace {

// The weights of texel j in texel i of the next level along a side of n texels.
double ours(int64_t n, int64_t i, int64_t j) {  // the polyphase box, see math/pyramid.h
  const int64_t m = n / 2, k = j - 2 * i;
  if (n % 2 == 0) return k == 0 || k == 1 ? 0.5 : 0.0;
  return k == 0 ? double(m - i) / n : k == 1 ? double(m) / n : k == 2 ? double(i + 1) / n : 0.0;
}
double bilinear(int64_t n, int64_t i, int64_t j) {  // at the centre of the destination texel
  const double at = (i + 0.5) * n / (n / 2) - 0.5;
  return std::max(0.0, 1.0 - std::abs(at - j));
}

}  // namespace

Filter Device::probe() {
  Filter found;
  // One impulse in each layer and channel: every texel of level 0 has its own.
  const auto weights = [&](int64_t height, int64_t width, double& from_ours, double* from_bilinear) {
    const int64_t impulses = height * width, h = height / 2, w = width / 2;
    Job job;
    job.shape = {width, height, (impulses + 3) / 4, 2, false};
    std::vector<float> above(job.shape.layers * impulses * 4, 0.0f), below(job.shape.layers * h * w * 4, 0.0f);
    for (int64_t i = 0; i < impulses; ++i) above[(i / 4 * impulses + i) * 4 + i % 4] = 1.0f;
    job.level[0] = {above.data(), impulses * 16};
    job.level[1] = {below.data(), h * w * 16};
    generate(job);
    for (int64_t i = 0; i < impulses; ++i) {
      for (int64_t y = 0; y < h; ++y) {
        for (int64_t x = 0; x < w; ++x) {
          const double weight = below[((i / 4 * h + y) * w + x) * 4 + i % 4];
          const auto difference = [&](double (*rule)(int64_t, int64_t, int64_t)) {
            const double d = std::abs(weight - rule(height, y, i / width) * rule(width, x, i % width));
            return std::isnan(d) ? 1.0 : d;
          };
          from_ours = std::max(from_ours, difference(ours));
          if (from_bilinear != nullptr) *from_bilinear = std::max(*from_bilinear, difference(bilinear));
        }
      }
    }
  };
  weights(4, 8, found.even_from_ours, nullptr);
  weights(5, 7, found.odd_from_ours, &found.odd_from_bilinear);
  shrink(0);
  return found;
}

}  // namespace texvlm::gl
