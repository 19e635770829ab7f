/* A library with NVML's names that counts GPUs: FAKE_GPUS of them, each with FAKE_MIG MIG mode, FAKE_THROTTLE reasons. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long u64;

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}
static int index_of(void *device) { return (int)(size_t)device - 1; }

int nvmlInit_v2(void) { return number("FAKE_NVML_ERROR", 0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return error == 9 ? "Driver Not Loaded" : "Unknown Error"; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)number("FAKE_GPUS", 1);
    return 0;
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "580.159.04");
    return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(size_t)(index + 1);
    return 0;
}
int nvmlDeviceGetName(void *device, char *text, unsigned size) {
    (void)device;
    snprintf(text, size, "Fake H100");
    return 0;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    snprintf(text, size, "GPU-fake-%d", index_of(device));
    return 0;
}
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *pending) {
    (void)device;
    *now = *pending = (unsigned)number("FAKE_MIG", 0);
    return 0;
}
int nvmlDeviceGetComputeMode(void *device, int *mode) {
    (void)device;
    *mode = number("FAKE_COMPUTE_MODE", 0);
    return 0;
}
int nvmlDeviceGetPersistenceMode(void *device, int *mode) {
    (void)device;
    *mode = 1;
    return 0;
}
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *mhz) {
    (void)device;
    *mhz = kind == 2 ? 2619 : 345;
    return 0;
}
int nvmlDeviceGetMaxClockInfo(void *device, int kind, unsigned *mhz) {
    (void)device;
    *mhz = kind == 2 ? 2619 : 1980;
    return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, u64 *reasons) {
    (void)device;
    *reasons = (u64)number("FAKE_THROTTLE", 1);
    return 0;
}
int nvmlDeviceGetP2PStatus(void *one, void *other, int kind, int *status) {
    (void)one, (void)other, (void)kind;
    *status = number("FAKE_P2P", 0);
    return 0;
}
