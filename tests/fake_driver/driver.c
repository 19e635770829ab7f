// The few functions of NVIDIA's driver and of NVML that a program begins with. Each call is a line in a file.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void record(const char *function)
{
    const char *path = getenv("FAKE_DRIVER_CALLS"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    char line[512];
    int length = snprintf(line, sizeof line, "%d %s %s\n", (int)getpid(), function, visible ? visible : "-");
    int fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (fd >= 0) {
        if (write(fd, line, (size_t)length) != length) abort();
        close(fd);
    }
}

static int count(void)
{
    const char *gpus = getenv("FAKE_DRIVER_GPUS");
    return gpus ? atoi(gpus) : 0;
}

int nvmlInit_v2(void) { record("nvmlInit"); return 0; }
int nvmlShutdown(void) { record("nvmlShutdown"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *gpus) { record("nvmlDeviceGetCount"); *gpus = (unsigned)count(); return 0; }

int cuInit(unsigned flags) { (void)flags; record("cuInit"); return 0; }
int cuDriverGetVersion(int *version) { record("cuDriverGetVersion"); *version = 12080; return 0; }
int cuDeviceGetCount(int *gpus) { record("cuDeviceGetCount"); *gpus = count(); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; record("cuDevicePrimaryCtxRetain"); *context = NULL; return 0; }
