// CUDA graphs. Rules of the programming guide: captured work must not wait for the host or for uncaptured work, and
// all streams to which a capture has spread must rejoin its first one before it ends.
#include "graphs.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "streams.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using Clock = std::map<void*, size_t>;  // number of each stream's works that precede
struct Capture {
  unsigned long long id;
  void* origin;
  std::thread::id thread;
  bool lax;  // relaxed mode
  std::map<void*, Clock> seen;
  std::vector<Node> nodes;
};
struct Graph {
  std::vector<Node> nodes;
  size_t number;  // of works; kernels have no node
};
struct Recorded {
  std::shared_ptr<Capture> capture;
  Clock clock;
};
static std::recursive_mutex mutex;
static std::map<void*, std::shared_ptr<Capture>> captures;  // by stream
static std::map<void*, Recorded> recorded;                  // by event, those recorded in a capture
static thread_local cudaStreamCaptureMode own_mode = cudaStreamCaptureModeGlobal;
using Guard = std::lock_guard<std::recursive_mutex>;

static cudaError_t illegal(cudaError_t error, const char* what) { return fault("%s during the capture of a graph", what), error; }
static std::shared_ptr<Capture> capture_of(void* stream) {
  auto found = captures.find(stream);
  return found == captures.end() ? nullptr : found->second;
}

bool captured(void* stream, const Node& node) {
  Guard guard(mutex);
  if (auto capture = capture_of(stream)) {
    capture->seen[stream][stream]++;
    if (node) capture->nodes.push_back(node);
    return true;
  }
  if (!stream && refused("work on the legacy stream")) return true;
  return false;
}

bool refused(const char* call, void* stream) {
  Guard guard(mutex);
  bool own = stream && capture_of(stream);
  for (auto& [_, capture] : captures)
    own = own || (capture->thread == std::this_thread::get_id() && !capture->lax && own_mode != cudaStreamCaptureModeRelaxed);
  if (own) illegal(cudaSuccess, call);
  return own;
}

// ---------------------------------------------------------------------------------------------------------- captures
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  static unsigned long long next;
  Guard guard(mutex);
  if (!stream || capture_of(stream)) return illegal(cudaErrorStreamCaptureUnsupported, "a capture of the legacy stream, or a second one");
  captures[stream] = std::make_shared<Capture>(Capture{++next, stream, std::this_thread::get_id(), mode == cudaStreamCaptureModeRelaxed});
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Guard guard(mutex);
  auto capture = capture_of(stream);
  if (!capture || capture->origin != stream) return illegal(cudaErrorStreamCaptureUnmatched, "an end without a beginning");
  bool joined = true;
  size_t number = 0;
  for (auto& [member, clock] : capture->seen) joined = joined && capture->seen[stream][member] >= clock[member], number += clock[member];
  for (auto at = captures.begin(); at != captures.end();) at = at->second == capture ? captures.erase(at) : std::next(at);
  if (!joined) return illegal(cudaErrorStreamCaptureUnjoined, "work on a stream that does not come back");
  return *graph = (cudaGraph_t) new Graph{std::move(capture->nodes), number}, cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { return std::swap(*mode, own_mode), cudaSuccess; }
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Guard guard(mutex);
  return *status = capture_of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
    const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* count) {
  Guard guard(mutex);
  auto capture = capture_of(stream);
  *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (capture && id) *id = capture->id;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------------------ events
bool record_captured(void* event, void* stream) {
  Guard guard(mutex);
  recorded.erase(event);
  auto capture = capture_of(stream);
  if (capture) recorded[event] = {capture, capture->seen[stream]};
  return capture != nullptr;
}
bool event_captured(void* event) {
  Guard guard(mutex);
  return recorded.count(event) && illegal(cudaSuccess, "a question to the host about an event");
}
bool wait_captured(void* stream, void* event, bool was_recorded, cudaError_t* error) {
  Guard guard(mutex);
  auto capture = capture_of(stream);
  auto found = recorded.find(event);
  *error = cudaSuccess;
  if (found == recorded.end() || !captures.count(found->second.capture->origin)) {
    if (capture && was_recorded) *error = illegal(cudaErrorStreamCaptureIsolation, "a wait for work that is not captured");
    return capture != nullptr;
  }
  if (capture && capture != found->second.capture) return *error = illegal(cudaErrorStreamCaptureMerge, "a wait for another capture"), true;
  captures[stream] = found->second.capture;
  for (auto& [member, number] : found->second.clock) {
    size_t& mine = found->second.capture->seen[stream][member];
    mine = std::max(mine, number);
  }
  return true;
}
void forget_event(void* event) {
  Guard guard(mutex);
  recorded.erase(event);
}

// ------------------------------------------------------------------------------------------------------------ graphs
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  return *count = ((Graph*)graph)->number, cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  return *exec = (cudaGraphExec_t) new Graph(*(Graph*)graph), cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(exec, graph, flags);
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  if (refused("the launch of a graph", stream)) return cudaErrorStreamCaptureUnsupported;
  count_launch();
  for (auto& node : ((Graph*)exec)->nodes) node(stream);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete (Graph*)graph, cudaSuccess; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return delete (Graph*)exec, cudaSuccess; }
