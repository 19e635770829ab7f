/* This file interposes functions; interpose.h says which and why. Source: System V ABI, chapter 5 (dynamic linking). */
#include "interpose.h"

#include <elf.h>
#include <link.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#define IS_IMPORT(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#elif defined(__aarch64__)
#define IS_IMPORT(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#else
#define IS_IMPORT(type) 0 /* no slots are found, and the caller does without */
#endif

struct search {
  const char *library, *symbol;
  struct plx_slots *slots;
};

/* The loader of glibc has made these entries absolute; others leave them relative to the library. */
static const void *absolute(ElfW(Addr) base, ElfW(Addr) value) {
  return (const void *)(value < base ? base + value : value);
}

static void scan(struct search *s, ElfW(Addr) base, const ElfW(Rela) *relocations, size_t bytes,
                 const ElfW(Sym) *symbols, const char *strings) {
  if (relocations == NULL) return;
  for (size_t i = 0; i < bytes / sizeof *relocations; i++) {
    const ElfW(Rela) *r = &relocations[i];
    if (!IS_IMPORT(ELF64_R_TYPE(r->r_info))) continue;
    const ElfW(Sym) *symbol = &symbols[ELF64_R_SYM(r->r_info)];
    if (strcmp(strings + symbol->st_name, s->symbol) != 0) continue;
    if (symbol->st_shndx != SHN_UNDEF) s->slots->definition = (void *)(base + symbol->st_value);
    if (s->slots->count < sizeof s->slots->at / sizeof *s->slots->at)
      s->slots->at[s->slots->count++] = (void **)(base + r->r_offset);
  }
}

static int look(struct dl_phdr_info *info, size_t size, void *context) {
  struct search *s = context;
  (void)size;
  const char *slash = strrchr(info->dlpi_name, '/'), *name = slash != NULL ? slash + 1 : info->dlpi_name;
  if (strcmp(name, s->library) != 0) return 0;
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type == PT_GNU_RELRO) { /* whole pages, as the loader of glibc counts them */
      uintptr_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
      s->slots->sealed_from = start & ~(page - 1);
      s->slots->sealed_to = (start + info->dlpi_phdr[i].p_memsz) & ~(page - 1);
    }
  }
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    const ElfW(Rela) *calls = NULL, *others = NULL;
    size_t call_bytes = 0, other_bytes = 0;
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    for (const ElfW(Dyn) *d = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr); d->d_tag != DT_NULL; d++) {
      switch (d->d_tag) {
      case DT_JMPREL: calls = absolute(info->dlpi_addr, d->d_un.d_ptr); break;
      case DT_PLTRELSZ: call_bytes = d->d_un.d_val; break;
      case DT_RELA: others = absolute(info->dlpi_addr, d->d_un.d_ptr); break;
      case DT_RELASZ: other_bytes = d->d_un.d_val; break;
      case DT_SYMTAB: symbols = absolute(info->dlpi_addr, d->d_un.d_ptr); break;
      case DT_STRTAB: strings = absolute(info->dlpi_addr, d->d_un.d_ptr); break;
      default: break;
      }
    }
    if (symbols == NULL || strings == NULL) return 1;
    scan(s, info->dlpi_addr, calls, call_bytes, symbols, strings);
    scan(s, info->dlpi_addr, others, other_bytes, symbols, strings);
  }
  return 1;
}

void plx_find_slots(const char *library, const char *symbol, struct plx_slots *slots) {
  struct search s = {library, symbol, slots};
  slots->count = 0;
  slots->definition = NULL;
  slots->sealed_from = slots->sealed_to = 0;
  dl_iterate_phdr(look, &s);
}

int plx_fill_slots(const struct plx_slots *slots, void *function) {
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  for (size_t i = 0; i < slots->count; i++) {
    /* Part of the table is read-only since the loader was done with it (RELRO), so that a stray write cannot send a call
     * elsewhere. The rest stays writable: there the loader fills slots when they are first used. */
    uintptr_t start = (uintptr_t)slots->at[i] & ~(page - 1);
    int is_sealed = start >= slots->sealed_from && start < slots->sealed_to;
    if (is_sealed && mprotect((void *)start, page, PROT_READ | PROT_WRITE) != 0) return -1;
    __atomic_store_n(slots->at[i], function, __ATOMIC_RELEASE);
    if (is_sealed && mprotect((void *)start, page, PROT_READ) != 0) return -1;
  }
  return 0;
}

int plx_slots_hold(const struct plx_slots *slots, const void *function) {
  for (size_t i = 0; i < slots->count; i++)
    if (__atomic_load_n(slots->at[i], __ATOMIC_RELAXED) != function) return 0;
  return 1;
}
