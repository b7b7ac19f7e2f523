/* A stand-in for NVIDIA's management library that plays a scripted history.

   Time is counted in ticks: one for each nvmlInit and each nvmlDeviceGetCount, which
   the watcher calls once a reading; its first reading is at tick 3. The file
   FAKE_NVML_SCRIPT holds lines

       tick gpu name value

   in the order of their ticks; at its tick a name takes its value, and keeps it.
   A value of -1 is "not supported"; `gone` is the code that every call on this GPU
   returns. Three names act: `xid` queues an Xid, `hang` lets the next call sleep so many
   milliseconds, `driver` 0 takes the driver away and 1 brings it back, with the
   volatile counters at 0. NVLink's errors are reported as sums, or by each of `links` links
   (link_replays and so on, the same on each). FAKE_NVML_GPUS is the number of GPUs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS, UNINITIALIZED, INVALID, UNSUPPORTED, DRIVER = 9, TIMEOUT = 10 };
enum { TEMPERATURE, SLOWDOWN, POWER, POWER_LIMIT, UTILISATION, BUSY, USED, TOTAL, THROTTLE,
       ECC_CORRECTED, ECC_UNCORRECTED, REMAPPED, PENDING, FAILED, RETIRED, RETIREMENT,
       REPLAYS, GONE, SM_CLOCK, SM_CLOCK_MAX, MEMORY_CLOCK, MEMORY_CLOCK_MAX,
       ECC_CORRECTED_LIFETIME, ECC_UNCORRECTED_LIFETIME, REMAPPED_CORRECTABLE,
       NVLINK_REPLAYS, NVLINK_RECOVERIES, NVLINK_CRC_FLIT, NVLINK_CRC_DATA,
       LINKS, LINK_REPLAYS, LINK_RECOVERIES, LINK_CRC, RECOVERY, NAMES };
static const char *names[NAMES] = {
    "temperature", "slowdown", "power", "power_limit", "utilisation", "busy", "used", "total",
    "throttle", "ecc_corrected", "ecc_uncorrected", "remapped", "remap_pending",
    "remap_failed", "retired", "retirement_pending", "replays", "gone", "sm_clock",
    "sm_clock_max", "memory_clock", "memory_clock_max", "ecc_corrected_lifetime",
    "ecc_uncorrected_lifetime", "remapped_correctable", "nvlink_replays", "nvlink_recoveries",
    "nvlink_crc_flit", "nvlink_crc_data", "links", "link_replays", "link_recoveries", "link_crc",
    "recovery"};
static const long long healthy[NAMES] = {60, 90, 300000, 700000, 95, 40, 60000000000LL,
                                         80000000000LL, 0, 0, 0, 0, 0, 0, -1, -1, 0, 0, 1755,
                                         1980, 2619, 2619, 7, 0, 0, -1, -1, -1, -1, 4, 0, 0, 0, 0};
#define GPUS 8
typedef struct { long long is[NAMES]; } gpu_t;
typedef struct { gpu_t *gpu; unsigned long long type, xid; unsigned gi, ci; } event_t;
static gpu_t gpus[GPUS];
static event_t queue[1024];
static int queued, taken, count, loaded = 1, tick, hang, begun;
static FILE *script;
static int due = -1, due_gpu;
static char due_name[64];
static long long due_value;

static void next_line(void) {
    if (fscanf(script, "%d %d %63s %lld", &due, &due_gpu, due_name, &due_value) != 4) due = -1;
}

static void begin(void) {
    begun = 1;
    count = atoi(getenv("FAKE_NVML_GPUS"));
    for (int g = 0; g < GPUS; g++) memcpy(gpus[g].is, healthy, sizeof healthy);
    script = fopen(getenv("FAKE_NVML_SCRIPT"), "r");
    next_line();
}

static void act(gpu_t *gpu) {
    if (!strcmp(due_name, "xid")) {
        queue[queued++ % 1024] = (event_t){gpu, 8, due_value, 0, 0};
    } else if (!strcmp(due_name, "hang")) {
        hang = due_value;
    } else if (!strcmp(due_name, "driver")) {
        loaded = due_value;
        for (int g = 0; g < GPUS; g++)
            gpus[g].is[ECC_CORRECTED] = gpus[g].is[ECC_UNCORRECTED] = gpus[g].is[REPLAYS] = 0;
    } else {
        for (int n = 0; n < NAMES; n++)
            if (!strcmp(due_name, names[n])) gpu->is[n] = due_value;
    }
}

static void advance(void) {
    if (!begun) begin();
    for (tick++; due >= 0 && due <= tick; next_line()) act(&gpus[due_gpu]);
}

static int state(gpu_t *gpu) {
    if (hang) { int ms = hang; hang = 0; usleep(1000 * ms); }
    if (!loaded) return UNINITIALIZED;
    return gpu ? (int)gpu->is[GONE] : SUCCESS;
}

static int get(gpu_t *gpu, int name, long long *value) {
    int code = state(gpu);
    *value = gpu->is[name];
    return code ? code : *value < 0 ? UNSUPPORTED : SUCCESS;
}

#define GET(function, type, name) \
    int function(gpu_t *gpu, type *out) { \
        long long value; int code = get(gpu, name, &value); *out = (type)value; return code; }
GET(nvmlDeviceGetPowerUsage, unsigned, POWER)
GET(nvmlDeviceGetEnforcedPowerLimit, unsigned, POWER_LIMIT)
GET(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, THROTTLE)
GET(nvmlDeviceGetPcieReplayCounter, unsigned, REPLAYS)
GET(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, RETIREMENT)

int fake_nvml_tick(void) { return tick; }
int nvmlShutdown(void) { return state(NULL); }
int nvmlEventSetCreate(void **set) { *set = queue; return state(NULL); }
int nvmlEventSetFree(void *set) { (void)set; return state(NULL); }
int nvmlDeviceGetIndex(gpu_t *gpu, unsigned *index) { *index = gpu - gpus; return SUCCESS; }

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    advance();
    return state(NULL) ? DRIVER : SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *out) { advance(); *out = count; return state(NULL); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t **gpu) {
    if (index >= (unsigned)count) return INVALID;
    *gpu = &gpus[index];
    return state(*gpu);
}

int nvmlDeviceGetUUID(gpu_t *gpu, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-%04d-fake", (int)(gpu - gpus));
    return state(gpu);
}

int nvmlDeviceRegisterEvents(gpu_t *gpu, unsigned long long types, void *set) {
    (void)set;
    return types == 8 ? state(gpu) : UNSUPPORTED;
}

int nvmlEventSetWait_v2(void *set, event_t *event, unsigned milliseconds) {
    (void)set;
    if (state(NULL)) return UNINITIALIZED;
    if (taken < queued) { *event = queue[taken++ % 1024]; return SUCCESS; }
    usleep(1000 * milliseconds);
    return TIMEOUT;
}

int nvmlDeviceGetTemperature(gpu_t *gpu, unsigned sensor, unsigned *out) {
    long long value; int code = get(gpu, TEMPERATURE, &value);
    *out = value;
    return sensor == 0 ? code : INVALID;
}

int nvmlDeviceGetTemperatureThreshold(gpu_t *gpu, unsigned which, unsigned *out) {
    long long value; int code = get(gpu, SLOWDOWN, &value);
    *out = value;
    return which == 1 ? code : INVALID;
}

int nvmlDeviceGetUtilizationRates(gpu_t *gpu, unsigned out[2]) {
    out[0] = gpu->is[UTILISATION]; out[1] = gpu->is[BUSY];
    return state(gpu);
}

int nvmlDeviceGetMemoryInfo(gpu_t *gpu, unsigned long long out[3]) {
    out[0] = gpu->is[TOTAL]; out[1] = gpu->is[TOTAL] - gpu->is[USED]; out[2] = gpu->is[USED];
    return state(gpu);
}

int nvmlDeviceGetTotalEccErrors(gpu_t *gpu, unsigned kind, unsigned counter,
                                unsigned long long *out) {
    int volatiles = kind ? ECC_UNCORRECTED : ECC_CORRECTED;
    int lifetimes = kind ? ECC_UNCORRECTED_LIFETIME : ECC_CORRECTED_LIFETIME;
    long long value; int code = get(gpu, counter ? lifetimes : volatiles, &value);
    *out = value;
    return code;
}

int nvmlDeviceGetRemappedRows(gpu_t *gpu, unsigned *correctable, unsigned *uncorrectable,
                              unsigned *pending, unsigned *failed) {
    long long value; int code = get(gpu, REMAPPED, &value);
    *correctable = gpu->is[REMAPPED_CORRECTABLE]; *uncorrectable = value;
    *pending = gpu->is[PENDING]; *failed = gpu->is[FAILED];
    return code;
}

int nvmlDeviceGetRetiredPages(gpu_t *gpu, unsigned cause, unsigned *number,
                              unsigned long long *pages) {
    long long value; int code = get(gpu, RETIRED, &value);
    if (cause) value = 0;
    if (pages) memset(pages, 0, value * sizeof *pages);
    *number = value;
    return code;
}

static int clock_of(gpu_t *gpu, unsigned which, int sm, int memory, unsigned *out) {
    long long value; int code = get(gpu, which == 1 ? sm : memory, &value);
    *out = value;
    return which == 1 || which == 2 ? code : INVALID;
}

int nvmlDeviceGetClockInfo(gpu_t *gpu, unsigned which, unsigned *out) {
    return clock_of(gpu, which, SM_CLOCK, MEMORY_CLOCK, out);
}

int nvmlDeviceGetMaxClockInfo(gpu_t *gpu, unsigned which, unsigned *out) {
    return clock_of(gpu, which, SM_CLOCK_MAX, MEMORY_CLOCK_MAX, out);
}

typedef struct {
    unsigned field, scope; long long timestamp, latency; unsigned type, code;
    union { double d; unsigned u; unsigned long long ull; } value;
} field_t;

int nvmlDeviceGetFieldValues(gpu_t *gpu, int number, field_t *asked) {
    static const unsigned fields[][2] = {
        {52, NVLINK_REPLAYS}, {59, NVLINK_RECOVERIES}, {38, NVLINK_CRC_FLIT},
        {45, NVLINK_CRC_DATA}, {91, LINKS}, {161, LINK_REPLAYS}, {162, LINK_RECOVERIES},
        {163, LINK_CRC}, {230, RECOVERY}};
    for (field_t *one = asked; one < asked + number; one++) {
        one->code = UNSUPPORTED;
        for (unsigned n = 0; n < sizeof fields / sizeof *fields; n++) {
            if (fields[n][0] != one->field) continue;
            long long value; int code = get(gpu, fields[n][1], &value);
            int a_link = one->field >= 161 && one->field <= 163;
            int whole = one->field == 91 || one->field == 230;
            one->code = a_link && one->scope >= gpu->is[LINKS] ? INVALID : code;
            one->type = whole ? 1 : 3;
            if (whole) one->value.u = value; else one->value.ull = value;
        }
    }
    return state(gpu);
}
