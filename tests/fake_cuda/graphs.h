// Streams during capture: their work is recorded in a graph and done at each of its launches.
#pragma once
#include <cuda_runtime_api.h>

#include <functional>

using Node = std::function<void(void* stream)>;

bool captured(void* stream, const Node& node);          // whether the stream is being captured; if so, records `node`
bool refused(const char* call, void* stream = nullptr); // whether the call is illegal now; if so, reports a fault
void count_launch();
// Events: the first two return whether a capture has handled the call.
bool record_captured(void* event, void* stream);
bool wait_captured(void* stream, void* event, bool was_recorded, cudaError_t* error);
bool event_captured(void* event);  // if so, reports a fault: the host may not query it
void forget_event(void* event);
