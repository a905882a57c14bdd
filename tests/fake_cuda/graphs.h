// Streams that are being captured: their work is noted in a graph and done at each of its launches.
#pragma once
#include <cuda_runtime_api.h>

#include <functional>

using Node = std::function<void(void* stream)>;

bool captured(void* stream, const Node& node);          // whether the stream is being captured: then `node` is noted
bool refused(const char* call, void* stream = nullptr); // whether the call may not be made now; then a fault is told
void count_launch();
// Events: the first two say whether a capture has dealt with the call.
bool record_captured(void* event, void* stream);
bool wait_captured(void* stream, void* event, bool was_recorded, cudaError_t* error);
bool event_captured(void* event);  // then a fault is told: the host may not ask about it
void forget_event(void* event);
