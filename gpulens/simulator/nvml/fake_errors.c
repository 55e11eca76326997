/* Error counters and field values, which say the same once more by number. */
#include <string.h>

#include "fake_calls.h"

/* ---- errors ---- */

API unsigned int nvmlDeviceGetEccMode(Handle *device, unsigned int *now, unsigned int *pending) {
    ENTER(device);
    unsigned int code = get_uint(&call, now, "ecc.mode");
    if (!code && get_uint(&call, pending, "ecc.mode.pending")) *pending = *now;
    return code;
}

static unsigned int ecc(const Call *call, unsigned long long *out, const char *key) {
    unsigned int on = 0, code = call->slot < 0 ? get_uint(call, &on, "ecc.mode") : 0;
    if (code || (call->slot < 0 && !on)) return FN_NOT_SUPPORTED;
    return get_ull(call, out, key);
}

API unsigned int nvmlDeviceGetTotalEccErrors(Handle *device, unsigned int kind, unsigned int counter,
                                             unsigned long long *out) {
    ENTER(device);
    char key[64];
    snprintf(key, sizeof key, "ecc.%u.%u", kind, counter);
    return ecc(&call, out, key);
}

API unsigned int nvmlDeviceGetMemoryErrorCounter(Handle *device, unsigned int kind, unsigned int counter,
                                                 unsigned int place, unsigned long long *out) {
    ENTER(device);
    char key[64];
    /* Volatile uncorrected errors outside DRAM (2) are told of the instances, not of a partitioned GPU. */
    if (is_parent_of_mig(&call) && kind == 1 && counter == 0 && place != 2) return FN_NOT_SUPPORTED;
    snprintf(key, sizeof key, "ecc.%u.%u.%u", kind, counter, place);
    return ecc(&call, out, key);
}

static unsigned int retired(Handle *device, const char *function, unsigned int cause, unsigned int *count,
                            unsigned long long *pages, unsigned long long *times) {
    Call call __attribute__((cleanup(leave))) = {0};
    unsigned int code = enter(&call, function, device), pages_there = 0;
    char key[64];
    if (code) return code;
    snprintf(key, sizeof key, "retired.%u", cause);
    code = get_uint(&call, &pages_there, key);
    if (code) return code;
    unsigned int room = pages ? *count : 0;
    *count = pages_there;
    if (pages_there > room) return FN_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < pages_there; i++) {
        pages[i] = 0x10000ull * (i + 1);
        if (times) times[i] = 0;
    }
    return FN_SUCCESS;
}

API unsigned int nvmlDeviceGetRetiredPages(Handle *device, unsigned int cause, unsigned int *count,
                                           unsigned long long *pages) {
    return retired(device, __func__, cause, count, pages, NULL);
}

API unsigned int nvmlDeviceGetRetiredPages_v2(Handle *device, unsigned int cause, unsigned int *count,
                                              unsigned long long *pages, unsigned long long *times) {
    return retired(device, __func__, cause, count, pages, times);
}

UINT_CALL(nvmlDeviceGetRetiredPagesPendingStatus, "retired.pending")

/* While MIG instances exist the rows are not told, the histogram is. */
API unsigned int nvmlDeviceGetRemappedRows(Handle *device, unsigned int *corrected, unsigned int *uncorrected,
                                           unsigned int *pending, unsigned int *failure) {
    ENTER(device);
    if (is_parent_of_mig(&call)) return FN_NOT_SUPPORTED;
    unsigned int code = get_uint(&call, corrected, "remap.corrected");
    if (!code) code = get_uint(&call, uncorrected, "remap.uncorrected");
    if (!code) code = get_uint(&call, pending, "remap.pending");
    return code ? code : get_uint(&call, failure, "remap.failure");
}

API unsigned int nvmlDeviceGetRemappedRows_v2(Handle *device, RemappedRowsV2 *out) {
    ENTER(device);
    if (is_parent_of_mig(&call)) return FN_NOT_SUPPORTED;
    memset(out, 0, sizeof *out);
    unsigned int code = get_uint(&call, &out->corrected_inactive, "remap.inactive.corrected");
    if (!code) code = get_uint(&call, &out->uncorrected_inactive, "remap.inactive.uncorrected");
    if (!code) code = get_uint(&call, &out->corrected_active, "remap.corrected");
    if (!code) code = get_uint(&call, &out->uncorrected_active, "remap.uncorrected");
    if (!code) code = get_uint(&call, &out->pending, "remap.pending");
    return code ? code : get_uint(&call, &out->failure, "remap.failure");
}

API unsigned int nvmlDeviceGetRowRemapperHistogram(Handle *device, RowRemapperHistogram *out) {
    ENTER(device);
    unsigned int code = get_uint(&call, &out->max, "remap.histogram.max");
    if (!code) code = get_uint(&call, &out->high, "remap.histogram.high");
    if (!code) code = get_uint(&call, &out->partial, "remap.histogram.partial");
    if (!code) code = get_uint(&call, &out->low, "remap.histogram.low");
    return code ? code : get_uint(&call, &out->none, "remap.histogram.none");
}

/* ---- field values ---- */

/* Fields that say the same as a call: they follow its key unless the state has `field.N` itself. */
static const char *field_key(unsigned int field) {
    switch (field) {
        case 1: return "ecc.mode";
        case 2: return "ecc.mode.pending";
        case 3: return "ecc.0.0";
        case 4: return "ecc.1.0";
        case 5: return "ecc.0.1";
        case 6: return "ecc.1.1";
        case 29: return "retired.0";
        case 30: return "retired.1";
        case 31: return "retired.pending";
        case 74: return "violation.0";
        case 75: return "violation.1";
        case 76: return "violation.2";
        case 77: return "violation.3";
        case 78: return "violation.4";
        case 79: return "violation.5";
        case 82: return "temperature.memory";
        case 83: return "energy_mj";
        case 91: return "nvlink.count";
        case 94: return "pcie.replay";
        case 142: return "remap.corrected";
        case 143: return "remap.uncorrected";
        case 144: return "remap.pending";
        case 145: return "remap.failure";
        case 185: return "power.average_mw";
        case 186: return "power.instant_mw";
        case 189: return "power.default_mw";
        case 190: return "power.management_mw";
        default: return NULL;
    }
}

static int is_link_field(unsigned int field) {
    return (field >= 32 && field <= 59) || field == 91 || (field >= 96 && field <= 119) ||
           (field >= 138 && field <= 141) || (field >= 148 && field <= 166) || (field >= 201 && field <= 222) ||
           (field >= 235 && field <= 250);
}

static unsigned int field_type(unsigned int field, long double value) {
    if (field >= 193 && field <= 196) return VALUE_INT;
    if (field == 82 || field == 91 || (field >= 142 && field <= 145) || (field >= 185 && field <= 192) || field == 230)
        return VALUE_UINT;
    return value < 0 ? VALUE_LONGLONG : VALUE_ULONGLONG;
}

static void fill(const Call *call, FieldValue *out) {
    const char *text = NULL, *key = field_key(out->field);
    int is_row = out->field >= 142 && out->field <= 145;
    if (!(is_parent_of_mig(call) && (is_link_field(out->field) || is_row))) {
        if (out->scope == 0xFFFFFFFF) text = text_of(call, "field.%u.all", out->field);
        else text = text_of(call, "field.%u.%u", out->field, out->scope);
        if (!text && !out->scope) text = text_of(call, "field.%u", out->field);
        if (!text && !out->scope && key) text = text_of(call, "%s", key);
    }
    long double value = 0;
    out->result = number_in(call->state, text, &value);
    out->timestamp = out->result ? 0 : (int64_t)now_us(call->state);
    out->latency_us = 0;
    out->value.ull = 0;
    out->type = field_type(out->field, value);
    if (out->type == VALUE_INT) out->value.si = (int)value;
    else if (out->type == VALUE_UINT) out->value.ui = (unsigned int)value;
    else if (out->type == VALUE_LONGLONG) out->value.sll = (long long)value;
    else out->value.ull = (unsigned long long)value;
}

API unsigned int nvmlDeviceGetFieldValues(Handle *device, int count, FieldValue *values) {
    ENTER(device);
    if (count <= 0) return FN_INVALID_ARGUMENT;
    for (int i = 0; i < count; i++) fill(&call, &values[i]);
    return FN_SUCCESS;
}
