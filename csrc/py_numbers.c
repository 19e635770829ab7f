/* C and Python share these numbers: they are written down in layout.h, and Python reads them here. */
#include "layout.h"
#include "p2p.h"
#include "py_types.h"

#define NUMBER(name) {#name, PLX_##name}
static const struct {
  const char *name;
  long value;
} numbers[] = {
    NUMBER(VERSION), NUMBER(MAX_WORLD), NUMBER(PAGE), NUMBER(BLOCKS), NUMBER(RECORDS), NUMBER(CALL_SITES), NUMBER(PENDING),
    /* enum plx_kind */
    NUMBER(BARRIER), NUMBER(BROADCAST), NUMBER(ALL_REDUCE), NUMBER(REDUCE), NUMBER(ALL_GATHER), NUMBER(GATHER),
    NUMBER(SCATTER), NUMBER(REDUCE_SCATTER), NUMBER(ALL_TO_ALL), NUMBER(SEND), NUMBER(RECV), NUMBER(GRADIENTS),
    NUMBER(BROADCAST_BUFFERS),
    /* enum plx_dtype */
    NUMBER(BYTES), NUMBER(BOOL), NUMBER(U8), NUMBER(I8), NUMBER(U16), NUMBER(I16), NUMBER(U32), NUMBER(I32), NUMBER(U64),
    NUMBER(I64), NUMBER(F16), NUMBER(BF16), NUMBER(F32), NUMBER(F64), NUMBER(C64), NUMBER(C128),
    /* enum plx_redop */
    NUMBER(SUM), NUMBER(AVG), NUMBER(PRODUCT), NUMBER(MIN), NUMBER(MAX), NUMBER(BAND), NUMBER(BOR), NUMBER(BXOR),
    /* enum plx_status */
    NUMBER(OK), NUMBER(MISMATCH), NUMBER(PEER_LOST), NUMBER(DEADLINE), NUMBER(INTERRUPTED), NUMBER(INVALID),
    NUMBER(NO_MEMORY), NUMBER(CLOSED),
    /* enum plx_life, and the flags of calls */
    NUMBER(ABSENT), NUMBER(JOINED), NUMBER(LEFT), NUMBER(FLAG_SPLITS),
};

int py_add_numbers(PyObject *module) {
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
    if (PyModule_AddIntConstant(module, numbers[i].name, numbers[i].value) != 0) return -1;
  return 0;
}
