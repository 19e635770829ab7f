/* What the files that know Python share. */
#ifndef PLX_MODULE_H
#define PLX_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Adds the type `Pool` and the function `after_fork`. Returns 0, or -1 with an exception. */
int plx_add_pool(PyObject *module);

#endif
