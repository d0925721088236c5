// Texture objects: filling arrays through surfaces, and fetching from them.
//
// Each launch has ONE handle that is the same for all threads, and all fetches are float4: some compilers mix up handles that
// differ between the lanes of a warp, and fetches of different widths in one function. (A surface is chosen per block.)
#include "hardware.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <mutex>

#include "launch.cuh"

namespace texvlm::cuda {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next launch would report it again
  const std::string message = std::string("texvlm: ") + what + " failed: " + cudaGetErrorString(error);
  if (error == cudaErrorMemoryAllocation) throw OutOfMemory(message);
  throw std::runtime_error(message);
}

struct OnDevice {
  int before = -1;
  explicit OnDevice(int device) {
    if (device >= 0 && cudaGetDevice(&before) == cudaSuccess && before != device) cudaSetDevice(device);
  }
  ~OnDevice() {
    if (before >= 0) cudaSetDevice(before);
  }
};

// Another thread may be capturing: allocations here are none of its business, and must not end its capture.
struct Relaxed {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode); }
  ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode); }
};

// ---- filling ----

constexpr int kTileX = 32, kTileY = kThreads / kTileX;

struct Surfaces {
  uint64_t handle[kMaxLevels];
  int64_t first_block[kMaxLevels + 1];
};

// `N` channels that move as one access.
template <class T, int N>
struct alignas(N * sizeof(T)) Packet {
  T value[N];
};

__device__ __forceinline__ void write(const Packet<float, 4>& v, cudaSurfaceObject_t to, int x, int y, int layer) {
  surf2DLayeredwrite(make_float4(v.value[0], v.value[1], v.value[2], v.value[3]), to, x * 16, y, layer);
}
__device__ __forceinline__ void write(const Packet<Half, 4>& v, cudaSurfaceObject_t to, int x, int y, int layer) {
  surf2DLayeredwrite(make_ushort4(v.value[0].bits, v.value[1].bits, v.value[2].bits, v.value[3].bits), to, x * 8, y, layer);
}
__device__ __forceinline__ void write(const Packet<float, 1>& v, cudaSurfaceObject_t to, int x, int y, int layer) {
  surf2DLayeredwrite(v.value[0], to, x * 4, y, layer);
}
__device__ __forceinline__ void write(const Packet<Half, 1>& v, cudaSurfaceObject_t to, int x, int y, int layer) {
  surf2DLayeredwrite(v.value[0].bits, to, x * 2, y, layer);
}

template <class T>
struct StoredAs {
  using type = float;  // bfloat16 too: arrays have no such format
};
template <>
struct StoredAs<Half> {
  using type = Half;
};

// A block writes a tile of one level, a thread one texel and all its channels: neighbouring threads then write neighbouring
// texels of the same layer, and what they read, a row of texels with all channels, stays in the cache from layer to layer.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    fill_kernel(TextureView<const T> data, Surfaces surfaces, int64_t pictures, int layers, bool aligned) {
  using Stored = typename StoredAs<T>::type;
  int level = 0;
  while (level + 1 < data.levels.count && blockIdx.x >= surfaces.first_block[level + 1]) ++level;
  const int64_t tile = blockIdx.x - surfaces.first_block[level], across = (data.levels.width[level] + kTileX - 1) / kTileX;
  const int64_t x = tile % across * kTileX + threadIdx.x % kTileX, y = tile / across * kTileY + threadIdx.x / kTileX;
  if (x >= data.levels.width[level] || y >= data.levels.height[level]) return;
  for (int64_t b = blockIdx.y; b < pictures; b += gridDim.y) {
    const T* from = data.texel(b, level, y, x);
    for (int layer = 0; layer < layers; ++layer, from += N) {
      Packet<T, N> texel;
      if (aligned) {
        texel = *reinterpret_cast<const Packet<T, N>*>(from);
      } else {
        for (int i = 0; i < N; ++i) texel.value[i] = int64_t{layer} * N + i < data.channels ? from[i] : static_cast<T>(0.0f);
      }
      Packet<Stored, N> out;
      for (int i = 0; i < N; ++i) out.value[i] = static_cast<Stored>(texel.value[i]);
      write(out, surfaces.handle[level], static_cast<int>(x), static_cast<int>(y), static_cast<int>(b * layers + layer));
    }
  }
}

// ---- fetching ----

// Which channels a launch writes, and through which layers.
template <class T>
struct Target {
  cudaTextureObject_t texture;
  Fetch<T> fetch;
  int layer_channels;  // 4 or 1
  bool modes, others;  // mode channels, all the others

  // read(layer) for the layers of channels [c0, c1), at most four channels: one fetch of four channels, or four of one.
  template <class Read>
  __device__ __forceinline__ void write(int64_t b, int64_t n, int64_t c0, int64_t c1, const Read& read) const {
    T* to = fetch.out + (b * fetch.count + n) * fetch.channels;
    const int64_t picture = fetch.pictures == 1 ? 0 : b;
    const int first = static_cast<int>(picture * ((fetch.channels + layer_channels - 1) / layer_channels) + c0 / layer_channels);
    float4 v = read(first);
    if (layer_channels == 1) {
      if (c0 + 1 < c1) v.y = read(first + 1).x;
      if (c0 + 2 < c1) v.z = read(first + 2).x;
      if (c0 + 3 < c1) v.w = read(first + 3).x;
    }
    const Packet<T, 4> texel = {static_cast<T>(v.x), static_cast<T>(v.y), static_cast<T>(v.z), static_cast<T>(v.w)};
    if (modes && others && fetch.channels % 4 == 0) {
      *reinterpret_cast<Packet<T, 4>*>(to + c0) = texel;
      return;
    }
    for (int64_t c = c0; c < c1; ++c)
      if (fetch.reducers.of(c) == Reducer::mode ? modes : others) to[c] = texel.value[c - c0];
  }

  __device__ __forceinline__ void write_not_a_number(int64_t b, int64_t n, int64_t c0, int64_t c1) const {
    T* to = fetch.out + (b * fetch.count + n) * fetch.channels;
    for (int64_t c = c0; c < c1; ++c) to[c] = not_a_number<T>();
  }

  // The nearest texel is chosen here, by the rule of the other backends, and read at its centre: how coordinates are rounded
  // in hardware does not matter then.
  __device__ __forceinline__ void write_nearest(int64_t b, int64_t n, int64_t c0, int64_t c1, float u, float v, float lod) const {
    const int level = nearest_level(lod, fetch.levels.count);
    const int w = static_cast<int>(fetch.levels.width[level]), h = static_cast<int>(fetch.levels.height[level]);
    const int x = axis_nearest(u, w, fetch.address), y = axis_nearest(v, h, fetch.address);
    const float at_u = (static_cast<float>(x) + 0.5f) / static_cast<float>(w);
    const float at_v = (static_cast<float>(y) + 0.5f) / static_cast<float>(h);
    write(b, n, c0, c1, [&](int layer) {
      return x < 0 || y < 0 ? make_float4(0, 0, 0, 0)
                            : tex2DLayeredLod<float4>(texture, at_u, at_v, layer, static_cast<float>(level));
    });
  }
};

template <class T>
struct FetchLod {
  Target<T> target;
  QueryView<float> queries;
  Filter filter;

  __device__ __forceinline__ void operator()(int64_t b, int64_t n, int64_t c0, int64_t c1) const {
    const float u = queries.u(b, n), v = queries.v(b, n), lod = queries.level(b, n);
    if (!(finite(u) && finite(v) && finite(lod))) return target.write_not_a_number(b, n, c0, c1);
    if (filter == Filter::nearest) return target.write_nearest(b, n, c0, c1, u, v, lod);
    const int levels = target.fetch.levels.count;
    const float level = filter == Filter::bilinear ? static_cast<float>(nearest_level(lod, levels))
                                                   : clamp(lod, 0.0f, static_cast<float>(levels - 1));
    target.write(b, n, c0, c1, [&](int layer) { return tex2DLayeredLod<float4>(target.texture, u, v, layer, level); });
  }
};

template <class T>
struct FetchGrad {
  Target<T> target;
  FootprintView<float> queries;
  int max_anisotropy;
  bool nearest;

  __device__ __forceinline__ void operator()(int64_t b, int64_t n, int64_t c0, int64_t c1) const {
    const float u = queries.u(b, n), v = queries.v(b, n);
    const Footprint<float> p = queries.footprint(b, n, target.fetch.levels, max_anisotropy);
    if (!(p.finite && finite(u) && finite(v))) return target.write_not_a_number(b, n, c0, c1);
    if (nearest) return target.write_nearest(b, n, c0, c1, u, v, p.lod);
    const float2 dx = make_float2(queries.at(1, b, n, 0), queries.at(1, b, n, 1));
    const float2 dy = make_float2(queries.at(2, b, n, 0), queries.at(2, b, n, 1));
    target.write(b, n, c0, c1, [&](int layer) { return tex2DLayeredGrad<float4>(target.texture, u, v, layer, dx, dy); });
  }
};

cudaTextureAddressMode address_mode(Address address) {
  switch (address) {
    case Address::wrap:
      return cudaAddressModeWrap;
    case Address::mirror:
      return cudaAddressModeMirror;
    case Address::border:
      return cudaAddressModeBorder;
    default:
      return cudaAddressModeClamp;
  }
}

}  // namespace

ArrayLimits array_limits(int device) {
  if (device < 0) check(cudaGetDevice(&device), "cudaGetDevice");
  static std::mutex mutex;
  static std::map<int, ArrayLimits> known;
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = known.find(device); found != known.end()) return found->second;
  const auto least = [&](std::initializer_list<cudaDeviceAttr> attributes) {
    int smallest = INT_MAX;
    for (const cudaDeviceAttr attribute : attributes) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
      smallest = std::min(smallest, value);
    }
    return smallest;
  };
  return known[device] = {least({cudaDevAttrMaxTexture2DLayeredWidth, cudaDevAttrMaxSurface2DLayeredWidth,
                                 cudaDevAttrMaxTexture2DMipmappedWidth}),
                          least({cudaDevAttrMaxTexture2DLayeredHeight, cudaDevAttrMaxSurface2DLayeredHeight,
                                 cudaDevAttrMaxTexture2DMipmappedHeight}),
                          least({cudaDevAttrMaxTexture2DLayeredLayers, cudaDevAttrMaxSurface2DLayeredLayers})};
}

Stream stream_of(void* handle) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  check(cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(handle), &status, &id, &graph), "cudaStreamGetCaptureInfo");
#else
  check(cudaStreamGetCaptureInfo_v2(static_cast<cudaStream_t>(handle), &status, &id, &graph), "cudaStreamGetCaptureInfo");
#endif
  if (status != cudaStreamCaptureStatusActive) return {handle, 0, nullptr};
  return {handle, id, graph};
}

MipArray::MipArray(const ArrayShape& shape) : shape_(shape), process_(getpid()) {
  const OnDevice device(shape.device);
  const Relaxed relaxed;
  const int bits = shape.half ? 16 : 32, more = shape.channels == 4 ? bits : 0;
  const cudaChannelFormatDesc format = cudaCreateChannelDesc(bits, more, more, more, cudaChannelFormatKindFloat);
  const cudaExtent extent = make_cudaExtent(shape.width, shape.height, shape.layers);
  cudaMipmappedArray_t array = nullptr;
  check(cudaMallocMipmappedArray(&array, &format, extent, shape.levels, cudaArrayLayered | cudaArraySurfaceLoadStore),
        "cudaMallocMipmappedArray");
  array_ = array;
  try {
    for (int l = 0; l < shape.levels; ++l) {
      cudaResourceDesc resource{};
      resource.resType = cudaResourceTypeArray;
      check(cudaGetMipmappedArrayLevel(&resource.res.array.array, array, l), "cudaGetMipmappedArrayLevel");
      cudaSurfaceObject_t surface = 0;
      check(cudaCreateSurfaceObject(&surface, &resource), "cudaCreateSurfaceObject");
      surfaces_[l] = surface;
    }
  } catch (...) {
    release();
    throw;
  }
}

MipArray::~MipArray() { release(); }

void MipArray::release() noexcept {
  int current = 0;
  if (process_ != getpid() || cudaGetDevice(&current) != cudaSuccess) return;
  const OnDevice device(shape_.device);
  const Relaxed relaxed;
  if (fill_.event) spare_.push_back(fill_.event);
  for (const Use& use : reads_) spare_.push_back(use.event);
  for (void* event : spare_) {
    if (capture_ == 0) cudaEventSynchronize(static_cast<cudaEvent_t>(event));  // freeing need not wait for the kernels
    cudaEventDestroy(static_cast<cudaEvent_t>(event));
  }
  for (const auto& [state, sampler] : samplers_) cudaDestroyTextureObject(sampler);
  for (int l = 0; l < shape_.levels; ++l)
    if (surfaces_[l]) cudaDestroySurfaceObject(surfaces_[l]);
  if (array_) cudaFreeMipmappedArray(static_cast<cudaMipmappedArray_t>(array_));
  cudaGetLastError();
}

bool MipArray::has(const std::vector<SamplerState>& states) const {
  return std::all_of(states.begin(), states.end(), [&](const SamplerState& s) { return samplers_.count(s) != 0; });
}

void MipArray::create(const std::vector<SamplerState>& states) {
  const OnDevice device(shape_.device);
  const Relaxed relaxed;
  for (const SamplerState& state : states) {
    if (samplers_.count(state)) continue;
    cudaResourceDesc resource{};
    resource.resType = cudaResourceTypeMipmappedArray;
    resource.res.mipmap.mipmap = static_cast<cudaMipmappedArray_t>(array_);
    cudaTextureDesc sampler{};
    for (cudaTextureAddressMode& mode : sampler.addressMode) mode = address_mode(state.address);
    sampler.filterMode = state.filter == Filter::nearest ? cudaFilterModePoint : cudaFilterModeLinear;
    sampler.mipmapFilterMode = state.filter == Filter::trilinear ? cudaFilterModeLinear : cudaFilterModePoint;
    sampler.readMode = cudaReadModeElementType;
    sampler.normalizedCoords = 1;
    sampler.maxAnisotropy = static_cast<unsigned>(state.max_anisotropy);
    sampler.maxMipmapLevelClamp = static_cast<float>(shape_.levels - 1);
    sampler.disableTrilinearOptimization = 1;  // else the blend of two levels snaps to one of them near whole LODs
    cudaTextureObject_t texture = 0;
    check(cudaCreateTextureObject(&texture, &resource, &sampler, nullptr), "cudaCreateTextureObject");
    samplers_[state] = texture;
  }
}

void MipArray::hold(const Stream& stream) {
  if (held_by(stream)) return;
  auto* mine = new std::shared_ptr<std::atomic<int>>(graphs_);
  const cudaHostFn_t let_go = [](void* p) {  // runs when the graph and all its instances are gone; may not call CUDA
    auto* graphs = static_cast<std::shared_ptr<std::atomic<int>>*>(p);
    --**graphs;
    delete graphs;
  };
  cudaUserObject_t object = nullptr;
  const cudaError_t error = cudaUserObjectCreate(&object, mine, let_go, 1, cudaUserObjectNoDestructorSync);
  if (error != cudaSuccess) delete mine;
  check(error, "cudaUserObjectCreate");
  ++*graphs_;
  check(cudaGraphRetainUserObject(static_cast<cudaGraph_t>(stream.graph), object, 1, cudaGraphUserObjectMove),
        "cudaGraphRetainUserObject");
}

// Events of another capture, or of none, mean nothing in this one and may not be waited for: what ran before a capture has ended
// when its graph is replayed (torch.cuda.graph synchronises), and after a graph is gone none of it runs.
void MipArray::begin(const Stream& stream, bool write) {
  if (stream.capture != capture_) {
    for (const Use& use : reads_) spare_.push_back(use.event);
    if (fill_.event) spare_.push_back(fill_.event);
    reads_.clear();
    fill_ = {};
    capture_ = stream.capture;
  }
  const auto wait = [&](const Use& use) {
    if (use.event && use.stream != stream.handle)
      check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream.handle), static_cast<cudaEvent_t>(use.event), 0),
            "cudaStreamWaitEvent");
  };
  wait(fill_);
  if (!write) return;
  for (const Use& use : reads_) {
    wait(use);
    spare_.push_back(use.event);
  }
  reads_.clear();
}

void MipArray::end(const Stream& stream, bool write) {
  Use* use = &fill_;
  if (!write) {
    auto found = std::find_if(reads_.begin(), reads_.end(), [&](const Use& r) { return r.stream == stream.handle; });
    if (found == reads_.end()) found = reads_.insert(found, Use{});
    use = &*found;
  }
  use->stream = stream.handle;
  if (!use->event && !spare_.empty()) {
    use->event = spare_.back();
    spare_.pop_back();
  }
  if (!use->event) {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    use->event = event;
  }
  check(cudaEventRecord(static_cast<cudaEvent_t>(use->event), static_cast<cudaStream_t>(stream.handle)), "cudaEventRecord");
}

template <class T>
void MipArray::fill(const TextureView<const T>& data, int64_t pictures, const Stream& stream) {
  begin(stream, true);
  Surfaces surfaces{};
  int64_t blocks = 0;
  for (int l = 0; l < shape_.levels; ++l) {
    surfaces.handle[l] = surfaces_[l];
    surfaces.first_block[l] = blocks;
    blocks += (data.levels.width[l] + kTileX - 1) / kTileX * ((data.levels.height[l] + kTileY - 1) / kTileY);
  }
  const int layers = static_cast<int>((data.channels + shape_.channels - 1) / shape_.channels);
  const bool aligned =
      data.channels % shape_.channels == 0 && reinterpret_cast<uintptr_t>(data.data) % (shape_.channels * sizeof(T)) == 0;
  const dim3 grid(static_cast<unsigned>(blocks), at_most(pictures, kMaxGridYZ));
  launch(shape_.channels == 4 ? fill_kernel<T, 4> : fill_kernel<T, 1>, grid, kThreads, 0, stream.handle, data, surfaces, pictures,
         layers, aligned);
  end(stream, true);
}

template <class T>
void MipArray::sample_lod(const Fetch<T>& fetch, const QueryView<float>& queries, Filter filter, const Stream& stream) {
  begin(stream, false);
  for (const SamplerState& state : samplers_for(filter, fetch.address, 1, fetch.reducers)) {
    const bool nearest = state.filter == Filter::nearest;
    const Target<T> target{samplers_.at(state), fetch, shape_.channels, nearest || !fetch.reducers.any_mode,
                           !nearest || filter == Filter::nearest};
    launch_queries(FetchLod<T>{target, queries, state.filter}, fetch.batch, fetch.count, fetch.channels, stream.handle);
  }
  end(stream, false);
}

template <class T>
void MipArray::sample_grad(const Fetch<T>& fetch, const FootprintView<float>& queries, int max_anisotropy, const Stream& stream) {
  begin(stream, false);
  for (const SamplerState& state : samplers_for(Filter::trilinear, fetch.address, max_anisotropy, fetch.reducers)) {
    const bool nearest = state.filter == Filter::nearest;
    const Target<T> target{samplers_.at(state), fetch, shape_.channels, nearest || !fetch.reducers.any_mode, !nearest};
    launch_queries(FetchGrad<T>{target, queries, max_anisotropy, nearest}, fetch.batch, fetch.count, fetch.channels,
                   stream.handle);
  }
  end(stream, false);
}

#define TEXVLM_MIP_ARRAY(T)                                                                            \
  template void MipArray::fill(const TextureView<const T>&, int64_t, const Stream&);                   \
  template void MipArray::sample_lod(const Fetch<T>&, const QueryView<float>&, Filter, const Stream&); \
  template void MipArray::sample_grad(const Fetch<T>&, const FootprintView<float>&, int, const Stream&)
TEXVLM_MIP_ARRAY(float);
TEXVLM_MIP_ARRAY(Half);
TEXVLM_MIP_ARRAY(BFloat16);

}  // namespace texvlm::cuda
