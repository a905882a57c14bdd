// Memory of the fake CUDA devices: pages of this process that are never accessed, and so cost nothing.
#pragma once
#include <cstddef>

enum Kind { UNKNOWN = 0, HOST = 1, DEVICE = 2 };  // pageable memory of the process is UNKNOWN

Kind kind_of(const void* pointer);
bool reserve(void** pointer, size_t bytes, Kind kind);  // false if the device has no more
void release(void* pointer);
bool charge(size_t bytes);  // of the device's memory; false if there is no more
void discharge(size_t bytes);
void note(void* pointer, size_t bytes, Kind kind);
void forget(void* pointer);
size_t device_bytes();
size_t free_bytes();
