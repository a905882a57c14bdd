// NCCL between processes of one machine, over files in /dev/shm. Each communicator has a thread that runs its operations
// in order, after what their stream waits for; so ranks that call them in different orders hang here as on GPUs. All ranks
// must pass the same operation, count and type. Small payloads are sent; of larger ones only these are compared.
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "graphs.h"
#include "streams.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
using Bytes = std::vector<char>;

static const size_t LARGEST = 1 << 20;   // bytes of a payload that is sent
static const double PATIENCE_S = 120.0;  // after which a rank reports what it waits for, and ends
static const std::string ROOT = "/dev/shm/fake_cuda/";

struct Header {
  char kind[16];
  size_t count;
  int type, reduction, root;
};
struct Operation {
  Header header;
  Bytes input;     // read when the operation begins; empty if it is too large
  char* output;    // null without a result
  int peer;        // of a send or receive
  const char* from;
  size_t bytes;
};
struct Group {
  std::vector<Operation> operations;
  Marks before;
  std::shared_ptr<Mark> mark;
};
struct ncclComm {
  std::string name;
  int size, rank;
  unsigned long number = 0;  // of collectives so far
  std::map<int, unsigned long> sent, received;
  std::deque<Group> queue;
  std::mutex mutex;
  std::condition_variable filled;
  std::atomic<bool> stopped{false};
  std::atomic<int> captured{0};  // operations in existing graphs

  std::string path(const std::string& file) const { return ROOT + name + "/" + file; }
};

// ------------------------------------------------------------------------------------------------------------- values
static size_t width_of(int type) {
  static const size_t WIDTHS[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // in the order of ncclDataType_t
  return WIDTHS[type];
}
template <class T>
static void reduce_as(char* into, const Bytes& other, int reduction) {
  for (size_t at = 0; at + sizeof(T) <= other.size(); at += sizeof(T)) {
    T x, y;
    memcpy(&x, into + at, sizeof(T));
    memcpy(&y, other.data() + at, sizeof(T));
    x = reduction == ncclMax ? std::max(x, y) : reduction == ncclMin ? std::min(x, y) : reduction == ncclProd ? x * y : x + y;
    memcpy(into + at, &x, sizeof(T));
  }
}
// Sums of what the host reads: integers and wide floats. Narrow floats keep the first rank's; kernels made none anyway.
static Bytes reduced(const std::vector<Bytes>& inputs, const Header& header) {
  Bytes out = inputs[0];
  for (size_t rank = 1; rank < inputs.size(); rank++) {
    if (header.type == ncclInt32) reduce_as<int32_t>(out.data(), inputs[rank], header.reduction);
    if (header.type == ncclInt64) reduce_as<int64_t>(out.data(), inputs[rank], header.reduction);
    if (header.type == ncclFloat32) reduce_as<float>(out.data(), inputs[rank], header.reduction);
    if (header.type == ncclFloat64) reduce_as<double>(out.data(), inputs[rank], header.reduction);
  }
  return out;
}

// -------------------------------------------------------------------------------------------------------------- files
static void post(const std::string& path, const Operation& operation) {
  FILE* file = fopen((path + ".new").c_str(), "wb");
  if (!file) return fault("%s cannot be written", path.c_str());
  fwrite(&operation.header, sizeof(Header), 1, file);
  fwrite(operation.input.data(), 1, operation.input.size(), file);
  fclose(file);
  rename((path + ".new").c_str(), path.c_str());
}
static bool await(ncclComm* comm, const std::string& path, const char* kind, Header& header, Bytes& payload) {
  const auto since = std::chrono::steady_clock::now();
  for (useconds_t nap = 50; !comm->stopped; nap = std::min(2 * nap, 2000u)) {
    if (FILE* file = fopen(path.c_str(), "rb")) {
      payload.resize(LARGEST);
      const bool whole = fread(&header, sizeof header, 1, file) == 1;
      payload.resize(fread(payload.data(), 1, LARGEST, file));
      fclose(file);
      if (whole) return true;
    }
    usleep(nap);
    const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
    if (waited > PATIENCE_S) {
      fault("rank %d of %d waits in %s number %lu for %s", comm->rank, comm->size, kind, comm->number, path.c_str());
      _exit(1);
    }
  }
  return false;
}

// --------------------------------------------------------------------------------------------------------- operations
static bool agree(ncclComm* comm, int other, const Header& theirs, const Header& mine) {
  if (!memcmp(&theirs, &mine, sizeof(Header))) return true;
  fault("in operation %lu rank %d calls %s of %zu (type %d, reduction %d, root %d), rank %d %s of %zu (%d, %d, %d)",
        comm->number, other, theirs.kind, theirs.count, theirs.type, theirs.reduction, theirs.root, comm->rank, mine.kind,
        mine.count, mine.type, mine.reduction, mine.root);
  return false;
}
static void put(char* to, const Bytes& from, size_t start, size_t bytes) {
  if (start + bytes <= from.size()) memcpy(to, from.data() + start, bytes);
}
static void run_collective(ncclComm* comm, const Operation& operation) {
  const Header& mine = operation.header;
  const auto path = [&](unsigned long number, int rank) {
    return comm->path(std::to_string(number) + "." + std::to_string(rank));
  };
  post(path(comm->number, comm->rank), operation);
  std::vector<Bytes> inputs(comm->size);
  bool usable = operation.output != nullptr;
  for (int rank = 0; rank < comm->size; rank++) {
    Header theirs;
    if (!await(comm, path(comm->number, rank), mine.kind, theirs, inputs[rank])) return;
    usable = agree(comm, rank, theirs, mine) && usable && !inputs[rank].empty();
  }
  if (comm->number) unlink(path(comm->number - 1, comm->rank).c_str());  // all ranks are here, so they have read it
  comm->number++;
  if (!usable) return;
  const size_t bytes = mine.count * width_of(mine.type);
  const std::string kind = mine.kind;
  if (kind == "broadcast") put(operation.output, inputs[mine.root], 0, bytes);
  if (kind == "all_reduce" || (kind == "reduce" && comm->rank == mine.root)) put(operation.output, reduced(inputs, mine), 0, bytes);
  if (kind == "reduce_scatter") put(operation.output, reduced(inputs, mine), comm->rank * bytes, bytes);
  for (int rank = 0; rank < comm->size; rank++) {
    if (kind == "all_gather") put(operation.output + rank * bytes, inputs[rank], 0, bytes);
    if (kind == "all_to_all") put(operation.output + rank * bytes, inputs[rank], comm->rank * bytes, bytes);
  }
}
static std::string message(int from, int to, unsigned long number) {
  return std::to_string(from) + "to" + std::to_string(to) + "." + std::to_string(number);
}
static void receive(ncclComm* comm, const Operation& operation) {
  const std::string path = comm->path(message(operation.peer, comm->rank, comm->received[operation.peer]++));
  Header theirs;
  Bytes payload;
  if (!await(comm, path, "recv", theirs, payload)) return;
  unlink(path.c_str());
  strcpy(theirs.kind, operation.header.kind);
  if (agree(comm, operation.peer, theirs, operation.header)) put(operation.output, payload, 0, payload.size());
}
static void run(ncclComm* comm, const std::vector<Operation>& group) {
  const auto is = [](const Operation& operation, const char* kind) { return !strcmp(operation.header.kind, kind); };
  for (auto& each : group)
    if (is(each, "send")) post(comm->path(message(comm->rank, each.peer, comm->sent[each.peer]++)), each);
  for (auto& each : group)
    if (!is(each, "send") && !is(each, "recv")) run_collective(comm, each);
  for (auto& each : group)
    if (is(each, "recv")) receive(comm, each);
}
static void work(ncclComm* comm) {
  while (!comm->stopped) {
    Group group;
    {
      std::unique_lock<std::mutex> guard(comm->mutex);
      comm->filled.wait(guard, [&] { return comm->stopped || !comm->queue.empty(); });
      if (comm->queue.empty()) return;
      group = std::move(comm->queue.front());
      comm->queue.pop_front();
    }
    wait_for(group.before);
    for (auto& each : group.operations)
      if (each.from && each.bytes <= LARGEST) each.input.assign(each.from, each.from + each.bytes);
    run(comm, group.operations);
    finish(group.mark);
  }
}

// -------------------------------------------------------------------------------------------------------------- calls
struct Call {
  ncclComm* comm;
  void* stream;
  Operation operation;
};
static thread_local int depth;
static thread_local std::vector<Call> calls;

struct InGraph {  // a captured operation, while a graph contains it
  ncclComm* comm;
  explicit InGraph(ncclComm* comm) : comm(comm) { comm->captured++; }
  ~InGraph() { comm->captured--; }
};
static void start(std::vector<Call> calls) {
  std::vector<std::shared_ptr<InGraph>> held;
  for (auto& call : calls) held.push_back(std::make_shared<InGraph>(call.comm));
  const auto later = [calls, held](void* stream) mutable {
    for (auto& call : calls) call.stream = stream;
    start(calls);
  };
  if (!calls.empty() && captured(calls[0].stream, later)) return;
  std::vector<ncclComm*> order;
  std::map<ncclComm*, Group> groups;
  for (auto& call : calls) {
    Group& group = groups[call.comm];
    if (group.operations.empty()) {
      order.push_back(call.comm);
      group.before = pending_of(call.stream);
      group.mark = std::make_shared<Mark>();
    }
    group.operations.push_back(std::move(call.operation));
  }
  for (auto& call : calls) follow(call.stream, groups[call.comm].mark);
  for (ncclComm* comm : order) {
    {
      std::lock_guard<std::mutex> guard(comm->mutex);
      comm->queue.push_back(std::move(groups[comm]));
    }
    comm->filled.notify_one();
  }
}
static ncclResult_t add(
    const char* kind, const void* input, size_t inputs, void* output, size_t count, int type, int reduction, int rank,
    ncclComm_t comm, void* stream) {
  const bool message = !strcmp(kind, "send") || !strcmp(kind, "recv");
  Operation operation = {{}, {}, (char*)output, rank, (const char*)input, inputs * width_of(type)};
  strcpy(operation.header.kind, kind);
  operation.header.count = count, operation.header.type = type, operation.header.reduction = reduction;
  operation.header.root = message ? 0 : rank;
  calls.push_back({comm, stream, std::move(operation)});
  if (!depth) start(std::move(calls)), calls.clear();
  return ncclSuccess;
}
EXPORT ncclResult_t ncclGroupStart() { return depth++, ncclSuccess; }
EXPORT ncclResult_t ncclGroupEnd() {
  if (--depth == 0) start(std::move(calls)), calls.clear();
  return ncclSuccess;
}
EXPORT ncclResult_t ncclAllReduce(const void* in, void* out, size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return add("all_reduce", in, n, out, n, type, op, 0, comm, stream);
}
EXPORT ncclResult_t ncclReduce(const void* in, void* out, size_t n, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return add("reduce", in, n, out, n, type, op, root, comm, stream);
}
EXPORT ncclResult_t ncclBroadcast(const void* in, void* out, size_t n, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return add("broadcast", in, n, out, n, type, 0, root, comm, stream);
}
EXPORT ncclResult_t ncclBcast(void* data, size_t n, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return add("broadcast", data, n, data, n, type, 0, root, comm, stream);
}
EXPORT ncclResult_t ncclAllGather(const void* in, void* out, size_t n, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return add("all_gather", in, n, out, n, type, 0, 0, comm, stream);
}
EXPORT ncclResult_t ncclReduceScatter(const void* in, void* out, size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return add("reduce_scatter", in, n * comm->size, out, n, type, op, 0, comm, stream);
}
EXPORT ncclResult_t ncclAlltoAll(const void* in, void* out, size_t n, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return add("all_to_all", in, n * comm->size, out, n, type, 0, 0, comm, stream);
}
EXPORT ncclResult_t ncclSend(const void* in, size_t n, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return add("send", in, n, nullptr, n, type, 0, peer, comm, stream);
}
EXPORT ncclResult_t ncclRecv(void* out, size_t n, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return add("recv", nullptr, 0, out, n, type, 0, peer, comm, stream);
}

// ------------------------------------------------------------------------------------------------------ communicators
static ncclComm* make(const std::string& name, int size, int rank) {
  auto* comm = new ncclComm;
  comm->name = name, comm->size = size, comm->rank = rank;
  mkdir(ROOT.c_str(), 0777);
  mkdir(comm->path("").c_str(), 0777);
  std::thread(work, comm).detach();
  return comm;
}
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> number;
  const long now = std::chrono::system_clock::now().time_since_epoch().count();
  return snprintf((char*)id, sizeof *id, "%d-%ld-%d", getpid(), now, number++), ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return *comm = make((char*)&id, size, rank), ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  return ncclCommInitRank(comm, size, id, rank);
}
EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return ncclCommInitRank(comm, size, ids[0], rank);
}
EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm->captured) fault("rank %d ends a communicator that a graph still uses, and would hang", comm->rank);
  comm->stopped = true;  // its memory stays, because the thread may still read it
  comm->filled.notify_all();
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclCommAbort(comm); }
EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) { return *size = comm->size, ncclSuccess; }
EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { return *error = ncclSuccess, ncclSuccess; }
EXPORT ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
EXPORT const char* ncclGetErrorString(ncclResult_t) { return "an error of the fake NCCL"; }
EXPORT const char* ncclGetLastError(ncclComm_t) { return ""; }
EXPORT ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) { return (ncclResult_t)cudaMalloc(pointer, bytes); }
EXPORT ncclResult_t ncclMemFree(void* pointer) { return (ncclResult_t)cudaFree(pointer); }
EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) {
  return *op = ncclSum, ncclSuccess;
}
