// Memory of the fake CUDA devices.
#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "streams.h"

struct Block {
  size_t bytes;
  Kind kind;
};
static const size_t PAGE = 2 << 20;
static std::mutex mutex;
static std::map<char*, Block> blocks;
static size_t used;

size_t device_bytes() {
  static const size_t bytes = getenv("FAKE_CUDA_GB") ? (size_t)(atof(getenv("FAKE_CUDA_GB")) * 1e9) : 150754820096;  // an H200's
  return bytes;
}

size_t free_bytes() {
  std::lock_guard<std::mutex> guard(mutex);
  return device_bytes() - used;
}

bool charge(size_t bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  if (used + bytes > device_bytes()) return false;
  used += bytes;
  return true;
}

void discharge(size_t bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  used -= bytes;
}

void note(void* pointer, size_t bytes, Kind kind) {
  std::lock_guard<std::mutex> guard(mutex);
  blocks[(char*)pointer] = {bytes, kind};
}

void forget(void* pointer) {
  std::lock_guard<std::mutex> guard(mutex);
  blocks.erase((char*)pointer);
}

Kind kind_of(const void* pointer) {
  std::lock_guard<std::mutex> guard(mutex);
  auto after = blocks.upper_bound((char*)pointer);
  if (after == blocks.begin()) return UNKNOWN;
  auto& [start, block] = *std::prev(after);
  return (char*)pointer < start + block.bytes ? block.kind : UNKNOWN;
}

bool reserve(void** pointer, size_t bytes, Kind kind) {
  *pointer = nullptr;
  if (bytes == 0) return true;
  bytes = (bytes + PAGE - 1) / PAGE * PAGE;
  if (kind == DEVICE && !charge(bytes)) return false;
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return false;
  note(pages, bytes, kind);
  *pointer = pages;
  return true;
}

void release(void* pointer) {
  if (!pointer) return;
  Block block;
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = blocks.find((char*)pointer);
    if (found == blocks.end()) return fault("free of %p, which was never allocated", pointer);
    block = found->second;
    blocks.erase(found);
    if (block.kind == DEVICE) used -= block.bytes;
  }
  munmap(pointer, block.bytes);
}
