/* Preloaded into a process (LD_PRELOAD), makes chosen file operations fail, kill the process, or be listed.
 *
 * GRACETUNE_TEST_FAULTS, or what `faults_configure` is given, holds one rule per line:
 *
 *     <operation> <action> <after> <times> <pattern>
 *
 * operation  open read write sync rename link unlink mkdir stat list lock truncate room map, or any
 * action     an error number; `kill`, `term`, `hup` (that signal before the call); `short` (half of a write is done);
 *            `list` (one line in GRACETUNE_TEST_FAULTS_LOG). There the others leave a line too, which begins with `met`
 * after      so many calls that match succeed before
 * times      so many fail then; 0: all
 * pattern    of absolute paths, as in a shell; `*` matches slashes too
 *
 * For a call with a descriptor the path is the one that /proc/self/fd knows.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum operation { OPEN, READ, WRITE, SYNC, RENAME, LINK, UNLINK, MKDIR, STAT, LIST, LOCK, TRUNCATE, ROOM, MAP, OPERATIONS };
static const char *const NAMES[OPERATIONS] = {"open", "read", "write", "sync", "rename", "link", "unlink",
                                              "mkdir", "stat", "list", "lock", "truncate", "room", "map"};
enum { KILL = -1, LISTED = -2, SHORT = -3, TERM = -4, HUP = -5, MOST_RULES = 32 };
static const struct {
    const char *name;
    int action;
} ACTIONS[] = {{"kill", KILL}, {"list", LISTED}, {"short", SHORT}, {"term", TERM}, {"hup", HUP}};

struct rule {
    unsigned operations;
    int action;
    long after, times;
    char pattern[PATH_MAX];
    atomic_long seen;
};
static struct rule rules[MOST_RULES];
static int rule_count;
static unsigned watched;
static char log_path[PATH_MAX];

static unsigned operations_of(const char *name) {
    if (strcmp(name, "any") == 0) return (1u << OPERATIONS) - 1;
    for (int number = 0; number < OPERATIONS; number++)
        if (strcmp(name, NAMES[number]) == 0) return 1u << number;
    fprintf(stderr, "faults: no operation %s\n", name);
    abort();
}

static int action_of(const char *name) {
    for (size_t number = 0; number < sizeof ACTIONS / sizeof *ACTIONS; number++)
        if (strcmp(name, ACTIONS[number].name) == 0) return ACTIONS[number].action;
    return atoi(name);
}

/* Also called by a process that was forked from a preloaded one. */
void faults_configure(const char *text, const char *log) {
    char copy[1 << 16], *rest = copy, *line;
    rule_count = 0;
    watched = 0;
    snprintf(log_path, sizeof log_path, "%s", log);
    snprintf(copy, sizeof copy, "%s", text);
    while ((line = strsep(&rest, "\n")) != NULL) {
        char operation[16], action[16];
        int begin = 0;
        if (*line == 0) continue;
        struct rule *rule = &rules[rule_count];
        if (rule_count == MOST_RULES ||
            sscanf(line, "%15s %15s %ld %ld %n", operation, action, &rule->after, &rule->times, &begin) != 4) {
            fprintf(stderr, "faults: not a rule: %s\n", line);
            abort();
        }
        rule->operations = operations_of(operation);
        rule->action = action_of(action);
        snprintf(rule->pattern, sizeof rule->pattern, "%s", line + begin);
        atomic_store(&rule->seen, 0);
        watched |= rule->operations;
        rule_count++;
    }
}

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("GRACETUNE_TEST_FAULTS"), *log = getenv("GRACETUNE_TEST_FAULTS_LOG");
    faults_configure(text ? text : "", log ? log : "");
}

static void note(const char *begin, enum operation operation, const char *path) {
    char line[PATH_MAX + 32];
    if (*log_path == 0) return;
    int length = snprintf(line, sizeof line, "%s%s %s\n", begin, NAMES[operation], path);
    long descriptor = syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (descriptor < 0) return;
    syscall(SYS_write, descriptor, line, length);
    syscall(SYS_close, descriptor);
}

/* 0, or the error that the call has to fail with, or SHORT. */
static int judge(enum operation operation, const char *path) {
    int before = errno;
    for (int number = 0; number < rule_count; number++) {
        struct rule *rule = &rules[number];
        if (!(rule->operations >> operation & 1) || fnmatch(rule->pattern, path, 0) != 0) continue;
        if (rule->action == LISTED) {
            note("", operation, path);
            continue;
        }
        long seen = atomic_fetch_add(&rule->seen, 1);
        if (seen < rule->after || (rule->times && seen >= rule->after + rule->times)) continue;
        note("met ", operation, path);
        if (rule->action == KILL) syscall(SYS_kill, getpid(), SIGKILL);
        if (rule->action == TERM || rule->action == HUP) {
            syscall(SYS_kill, getpid(), rule->action == TERM ? SIGTERM : SIGHUP);
            continue;
        }
        errno = before;
        return rule->action;
    }
    errno = before;
    return 0;
}

static int of_descriptor(enum operation operation, int descriptor) {
    char link[64], path[PATH_MAX];
    if (!(watched >> operation & 1)) return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    long length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    return judge(operation, path);
}

static int of_path(enum operation operation, int folder, const char *name) {
    char path[2 * PATH_MAX], above[PATH_MAX], link[64];
    if (!(watched >> operation & 1) || name == NULL) return 0;
    if (*name == '/') return judge(operation, name);
    int before = errno;
    if (folder == AT_FDCWD) {
        if (getcwd(above, sizeof above) == NULL) above[0] = 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        long length = readlink(link, above, sizeof above - 1);
        above[length < 0 ? 0 : length] = 0;
    }
    errno = before;
    snprintf(path, sizeof path, *name ? "%s/%s" : "%s%s", above, name);
    return judge(operation, path);
}

#define REAL(name)                                              \
    ({                                                          \
        static __typeof__(&name) real_;                         \
        if (!real_) real_ = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
        real_;                                                  \
    })
#define FAIL(found, value)          \
    do {                            \
        int number_ = (found);      \
        if (number_ > 0) {          \
            errno = number_;        \
            return value;           \
        }                           \
    } while (0)

/* -- opening: a file made anew is a write too, for rules about writing */
static int of_opening(int folder, const char *name, int flags) {
    int found = of_path(OPEN, folder, name);
    return found || !(flags & O_CREAT) ? found : of_path(WRITE, folder, name);
}
#define MODE(flags, mode)                                    \
    unsigned mode = 0;                                       \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {                 \
        va_list more_;                                       \
        va_start(more_, flags);                              \
        mode = va_arg(more_, unsigned);                      \
        va_end(more_);                                       \
    }
#define OPENS(name)                                          \
    int name(const char *path, int flags, ...) {             \
        MODE(flags, mode)                                    \
        FAIL(of_opening(AT_FDCWD, path, flags), -1);         \
        return REAL(name)(path, flags, mode);                \
    }
#define OPENS_AT(name)                                       \
    int name(int folder, const char *path, int flags, ...) { \
        MODE(flags, mode)                                    \
        FAIL(of_opening(folder, path, flags), -1);           \
        return REAL(name)(folder, path, flags, mode);        \
    }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)
#define OPENS_STREAM(name)                                                                  \
    FILE *name(const char *path, const char *mode) {                                        \
        FAIL(of_opening(AT_FDCWD, path, *mode == 'r' ? 0 : O_CREAT), NULL);                 \
        return REAL(name)(path, mode);                                                      \
    }
OPENS_STREAM(fopen)
OPENS_STREAM(fopen64)
DIR *opendir(const char *path) {
    FAIL(of_path(LIST, AT_FDCWD, path), NULL);
    return REAL(opendir)(path);
}
DIR *fdopendir(int descriptor) {
    FAIL(of_descriptor(LIST, descriptor), NULL);
    return REAL(fdopendir)(descriptor);
}

/* -- reading and writing */
#define ON_DESCRIPTOR(operation, type, name, parameters, arguments) \
    type name parameters {                                          \
        FAIL(of_descriptor(operation, descriptor), -1);             \
        return REAL(name) arguments;                                \
    }
ON_DESCRIPTOR(READ, ssize_t, read, (int descriptor, void *data, size_t size), (descriptor, data, size))
ON_DESCRIPTOR(READ, ssize_t, pread, (int descriptor, void *data, size_t size, off_t at), (descriptor, data, size, at))
ON_DESCRIPTOR(READ, ssize_t, pread64, (int descriptor, void *data, size_t size, off_t at), (descriptor, data, size, at))
ON_DESCRIPTOR(READ, ssize_t, readv, (int descriptor, const struct iovec *parts, int count), (descriptor, parts, count))
ON_DESCRIPTOR(READ, ssize_t, preadv, (int descriptor, const struct iovec *parts, int count, off_t at),
              (descriptor, parts, count, at))
ON_DESCRIPTOR(READ, ssize_t, preadv64, (int descriptor, const struct iovec *parts, int count, off_t at),
              (descriptor, parts, count, at))
ON_DESCRIPTOR(READ, ssize_t, preadv2, (int descriptor, const struct iovec *parts, int count, off_t at, int flags),
              (descriptor, parts, count, at, flags))
ON_DESCRIPTOR(READ, ssize_t, preadv64v2, (int descriptor, const struct iovec *parts, int count, off_t at, int flags),
              (descriptor, parts, count, at, flags))
#define WRITES(name, parameters, whole, half)                  \
    ssize_t name parameters {                                  \
        int found = of_descriptor(WRITE, descriptor);          \
        FAIL(found, -1);                                       \
        return found == SHORT ? REAL(name) half : REAL(name) whole; \
    }
#define HALF ((size + 1) / 2)
WRITES(write, (int descriptor, const void *data, size_t size), (descriptor, data, size), (descriptor, data, HALF))
WRITES(pwrite, (int descriptor, const void *data, size_t size, off_t at), (descriptor, data, size, at),
       (descriptor, data, HALF, at))
WRITES(pwrite64, (int descriptor, const void *data, size_t size, off_t at), (descriptor, data, size, at),
       (descriptor, data, HALF, at))
static struct iovec half_of(const struct iovec *parts) {
    return (struct iovec){parts->iov_base, (parts->iov_len + 1) / 2};
}
WRITES(writev, (int descriptor, const struct iovec *parts, int count), (descriptor, parts, count),
       (descriptor, (struct iovec[]){half_of(parts)}, 1))
WRITES(pwritev64v2, (int descriptor, const struct iovec *parts, int count, off_t at, int flags),
       (descriptor, parts, count, at, flags), (descriptor, (struct iovec[]){half_of(parts)}, 1, at, flags))
#define MAPS(name)                                                                                  \
    void *name(void *address, size_t size, int access, int flags, int descriptor, off_t at) {       \
        FAIL(flags & MAP_ANONYMOUS ? 0 : of_descriptor(MAP, descriptor), MAP_FAILED);               \
        return REAL(name)(address, size, access, flags, descriptor, at);                            \
    }
MAPS(mmap)
MAPS(mmap64)
ON_DESCRIPTOR(SYNC, int, fsync, (int descriptor), (descriptor))
ON_DESCRIPTOR(SYNC, int, fdatasync, (int descriptor), (descriptor))
ON_DESCRIPTOR(TRUNCATE, int, ftruncate, (int descriptor, off_t size), (descriptor, size))
ON_DESCRIPTOR(TRUNCATE, int, ftruncate64, (int descriptor, off_t size), (descriptor, size))
ON_DESCRIPTOR(LOCK, int, flock, (int descriptor, int how), (descriptor, how))
ON_DESCRIPTOR(ROOM, int, fstatvfs64, (int descriptor, struct statvfs64 *found), (descriptor, found))
ON_DESCRIPTOR(STAT, int, fstat, (int descriptor, struct stat *found), (descriptor, found))
ON_DESCRIPTOR(STAT, int, fstat64, (int descriptor, struct stat64 *found), (descriptor, found))

static int is_lock(int command) {
    return command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;
}
#define CONTROLS(name)                                                        \
    int name(int descriptor, int command, ...) {                              \
        va_list more;                                                         \
        va_start(more, command);                                              \
        void *argument = va_arg(more, void *);                                \
        va_end(more);                                                         \
        FAIL(is_lock(command) ? of_descriptor(LOCK, descriptor) : 0, -1);     \
        return REAL(name)(descriptor, command, argument);                     \
    }
CONTROLS(fcntl)
CONTROLS(fcntl64)

/* -- names: the one that appears or goes decides */
#define ON_PATH(operation, type, name, parameters, folder, path, arguments) \
    type name parameters {                                                  \
        FAIL(of_path(operation, folder, path), -1);                         \
        return REAL(name) arguments;                                        \
    }
ON_PATH(RENAME, int, rename, (const char *from, const char *to), AT_FDCWD, to, (from, to))
ON_PATH(RENAME, int, renameat, (int folder, const char *from, int other, const char *to), other, to,
        (folder, from, other, to))
ON_PATH(LINK, int, link, (const char *from, const char *to), AT_FDCWD, to, (from, to))
ON_PATH(LINK, int, linkat, (int folder, const char *from, int other, const char *to, int flags), other, to,
        (folder, from, other, to, flags))
ON_PATH(LINK, int, symlink, (const char *target, const char *path), AT_FDCWD, path, (target, path))
ON_PATH(UNLINK, int, unlink, (const char *path), AT_FDCWD, path, (path))
ON_PATH(UNLINK, int, unlinkat, (int folder, const char *path, int flags), folder, path, (folder, path, flags))
ON_PATH(UNLINK, int, rmdir, (const char *path), AT_FDCWD, path, (path))
ON_PATH(MKDIR, int, mkdir, (const char *path, mode_t mode), AT_FDCWD, path, (path, mode))
ON_PATH(MKDIR, int, mkdirat, (int folder, const char *path, mode_t mode), folder, path, (folder, path, mode))
ON_PATH(STAT, int, stat, (const char *path, struct stat *found), AT_FDCWD, path, (path, found))
ON_PATH(STAT, int, stat64, (const char *path, struct stat64 *found), AT_FDCWD, path, (path, found))
ON_PATH(STAT, int, lstat, (const char *path, struct stat *found), AT_FDCWD, path, (path, found))
ON_PATH(STAT, int, lstat64, (const char *path, struct stat64 *found), AT_FDCWD, path, (path, found))
ON_PATH(STAT, int, fstatat, (int folder, const char *path, struct stat *found, int flags), folder, path,
        (folder, path, found, flags))
ON_PATH(STAT, int, fstatat64, (int folder, const char *path, struct stat64 *found, int flags), folder, path,
        (folder, path, found, flags))
ON_PATH(STAT, int, statx, (int folder, const char *path, int flags, unsigned mask, struct statx *found), folder, path,
        (folder, path, flags, mask, found))
ON_PATH(ROOM, int, statvfs, (const char *path, struct statvfs *found), AT_FDCWD, path, (path, found))
ON_PATH(ROOM, int, statvfs64, (const char *path, struct statvfs64 *found), AT_FDCWD, path, (path, found))
