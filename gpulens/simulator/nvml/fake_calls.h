/* Calls that only read one figure: each is made from its name and the key of the state. */
#ifndef FAKE_CALLS_H
#define FAKE_CALLS_H

#include <stdio.h>

#include "fake_state.h"

#define UINT_CALL(name, key)                                                                                           \
    API unsigned int name(Handle *device, unsigned int *out) {                                                         \
        ENTER(device);                                                                                                 \
        return get_uint(&call, out, key);                                                                              \
    }
#define ULL_CALL(name, key)                                                                                            \
    API unsigned int name(Handle *device, unsigned long long *out) {                                                   \
        ENTER(device);                                                                                                 \
        return get_ull(&call, out, key);                                                                               \
    }
#define TEXT_CALL(name, key)                                                                                           \
    API unsigned int name(Handle *device, char *out, unsigned int length) {                                            \
        ENTER(device);                                                                                                 \
        return get_text(&call, out, length, key);                                                                      \
    }
/* A value that the caller numbers: PREFIX.N. */
#define NUMBERED_CALL(name, key)                                                                                       \
    API unsigned int name(Handle *device, unsigned int which, unsigned int *out) {                                     \
        ENTER(device);                                                                                                 \
        char full[64];                                                                                                 \
        snprintf(full, sizeof full, key ".%u", which);                                                                 \
        return get_uint(&call, out, full);                                                                             \
    }

#endif
