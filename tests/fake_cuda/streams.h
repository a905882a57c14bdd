// What the work of a stream waits for. Kernels take no time here: only messages between ranks do, and work that waits
// for them.
#pragma once
#include <memory>
#include <vector>

struct Mark {
  bool done = false;
};
using Marks = std::vector<std::shared_ptr<Mark>>;

Marks pending_of(void* stream);                           // what the stream's next work must wait for
void follow(void* stream, std::shared_ptr<Mark> work);    // `work`, which waits for all before it, is the stream's last
void join(void* stream, const Marks& marks);              // the stream's next work waits for these, too
Marks pending_everywhere();
void finish(const std::shared_ptr<Mark>& work);
bool all_done(const Marks& marks);
void wait_for(const Marks& marks);
void load(const void* kernel);        // before its first launch: the host waits until the whole device is idle
void fault(const char* format, ...);  // reports on stderr what a GPU would refuse, or what would hang
