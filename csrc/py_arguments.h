/* These functions read numbers, addresses and tuples from Python. Each returns 0, or -1 with an exception, unless it
 * says more. */
#ifndef PY_ARGUMENTS_H
#define PY_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

static inline int py_to_u64(PyObject *o, uint64_t *v) {
  *v = PyLong_AsUnsignedLongLong(o);
  return *v == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static inline int py_to_int(PyObject *o, int *v) {
  *v = (int)PyLong_AsLong(o);
  return *v == -1 && PyErr_Occurred() ? -1 : 0;
}

static inline int py_to_address(PyObject *o, void **v) {
  uint64_t u;
  if (py_to_u64(o, &u) != 0) return -1;
  *v = (void *)(uintptr_t)u;
  return 0;
}

/* Check that there are as many arguments as needed. */
int py_want(Py_ssize_t have, Py_ssize_t need, const char *name);
/* Return `world` numbers from a tuple; NULL with an error set. None gives zeros. */
uint64_t *py_to_array(PyObject *o, uint32_t world);
/* Return whether there is memory at an address. A tensor without any (fake, wrapped, freed) has address 0; to go there
 * would end the process. */
int py_has_memory(const void *at, uint64_t size);
/* Check the same for `world` addresses; `given` is the tuple that they came from, or None where this rank has none. */
int py_have_memory(PyObject *given, const uint64_t *at, const uint64_t *sizes, uint32_t world);

#endif
