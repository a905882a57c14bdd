// The CUDA driver's functions that torch and Triton call, and cuBLAS's handles. Checks launches and descriptors.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "graphs.h"
#include "memory.h"
#include "streams.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

static void* const HANDLE = (void*)64;  // of a context, module or library without state

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int* count) { return (CUresult)cudaGetDeviceCount(count); }
EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return *context = (CUcontext)HANDLE, CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) { return *context = (CUcontext)HANDLE, CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetLimit(size_t* value, CUlimit) { return *value = 0, CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorString(CUresult, const char** text) { return *text = "an error of the fake CUDA runtime", CUDA_SUCCESS; }

EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  const Kind kind = kind_of((void*)pointer);
  if (!kind) return CUDA_ERROR_INVALID_VALUE;  // by which Triton recognizes host memory
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *(CUdeviceptr*)value = pointer;
  else
    *(int*)value = kind == DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  return CUDA_SUCCESS;
}

// --------------------------------------------------------------------------------------------------- Triton's kernels
EXPORT CUresult cuModuleLoadData(CUmodule* module, const void*) {
  if (refused("the loading of a kernel")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return *module = (CUmodule)HANDLE, CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoad(CUmodule* module, const char*) { return *module = (CUmodule)HANDLE, CUDA_SUCCESS; }
EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  return *function = (CUfunction) new std::string(name), CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) { return *clusters = 66, CUDA_SUCCESS; }

static CUresult launch(CUfunction function, const unsigned grid[3], unsigned threads, unsigned shared, CUstream stream) {
  if (!captured(stream, nullptr)) load(function), count_launch();
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, 0);
  const bool legal = grid[0] && grid[1] && grid[2] && grid[0] <= 2147483647u && grid[1] <= 65535 && grid[2] <= 65535 &&
                     threads && threads <= 1024 && shared <= p.sharedMemPerBlockOptin;
  if (legal) return CUDA_SUCCESS;
  fault("%s with grid (%u, %u, %u), %u threads and %u bytes of shared memory", ((std::string*)function)->c_str(), grid[0],
        grid[1], grid[2], threads, shared);
  return CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void**, void**) {
  const unsigned grid[] = {c->gridDimX, c->gridDimY, c->gridDimZ};
  return launch(function, grid, c->blockDimX * c->blockDimY * c->blockDimZ, c->sharedMemBytes, c->hStream);
}
EXPORT CUresult cuLaunchKernel(
    CUfunction function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    CUstream stream, void**, void**) {
  const unsigned grid[] = {x, y, z};
  return launch(function, grid, bx * by * bz, shared, stream);
}

// A descriptor for the copy engine; the rules are those of the CUDA driver API's reference.
EXPORT CUresult cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* dims,
    const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  static const size_t ITEM_BYTES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};  // in the order of CUtensorMapDataType
  memset(map, 0, sizeof *map);
  const size_t inner = box[0] * ITEM_BYTES[type];
  bool legal = rank >= 1 && rank <= 5 && (size_t)address % 16 == 0 && kind_of(address) == DEVICE && inner % 16 == 0;
  for (cuuint32_t i = 0; i < rank; i++)
    legal = legal && dims[i] && dims[i] <= 1ull << 32 && box[i] && box[i] <= 256 && steps[i] == 1;
  for (cuuint32_t i = 0; i + 1 < rank; i++) legal = legal && strides[i] % 16 == 0 && strides[i] < 1ull << 40;
  if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE) legal = legal && inner <= 16u << swizzle;
  if (legal) return CUDA_SUCCESS;
  fault("a descriptor of %u dims at %p with box (%u, %u), stride %llu and swizzle %d", rank, address, box[0],
        rank > 1 ? box[1] : 0, rank > 1 ? (unsigned long long)strides[0] : 0ull, (int)swizzle);
  return CUDA_ERROR_INVALID_VALUE;
}

// ---------------------------------------------------------- memory that ranks share, for symmetric memory: a file each
static std::mutex mutex;
static std::map<int, size_t> charged;  // by file descriptor; bytes of the device that creating it took
EXPORT CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return *bytes = 2 << 20, CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  note(pages, bytes, DEVICE);
  return *pointer = (CUdeviceptr)pages, CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
  forget((void*)pointer);
  munmap((void*)pointer, bytes);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*, unsigned long long) {
  if (!charge(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  const int file = memfd_create("fake_cuda", 0);
  if (file < 0 || ftruncate(file, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard<std::mutex> guard(mutex);
  charged[file] = bytes;
  return *handle = file, CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> guard(mutex);
  discharge(charged[(int)handle]);
  charged.erase((int)handle);
  close((int)handle);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
  void* pages = mmap((void*)pointer, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, (int)handle, offset);
  return pages == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
  mmap((void*)pointer, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
EXPORT CUresult cuMemExportToShareableHandle(void* file, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType, unsigned long long) {
  return *(int*)file = dup((int)handle), CUDA_SUCCESS;
}
EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* file, CUmemAllocationHandleType) {
  return *handle = dup((int)(size_t)file), CUDA_SUCCESS;
}

EXPORT CUresult fake_success() { return CUDA_SUCCESS; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char* symbol, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  static void* const self = dlopen(getenv("FAKE_CUDA_LIBRARY"), RTLD_LAZY | RTLD_NOLOAD);
  void* found = self ? dlsym(self, symbol) : nullptr;
  *function = found ? found : (void*)fake_success;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ------------------------------------------------------------------------------------- NVML: no fabric and no NVLink
static const int NOT_SUPPORTED = 3;
EXPORT int nvmlInit_v2() { return 0; }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return *device = HANDLE, 0; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }  // its state stays 0: not supported
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = CUDA_VERSION, 0; }

// ------------------------------------------------------------------------- cuBLAS: functions that return something
EXPORT int cublasCreate_v2(void** handle) { return *handle = HANDLE, 0; }
EXPORT int cublasGetMathMode(void*, int* mode) { return *mode = 0; }
EXPORT int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }
EXPORT size_t cublasLtGetVersion() { return 130000; }
EXPORT int cublasLtMatmulDescCreate(void** description, int, int) { return *description = HANDLE, 0; }
EXPORT int cublasLtMatrixLayoutCreate(void** layout, int, unsigned long, unsigned long, long) { return *layout = HANDLE, 0; }
EXPORT int cublasLtMatmulPreferenceCreate(void** preference) { return *preference = HANDLE, 0; }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* count) {
  memset(results, 0, 64);  // the first of the requested algorithms
  return *count = 1, 0;
}
