/* Processes, GPM samples and events: what comes in lists and over time. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fake_state.h"

/* ---- processes ---- */

/* `process.TYPE.N = pid bytes gi ci`, with `-` for a figure that there is not. The list that is fetched may be longer
 * than the one whose size was asked, by `process.TYPE.grow`. */
static unsigned int list_processes(Handle *device, const char *function, const char *type, unsigned int *count,
                                   ProcessInfo *out) {
    Call call __attribute__((cleanup(leave))) = {0};
    unsigned int code = enter(&call, function, device);
    if (code) return code;
    char key[64];
    unsigned int there = 0, grow = 0;
    snprintf(key, sizeof key, "process.%s.count", type);
    code = get_uint(&call, &there, key);
    if (code) return code;
    snprintf(key, sizeof key, "process.%s.grow", type);
    get_uint(&call, &grow, key);
    unsigned int room = out ? *count : 0;
    if (!out && grow) there -= grow < there ? grow : there;
    *count = there;
    if (there > room) return FN_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < there; i++) {
        const char *text = text_of(&call, "process.%s.%u", type, i);
        char used[32] = "-", gi[16] = "-", ci[16] = "-";
        memset(&out[i], 0, sizeof out[i]);
        if (text) sscanf(text, "%u %31s %15s %15s", &out[i].pid, used, gi, ci);
        out[i].used = *used == '-' ? ~0ull : strtoull(used, NULL, 10);
        out[i].gpu_instance = *gi == '-' ? 0xFFFFFFFF : (unsigned int)strtoul(gi, NULL, 10);
        out[i].compute_instance = *ci == '-' ? 0xFFFFFFFF : (unsigned int)strtoul(ci, NULL, 10);
    }
    return FN_SUCCESS;
}

#define PROCESS_CALL(name, type)                                                                                       \
    API unsigned int name(Handle *device, unsigned int *count, ProcessInfo *out) {                                     \
        return list_processes(device, __func__, type, count, out);                                                     \
    }
PROCESS_CALL(nvmlDeviceGetComputeRunningProcesses_v3, "compute")
PROCESS_CALL(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics")
PROCESS_CALL(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps")

/* `process.sample.N = pid age_us sm memory encoder decoder`: who ran how long ago; `age_us` counts back from now, and -1
 * stands for a sample without a time stamp, which no time given keeps out. */
API unsigned int nvmlDeviceGetProcessUtilization(Handle *device, ProcessSample *out, unsigned int *count,
                                                 unsigned long long since_us) {
    ENTER(device);
    if (call.slot >= 0 || is_parent_of_mig(&call)) return FN_NOT_SUPPORTED;
    unsigned int there = 0, room = out ? *count : 0, newer = 0;
    unsigned int code = get_uint(&call, &there, "process.sample.count");
    if (code) return code;
    for (unsigned int i = 0; i < there; i++) {
        ProcessSample sample = {0};
        unsigned long long age = 0;
        const char *text = text_of(&call, "process.sample.%u", i);
        if (!text || sscanf(text, "%u %llu %u %u %u %u", &sample.pid, &age, &sample.sm, &sample.memory, &sample.encoder,
                            &sample.decoder) < 4)
            continue;
        sample.timestamp_us = age == ~0ull ? 0 : now_us(call.state) - age;
        if (age != ~0ull && sample.timestamp_us <= since_us) continue;
        if (newer < room) out[newer] = sample;
        newer++;
    }
    *count = newer;
    if (!newer) return FN_NOT_FOUND;
    return newer > room ? FN_INSUFFICIENT_SIZE : FN_SUCCESS;
}

/* Confidential computing is off on every profile. That a driver has the first of these calls and not the second tells
 * the early ones of R535, whose process lists have longer entries. */
API unsigned int nvmlDeviceGetConfComputeMemSizeInfo(Handle *device, void *out) {
    ENTER(device);
    (void)out;
    return FN_NOT_SUPPORTED;
}

API unsigned int nvmlDeviceGetRunningProcessDetailList(Handle *device, void *out) {
    ENTER(device);
    (void)out;
    return FN_NOT_SUPPORTED;
}

/* ---- GPM ---- */

#define GPM_ITEMS 128
#define GPM_SHORTEST_S 0.1
#define GPM_FIRST_CUMULATIVE 248

/* A moment: the integrals of all metrics until then, as the state has them (`gpm.ID`). */
typedef struct {
    double at_s;
    char uuid[96];
    long generation;
    int gi, items;
    unsigned int ids[GPM_ITEMS];
    long double integrals[GPM_ITEMS];
    unsigned int results[GPM_ITEMS];
} GpmSample;

API unsigned int nvmlGpmQueryDeviceSupport(Handle *device, GpmSupport *out) {
    ENTER(device);
    if (out->version != 1) return FN_VERSION_MISMATCH;
    out->supported = 0;
    if (call.slot >= 0) snprintf(call.prefix, sizeof call.prefix, "gpu.%d.", call.gpu);
    unsigned int code = get_uint(&call, &out->supported, "gpm.supported");
    return code == FN_NOT_SUPPORTED ? FN_SUCCESS : code;
}

API unsigned int nvmlGpmSampleAlloc(GpmSample **out) {
    ENTER_SYSTEM();
    return (*out = calloc(1, sizeof **out)) ? FN_SUCCESS : 20;
}

API unsigned int nvmlGpmSampleFree(GpmSample *sample) {
    ENTER_SYSTEM();
    free(sample);
    return FN_SUCCESS;
}

static unsigned int take_sample(Call *call, int gi, GpmSample *out) {
    char key[KEY_SIZE];
    unsigned int supported = 0;
    snprintf(key, sizeof key, "gpu.%d.gpm.supported", call->gpu);
    supported = whole_uint(call->state, key, 0);
    if (!supported) return FN_NOT_SUPPORTED;
    memset(out, 0, sizeof *out);
    out->at_s = now_s(call->state);
    out->gi = gi;
    snprintf(out->uuid, sizeof out->uuid, "%s", call->handle->uuid);
    snprintf(key, sizeof key, "%sgeneration", call->prefix);
    out->generation = (long)whole_uint(call->state, key, 0);
    int length = snprintf(key, sizeof key, "%sgpm.", call->prefix);
    const State *state = call->state;
    for (size_t i = first_key(state, key); i < state->count && !strncmp(state->keys[i], key, (size_t)length); i++) {
        char *end;
        unsigned int id = (unsigned int)strtoul(state->keys[i] + length, &end, 10);
        if (*end || end == state->keys[i] + length || out->items == GPM_ITEMS) continue;
        out->ids[out->items] = id;
        out->results[out->items] = number_in(state, state->values[i], &out->integrals[out->items]);
        out->items++;
    }
    return FN_SUCCESS;
}

API unsigned int nvmlGpmSampleGet(Handle *device, GpmSample *sample) {
    ENTER(device);
    return sample ? take_sample(&call, -1, sample) : FN_INVALID_ARGUMENT;
}

API unsigned int nvmlGpmMigSampleGet(Handle *device, unsigned int gi, GpmSample *sample) {
    ENTER(device);
    if (!sample) return FN_INVALID_ARGUMENT;
    for (int slot = 0; slot < 16 && is_parent_of_mig(&call); slot++) {
        char key[KEY_SIZE];
        snprintf(key, sizeof key, "gpu.%d.mig.%d.gi", call.gpu, slot);
        if (!whole_text(call.state, key) || whole_uint(call.state, key, 0) != gi) continue;
        snprintf(call.prefix, sizeof call.prefix, "gpu.%d.mig.%d.", call.gpu, slot);
        return take_sample(&call, (int)gi, sample);
    }
    return call.slot >= 0 ? FN_INVALID_ARGUMENT : FN_NOT_FOUND;
}

static int item_of(const GpmSample *sample, unsigned int id) {
    for (int i = 0; i < sample->items; i++)
        if (sample->ids[i] == id) return i;
    return -1;
}

/* The mean over the window between two samples of one thing. */
API unsigned int nvmlGpmMetricsGet(GpmMetricsGet *request) {
    ENTER_SYSTEM();
    if (request->version != 1) return FN_VERSION_MISMATCH;
    const GpmSample *first = request->first, *second = request->second;
    if (!first || !second || strcmp(first->uuid, second->uuid) || first->gi != second->gi ||
        first->generation != second->generation)
        return FN_INVALID_ARGUMENT;
    double window = second->at_s - first->at_s;
    if (window < 0) return FN_INVALID_ARGUMENT;
    /* What the real library says to a shorter window is not known; that there is nothing to tell yet is our choice. */
    if (window < GPM_SHORTEST_S - 1e-9) return FN_NO_DATA;
    for (unsigned int i = 0; i < request->count; i++) {
        GpmMetric *metric = &request->metrics[i];
        int a = item_of(first, metric->id), b = item_of(second, metric->id);
        metric->value = 0;
        metric->result = a < 0 || b < 0 ? (unsigned int)FN_NOT_SUPPORTED : second->results[b];
        if (metric->result) continue;
        if (metric->id >= GPM_FIRST_CUMULATIVE && metric->id <= 332) metric->value = (double)second->integrals[b];
        else metric->value = (double)((second->integrals[b] - first->integrals[a]) / (long double)window);
        if (metric->value < 0) metric->value = 0;
    }
    return FN_SUCCESS;
}

/* ---- events ---- */

typedef struct {
    int count;
    unsigned long long last;
    char uuids[64][96];
    unsigned long long masks[64];
} EventSet;

static pthread_mutex_t set_lock = PTHREAD_MUTEX_INITIALIZER;

static unsigned long long last_event(const State *state) {
    const char *text = whole_text(state, "event.last");
    return text ? strtoull(text, NULL, 10) : 0;
}

API unsigned int nvmlEventSetCreate(EventSet **out) {
    ENTER_SYSTEM();
    *out = calloc(1, sizeof **out);
    return *out ? FN_SUCCESS : 20;
}

API unsigned int nvmlEventSetFree(EventSet *set) {
    ENTER_SYSTEM();
    free(set);
    return FN_SUCCESS;
}

API unsigned int nvmlDeviceGetSupportedEventTypes(Handle *device, unsigned long long *out) {
    ENTER(device);
    return get_ull(&call, out, "events");
}

/* Nothing from before is told: the first registration sets the mark. */
API unsigned int nvmlDeviceRegisterEvents(Handle *device, unsigned long long mask, EventSet *set) {
    ENTER(device);
    unsigned long long supported = 0;
    unsigned int code = get_ull(&call, &supported, "events");
    if (code || (mask & ~supported)) return code ? code : FN_NOT_SUPPORTED;
    pthread_mutex_lock(&set_lock);
    if (!set->count) set->last = last_event(call.state);
    int place = 0;
    while (place < set->count && strcmp(set->uuids[place], call.handle->uuid)) place++;
    if (place < 64) {
        snprintf(set->uuids[place], sizeof set->uuids[place], "%s", call.handle->uuid);
        set->masks[place] = mask;
        if (place == set->count) set->count++;
    }
    pthread_mutex_unlock(&set_lock);
    return FN_SUCCESS;
}

/* `event.N = uuid type data gi ci`: 1 when one that this set waits for was taken. */
static int take_event(const State *state, EventSet *set, EventData *out) {
    unsigned long long last = last_event(state);
    while (set->last < last) {
        char key[KEY_SIZE], uuid[96], gi[16] = "-", ci[16] = "-";
        unsigned long long type = 0, data = 0;
        snprintf(key, sizeof key, "event.%llu", ++set->last);
        const char *text = whole_text(state, key);
        if (!text || sscanf(text, "%95s %llu %llu %15s %15s", uuid, &type, &data, gi, ci) < 3) continue;
        for (int i = 0; i < set->count; i++) {
            if (strcmp(set->uuids[i], uuid) || !(set->masks[i] & type)) continue;
            int gpu = find_gpu(state, uuid);
            out->device = gpu < 0 ? NULL : gpu_handle(state, gpu);
            out->type = type;
            out->data = data;
            out->gpu_instance = *gi == '-' ? 0xFFFFFFFF : (unsigned int)strtoul(gi, NULL, 10);
            out->compute_instance = *ci == '-' ? 0xFFFFFFFF : (unsigned int)strtoul(ci, NULL, 10);
            if (out->device) return 1;
        }
    }
    return 0;
}

static int one_is_lost(const State *state, const EventSet *set) {
    for (int i = 0; i < set->count; i++) {
        char key[KEY_SIZE];
        int gpu = find_gpu(state, set->uuids[i]);
        snprintf(key, sizeof key, "gpu.%d.lost", gpu);
        if (gpu < 0 || whole_uint(state, key, 0)) return 1;
    }
    return 0;
}

API unsigned int nvmlEventSetWait_v2(EventSet *set, EventData *out, unsigned int timeout_ms) {
    ENTER_SYSTEM();
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const double until = (double)now.tv_sec + (double)now.tv_nsec / 1e9 + timeout_ms / 1e3;
    for (;;) {
        pthread_mutex_lock(&set_lock);
        int found = take_event(call.state, set, out), lost = !found && one_is_lost(call.state, set);
        pthread_mutex_unlock(&set_lock);
        if (found) return FN_SUCCESS;
        if (lost) return FN_GPU_IS_LOST;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((double)now.tv_sec + (double)now.tv_nsec / 1e9 >= until) return FN_TIMEOUT;
        usleep(5000);
        drop_state(call.state);
        call.state = take_state();
    }
}
