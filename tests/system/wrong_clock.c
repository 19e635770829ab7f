/* Let a program see a wrong time of day: LD_PRELOAD this, and name in WRONG_CLOCK a file with the seconds to add.
 *
 * The file holds one int64_t, and is read at each call, so that the clock can jump. Only what tells the time of day is
 * wrong, as on a host whose clock was set wrong: the clocks that nobody can set (CLOCK_MONOTONIC) are not. A wait until
 * a time of day lasts as long as it would there. (libfaketime 0.9.10 makes a sleep on CLOCK_MONOTONIC fail.)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift;

__attribute__((constructor)) static void open_shift(void)
{
    const char *path = getenv("WRONG_CLOCK");
    const int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        void *map = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
        shift = map == MAP_FAILED ? NULL : map;
        close(fd);
    }
}

static int64_t seconds(void) { return shift ? *shift : 0; }

int clock_gettime(clockid_t clock, struct timespec *at)
{
    const int failed = (int)syscall(SYS_clock_gettime, clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += seconds();
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone)
{
    const int failed = (int)syscall(SYS_gettimeofday, at, zone);
    if (!failed) at->tv_sec += seconds();
    return failed;
}

time_t time(time_t *at)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

/* A time of a clock that counts from the machine's start is earlier than any of this century. */
static struct timespec truly(const struct timespec *until)
{
    struct timespec at = *until;
    if (at.tv_sec > 1000000000) at.tv_sec -= seconds();
    return at;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until)
{
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) *(void **)&real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"); /* the older one differs */
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    const struct timespec at = truly(until);
    return real(condition, mutex, &at);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until)
{
    static int (*real)(sem_t *, const struct timespec *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "sem_timedwait");
    const struct timespec at = truly(until);
    return real(semaphore, &at);
}
