/* The part of NVML's binary interface that the fake library serves, declared anew from the layouts that the Python
 * binding (nvidia-ml-py) documents in its ctypes structures; tests compare the sizes with that binding.
 */
#ifndef FAKE_NVML_H
#define FAKE_NVML_H

#include <stdint.h>

enum {
    FN_SUCCESS = 0,
    FN_UNINITIALIZED = 1,
    FN_INVALID_ARGUMENT = 2,
    FN_NOT_SUPPORTED = 3,
    FN_NO_PERMISSION = 4,
    FN_NOT_FOUND = 6,
    FN_INSUFFICIENT_SIZE = 7,
    FN_DRIVER_NOT_LOADED = 9,
    FN_TIMEOUT = 10,
    FN_FUNCTION_NOT_FOUND = 13,
    FN_GPU_IS_LOST = 15,
    FN_NO_DATA = 21,
    FN_VERSION_MISMATCH = 25,
    FN_UNKNOWN = 999
};

enum { VALUE_DOUBLE = 0, VALUE_UINT = 1, VALUE_ULONG = 2, VALUE_ULONGLONG = 3, VALUE_LONGLONG = 4, VALUE_INT = 5 };

/* The first word of a versioned structure: its size and its version. */
#define VERSION_WORD(type, version) ((unsigned int)(sizeof(type) | ((version) << 24)))

typedef struct {
    unsigned long long total, free, used;
} Memory;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} MemoryV2;

typedef struct {
    unsigned long long total, free, used;
} Bar1Memory;

typedef struct {
    char legacy_bus_id[16];
    unsigned int domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} PciInfo;

typedef struct {
    unsigned int gpu, memory;
} Utilization;

typedef union {
    double d;
    unsigned int ui;
    unsigned long ul;
    unsigned long long ull;
    long long sll;
    int si;
    unsigned short us;
} Value;

typedef struct {
    unsigned long long timestamp_us;
    Value value;
} Sample;

typedef struct {
    unsigned long long reference_time, violation_time;
} ViolationTime;

typedef struct {
    uint32_t field, scope;
    int64_t timestamp, latency_us;
    unsigned int type;
    unsigned int result;
    Value value;
} FieldValue;

typedef struct {
    unsigned int max, high, partial, low, none;
} RowRemapperHistogram;

typedef struct {
    unsigned int corrected_active, corrected_inactive, uncorrected_active, uncorrected_inactive, pending, failure;
} RemappedRowsV2;

typedef struct {
    unsigned int version, sensor;
    int temperature;
} TemperatureV1;

typedef struct {
    unsigned int version;
    int margin;
} MarginTemperature;

typedef struct {
    void *device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
} EventData;

typedef struct {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
} ProcessInfo;

typedef struct {
    unsigned int pid;
    unsigned long long timestamp_us;
    unsigned int sm, memory, encoder, decoder;
} ProcessSample;

typedef struct {
    unsigned int multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gpu_slices, compute_slices;
    unsigned long long memory_mib;
} DeviceAttributes;

typedef struct {
    unsigned int version;
    char branch[80];
} DriverBranch;

typedef struct {
    const char *short_name, *long_name, *unit;
} GpmMetricInfo;

typedef struct {
    unsigned int id, result;
    double value;
    GpmMetricInfo info;
} GpmMetric;

/* The binding's array is longer or shorter from version to version; `count` bounds what is read. */
typedef struct {
    unsigned int version, count;
    void *first, *second;
    GpmMetric metrics[1];
} GpmMetricsGet;

typedef struct {
    unsigned int version, supported;
} GpmSupport;

#endif
