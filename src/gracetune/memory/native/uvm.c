/*
 * Managed ("unified") memory for an unmodified PyTorch: allocator slots with a policy and a byte cap, and the driver
 * calls that managed buffers need. libcuda is opened at run time, so building needs neither a CUDA toolkit nor a GPU.
 *
 * Rules of this file
 *  - PyTorch calls a slot while it holds its allocator lock. Therefore slots neither call Python nor take a lock.
 *  - Every result code is checked. Positive codes come from the driver, negative ones are defined below.
 *  - Bytes are reserved before the driver allocates and released after it has freed, so the allocated bytes never
 *    exceed a cap, even if threads race.
 *  - Autograd threads have no current context, so every driver call pushes the primary context and pops it again.
 *  - Exported functions accept any number and NULL; they return GT_ERROR_ARGUMENT for invalid ones. The caller must
 *    make sure that other pointers are valid.
 *  - CUDA does not work in a forked process. There, every function returns GT_ERROR_FORKED without calling the driver.
 */
#define _POSIX_C_SOURCE 200809L

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GT_API __attribute__((visibility("default")))

enum { GT_ABI_VERSION = 4 }; /* increase it when a signature, struct or code below changes; binding.py checks it */
enum { GT_SLOT_COUNT = 8, GT_ACCOUNT_TOTAL = -1 };
enum { GT_HOST = -1 }; /* the location of host memory; other locations are device ordinals */

enum {
    GT_OK = 0,
    GT_ERROR_NOT_INITIALIZED = -1,
    GT_ERROR_NO_LIBRARY = -2,
    GT_ERROR_MISSING_SYMBOL = -3, /* the library lacks a required function, so it is not a CUDA driver */
    GT_ERROR_UNAVAILABLE = -4,    /* this driver is too old for the call */
    GT_ERROR_FORKED = -5,
    GT_ERROR_CAP = -6,
    GT_ERROR_ARGUMENT = -7,
    GT_ERROR_SLOT_DISABLED = -8,
    GT_ERROR_SLOT_DEVICE = -9, /* the slot is configured for another device */
    GT_ERROR_OTHER_DRIVER = -10, /* already initialized with another driver library */
    GT_ERROR_CUPTI = -11 /* CUPTI failed, not the driver */
};

enum { GT_PREFER_NONE = 0, GT_PREFER_HOST = 1, GT_PREFER_DEVICE = 2 };

struct gt_slot_config {
    uint64_t cap_bytes;
    int32_t enabled;
    int32_t device;
    int32_t preferred;   /* GT_PREFER_* */
    int32_t accessed_by; /* keep the slot's memory mapped for its device */
    int32_t read_mostly;
    int32_t unused;
};

/* The counters of an account, in the order in which gt_stats returns them. */
enum gt_counter {
    GT_CAP_BYTES,
    GT_LIVE_BYTES,
    GT_PEAK_BYTES,
    GT_ALLOCATIONS,
    GT_FREES,
    GT_REFUSED_BY_CAP,
    GT_REFUSED_BY_DRIVER,
    GT_REFUSED_UNUSABLE, /* slot disabled, wrong device, not initialised, forked */
    GT_FAILED_ADVISES,
    GT_FAILED_FREES,
    GT_LAST_ERROR, /* code << 32 | function (see gt_function_name); one word, so that both are updated atomically */
    GT_COUNTERS
};

/* ---- the driver ------------------------------------------------------------------------------------------------ */

struct cu_location { /* CUmemLocation; passed by value, so its layout is part of the calling convention */
    int type;
    int id;
};
_Static_assert(sizeof(struct cu_location) == 8, "CUmemLocation is two 32-bit fields");

struct cu_copy_attributes { /* CUmemcpyAttributes */
    int source_order;
    struct cu_location source, target;
    unsigned int flags;
};
_Static_assert(sizeof(struct cu_copy_attributes) == 24, "CUmemcpyAttributes is six 32-bit fields");

enum { CU_LOCATION_DEVICE = 1, CU_LOCATION_HOST = 2 };
enum { CU_SOURCE_ORDER_ANY = 3, CU_COPY_BESIDE_COMPUTE = 1 };
enum { CU_ADVISE_SET_READ_MOSTLY = 1, CU_ADVISE_SET_PREFERRED = 3, CU_ADVISE_SET_ACCESSED_BY = 5, CU_ADVISE_LAST = 6 };
enum { CU_POINTER_IS_MANAGED = 8, CU_POINTER_RANGE_START = 11, CU_POINTER_RANGE_SIZE = 12 };
enum { CU_RANGE_READ_MOSTLY = 1, CU_RANGE_LAST_PREFETCH = 4 };
enum { CU_ATTACH_GLOBAL = 1 };
enum { CU_ERROR_INVALID_VALUE = 1 };

/* These are the names that the library exports. In cuda.h, `cuMemAdvise` is a macro for `_v2`; in the library it is the
 * old function. */
#define DRIVER_FUNCTIONS(X)                                                                                            \
    X(1, cuInit, (unsigned int flags))                                                                                 \
    X(0, cuDriverGetVersion, (int *version))                                                                           \
    X(1, cuDeviceGet, (int *device, int ordinal))                                                                      \
    X(1, cuDevicePrimaryCtxRetain, (void **context, int device))                                                       \
    X(1, cuDevicePrimaryCtxRelease_v2, (int device))                                                                   \
    X(1, cuCtxPushCurrent_v2, (void *context))                                                                         \
    X(1, cuCtxPopCurrent_v2, (void **context))                                                                         \
    X(1, cuMemAllocManaged, (uint64_t *pointer, size_t bytes, unsigned int flags))                                     \
    X(1, cuMemFree_v2, (uint64_t pointer))                                                                             \
    X(0, cuMemAdvise_v2, (uint64_t pointer, size_t bytes, int advice, struct cu_location location))                    \
    X(0, cuMemAdvise, (uint64_t pointer, size_t bytes, int advice, int device))                                        \
    X(0, cuMemPrefetchAsync_v2,                                                                                        \
      (uint64_t pointer, size_t bytes, struct cu_location location, unsigned int flags, void *stream))                 \
    X(0, cuMemPrefetchAsync, (uint64_t pointer, size_t bytes, int device, void *stream))                               \
    X(0, cuMemRangeGetAttribute, (void *data, size_t data_size, int attribute, uint64_t pointer, size_t bytes))        \
    X(0, cuPointerGetAttribute, (void *data, int attribute, uint64_t pointer))                                         \
    X(0, cuMemcpyAsync, (uint64_t target, uint64_t source, size_t bytes, void *stream))                                \
    X(0, cuMemcpyBatchAsync_v2,                                                                                        \
      (uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, struct cu_copy_attributes *attributes,       \
       size_t *attribute_starts, size_t attribute_count, void *stream))                                                \
    X(0, cuMemcpyBatchAsync,                                                                                           \
      (uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, struct cu_copy_attributes *attributes,       \
       size_t *attribute_starts, size_t attribute_count, size_t *failed, void *stream))                                \
    X(0, cuMemGetInfo_v2, (size_t *free_bytes, size_t *total_bytes))                                                   \
    X(0, cuGetErrorName, (int code, const char **name))                                                                \
    X(0, cuGetErrorString, (int code, const char **text))

struct driver {
#define X(required, name, parameters) int(*name) parameters;
    DRIVER_FUNCTIONS(X)
#undef X
};

enum driver_function {
    FN_NONE = -1,
#define X(required, name, parameters) FN_##name,
    DRIVER_FUNCTIONS(X)
#undef X
    FN_COUNT
};

static const struct {
    const char *name;
    size_t offset;
    int required;
} symbols[FN_COUNT] = {
#define X(required, name, parameters) {#name, offsetof(struct driver, name), required},
    DRIVER_FUNCTIONS(X)
#undef X
};

enum { EMPTY, LOADING, READY };
enum { MAX_DEVICES = 64, MAX_PATH = 4096 };

static struct driver driver;         /* written once, before `state` becomes READY */
static char driver_path[MAX_PATH];   /* the same */
static atomic_int state = EMPTY;
static atomic_int forked;
static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(void *) contexts[MAX_DEVICES];
static _Thread_local int failed_function = FN_NONE; /* the function that caused the last error on this thread */

static int checked(enum driver_function function, int code)
{
    if (code != GT_OK)
        failed_function = function;
    return code;
}

#define DRIVER(name, ...) checked(FN_##name, driver.name(__VA_ARGS__))
#define UNAVAILABLE(name) checked(FN_##name, GT_ERROR_UNAVAILABLE)

static int own_error(int code)
{
    failed_function = FN_NONE;
    return code;
}

static int usable(void)
{
    if (atomic_load_explicit(&forked, memory_order_relaxed))
        return own_error(GT_ERROR_FORKED);
    if (atomic_load_explicit(&state, memory_order_acquire) != READY)
        return own_error(GT_ERROR_NOT_INITIALIZED);
    return GT_OK;
}

static void after_fork_in_child(void)
{
    /* If the parent never initialized the driver, the child can do so. */
    if (atomic_load_explicit(&state, memory_order_relaxed) != EMPTY)
        atomic_store_explicit(&forked, 1, memory_order_relaxed);
}

static const char *error_text(int (*ask)(int, const char **), int code)
{
    const char *text = NULL;
    return ask != NULL && ask(code, &text) == GT_OK && text != NULL ? text : "";
}

static int load_symbols(void *library, struct driver *loaded, char *detail, size_t detail_size)
{
    for (int i = 0; i < FN_COUNT; i++) {
        void *address = dlsym(library, symbols[i].name);
        if (address == NULL && symbols[i].required) {
            snprintf(detail, detail_size, "%s", symbols[i].name);
            return own_error(GT_ERROR_MISSING_SYMBOL);
        }
        /* memcpy, because ISO C does not allow converting an object pointer to a function pointer */
        memcpy((char *)loaded + symbols[i].offset, &address, sizeof(address));
    }
    return GT_OK;
}

static int load_driver(const char *path, char *detail, size_t detail_size)
{
    static int handler_registered;
    if (!handler_registered && pthread_atfork(NULL, NULL, after_fork_in_child) != 0) {
        snprintf(detail, detail_size, "pthread_atfork: out of memory");
        return own_error(GT_ERROR_NO_LIBRARY);
    }
    handler_registered = 1;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        snprintf(detail, detail_size, "%s", dlerror());
        return own_error(GT_ERROR_NO_LIBRARY);
    }
    struct driver loaded;
    int code = load_symbols(library, &loaded, detail, detail_size);
    if (code != GT_OK) {
        dlclose(library);
        return code;
    }
    /* The library stays open from here on, because an initialized driver cannot be unloaded. */
    code = checked(FN_cuInit, loaded.cuInit(0));
    if (code == GT_OK)
        driver = loaded;
    else
        snprintf(detail, detail_size, "%s", error_text(loaded.cuGetErrorName, code));
    return code;
}

/* Loads and initializes the driver. If `path` is NULL, libcuda.so.1 is used. May be called repeatedly. On failure,
 * `detail` receives the message of the loader, the missing symbol, or the name of cuInit's error. */
GT_API int gt_init(const char *path, char *detail, size_t detail_size)
{
    if (path == NULL)
        path = "libcuda.so.1";
    if (detail == NULL || detail_size == 0 || strlen(path) >= MAX_PATH)
        return own_error(GT_ERROR_ARGUMENT);
    detail[0] = '\0';
    if (atomic_load_explicit(&forked, memory_order_relaxed))
        return own_error(GT_ERROR_FORKED);
    pthread_mutex_lock(&init_lock);
    int code = GT_OK;
    if (atomic_load_explicit(&state, memory_order_relaxed) == READY) {
        if (strcmp(path, driver_path) != 0) {
            snprintf(detail, detail_size, "%s", driver_path);
            code = own_error(GT_ERROR_OTHER_DRIVER);
        }
    } else {
        atomic_store_explicit(&state, LOADING, memory_order_relaxed);
        code = load_driver(path, detail, detail_size);
        if (code == GT_OK)
            memcpy(driver_path, path, strlen(path) + 1);
        atomic_store_explicit(&state, code == GT_OK ? READY : EMPTY, memory_order_release);
    }
    pthread_mutex_unlock(&init_lock);
    return code;
}

static int primary_context(int device, void **context)
{
    if (device < 0 || device >= MAX_DEVICES)
        return own_error(GT_ERROR_ARGUMENT);
    void *known = atomic_load_explicit(&contexts[device], memory_order_acquire);
    if (known == NULL) {
        int handle = 0;
        void *fresh = NULL;
        int code = DRIVER(cuDeviceGet, &handle, device);
        if (code == GT_OK)
            code = DRIVER(cuDevicePrimaryCtxRetain, &fresh, handle);
        if (code != GT_OK)
            return code;
        /* The context is kept until the process ends, because PyTorch may free slot memory at any time. If two threads
         * race for the first retain, the loser releases its own reference. */
        if (atomic_compare_exchange_strong_explicit(&contexts[device], &known, fresh, memory_order_acq_rel,
                                                    memory_order_acquire))
            known = fresh;
        else if ((code = DRIVER(cuDevicePrimaryCtxRelease_v2, handle)) != GT_OK)
            return code;
    }
    *context = known;
    return GT_OK;
}

/* Pushes the device's primary context. If it succeeds, call `leave`. */
static int enter(int device)
{
    void *context = NULL;
    int code = usable();
    if (code == GT_OK)
        code = primary_context(device, &context);
    if (code == GT_OK)
        code = DRIVER(cuCtxPushCurrent_v2, context);
    return code;
}

/* Pops the context that `enter` pushed. Returns `code` if that is an error, else the result of popping. */
static int leave(int code)
{
    int function = failed_function;
    void *popped = NULL;
    int pop_code = DRIVER(cuCtxPopCurrent_v2, &popped);
    if (code == GT_OK)
        return pop_code;
    failed_function = function;
    return code;
}

static struct cu_location as_location(int location)
{
    if (location == GT_HOST)
        return (struct cu_location){CU_LOCATION_HOST, 0};
    return (struct cu_location){CU_LOCATION_DEVICE, location};
}

static int advise(uint64_t pointer, size_t bytes, int advice, int location)
{
    if (driver.cuMemAdvise_v2 != NULL)
        return DRIVER(cuMemAdvise_v2, pointer, bytes, advice, as_location(location));
    if (driver.cuMemAdvise != NULL)
        return DRIVER(cuMemAdvise, pointer, bytes, advice, location); /* CU_DEVICE_CPU is -1, like GT_HOST */
    return UNAVAILABLE(cuMemAdvise);
}

static int prefetch(uint64_t pointer, size_t bytes, int location, void *stream)
{
    if (driver.cuMemPrefetchAsync_v2 != NULL)
        return DRIVER(cuMemPrefetchAsync_v2, pointer, bytes, as_location(location), 0, stream);
    if (driver.cuMemPrefetchAsync != NULL)
        return DRIVER(cuMemPrefetchAsync, pointer, bytes, location, stream);
    return UNAVAILABLE(cuMemPrefetchAsync);
}

/* ---- accounts: allocated bytes, rejected requests, and caps ---------------------------------------------------- */

struct account {
    _Atomic uint64_t reserved; /* live bytes plus those being allocated; caps limit this value */
    _Atomic uint64_t counter[GT_COUNTERS];
};

/* The policy of a slot. It fits one word, so that threads read and write it atomically. */
struct policy {
    int16_t device;
    uint8_t preferred;
    uint8_t accessed_by;
    uint8_t read_mostly;
    uint8_t enabled;
    uint8_t unused[2];
};
_Static_assert(sizeof(struct policy) == sizeof(uint64_t), "a policy is read and written as one word");

/* The default cap is the one for machines where oversubscription can hang the driver, so forgetting to set a cap is
 * harmless. */
static struct account total = {.counter = {[GT_CAP_BYTES] = UINT64_C(4) << 30}};
static struct account direct = {.counter = {[GT_CAP_BYTES] = UINT64_MAX}};
static struct account slots[GT_SLOT_COUNT];
static _Atomic uint64_t policies[GT_SLOT_COUNT];

static uint64_t get(struct account *account, enum gt_counter counter)
{
    return atomic_load_explicit(&account->counter[counter], memory_order_relaxed);
}

static void set(struct account *account, enum gt_counter counter, uint64_t value)
{
    atomic_store_explicit(&account->counter[counter], value, memory_order_relaxed);
}

static void count(struct account *account, enum gt_counter counter)
{
    atomic_fetch_add_explicit(&account->counter[counter], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&total.counter[counter], 1, memory_order_relaxed);
}

static void note_error(struct account *account, int code)
{
    uint64_t word = (uint64_t)(uint32_t)code << 32 | (uint32_t)failed_function;
    set(account, GT_LAST_ERROR, word);
    set(&total, GT_LAST_ERROR, word);
}

/* Acquire here pairs with release in `unreserve`: a thread that reserves the bytes of a freed block also sees them
 * subtracted from the live bytes. */
static int reserve(struct account *account, uint64_t bytes)
{
    uint64_t taken = atomic_load_explicit(&account->reserved, memory_order_relaxed);
    do {
        uint64_t cap = get(account, GT_CAP_BYTES);
        if (taken > cap || cap - taken < bytes)
            return own_error(GT_ERROR_CAP);
    } while (!atomic_compare_exchange_weak_explicit(&account->reserved, &taken, taken + bytes, memory_order_acquire,
                                                    memory_order_relaxed));
    return GT_OK;
}

static void unreserve(struct account *account, uint64_t bytes)
{
    atomic_fetch_sub_explicit(&account->reserved, bytes, memory_order_release);
}

static void add_live(struct account *account, uint64_t bytes)
{
    _Atomic uint64_t *peak = &account->counter[GT_PEAK_BYTES];
    uint64_t live = atomic_fetch_add_explicit(&account->counter[GT_LIVE_BYTES], bytes, memory_order_relaxed) + bytes;
    uint64_t seen = atomic_load_explicit(peak, memory_order_relaxed);
    while (seen < live &&
           !atomic_compare_exchange_weak_explicit(peak, &seen, live, memory_order_relaxed, memory_order_relaxed))
        ;
}

static void subtract_live(struct account *account, uint64_t bytes)
{
    atomic_fetch_sub_explicit(&account->counter[GT_LIVE_BYTES], bytes, memory_order_relaxed);
}

static int reserve_in_both(struct account *account, uint64_t bytes)
{
    int code = reserve(account, bytes);
    if (code != GT_OK)
        return code;
    code = reserve(&total, bytes);
    if (code != GT_OK)
        unreserve(account, bytes);
    return code;
}

static void unreserve_in_both(struct account *account, uint64_t bytes)
{
    unreserve(account, bytes);
    unreserve(&total, bytes);
}

static int refuse(struct account *account, int code)
{
    if (code == GT_ERROR_CAP)
        count(account, GT_REFUSED_BY_CAP);
    else if (code > 0)
        count(account, GT_REFUSED_BY_DRIVER);
    else
        count(account, GT_REFUSED_UNUSABLE);
    note_error(account, code);
    return code;
}

/* Rejected advice affects only speed. It is counted, and the allocation succeeds nevertheless. */
static void advise_or_count(struct account *account, uint64_t pointer, size_t bytes, int advice, int location)
{
    int code = advise(pointer, bytes, advice, location);
    if (code == GT_OK)
        return;
    count(account, GT_FAILED_ADVISES);
    note_error(account, code);
}

static void apply_policy(struct account *account, struct policy policy, uint64_t pointer, size_t bytes)
{
    int device = policy.device;
    if (policy.preferred != GT_PREFER_NONE)
        advise_or_count(account, pointer, bytes, CU_ADVISE_SET_PREFERRED,
                        policy.preferred == GT_PREFER_HOST ? GT_HOST : device);
    if (policy.accessed_by)
        advise_or_count(account, pointer, bytes, CU_ADVISE_SET_ACCESSED_BY, device);
    if (policy.read_mostly)
        advise_or_count(account, pointer, bytes, CU_ADVISE_SET_READ_MOSTLY, device);
}

static int allocate(struct account *account, int device, size_t bytes, const struct policy *policy, uint64_t *pointer)
{
    uint64_t fresh = 0;
    int code = bytes == 0 ? own_error(GT_ERROR_ARGUMENT) : reserve_in_both(account, bytes);
    if (code != GT_OK)
        return refuse(account, code);
    code = enter(device);
    if (code == GT_OK) {
        code = DRIVER(cuMemAllocManaged, &fresh, bytes, CU_ATTACH_GLOBAL);
        if (code == GT_OK && policy != NULL)
            apply_policy(account, *policy, fresh, bytes);
        int allocated = code == GT_OK;
        code = leave(code);
        if (allocated && code != GT_OK && driver.cuMemFree_v2(fresh) != GT_OK) {
            /* The memory could be neither returned nor freed. It still exists, so its bytes stay reserved. */
            count(account, GT_FAILED_FREES);
            return refuse(account, code);
        }
    }
    if (code != GT_OK) {
        unreserve_in_both(account, bytes);
        return refuse(account, code);
    }
    add_live(account, bytes);
    add_live(&total, bytes);
    count(account, GT_ALLOCATIONS);
    *pointer = fresh;
    return GT_OK;
}

/* If the driver fails to free memory, the memory may still exist, so it still counts as live. */
static int release(struct account *account, int device, uint64_t pointer, size_t bytes)
{
    int freed = 0;
    int code = enter(device);
    if (code == GT_OK) {
        code = DRIVER(cuMemFree_v2, pointer);
        freed = code == GT_OK;
        code = leave(code);
    }
    if (code != GT_OK)
        note_error(account, code);
    if (!freed) {
        count(account, GT_FAILED_FREES);
        return code;
    }
    subtract_live(account, bytes);
    subtract_live(&total, bytes);
    unreserve_in_both(account, bytes);
    count(account, GT_FREES);
    return code;
}

/* ---- allocator slots, for torch.cuda.memory.CUDAPluggableAllocator ---------------------------------------------- */

static void *slot_alloc(int slot, size_t bytes, int device)
{
    uint64_t word = atomic_load_explicit(&policies[slot], memory_order_acquire);
    uint64_t pointer = 0;
    struct policy policy;
    memcpy(&policy, &word, sizeof(policy));
    int code = usable();
    if (code == GT_OK && !policy.enabled)
        code = own_error(GT_ERROR_SLOT_DISABLED);
    if (code == GT_OK && policy.device != device)
        code = own_error(GT_ERROR_SLOT_DEVICE);
    if (code != GT_OK)
        refuse(&slots[slot], code);
    else
        allocate(&slots[slot], device, bytes, &policy, &pointer);
    return (void *)(uintptr_t)pointer; /* PyTorch raises OutOfMemoryError for NULL */
}

static void slot_free(int slot, void *pointer, size_t bytes, int device)
{
    struct account *account = &slots[slot];
    if (pointer == NULL)
        return;
    if (bytes == 0 || bytes > get(account, GT_LIVE_BYTES)) { /* would corrupt the counters, see gt_managed_free */
        note_error(account, own_error(GT_ERROR_ARGUMENT));
        count(account, GT_FAILED_FREES);
        return;
    }
    release(account, device, (uint64_t)(uintptr_t)pointer, bytes);
}

/* PyTorch passes no user data to an allocator, so each slot needs its own pair of functions. */
#define SLOT(n)                                                                                                        \
    GT_API void *gt_slot##n##_alloc(size_t bytes, int device, void *stream)                                            \
    {                                                                                                                  \
        (void)stream;                                                                                                  \
        return slot_alloc(n, bytes, device);                                                                           \
    }                                                                                                                  \
    GT_API void gt_slot##n##_free(void *pointer, size_t bytes, int device, void *stream)                               \
    {                                                                                                                  \
        (void)stream;                                                                                                  \
        slot_free(n, pointer, bytes, device);                                                                          \
    }

SLOT(0) SLOT(1) SLOT(2) SLOT(3) SLOT(4) SLOT(5) SLOT(6) SLOT(7)
_Static_assert(GT_SLOT_COUNT == 8, "one SLOT() line per slot");

/* Enabling a slot retains the device's context, so that allocations do not have to. */
GT_API int gt_slot_configure(int slot, const struct gt_slot_config *config)
{
    int code = usable();
    if (code != GT_OK)
        return code;
    if (slot < 0 || slot >= GT_SLOT_COUNT || config == NULL || config->device < 0 || config->device >= MAX_DEVICES ||
        config->preferred < GT_PREFER_NONE || config->preferred > GT_PREFER_DEVICE)
        return own_error(GT_ERROR_ARGUMENT);
    void *context = NULL;
    if (config->enabled && (code = primary_context(config->device, &context)) != GT_OK)
        return code;
    struct policy policy = {
        .device = (int16_t)config->device,
        .preferred = (uint8_t)config->preferred,
        .accessed_by = config->accessed_by != 0,
        .read_mostly = config->read_mostly != 0,
        .enabled = config->enabled != 0,
    };
    uint64_t word = 0;
    memcpy(&word, &policy, sizeof(word));
    set(&slots[slot], GT_CAP_BYTES, config->cap_bytes);
    atomic_store_explicit(&policies[slot], word, memory_order_release);
    return GT_OK;
}

/* ---- caps and statistics ---------------------------------------------------------------------------------------- */

GT_API int gt_set_managed_cap(uint64_t bytes)
{
    if (atomic_load_explicit(&forked, memory_order_relaxed))
        return own_error(GT_ERROR_FORKED);
    set(&total, GT_CAP_BYTES, bytes);
    return GT_OK;
}

/* `which`: a slot or GT_ACCOUNT_TOTAL. Each value is correct by itself, but they are not a consistent snapshot. */
GT_API int gt_stats(int which, uint64_t *out, size_t count_wanted)
{
    if (atomic_load_explicit(&forked, memory_order_relaxed))
        return own_error(GT_ERROR_FORKED);
    if (which < GT_ACCOUNT_TOTAL || which >= GT_SLOT_COUNT || out == NULL || count_wanted != GT_COUNTERS)
        return own_error(GT_ERROR_ARGUMENT);
    struct account *account = which == GT_ACCOUNT_TOTAL ? &total : &slots[which];
    for (int i = 0; i < GT_COUNTERS; i++)
        out[i] = get(account, (enum gt_counter)i);
    return GT_OK;
}

/* ---- direct calls, for managed buffers --------------------------------------------------------------------------- */

static int check_range(uint64_t pointer, size_t bytes, int location)
{
    if (pointer == 0 || bytes == 0 || location < GT_HOST || location >= MAX_DEVICES)
        return own_error(GT_ERROR_ARGUMENT);
    return usable();
}

GT_API int gt_managed_alloc(int device, size_t bytes, uint64_t *pointer)
{
    int code = usable();
    if (code != GT_OK)
        return code;
    return pointer == NULL ? own_error(GT_ERROR_ARGUMENT) : allocate(&direct, device, bytes, NULL, pointer);
}

GT_API int gt_managed_free(int device, uint64_t pointer, size_t bytes)
{
    int code = check_range(pointer, bytes, device);
    /* A wrong size would corrupt the counters for the rest of the process. */
    if (code == GT_OK && bytes > get(&direct, GT_LIVE_BYTES))
        code = own_error(GT_ERROR_ARGUMENT);
    return code == GT_OK ? release(&direct, device, pointer, bytes) : code;
}

GT_API int gt_advise(int device, uint64_t pointer, size_t bytes, int advice, int location)
{
    int code = check_range(pointer, bytes, location);
    if (code == GT_OK && (advice < CU_ADVISE_SET_READ_MOSTLY || advice > CU_ADVISE_LAST))
        code = own_error(GT_ERROR_ARGUMENT);
    if (code == GT_OK)
        code = enter(device);
    return code == GT_OK ? leave(advise(pointer, bytes, advice, location)) : code;
}

GT_API int gt_prefetch(int device, uint64_t pointer, size_t bytes, int location, void *stream)
{
    int code = check_range(pointer, bytes, location);
    if (code == GT_OK)
        code = enter(device);
    return code == GT_OK ? leave(prefetch(pointer, bytes, location, stream)) : code;
}

/* Reads attribute 1 to 4 (read-mostly, preferred location, accessed-by, last prefetch) as 32-bit integers: a device
 * ordinal, -1 for the host, or -2 for none or different values among the pages. */
GT_API int gt_range_attribute(int device, uint64_t pointer, size_t bytes, int attribute, int32_t *values, size_t count)
{
    int code = check_range(pointer, bytes, device);
    if (code == GT_OK && (attribute < CU_RANGE_READ_MOSTLY || attribute > CU_RANGE_LAST_PREFETCH || values == NULL ||
                          count == 0 || count > MAX_DEVICES)) /* the driver writes exactly `count` values */
        code = own_error(GT_ERROR_ARGUMENT);
    if (code == GT_OK && driver.cuMemRangeGetAttribute == NULL)
        code = UNAVAILABLE(cuMemRangeGetAttribute);
    if (code == GT_OK)
        code = enter(device);
    if (code != GT_OK)
        return code;
    return leave(DRIVER(cuMemRangeGetAttribute, values, count * sizeof(*values), attribute, pointer, bytes));
}

static int pointer_attribute(int device, uint64_t pointer, int attribute, void *value)
{
    int code = check_range(pointer, 1, device);
    if (code == GT_OK && driver.cuPointerGetAttribute == NULL)
        code = UNAVAILABLE(cuPointerGetAttribute);
    if (code == GT_OK)
        code = enter(device);
    return code == GT_OK ? leave(DRIVER(cuPointerGetAttribute, value, attribute, pointer)) : code;
}

/* For an unknown address the driver returns CUDA_ERROR_INVALID_VALUE. That means: not managed. */
GT_API int gt_is_managed(int device, uint64_t pointer, int32_t *managed)
{
    uint64_t value = 0; /* wide enough: the driver writes a boolean of undocumented width */
    if (managed == NULL)
        return own_error(GT_ERROR_ARGUMENT);
    int code = pointer_attribute(device, pointer, CU_POINTER_IS_MANAGED, &value);
    *managed = code == GT_OK && value != 0;
    if (code == CU_ERROR_INVALID_VALUE && failed_function == FN_cuPointerGetAttribute)
        return own_error(GT_OK);
    return code;
}

/* Start and size of the allocation that contains a pointer. */
GT_API int gt_pointer_range(int device, uint64_t pointer, uint64_t *start, uint64_t *bytes)
{
    size_t size = 0;
    if (start == NULL || bytes == NULL)
        return own_error(GT_ERROR_ARGUMENT);
    *start = 0;
    int code = pointer_attribute(device, pointer, CU_POINTER_RANGE_START, start);
    if (code == GT_OK)
        code = pointer_attribute(device, pointer, CU_POINTER_RANGE_SIZE, &size);
    *bytes = size;
    return code;
}

/* Uses one batch call if the driver has it (CUDA 12.8). The batch call rejects the legacy default stream. */
static int copy_all(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, int device, void *stream)
{
    struct cu_copy_attributes how = {
        .source_order = CU_SOURCE_ORDER_ANY,
        .source = as_location(GT_HOST), /* matters only for managed memory, whose location is not fixed */
        .target = as_location(device),
        .flags = CU_COPY_BESIDE_COMPUTE,
    };
    size_t first = 0, failed = 0;
    int code = GT_OK;
    if (stream != NULL && driver.cuMemcpyBatchAsync_v2 != NULL)
        return DRIVER(cuMemcpyBatchAsync_v2, targets, sources, sizes, count, &how, &first, 1, stream);
    if (stream != NULL && driver.cuMemcpyBatchAsync != NULL)
        return DRIVER(cuMemcpyBatchAsync, targets, sources, sizes, count, &how, &first, 1, &failed, stream);
    if (driver.cuMemcpyAsync == NULL)
        return UNAVAILABLE(cuMemcpyAsync);
    for (size_t i = 0; i < count && code == GT_OK; i++)
        code = DRIVER(cuMemcpyAsync, targets[i], sources[i], sizes[i], stream);
    return code;
}

/* Enqueues copies to the device; their order is undefined. The sources must be page-locked host memory or managed
 * memory on the host. They must be complete, and must not change until the stream has executed the copies. */
GT_API int gt_copy_batch(int device, uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, void *stream)
{
    int code = usable();
    if (code == GT_OK && (targets == NULL || sources == NULL || sizes == NULL || count == 0 ||
                          count > SIZE_MAX / sizeof(*sizes) || device < 0 || device >= MAX_DEVICES))
        code = own_error(GT_ERROR_ARGUMENT);
    for (size_t i = 0; code == GT_OK && i < count; i++)
        if (targets[i] == 0 || sources[i] == 0 || sizes[i] == 0)
            code = own_error(GT_ERROR_ARGUMENT);
    if (code == GT_OK)
        code = enter(device);
    return code == GT_OK ? leave(copy_all(targets, sources, sizes, count, device, stream)) : code;
}

GT_API int gt_memory_info(int device, uint64_t *free_bytes, uint64_t *total_bytes)
{
    size_t free_size = 0, total_size = 0;
    int code = usable();
    if (code == GT_OK && (free_bytes == NULL || total_bytes == NULL))
        code = own_error(GT_ERROR_ARGUMENT);
    if (code == GT_OK && driver.cuMemGetInfo_v2 == NULL)
        code = UNAVAILABLE(cuMemGetInfo_v2);
    if (code == GT_OK)
        code = enter(device);
    if (code != GT_OK)
        return code;
    code = leave(DRIVER(cuMemGetInfo_v2, &free_size, &total_size));
    *free_bytes = free_size;
    *total_bytes = total_size;
    return code;
}

/* ---- page faults and migrations -------------------------------------------------------------------------------- */

/* CUPTI reports page faults and migrations of managed memory as records in buffers that we provide. It requests buffers
 * inside CUDA calls, which PyTorch may make while it holds its allocator lock. Therefore this is written in C. */

enum { CUPTI_UNIFIED_MEMORY_COUNTER = 25, CUPTI_ALL_DEVICES = 2, CUPTI_FLUSH_FORCED = 1 };
enum { CUPTI_TO_DEVICE_BYTES = 1, CUPTI_TO_HOST_BYTES = 2, CUPTI_CPU_PAGE_FAULT = 3, CUPTI_GPU_PAGE_FAULTS = 4 };
enum { CUPTI_BUFFER_BYTES = 1 << 18 };

struct cupti_config { /* CUpti_ActivityUnifiedMemoryCounterConfig */
    uint32_t scope, kind, device, enable;
};
_Static_assert(sizeof(struct cupti_config) == 16, "four 32-bit fields");

struct cupti_record { /* the common start of all versions of CUpti_ActivityUnifiedMemoryCounter */
    uint32_t activity, kind;
    uint64_t value;
};

struct cupti {
    int (*cuptiActivityRegisterCallbacks)(void (*)(uint8_t **, size_t *, size_t *),
                                          void (*)(void *, uint32_t, uint8_t *, size_t, size_t));
    int (*cuptiActivityConfigureUnifiedMemoryCounter)(struct cupti_config *, uint32_t);
    int (*cuptiActivityEnable)(int);
    int (*cuptiActivityDisable)(int);
    int (*cuptiActivityFlushAll)(uint32_t);
    int (*cuptiActivityGetNextRecord)(uint8_t *, size_t, struct cupti_record **);
    int (*cuptiGetResultString)(int, const char **);
};

static const char *const cupti_names[] = { /* in the order of struct cupti */
    "cuptiActivityRegisterCallbacks", "cuptiActivityConfigureUnifiedMemoryCounter", "cuptiActivityEnable",
    "cuptiActivityDisable", "cuptiActivityFlushAll", "cuptiActivityGetNextRecord", "cuptiGetResultString",
};

/* The counters in the order in which gt_migrations returns them. */
enum { GT_TO_DEVICE_BYTES, GT_TO_HOST_BYTES, GT_CPU_PAGE_FAULTS, GT_GPU_PAGE_FAULTS, GT_MIGRATION_COUNTERS };

static struct cupti cupti;           /* written once, under init_lock */
static atomic_int migrations_counted;
static _Atomic uint64_t migrations[GT_MIGRATION_COUNTERS];

static void provide_buffer(uint8_t **buffer, size_t *size, size_t *most_records)
{
    *buffer = aligned_alloc(8, CUPTI_BUFFER_BYTES); /* if NULL, CUPTI drops the records */
    *size = *buffer == NULL ? 0 : CUPTI_BUFFER_BYTES;
    *most_records = 0; /* no limit: as many as fit */
}

static void take_buffer(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t filled)
{
    struct cupti_record *record = NULL;
    (void)context, (void)stream, (void)size;
    while (filled > 0 && cupti.cuptiActivityGetNextRecord(buffer, filled, &record) == GT_OK) {
        if (record->activity != CUPTI_UNIFIED_MEMORY_COUNTER)
            continue;
        switch (record->kind) {
        case CUPTI_TO_DEVICE_BYTES: atomic_fetch_add(&migrations[GT_TO_DEVICE_BYTES], record->value); break;
        case CUPTI_TO_HOST_BYTES: atomic_fetch_add(&migrations[GT_TO_HOST_BYTES], record->value); break;
        /* `value` is the address of the instruction for a CPU fault, but the number of faults for GPU faults */
        case CUPTI_CPU_PAGE_FAULT: atomic_fetch_add(&migrations[GT_CPU_PAGE_FAULTS], 1); break;
        case CUPTI_GPU_PAGE_FAULTS: atomic_fetch_add(&migrations[GT_GPU_PAGE_FAULTS], record->value); break;
        }
    }
    free(buffer);
}

static int load_cupti(const char *path, char *detail, size_t detail_size)
{
    _Static_assert(sizeof(struct cupti) == sizeof(cupti_names), "a name for each function");
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        snprintf(detail, detail_size, "%s", dlerror());
        return own_error(GT_ERROR_NO_LIBRARY);
    }
    for (size_t i = 0; i < sizeof(cupti_names) / sizeof(*cupti_names); i++) {
        void *address = dlsym(library, cupti_names[i]);
        if (address == NULL) {
            snprintf(detail, detail_size, "%s", cupti_names[i]);
            dlclose(library);
            return own_error(GT_ERROR_MISSING_SYMBOL);
        }
        memcpy((char *)&cupti + i * sizeof(address), &address, sizeof(address));
    }
    return GT_OK;
}

static int start_counting(char *detail, size_t detail_size)
{
    int code = cupti.cuptiActivityRegisterCallbacks(provide_buffer, take_buffer);
    for (uint32_t kind = CUPTI_TO_DEVICE_BYTES; code == GT_OK && kind <= CUPTI_GPU_PAGE_FAULTS; kind++) {
        struct cupti_config config = {CUPTI_ALL_DEVICES, kind, 0, 1};
        code = cupti.cuptiActivityConfigureUnifiedMemoryCounter(&config, 1);
    }
    if (code == GT_OK)
        code = cupti.cuptiActivityEnable(CUPTI_UNIFIED_MEMORY_COUNTER);
    if (code == GT_OK)
        return GT_OK;
    snprintf(detail, detail_size, "%s", error_text(cupti.cuptiGetResultString, code));
    return own_error(GT_ERROR_CUPTI);
}

/* Starts counting page faults and migrations of managed memory. `path` is a CUPTI library. On failure, `detail`
 * receives the message of the loader, the missing function, or the name of CUPTI's error. May be called repeatedly. */
GT_API int gt_count_migrations(const char *path, char *detail, size_t detail_size)
{
    int code = usable();
    if (code != GT_OK)
        return code;
    if (path == NULL || detail == NULL || detail_size == 0)
        return own_error(GT_ERROR_ARGUMENT);
    detail[0] = '\0';
    pthread_mutex_lock(&init_lock);
    if (!atomic_load(&migrations_counted)) {
        code = load_cupti(path, detail, detail_size);
        if (code == GT_OK)
            code = start_counting(detail, detail_size);
        atomic_store(&migrations_counted, code == GT_OK);
    }
    pthread_mutex_unlock(&init_lock);
    return code;
}

GT_API int gt_migrations(uint64_t *out, size_t count_wanted)
{
    int code = usable();
    if (code != GT_OK)
        return code;
    if (out == NULL || count_wanted != GT_MIGRATION_COUNTERS || !atomic_load(&migrations_counted))
        return own_error(GT_ERROR_ARGUMENT);
    if (cupti.cuptiActivityFlushAll(CUPTI_FLUSH_FORCED) != GT_OK)
        return own_error(GT_ERROR_CUPTI);
    for (int i = 0; i < GT_MIGRATION_COUNTERS; i++)
        out[i] = atomic_load(&migrations[i]);
    return GT_OK;
}

GT_API int gt_stop_counting_migrations(void)
{
    int code = usable();
    if (code != GT_OK || !atomic_exchange(&migrations_counted, 0))
        return code;
    int disabled = cupti.cuptiActivityDisable(CUPTI_UNIFIED_MEMORY_COUNTER);
    int flushed = cupti.cuptiActivityFlushAll(CUPTI_FLUSH_FORCED);
    return disabled == GT_OK && flushed == GT_OK ? GT_OK : own_error(GT_ERROR_CUPTI);
}

/* ---- about the driver and this library --------------------------------------------------------------------------- */

GT_API int gt_abi_version(void)
{
    return GT_ABI_VERSION;
}

GT_API int gt_slot_count(void)
{
    return GT_SLOT_COUNT;
}

GT_API int gt_driver_version(int *version)
{
    int code = usable();
    if (code == GT_OK && version == NULL)
        code = own_error(GT_ERROR_ARGUMENT);
    if (code == GT_OK && driver.cuDriverGetVersion == NULL)
        code = UNAVAILABLE(cuDriverGetVersion);
    return code == GT_OK ? DRIVER(cuDriverGetVersion, version) : code;
}

/* Returns 1 or 0, or a negative error code. */
GT_API int gt_has_function(const char *name)
{
    int code = usable();
    if (code != GT_OK)
        return code;
    if (name == NULL)
        return own_error(GT_ERROR_ARGUMENT);
    for (int i = 0; i < FN_COUNT; i++) {
        void *address = NULL;
        memcpy(&address, (const char *)&driver + symbols[i].offset, sizeof(address));
        if (strcmp(symbols[i].name, name) == 0)
            return address != NULL;
    }
    return own_error(GT_ERROR_ARGUMENT);
}

/* The driver's name of one of its codes, or "". */
GT_API const char *gt_error_name(int code)
{
    return usable() == GT_OK ? error_text(driver.cuGetErrorName, code) : "";
}

/* The driver's description of one of its codes, or "". */
GT_API const char *gt_error_string(int code)
{
    return usable() == GT_OK ? error_text(driver.cuGetErrorString, code) : "";
}

GT_API const char *gt_function_name(int function)
{
    return function < 0 || function >= FN_COUNT ? "" : symbols[function].name;
}

/* The driver function that caused the last error on this thread, or "". */
GT_API const char *gt_last_function(void)
{
    return gt_function_name(failed_function);
}
