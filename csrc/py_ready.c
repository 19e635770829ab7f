/* This file lets Python wait for descriptors. */
#include <errno.h>

#include "py_types.h"
#include "ready.h"

/* wait_ready(fd, bell, spin_ns, timeout_ms): what plx_wait_ready says; a signal handler may raise. */
static PyObject *core_wait_ready(PyObject *module, PyObject *args) {
  int fd, bell, timeout_ms, found;
  unsigned long long spin_ns;
  (void)module;
  if (!PyArg_ParseTuple(args, "iiKi", &fd, &bell, &spin_ns, &timeout_ms)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  found = plx_wait_ready(fd, bell, spin_ns, timeout_ms);
  Py_END_ALLOW_THREADS
  if (found == -EINTR) {
    if (PyErr_CheckSignals() != 0) return NULL;
    found = 0;
  }
  if (found < 0) {
    errno = -found;
    return PyErr_SetFromErrno(PyExc_OSError);
  }
  return PyLong_FromLong(found);
}

PyMethodDef py_ready_functions[] = {{"wait_ready", core_wait_ready, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
