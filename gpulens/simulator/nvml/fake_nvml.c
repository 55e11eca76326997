/* The calls about the system and its devices. Each says what it reads by the key of the state file; what the state
 * does not have is not supported. `fake_errors.c` has error counters and field values, `fake_activity.c` has processes,
 * GPM and events.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "fake_calls.h"

/* ---- system ---- */

API unsigned int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    return start_library(__func__);
}

API unsigned int nvmlInit_v2(void) { return start_library(__func__); }

API unsigned int nvmlShutdown(void) { return stop_library(__func__); }

API const char *nvmlErrorString(unsigned int code) {
    static const char *const texts[] = {
        "no error", "library not started", "bad argument", "not supported here", "not permitted", "started already",
        "nothing found", "buffer too small", "power cable missing", "driver not loaded", "timed out", "interrupt trouble",
        "library not there", "no such function", "InfoROM damaged", "the GPU fell off the bus", "reset needed",
        "refused by the operating system", "driver and library do not fit", "in use", "out of memory", "no data"};
    return code < sizeof texts / sizeof *texts ? texts[code] : "unknown trouble (fake library)";
}

API unsigned int nvmlSystemGetDriverVersion(char *out, unsigned int length) {
    ENTER_SYSTEM();
    return get_text(&call, out, length, "driver");
}

API unsigned int nvmlSystemGetNVMLVersion(char *out, unsigned int length) {
    ENTER_SYSTEM();
    return get_text(&call, out, length, "nvml");
}

API unsigned int nvmlSystemGetCudaDriverVersion(int *out) {
    ENTER_SYSTEM();
    return get_uint(&call, (unsigned int *)out, "cuda");
}

API unsigned int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    ENTER_SYSTEM();
    return get_uint(&call, (unsigned int *)out, "cuda");
}

API unsigned int nvmlSystemGetDriverBranch(DriverBranch *out, unsigned int length) {
    ENTER_SYSTEM();
    if (out->version != VERSION_WORD(DriverBranch, 1)) return FN_VERSION_MISMATCH;
    return get_text(&call, out->branch, length < sizeof out->branch ? length : sizeof out->branch, "branch");
}

API unsigned int nvmlDeviceGetCount_v2(unsigned int *out) {
    ENTER_SYSTEM();
    *out = whole_uint(call.state, "count", 0);
    return FN_SUCCESS;
}

/* ---- who is who ---- */

static unsigned int given(const Call *call, int gpu, Handle **out) {
    char key[KEY_SIZE];
    snprintf(key, sizeof key, "gpu.%d.lost", gpu);
    if (whole_uint(call->state, key, 0)) return FN_GPU_IS_LOST;
    snprintf(key, sizeof key, "gpu.%d.access", gpu);
    unsigned int code = whole_uint(call->state, key, 0);
    if (code) return code;
    *out = gpu_handle(call->state, gpu);
    return *out ? FN_SUCCESS : FN_INVALID_ARGUMENT;
}

API unsigned int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Handle **out) {
    ENTER_SYSTEM();
    return index < whole_uint(call.state, "count", 0) ? given(&call, (int)index, out) : FN_INVALID_ARGUMENT;
}

API unsigned int nvmlDeviceGetHandleByUUID(const char *uuid, Handle **out) {
    ENTER_SYSTEM();
    int count = (int)whole_uint(call.state, "count", 0), gpu = find_gpu(call.state, uuid);
    char key[KEY_SIZE];
    if (gpu >= 0) return given(&call, gpu, out);
    for (gpu = 0; gpu < count; gpu++) {
        for (int slot = 0; slot < 16; slot++) {
            snprintf(key, sizeof key, "gpu.%d.mig.%d.uuid", gpu, slot);
            const char *found = whole_text(call.state, key);
            if (found && !strcmp(found, uuid)) return (*out = mig_handle(call.state, gpu, slot)) ? 0 : FN_NOT_FOUND;
        }
    }
    return FN_NOT_FOUND;
}

API unsigned int nvmlDeviceGetHandleByPciBusId_v2(const char *address, Handle **out) {
    ENTER_SYSTEM();
    int count = (int)whole_uint(call.state, "count", 0);
    char key[KEY_SIZE];
    for (int gpu = 0; gpu < count; gpu++) {
        snprintf(key, sizeof key, "gpu.%d.pci.address", gpu);
        const char *found = whole_text(call.state, key);
        if (found && (!strcasecmp(found, address) || !strcasecmp(found + 4, address))) return given(&call, gpu, out);
    }
    return FN_NOT_FOUND;
}

API unsigned int nvmlDeviceGetIndex(Handle *device, unsigned int *out) {
    ENTER(device);
    *out = (unsigned int)(call.slot < 0 ? call.gpu : call.slot);
    return FN_SUCCESS;
}

API unsigned int nvmlDeviceGetPciInfo_v3(Handle *device, PciInfo *out) {
    ENTER(device);
    memset(out, 0, sizeof *out);
    unsigned int code = get_text(&call, out->bus_id, sizeof out->bus_id, "pci.address"), function;
    if (code) return code;
    if (sscanf(out->bus_id, "%x:%x:%x.%x", &out->domain, &out->bus, &out->device, &function) != 4) return FN_UNKNOWN;
    snprintf(out->legacy_bus_id, sizeof out->legacy_bus_id, "%04x:%02x:%02x.0", out->domain & 0xffff, out->bus & 0xff,
             out->device & 0xff);
    get_uint(&call, &out->device_id, "pci.device_id");
    get_uint(&call, &out->subsystem_id, "pci.subsystem_id");
    return FN_SUCCESS;
}

API unsigned int nvmlDeviceGetCudaComputeCapability(Handle *device, int *major, int *minor) {
    ENTER(device);
    const char *text = text_of(&call, "compute_capability");
    if (!text) return FN_NOT_SUPPORTED;
    return sscanf(text, "%d.%d", major, minor) == 2 ? FN_SUCCESS : FN_UNKNOWN;
}

TEXT_CALL(nvmlDeviceGetUUID, "uuid")
TEXT_CALL(nvmlDeviceGetName, "name")
TEXT_CALL(nvmlDeviceGetSerial, "serial")
TEXT_CALL(nvmlDeviceGetVbiosVersion, "vbios")
UINT_CALL(nvmlDeviceGetMinorNumber, "minor")
UINT_CALL(nvmlDeviceGetArchitecture, "architecture")
UINT_CALL(nvmlDeviceGetBrand, "brand")
UINT_CALL(nvmlDeviceGetBoardId, "board_id")
UINT_CALL(nvmlDeviceGetModuleId, "module_id")
UINT_CALL(nvmlDeviceGetNumGpuCores, "cores")
UINT_CALL(nvmlDeviceGetPersistenceMode, "persistence")
UINT_CALL(nvmlDeviceGetPerformanceState, "performance_state")

/* ---- activity and memory ---- */

API unsigned int nvmlDeviceGetUtilizationRates(Handle *device, Utilization *out) {
    ENTER(device);
    if (is_parent_of_mig(&call)) return FN_NOT_SUPPORTED;
    unsigned int code = get_uint(&call, &out->gpu, "utilization.gpu");
    return code ? code : get_uint(&call, &out->memory, "utilization.memory");
}

static unsigned int unit_utilization(const Call *call, const char *key, unsigned int *out, unsigned int *period_us) {
    if (is_parent_of_mig(call)) return FN_NOT_SUPPORTED;
    *period_us = 167000;
    return get_uint(call, out, key);
}

#define UNIT_CALL(name, key)                                                                                           \
    API unsigned int name(Handle *device, unsigned int *out, unsigned int *period_us) {                                \
        ENTER(device);                                                                                                 \
        return unit_utilization(&call, key, out, period_us);                                                           \
    }
UNIT_CALL(nvmlDeviceGetEncoderUtilization, "utilization.encoder")
UNIT_CALL(nvmlDeviceGetDecoderUtilization, "utilization.decoder")
UNIT_CALL(nvmlDeviceGetJpgUtilization, "utilization.jpeg")
UNIT_CALL(nvmlDeviceGetOfaUtilization, "utilization.ofa")

/* What the driver's ring holds: a sample each period, its value taken from the list in turn. */
API unsigned int nvmlDeviceGetSamples(Handle *device, unsigned int type, unsigned long long since_us,
                                      unsigned int *value_type, unsigned int *count, Sample *out) {
    ENTER(device);
    static const char *const now_keys[] = {"power.usage_mw",      "utilization.gpu", "utilization.memory",
                                           "utilization.encoder", "utilization.decoder", "clock.1", "clock.2"};
    int is_utilization = (type >= 1 && type <= 4) || type == 8 || type == 9;
    if (is_utilization && is_parent_of_mig(&call)) return FN_NOT_SUPPORTED;
    const char *list = text_of(&call, "samples.%u", type);
    if (!list && type < sizeof now_keys / sizeof *now_keys) list = text_of(&call, "%s", now_keys[type]);
    if (!list) return FN_NOT_SUPPORTED;
    if (*list == '!') return (unsigned int)strtoul(list + 1, NULL, 10);
    const char *items[256];
    unsigned int length = 0;
    for (const char *item = list; item && length < 256; item = strchr(item, ',') ? strchr(item, ',') + 1 : NULL)
        items[length++] = item;
    unsigned int period = 167000, ring = 100;
    get_uint(&call, &period, "samples.period_us");
    get_uint(&call, &ring, "samples.ring");
    unsigned long long newest = now_us(call.state) / period, since = since_us / period;
    unsigned long long available = newest > since ? newest - since : 0;
    if (available > ring) available = ring;
    if (!available) return FN_NOT_FOUND;
    *value_type = VALUE_UINT;
    if (!out) {
        *count = (unsigned int)available;
        return FN_SUCCESS;
    }
    if (*count > available) *count = (unsigned int)available;
    for (unsigned int i = 0; i < *count; i++) {
        unsigned long long tick = newest - available + 1 + i;
        long double value = 0;
        number_in(call.state, items[tick % length], &value);
        out[i].timestamp_us = tick * period;
        out[i].value.ull = 0;
        out[i].value.ui = (unsigned int)value;
    }
    return FN_SUCCESS;
}

API unsigned int nvmlDeviceGetMemoryInfo_v2(Handle *device, MemoryV2 *out) {
    ENTER(device);
    if (out->version != VERSION_WORD(MemoryV2, 2)) return FN_VERSION_MISMATCH;
    unsigned int code = get_ull(&call, &out->total, "memory.total");
    if (!code) code = get_ull(&call, &out->reserved, "memory.reserved");
    if (!code) code = get_ull(&call, &out->used, "memory.used");
    if (!code) out->free = out->total - out->reserved - out->used;
    return code;
}

/* The first version counts the driver's share as used. */
API unsigned int nvmlDeviceGetMemoryInfo(Handle *device, Memory *out) {
    ENTER(device);
    unsigned long long reserved = 0;
    unsigned int code = get_ull(&call, &out->total, "memory.total");
    if (!code) code = get_ull(&call, &reserved, "memory.reserved");
    if (!code) code = get_ull(&call, &out->used, "memory.used");
    out->used += reserved;
    if (!code) out->free = out->total - out->used;
    return code;
}

API unsigned int nvmlDeviceGetBAR1MemoryInfo(Handle *device, Bar1Memory *out) {
    ENTER(device);
    unsigned int code = get_ull(&call, &out->total, "bar1.total");
    if (!code) code = get_ull(&call, &out->used, "bar1.used");
    if (!code) out->free = out->total - out->used;
    return code;
}

/* ---- temperature, power, clocks ---- */

API unsigned int nvmlDeviceGetTemperatureV(Handle *device, TemperatureV1 *out) {
    ENTER(device);
    if (out->version != VERSION_WORD(TemperatureV1, 1)) return FN_VERSION_MISMATCH;
    if (out->sensor) return FN_INVALID_ARGUMENT;
    return get_uint(&call, (unsigned int *)&out->temperature, "temperature.gpu");
}

API unsigned int nvmlDeviceGetTemperature(Handle *device, unsigned int sensor, unsigned int *out) {
    ENTER(device);
    return sensor ? FN_INVALID_ARGUMENT : get_uint(&call, out, "temperature.gpu");
}

API unsigned int nvmlDeviceGetMarginTemperature(Handle *device, MarginTemperature *out) {
    ENTER(device);
    if (out->version != VERSION_WORD(MarginTemperature, 1)) return FN_VERSION_MISMATCH;
    return get_uint(&call, (unsigned int *)&out->margin, "temperature.margin");
}

NUMBERED_CALL(nvmlDeviceGetTemperatureThreshold, "temperature.threshold")
UINT_CALL(nvmlDeviceGetPowerUsage, "power.usage_mw")
UINT_CALL(nvmlDeviceGetEnforcedPowerLimit, "power.enforced_mw")
UINT_CALL(nvmlDeviceGetPowerManagementLimit, "power.management_mw")
UINT_CALL(nvmlDeviceGetPowerManagementDefaultLimit, "power.default_mw")
ULL_CALL(nvmlDeviceGetTotalEnergyConsumption, "energy_mj")
NUMBERED_CALL(nvmlDeviceGetClockInfo, "clock")
NUMBERED_CALL(nvmlDeviceGetMaxClockInfo, "clock.max")
ULL_CALL(nvmlDeviceGetCurrentClocksEventReasons, "clock.reasons")
ULL_CALL(nvmlDeviceGetCurrentClocksThrottleReasons, "clock.reasons")

API unsigned int nvmlDeviceGetViolationStatus(Handle *device, unsigned int policy, ViolationTime *out) {
    ENTER(device);
    char key[64];
    snprintf(key, sizeof key, "violation.%u", policy);
    out->reference_time = now_us(call.state);
    return get_ull(&call, &out->violation_time, key);
}

/* ---- PCIe and NVLink ---- */

UINT_CALL(nvmlDeviceGetPcieReplayCounter, "pcie.replay")
UINT_CALL(nvmlDeviceGetCurrPcieLinkGeneration, "pcie.generation")
UINT_CALL(nvmlDeviceGetMaxPcieLinkGeneration, "pcie.generation.max")
UINT_CALL(nvmlDeviceGetCurrPcieLinkWidth, "pcie.width")
UINT_CALL(nvmlDeviceGetMaxPcieLinkWidth, "pcie.width.max")
/* On hardware this blocks for about 20 ms: nobody should be found in the log with it. */
NUMBERED_CALL(nvmlDeviceGetPcieThroughput, "pcie.throughput")

static unsigned int link_value(const Call *call, unsigned int link, const char *name, unsigned long long *out) {
    char key[64];
    unsigned int links = 0, code = get_uint(call, &links, "nvlink.count");
    if (code || is_parent_of_mig(call)) return FN_NOT_SUPPORTED;
    if (link >= links) return FN_INVALID_ARGUMENT;
    snprintf(key, sizeof key, "nvlink.%u.%s", link, name);
    return get_ull(call, out, key);
}

#define LINK_CALL(name, key)                                                                                           \
    API unsigned int name(Handle *device, unsigned int link, unsigned int *out) {                                      \
        ENTER(device);                                                                                                 \
        unsigned long long found = 0;                                                                                  \
        unsigned int code = link_value(&call, link, key, &found);                                                      \
        if (!code) *out = (unsigned int)found;                                                                         \
        return code;                                                                                                   \
    }
LINK_CALL(nvmlDeviceGetNvLinkState, "state")
LINK_CALL(nvmlDeviceGetNvLinkVersion, "version")

API unsigned int nvmlDeviceGetNvLinkErrorCounter(Handle *device, unsigned int link, unsigned int counter,
                                                 unsigned long long *out) {
    ENTER(device);
    char name[32];
    snprintf(name, sizeof name, "error.%u", counter);
    return link_value(&call, link, name, out);
}

/* ---- MIG ---- */

API unsigned int nvmlDeviceGetMigMode(Handle *device, unsigned int *now, unsigned int *pending) {
    ENTER(device);
    unsigned int code = get_uint(&call, now, "mig.mode");
    if (!code && get_uint(&call, pending, "mig.pending")) *pending = *now;
    return code;
}

API unsigned int nvmlDeviceIsMigDeviceHandle(Handle *device, unsigned int *out) {
    ENTER(device);
    *out = call.slot >= 0;
    return FN_SUCCESS;
}

API unsigned int nvmlDeviceGetMaxMigDeviceCount(Handle *device, unsigned int *out) {
    ENTER(device);
    *out = 0;
    return call.slot >= 0 ? FN_INVALID_ARGUMENT : (get_uint(&call, out, "mig.max"), FN_SUCCESS);
}

API unsigned int nvmlDeviceGetMigDeviceHandleByIndex(Handle *device, unsigned int index, Handle **out) {
    ENTER(device);
    unsigned int most = 0;
    get_uint(&call, &most, "mig.max");
    if (call.slot >= 0 || index >= most) return FN_INVALID_ARGUMENT;
    *out = is_parent_of_mig(&call) ? mig_handle(call.state, call.gpu, (int)index) : NULL;
    return *out ? FN_SUCCESS : FN_NOT_FOUND;
}

API unsigned int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Handle *device, Handle **out) {
    ENTER(device);
    if (call.slot < 0) return FN_INVALID_ARGUMENT;
    *out = gpu_handle(call.state, call.gpu);
    return *out ? FN_SUCCESS : FN_NOT_FOUND;
}

static unsigned int of_instance(const Call *call, unsigned int *out, const char *key) {
    return call->slot < 0 ? FN_INVALID_ARGUMENT : get_uint(call, out, key);
}

API unsigned int nvmlDeviceGetGpuInstanceId(Handle *device, unsigned int *out) {
    ENTER(device);
    return of_instance(&call, out, "gi");
}

API unsigned int nvmlDeviceGetComputeInstanceId(Handle *device, unsigned int *out) {
    ENTER(device);
    return of_instance(&call, out, "ci");
}

API unsigned int nvmlDeviceGetAttributes_v2(Handle *device, DeviceAttributes *out) {
    ENTER(device);
    if (call.slot < 0) return FN_NOT_SUPPORTED;
    memset(out, 0, sizeof *out);
    unsigned int code = get_uint(&call, &out->multiprocessors, "attribute.multiprocessors");
    if (!code) code = get_uint(&call, &out->gpu_slices, "attribute.gpu_slices");
    if (!code) code = get_uint(&call, &out->compute_slices, "attribute.compute_slices");
    if (!code) code = get_ull(&call, &out->memory_mib, "attribute.memory_mib");
    get_uint(&call, &out->copy_engines, "attribute.copy_engines");
    get_uint(&call, &out->decoders, "attribute.decoders");
    get_uint(&call, &out->encoders, "attribute.encoders");
    get_uint(&call, &out->jpegs, "attribute.jpegs");
    get_uint(&call, &out->ofas, "attribute.ofas");
    return code;
}
