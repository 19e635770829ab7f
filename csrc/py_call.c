/* This file surrounds an operation: it counts who is inside, releases the GIL, and reads what comes with every call. */
#include "py_call.h"

#include <sys/syscall.h>
#include <unistd.h>

int py_is_main(void) {
  static _Thread_local int answer = -1; /* each thread asks once: two system calls */
  if (answer < 0) answer = syscall(SYS_gettid) == getpid();
  return answer;
}

/* Let the memory go after close(), if no thread is inside. This keeps the error that is set. */
void py_let_go(PyGroup *self) {
  PyObject *call = self->let_go, *type, *value, *trace;
  if (!self->closed || self->inside != 0 || call == NULL) return;
  self->let_go = NULL;
  PyErr_Fetch(&type, &value, &trace);
  PyObject *result = PyObject_CallObject(call, NULL);
  if (result == NULL) PyErr_WriteUnraisable(call);
  Py_XDECREF(result);
  Py_DECREF(call);
  PyErr_Restore(type, value, trace);
}

int py_idle(void *context, uint64_t waited_ns) {
  struct patience *p = context;
  py_come_back(p->group, p->thread);
  int failed = PyErr_CheckSignals() != 0;
  if (!failed && p->group->idle != NULL && waited_ns >= 1000000000ull && waited_ns - p->said_ns >= 500000000ull) {
    p->said_ns = waited_ns;
    p->group->failed_rank = *p->failed_rank;
    PyObject *result = PyObject_CallFunction(p->group->idle, "d", (double)waited_ns * 1e-9);
    failed = result == NULL;
    Py_XDECREF(result);
  }
  p->thread = PyEval_SaveThread();
  return failed;
}

/* The mapping goes with the group: nothing may be read or written after that. Operations answer PLX_CLOSED; what has
 * another answer raises. */
int py_is_open(PyGroup *self) {
  if (!self->closed) return 1;
  PyObject *errors = PyImport_ImportModule("phalanx.errors");
  PyObject *kind = errors != NULL ? PyObject_GetAttrString(errors, "ClosedError") : NULL;
  if (kind != NULL)
    PyErr_SetString(kind, "the group was destroyed in this process, or this process was forked from a rank.\n"
                          "Create the group again, or start processes that communicate with spawn.");
  Py_XDECREF(kind);
  Py_XDECREF(errors);
  return 0;
}

int py_to_tail(PyGroup *self, PyObject *const *args, struct tail *t) {
  PyObject *shape = args[2];
  uint64_t call_site_number;
  if (!py_is_open(self)) return -1;
  if (py_to_u64(args[0], &t->timeout_ns) != 0 || py_to_u64(args[1], &call_site_number) != 0) return -1;
  Py_ssize_t dims = PyTuple_Check(shape) ? PyTuple_Size(shape) : 0;
  uint32_t ndim = dims < (Py_ssize_t)PLX_MAX_DIMS ? (uint32_t)dims : PLX_MAX_DIMS;
  t->origin = (struct plx_origin){.call_site = (uint32_t)call_site_number, .ndim = ndim, .shape = t->shape};
  for (Py_ssize_t i = 0; i < dims; i++) { /* further dimensions count in the last one, so that the product is right */
    uint64_t size;
    if (py_to_u64(PyTuple_GetItem(shape, i), &size) != 0) return -1;
    t->shape[i < ndim ? i : ndim - 1] = i < ndim ? size : t->shape[ndim - 1] * size;
  }
  return 0;
}

int py_to_rank(PyGroup *self, PyObject *o, uint32_t *rank) {
  int r;
  if (py_to_int(o, &r) != 0 || !py_is_open(self)) return -1;
  if (r < 0 || r >= (int)self->g.world) {
    PyErr_Format(PyExc_ValueError, "no rank %d in a group of %u", r, self->g.world);
    return -1;
  }
  *rank = (uint32_t)r;
  return 0;
}
