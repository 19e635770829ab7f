/* Function interposition makes the calls of one loaded library to an imported function go to ours instead.
 *
 * The library's global offset table has a slot for each function that it imports; the slot is what we write. Memory
 * profilers do the same. Nothing else in the process changes: other libraries have tables of their own.
 */
#ifndef PLX_INTERPOSE_H
#define PLX_INTERPOSE_H

#include <stddef.h>
#include <stdint.h>

/* It says where a library keeps the addresses of one function that it calls: one slot for calls, one for its address
 * taken. */
struct plx_slots {
  void **at[4];
  size_t count;
  uintptr_t sealed_from, sealed_to; /* the part of the table that the loader has made read-only, page by page */
  void *definition; /* the function itself, where the library is the one that defines it; else NULL */
};

/* Find the slots of `symbol` in the first loaded library whose file name is `library`. There may be none. */
void plx_find_slots(const char *library, const char *symbol, struct plx_slots *slots);
/* Write `function` into all slots; pages that are read-only are so again afterwards. Return 0, or -1 with errno where
 * the system does not let us. */
int plx_fill_slots(const struct plx_slots *slots, void *function);
/* Return whether all slots still hold `function`: no other code has written them since. */
int plx_slots_hold(const struct plx_slots *slots, const void *function);

#endif
