/* The scripted world of the fake library: its text, its handles, and what every call does first. */
#ifndef FAKE_STATE_H
#define FAKE_STATE_H

#include <stddef.h>

#include "fake_nvml.h"

#define API __attribute__((visibility("default")))
#define KEY_SIZE 192

/* One consistent reading of the state file; never changed after it was made. */
typedef struct {
    char *text;
    const char **keys, **values;
    size_t count;
    int users;
} State;

/* What a caller holds: a GPU or a MIG instance by its UUID, in one generation of one load of the driver. */
typedef struct Handle {
    struct Handle *next;
    char uuid[96];
    char parent[96]; /* empty for a GPU */
    long generation, epoch;
} Handle;

/* One call under way. `prefix` leads to the device's keys. */
typedef struct {
    State *state;
    Handle *handle;
    int gpu, slot; /* slot: -1 for a GPU */
    char prefix[64];
} Call;

/* Logs, waits and fails as the state says, then resolves the handle. 0, or the code to return. */
unsigned int enter(Call *call, const char *function, Handle *handle);
unsigned int enter_system(Call *call, const char *function);
void leave(Call *call);

#define ENTER(handle)                                                                                                  \
    Call call __attribute__((cleanup(leave))) = {0};                                                                   \
    unsigned int refused = enter(&call, __func__, handle);                                                             \
    if (refused) return refused
#define ENTER_SYSTEM()                                                                                                 \
    Call call __attribute__((cleanup(leave))) = {0};                                                                   \
    unsigned int refused = enter_system(&call, __func__);                                                              \
    if (refused) return refused

unsigned int start_library(const char *function);
unsigned int stop_library(const char *function);

/* A value's text by its key under the call's device (or whole), NULL where the state does not have it. */
const char *text_of(const Call *call, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *whole_text(const State *state, const char *key);
/* The index of the first key that is not below this one. */
size_t first_key(const State *state, const char *key);
/* A number now; ramps are worked out. 0, NOT_SUPPORTED where it is missing, or the code that stands for it. */
unsigned int number_in(const State *state, const char *text, long double *out);
unsigned int number(const Call *call, long double *out, const char *format, ...) __attribute__((format(printf, 3, 4)));
unsigned int get_uint(const Call *call, unsigned int *out, const char *key);
unsigned int get_ull(const Call *call, unsigned long long *out, const char *key);
unsigned int get_text(const Call *call, char *out, unsigned int length, const char *key);
unsigned int whole_uint(const State *state, const char *key, unsigned int otherwise);

/* The clock of ramps in seconds, and of time stamps in microseconds. */
double now_s(const State *state);
unsigned long long now_us(const State *state);

/* Whether MIG is on and this is the parent, which then has no figures of its own. */
int is_parent_of_mig(const Call *call);

Handle *gpu_handle(const State *state, int gpu);
Handle *mig_handle(const State *state, int gpu, int slot);
State *take_state(void);
void drop_state(State *state);
/* Where a GPU stands in the state; -1 if it is not there. */
int find_gpu(const State *state, const char *uuid);

#endif
