/* Reads the state file and keeps handles. The file is text, one `key = value` a line, and is read again when its
 * inode, size or time of change differs: writers replace it as a whole, so every call sees one consistent world.
 *
 * Numbers: `42`; `BASE+RATE@T` is BASE at second T of the monotonic clock and rises by RATE a second; `!CODE` makes
 * the call that asks for it fail with CODE. What the state does not have is not supported.
 */
#define _GNU_SOURCE
#include "fake_state.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static State *current;
static struct stat seen;
static Handle *handles;
static int starts;
static long loaded_epoch;

typedef struct Used {
    struct Used *next;
    char rule[32];
    long times;
} Used;
static Used *used_rules;

static const char *state_path(void) {
    static char beside[4096];
    const char *named = getenv("FAKE_NVML_STATE");
    if (named && *named) return named;
    if (!*beside) {
        Dl_info info;
        if (dladdr((void *)state_path, &info) && info.dli_fname) {
            snprintf(beside, sizeof beside - 8, "%s", info.dli_fname);
            char *slash = strrchr(beside, '/');
            strcpy(slash ? slash + 1 : beside, "state");
        }
    }
    return beside;
}

/* ---- text ---- */

typedef struct {
    const char *key, *value;
} Pair;

static int compare_pairs(const void *a, const void *b) { return strcmp(((const Pair *)a)->key, ((const Pair *)b)->key); }

static char *trimmed(char *from, char *to) {
    while (to > from && (to[-1] == ' ' || to[-1] == '\t' || to[-1] == '\r')) to--;
    *to = 0;
    while (*from == ' ' || *from == '\t') from++;
    return from;
}

static State *parse(char *text) {
    State *state = calloc(1, sizeof *state);
    size_t lines = 1;
    for (const char *c = text; *c; c++) lines += *c == '\n';
    Pair *pairs = calloc(lines, sizeof *pairs);
    for (char *line = text; line && *line;) {
        char *end = strchr(line, '\n');
        char *next = end ? end + 1 : NULL;
        if (!end) end = line + strlen(line);
        char *equals = memchr(line, '=', (size_t)(end - line));
        if (equals && *line != '#') {
            Pair *pair = &pairs[state->count++];
            pair->value = trimmed(equals + 1, end);
            pair->key = trimmed(line, equals);
        }
        line = next;
    }
    qsort(pairs, state->count, sizeof *pairs, compare_pairs);
    state->text = text;
    state->keys = calloc(state->count + 1, sizeof *state->keys);
    state->values = calloc(state->count + 1, sizeof *state->values);
    for (size_t i = 0; i < state->count; i++) {
        state->keys[i] = pairs[i].key;
        state->values[i] = pairs[i].value;
    }
    free(pairs);
    return state;
}

static char *read_file(const char *path, struct stat *found) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, found)) {
        if (file >= 0) close(file);
        return NULL;
    }
    char *text = malloc((size_t)found->st_size + 1);
    ssize_t got, total = 0;
    while (total < found->st_size && (got = read(file, text + total, (size_t)(found->st_size - total))) > 0) total += got;
    text[total] = 0;
    close(file);
    return text;
}

static void unlink_user(State *state) {
    if (--state->users == 0) {
        free(state->text);
        free(state->keys);
        free(state->values);
        free(state);
    }
}

static int same_file(const struct stat *a, const struct stat *b) {
    return a->st_ino == b->st_ino && a->st_size == b->st_size && a->st_mtim.tv_sec == b->st_mtim.tv_sec &&
           a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static State *take_locked(void) {
    struct stat found;
    memset(&found, 0, sizeof found);
    int there = stat(state_path(), &found) == 0;
    if (!current || !same_file(&found, &seen)) {
        char *text = there ? read_file(state_path(), &found) : NULL;
        State *fresh = parse(text ? text : strdup("init = 9\n"));
        fresh->users = 1;
        if (current) unlink_user(current);
        current = fresh;
        seen = found;
    }
    current->users++;
    return current;
}

State *take_state(void) {
    pthread_mutex_lock(&lock);
    State *state = take_locked();
    pthread_mutex_unlock(&lock);
    return state;
}

void drop_state(State *state) {
    pthread_mutex_lock(&lock);
    unlink_user(state);
    pthread_mutex_unlock(&lock);
}

size_t first_key(const State *state, const char *key) {
    size_t low = 0, high = state->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (strcmp(state->keys[middle], key) < 0) low = middle + 1;
        else high = middle;
    }
    return low;
}

const char *whole_text(const State *state, const char *key) {
    size_t i = first_key(state, key);
    return i < state->count && !strcmp(state->keys[i], key) ? state->values[i] : NULL;
}

static const char *formatted_text(const Call *call, const char *format, va_list arguments) {
    char key[KEY_SIZE];
    int length = snprintf(key, sizeof key, "%s", call->prefix);
    vsnprintf(key + length, sizeof key - (size_t)length, format, arguments);
    return whole_text(call->state, key);
}

const char *text_of(const Call *call, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const char *text = formatted_text(call, format, arguments);
    va_end(arguments);
    return text;
}

/* ---- numbers ---- */

double now_s(const State *state) {
    const char *pinned = whole_text(state, "clock");
    if (pinned) return strtod(pinned, NULL);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

unsigned long long now_us(const State *state) {
    const char *pinned = whole_text(state, "clock");
    if (pinned) return (unsigned long long)(strtod(pinned, NULL) * 1e6);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
}

unsigned int number_in(const State *state, const char *text, long double *out) {
    if (!text) return FN_NOT_SUPPORTED;
    if (*text == '!') return (unsigned int)strtoul(text + 1, NULL, 10);
    char *end;
    *out = strtold(text, &end);
    if (*end == '+' || *end == '-') {
        long double rate = strtold(end, &end);
        if (*end == '@') *out += rate * ((long double)now_s(state) - strtold(end + 1, NULL));
    }
    return FN_SUCCESS;
}

unsigned int number(const Call *call, long double *out, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const char *text = formatted_text(call, format, arguments);
    va_end(arguments);
    return number_in(call->state, text, out);
}

unsigned int get_uint(const Call *call, unsigned int *out, const char *key) {
    long double found;
    unsigned int code = number(call, &found, "%s", key);
    if (!code) *out = found < 0 ? (unsigned int)(int)found : (unsigned int)found;
    return code;
}

unsigned int get_ull(const Call *call, unsigned long long *out, const char *key) {
    long double found;
    unsigned int code = number(call, &found, "%s", key);
    if (!code) *out = (unsigned long long)found;
    return code;
}

unsigned int get_text(const Call *call, char *out, unsigned int length, const char *key) {
    const char *text = text_of(call, "%s", key);
    if (!text) return FN_NOT_SUPPORTED;
    if (*text == '!') return (unsigned int)strtoul(text + 1, NULL, 10);
    /* \xHH stands for a byte, so that the state can hold what is no UTF-8. */
    unsigned int at = 0;
    while (*text) {
        if (at + 1 >= length) return FN_INSUFFICIENT_SIZE;
        if (text[0] == '\\' && text[1] == 'x' && text[2] && text[3]) {
            char digits[3] = {text[2], text[3], 0};
            out[at++] = (char)strtoul(digits, NULL, 16);
            text += 4;
        } else {
            out[at++] = *text++;
        }
    }
    out[at] = 0;
    return FN_SUCCESS;
}

unsigned int whole_uint(const State *state, const char *key, unsigned int otherwise) {
    const char *text = whole_text(state, key);
    return text ? (unsigned int)strtoul(text, NULL, 10) : otherwise;
}

/* ---- handles ---- */

static const char *keyed(const State *state, const char *format, int gpu, int slot) {
    char key[KEY_SIZE];
    snprintf(key, sizeof key, format, gpu, slot);
    return whole_text(state, key);
}

static long generation_at(const State *state, int gpu, int slot) {
    const char *text = slot < 0 ? keyed(state, "gpu.%d.generation", gpu, 0)
                                : keyed(state, "gpu.%d.mig.%d.generation", gpu, slot);
    return text ? strtol(text, NULL, 10) : 0;
}

int find_gpu(const State *state, const char *uuid) {
    int count = (int)whole_uint(state, "count", 0);
    for (int gpu = 0; gpu < count; gpu++) {
        const char *found = keyed(state, "gpu.%d.uuid", gpu, 0);
        if (found && !strcmp(found, uuid)) return gpu;
    }
    return -1;
}

static int find_slot(const State *state, int gpu, const char *uuid) {
    for (int slot = 0; slot < 16; slot++) {
        const char *found = keyed(state, "gpu.%d.mig.%d.uuid", gpu, slot);
        if (found && !strcmp(found, uuid)) return slot;
    }
    return -1;
}

static Handle *interned(const char *uuid, const char *parent, long generation) {
    pthread_mutex_lock(&lock);
    Handle *handle = handles;
    while (handle && (strcmp(handle->uuid, uuid) || strcmp(handle->parent, parent) ||
                      handle->generation != generation || handle->epoch != loaded_epoch))
        handle = handle->next;
    if (!handle) {
        handle = calloc(1, sizeof *handle);
        snprintf(handle->uuid, sizeof handle->uuid, "%s", uuid);
        snprintf(handle->parent, sizeof handle->parent, "%s", parent);
        handle->generation = generation;
        handle->epoch = loaded_epoch;
        handle->next = handles;
        handles = handle;
    }
    pthread_mutex_unlock(&lock);
    return handle;
}

Handle *gpu_handle(const State *state, int gpu) {
    const char *uuid = keyed(state, "gpu.%d.uuid", gpu, 0);
    return uuid ? interned(uuid, "", generation_at(state, gpu, -1)) : NULL;
}

Handle *mig_handle(const State *state, int gpu, int slot) {
    const char *uuid = keyed(state, "gpu.%d.mig.%d.uuid", gpu, slot), *parent = keyed(state, "gpu.%d.uuid", gpu, 0);
    return uuid && parent ? interned(uuid, parent, generation_at(state, gpu, slot)) : NULL;
}

static unsigned int resolve(Call *call, Handle *handle) {
    int known = 0;
    pthread_mutex_lock(&lock);
    for (Handle *one = handles; one && !known; one = one->next) known = one == handle;
    long epoch = loaded_epoch;
    pthread_mutex_unlock(&lock);
    if (!known || handle->epoch != epoch) return FN_INVALID_ARGUMENT;
    const State *state = call->state;
    int mig = *handle->parent != 0;
    call->handle = handle;
    call->gpu = find_gpu(state, mig ? handle->parent : handle->uuid);
    call->slot = -1;
    if (call->gpu < 0) return FN_GPU_IS_LOST;
    const char *lost = keyed(state, "gpu.%d.lost", call->gpu, 0);
    if (lost && *lost == '1') return FN_GPU_IS_LOST;
    if (mig) {
        call->slot = find_slot(state, call->gpu, handle->uuid);
        if (call->slot < 0) return FN_INVALID_ARGUMENT;
        snprintf(call->prefix, sizeof call->prefix, "gpu.%d.mig.%d.", call->gpu, call->slot);
    } else {
        snprintf(call->prefix, sizeof call->prefix, "gpu.%d.", call->gpu);
    }
    return handle->generation == generation_at(state, call->gpu, call->slot) ? FN_SUCCESS : FN_INVALID_ARGUMENT;
}

int is_parent_of_mig(const Call *call) {
    const char *mode = call->slot < 0 ? text_of(call, "mig.mode") : NULL;
    return mode && *mode == '1';
}

/* ---- what every call does first ---- */

static void log_call(const char *function, const Handle *handle) {
    static int file = -2;
    pthread_mutex_lock(&lock);
    if (file == -2) {
        const char *path = getenv("FAKE_NVML_LOG");
        file = path && *path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    }
    pthread_mutex_unlock(&lock);
    if (file < 0) return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    char line[256];
    int length = snprintf(line, sizeof line, "%lld %ld %s %s\n", (long long)now.tv_sec * 1000000000 + now.tv_nsec,
                          (long)syscall(SYS_gettid), function, handle ? handle->uuid : "-");
    if (write(file, line, (size_t)length) < 0) file = -1;
}

static int matches(const char *pattern, const char *text) {
    size_t length = strlen(pattern);
    if (length && pattern[length - 1] == '*') return !strncmp(pattern, text, length - 1);
    return !strcmp(pattern, text);
}

static int use_up(const char *rule, long times) {
    if (times <= 0) return 1;
    pthread_mutex_lock(&lock);
    Used *used = used_rules;
    while (used && strcmp(used->rule, rule)) used = used->next;
    if (!used) {
        used = calloc(1, sizeof *used);
        snprintf(used->rule, sizeof used->rule, "%s", rule);
        used->next = used_rules;
        used_rules = used;
    }
    int left = used->times < times;
    used->times += left;
    pthread_mutex_unlock(&lock);
    return left;
}

/* A rule's number: `KIND.N = function number uuid times`; 0 where none applies. Its key goes to `rule`. */
static long rule_for(const State *state, const char *kind, const char *function, const Handle *handle, char *rule) {
    size_t length = strlen(kind);
    for (size_t i = first_key(state, kind); i < state->count && !strncmp(state->keys[i], kind, length); i++) {
        char pattern[96], device[96];
        long amount = 0, times = 0;
        if (sscanf(state->values[i], "%95s %ld %95s %ld", pattern, &amount, device, &times) < 2) continue;
        int here = *device == '*' || (handle && (!strcmp(device, handle->uuid) || !strcmp(device, handle->parent)));
        if (here && matches(pattern, function) && use_up(state->keys[i], times)) {
            snprintf(rule, 32, "%s", state->keys[i]);
            return amount;
        }
    }
    return 0;
}

static void wait_out(State **state, const char *function, const Handle *handle) {
    char rule[32];
    long left_ms = rule_for(*state, "delay.", function, handle, rule);
    /* In small steps: a hang ends as soon as its rule is taken out of the state. */
    while (left_ms > 0 && whole_text(*state, rule)) {
        long step = left_ms < 10 ? left_ms : 10;
        usleep((useconds_t)step * 1000);
        left_ms -= step;
        drop_state(*state);
        *state = take_state();
    }
}

static unsigned int begin(Call *call, const char *function, const Handle *handle) {
    char rule[32];
    log_call(function, handle);
    call->state = take_state();
    call->slot = -1;
    wait_out(&call->state, function, handle);
    return (unsigned int)rule_for(call->state, "fault.", function, handle, rule);
}

static long epoch_of(const State *state) {
    const char *text = whole_text(state, "epoch");
    return text ? strtol(text, NULL, 10) : 0;
}

unsigned int enter_system(Call *call, const char *function) {
    unsigned int code = begin(call, function, NULL);
    if (code) return code;
    pthread_mutex_lock(&lock);
    int running = starts > 0 && epoch_of(call->state) == loaded_epoch;
    pthread_mutex_unlock(&lock);
    return running ? FN_SUCCESS : FN_UNINITIALIZED;
}

unsigned int enter(Call *call, const char *function, Handle *handle) {
    pthread_mutex_lock(&lock);
    int known = 0;
    for (Handle *one = handles; one && !known; one = one->next) known = one == handle;
    pthread_mutex_unlock(&lock);
    unsigned int code = begin(call, function, known ? handle : NULL);
    if (code) return code;
    pthread_mutex_lock(&lock);
    int running = starts > 0 && epoch_of(call->state) == loaded_epoch;
    pthread_mutex_unlock(&lock);
    return running ? resolve(call, handle) : FN_UNINITIALIZED;
}

void leave(Call *call) {
    if (call->state) drop_state(call->state);
}

unsigned int start_library(const char *function) {
    Call call __attribute__((cleanup(leave))) = {0};
    unsigned int code = begin(&call, function, NULL);
    if (!code) code = whole_uint(call.state, "init", 0);
    if (code) return code;
    pthread_mutex_lock(&lock);
    if (starts++ == 0 || epoch_of(call.state) != loaded_epoch) loaded_epoch = epoch_of(call.state);
    pthread_mutex_unlock(&lock);
    return FN_SUCCESS;
}

unsigned int stop_library(const char *function) {
    Call call __attribute__((cleanup(leave))) = {0};
    unsigned int code = begin(&call, function, NULL);
    pthread_mutex_lock(&lock);
    if (!code && starts == 0) code = FN_UNINITIALIZED;
    if (!code) starts--;
    pthread_mutex_unlock(&lock);
    return code;
}
