/* These are the types and functions of the module, which py_module.c puts together. */
#ifndef PY_TYPES_H
#define PY_TYPES_H

#include "py_call.h"

extern PyType_Spec py_group_spec, py_receive_spec, py_reducer_spec, py_pool_spec, py_sums_spec,
    py_event_log_spec;
extern PyMethodDef py_memory_functions[], py_pool_functions[], py_ready_functions[], py_fold_functions[],
    py_crc32_functions[];

/* It tells that an object is a group: the one type that is built from this. */
void py_group_dealloc(PyObject *object);
/* Add every number that C and Python share, under its name without PLX_. Return 0, or -1 with an exception. */
int py_add_numbers(PyObject *module);

#endif
