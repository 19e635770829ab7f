/* This file checks the arguments that come from Python. */
#include "py_arguments.h"

#include <stdlib.h>

int py_want(Py_ssize_t have, Py_ssize_t need, const char *name) {
  if (have == need) return 0;
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, need, have);
  return -1;
}

uint64_t *py_to_array(PyObject *o, uint32_t world) {
  uint64_t *v = calloc(world, sizeof *v);
  if (v == NULL) {
    PyErr_NoMemory();
    return NULL;
  }
  if (o == Py_None) return v;
  if (!PyTuple_Check(o) || PyTuple_Size(o) != (Py_ssize_t)world) {
    PyErr_Format(PyExc_ValueError, "expected a tuple of %u numbers, one per rank", world);
    free(v);
    return NULL;
  }
  for (uint32_t i = 0; i < world; i++)
    if (py_to_u64(PyTuple_GetItem(o, i), &v[i]) != 0) {
      free(v);
      return NULL;
    }
  return v;
}

int py_has_memory(const void *at, uint64_t size) {
  if (at != NULL || size == 0) return 1;
  PyErr_Format(PyExc_ValueError, "address 0 with a size of %llu: the tensor has no memory", (unsigned long long)size);
  return 0;
}

int py_have_memory(PyObject *given, const uint64_t *at, const uint64_t *sizes, uint32_t world) {
  for (uint32_t r = 0; given != Py_None && r < world; r++)
    if (!py_has_memory((const void *)(uintptr_t)at[r], sizes[r])) return 0;
  return 1;
}
