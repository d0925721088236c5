// Graphs, as far as texvlm asks for them: whether a stream is capturing one, and what a graph keeps alive. A test begins and ends
// a capture; what is launched meanwhile runs at once all the same, and nothing can be replayed.
#include <vector>

#include "cuda_runtime_api.h"

struct texvlm_shim_user_object {
  void* data;
  cudaHostFn_t destroy;
};
struct texvlm_shim_graph {
  unsigned long long id;
  std::vector<cudaUserObject_t> objects;
};

namespace {
cudaGraph_t capturing = nullptr;  // by all streams
}

// --- for tests, through ctypes
// --------------------------------------------------------------------------------------------------

#define TEXVLM_SHIM_TEST extern "C" __attribute__((visibility("default")))

TEXVLM_SHIM_TEST void* texvlm_shim_begin_capture() {
  static unsigned long long captures = 0;
  return capturing = new texvlm_shim_graph{++captures, {}};
}
TEXVLM_SHIM_TEST void texvlm_shim_end_capture() { capturing = nullptr; }
TEXVLM_SHIM_TEST void texvlm_shim_destroy_graph(void* graph) {
  auto* const g = static_cast<cudaGraph_t>(graph);
  for (cudaUserObject_t object : g->objects) {
    object->destroy(object->data);
    delete object;
  }
  delete g;
}

// --- the runtime
// ----------------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph) {
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (capturing && id) *id = capturing->id;
  if (capturing && graph) *graph = capturing;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  const cudaStreamCaptureMode before = current;
  current = *mode;
  *mode = before;
  return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t destroy, unsigned references,
                                 unsigned flags) {
  if (references != 1 || flags != cudaUserObjectNoDestructorSync) return cudaErrorInvalidValue;
  *object = new texvlm_shim_user_object{data, destroy};
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags) {
  if (count != 1 || flags != cudaGraphUserObjectMove) return cudaErrorInvalidValue;
  graph->objects.push_back(object);
  return cudaSuccess;
}
