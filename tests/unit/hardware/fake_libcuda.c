/* A libcuda for tests: host memory instead of a GPU, a journal of what is still held, and errors on request. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { FAIL_NOTHING, FAIL_INIT, FAIL_CONTEXT, FAIL_ALLOC, FAIL_MEMSET, FAIL_SYNC, FAIL_FREE };

static int fail_where = FAIL_NOTHING, fail_code = 0, integrated = 0, contexts = 0, current = 0, contexts_opened = 0;
static int64_t live_blocks = 0;
static size_t largest = 0;

void fake_reset(int where, int code, int is_integrated) {
    fail_where = where; fail_code = code; integrated = is_integrated;
    contexts = current = contexts_opened = 0; live_blocks = 0; largest = 0;
}
int fake_contexts(void) { return contexts + current; }
int fake_contexts_opened(void) { return contexts_opened; }
int64_t fake_live_blocks(void) { return live_blocks; }
size_t fake_largest(void) { return largest; }

static int outcome(int where) { return fail_where == where ? fail_code : 0; }

int cuInit(unsigned flags) { (void)flags; return outcome(FAIL_INIT); }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
int cuDeviceGetName(char *text, int length, int device) {
    (void)device; strncpy(text, "Fake GPU", (size_t)length); return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = (size_t)8 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (device != 40) return 101;
    switch (attribute) {
    case 16: *value = 7; return 0;          /* MULTIPROCESSOR_COUNT */
    case 18: *value = integrated; return 0; /* INTEGRATED */
    case 33: *value = 0x3b; return 0;       /* PCI_BUS_ID */
    case 34: *value = 2; return 0;          /* PCI_DEVICE_ID */
    case 50: *value = 1; return 0;          /* PCI_DOMAIN_ID */
    case 75: *value = 9; return 0;          /* COMPUTE_CAPABILITY_MAJOR */
    case 76: *value = 0; return 0;          /* COMPUTE_CAPABILITY_MINOR */
    case 83: *value = 1; return 0;          /* MANAGED_MEMORY */
    case 88: *value = 0; return 0;          /* PAGEABLE_MEMORY_ACCESS */
    case 89: *value = 1; return 0;          /* CONCURRENT_MANAGED_ACCESS */
    default: return 1;                      /* CUDA_ERROR_INVALID_VALUE: an attribute from the future */
    }
}
int cuGetErrorName(int code, const char **name) {
    switch (code) {
    case 1: *name = "CUDA_ERROR_INVALID_VALUE"; return 0;
    case 2: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return 0;
    case 46: *name = "CUDA_ERROR_DEVICE_UNAVAILABLE"; return 0;
    case 100: *name = "CUDA_ERROR_NO_DEVICE"; return 0;
    case 803: *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"; return 0;
    default: return 1;
    }
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    if (outcome(FAIL_CONTEXT)) return outcome(FAIL_CONTEXT);
    contexts++; contexts_opened++; *context = &contexts; return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; contexts--; return 0; }
int cuCtxPushCurrent_v2(void *context) { if (context != &contexts) return 1; current++; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = &contexts; current--; return 0; }
int cuMemGetInfo_v2(size_t *available, size_t *total) {
    if (!current) return 201;
    *available = (size_t)6 << 30; *total = (size_t)8 << 30; return 0;
}
int cuMemAllocManaged(uint64_t *address, size_t bytes, unsigned flags) {
    if (!current) return 201;
    if (flags != 1 || outcome(FAIL_ALLOC)) return flags != 1 ? 1 : outcome(FAIL_ALLOC);
    void *block = malloc(bytes);
    if (!block) return 2;
    live_blocks++; if (bytes > largest) largest = bytes;
    *address = (uint64_t)(uintptr_t)block; return 0;
}
int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t bytes) {
    if (outcome(FAIL_MEMSET)) return outcome(FAIL_MEMSET);
    memset((void *)(uintptr_t)address, value, bytes); return 0;
}
int cuCtxSynchronize(void) { return outcome(FAIL_SYNC); }
int cuMemFree_v2(uint64_t address) {
    free((void *)(uintptr_t)address); live_blocks--; return outcome(FAIL_FREE);
}
