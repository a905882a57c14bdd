// Streams and events: dependencies between works.
#include "streams.h"

#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>

static std::mutex mutex;
static std::condition_variable changed;
static std::map<void*, Marks> streams;

static Marks unfinished(const Marks& marks) {
  Marks left;
  for (auto& mark : marks)
    if (!mark->done) left.push_back(mark);
  return left;
}

Marks pending_of(void* stream) {
  std::lock_guard<std::mutex> guard(mutex);
  return streams[stream] = unfinished(streams[stream]);
}

Marks pending_everywhere() {
  std::lock_guard<std::mutex> guard(mutex);
  Marks all;
  for (auto& [stream, marks] : streams)
    for (auto& mark : unfinished(marks)) all.push_back(mark);
  return all;
}

void follow(void* stream, std::shared_ptr<Mark> work) {
  std::lock_guard<std::mutex> guard(mutex);
  streams[stream] = {work};
}

void join(void* stream, const Marks& marks) {
  std::lock_guard<std::mutex> guard(mutex);
  Marks all = unfinished(streams[stream]);
  for (auto& mark : unfinished(marks)) all.push_back(mark);
  streams[stream] = all;
}

void finish(const std::shared_ptr<Mark>& work) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    work->done = true;
  }
  changed.notify_all();
}

bool all_done(const Marks& marks) {
  std::lock_guard<std::mutex> guard(mutex);
  return unfinished(marks).empty();
}

void wait_for(const Marks& marks) {
  std::unique_lock<std::mutex> guard(mutex);
  changed.wait(guard, [&] { return unfinished(marks).empty(); });
}

// CUDA loads kernels lazily, and waits for running work first, which may be a message that waits for this very host.
void load(const void* kernel) {
  static std::mutex guard;
  static std::set<const void*> loaded;
  {
    std::lock_guard<std::mutex> held(guard);
    if (!loaded.insert(kernel).second) return;
  }
  wait_for(pending_everywhere());
}

void fault(const char* format, ...) {
  char text[500];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  fprintf(stderr, "FAKE CUDA FAULT: %s\n", text);
}
