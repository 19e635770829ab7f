/* What a memory profiler does to torch's allocator: its own functions in the place of those that libc10 calls. */
#include <stdlib.h>

#include "interpose.h"

static long calls;

static int their_posix_memalign(void **block, size_t alignment, size_t size) {
  calls++;
  return posix_memalign(block, alignment, size);
}

static void their_free(void *block) { free(block); }

/* The C library's, as memray does. Returns how many slots there are. */
long patch_libc(void) {
  struct plx_slots aligned, freed;
  plx_find_slots("libc10.so", "posix_memalign", &aligned);
  plx_find_slots("libc10.so", "free", &freed);
  if (plx_fill_slots(&freed, (void *)their_free) != 0 || plx_fill_slots(&aligned, (void *)their_posix_memalign) != 0)
    return -1;
  return (long)(aligned.count + freed.count);
}

long num_calls(void) { return calls; }

/* Torch's own, back to what they were: whoever had a place there has lost it. */
long patch_torch(void) {
  struct plx_slots allocated, freed;
  plx_find_slots("libc10.so", "_ZN3c109alloc_cpuEm", &allocated);
  plx_find_slots("libc10.so", "_ZN3c108free_cpuEPv", &freed);
  if (plx_fill_slots(&freed, freed.definition) != 0 || plx_fill_slots(&allocated, allocated.definition) != 0) return -1;
  return (long)(allocated.count + freed.count);
}
