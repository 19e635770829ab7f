/* This file gives Python the pools of gradients. */
#include "py_types.h"

#include <errno.h>
#include <stdlib.h>

#include "pool.h"

typedef struct {
  PyObject_HEAD
  struct plx_pool *pool; /* NULL once deleted */
} Pool;

/* Pool(address, nbytes, ((size, most), ...)) */
static int pool_init(PyObject *object, PyObject *args, PyObject *kwargs) {
  Pool *self = (Pool *)object;
  unsigned long long address, nbytes;
  PyObject *classes;
  (void)kwargs;
  if (!PyArg_ParseTuple(args, "KKO!", &address, &nbytes, &PyTuple_Type, &classes)) return -1;
  Py_ssize_t count = PyTuple_Size(classes);
  size_t *sizes = calloc((size_t)count * 2 + 1, sizeof *sizes);
  if (sizes == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    unsigned long long size, most;
    PyObject *item = PyTuple_GetItem(classes, i);
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "KK", &size, &most)) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a class is (size, most)");
      free(sizes);
      return -1;
    }
    sizes[i] = (size_t)size;
    sizes[count + i] = (size_t)most;
  }
  self->pool = plx_pool_new((void *)(uintptr_t)address, (size_t)nbytes, sizes, sizes + count, (size_t)count);
  free(sizes);
  if (self->pool != NULL) return 0;
  PyErr_SetFromErrno(PyExc_OSError);
  return -1;
}

static int is_open(Pool *self) {
  if (self->pool != NULL) return 1;
  PyErr_SetString(PyExc_ValueError, "the pool is deleted");
  return 0;
}

static PyObject *pool_enter(Pool *self, PyObject *unused) {
  (void)unused;
  if (!is_open(self)) return NULL;
  int inside = plx_pool_enter(self->pool);
  if (inside >= 0) return PyBool_FromLong(inside);
  PyErr_SetString(PyExc_OSError, "another tool has put its own functions into torch's allocator");
  return NULL;
}

static PyObject *pool_leave(Pool *self, PyObject *unused) {
  (void)self, (void)unused;
  plx_pool_leave();
  Py_RETURN_NONE;
}

static PyObject *pool_used(Pool *self, PyObject *unused) {
  (void)unused;
  return is_open(self) ? PyLong_FromSize_t(plx_pool_used(self->pool)) : NULL;
}

static PyObject *pool_delete(Pool *self, PyObject *unused) {
  (void)unused;
  if (self->pool != NULL && plx_pool_delete(self->pool)) self->pool = NULL;
  return PyBool_FromLong(self->pool == NULL);
}

/* A pool whose blocks are in use stays: its tensors must find it when they are freed. */
static void pool_dealloc(PyObject *object) {
  Pool *self = (Pool *)object;
  PyTypeObject *type = Py_TYPE(object);
  if (self->pool != NULL) plx_pool_delete(self->pool);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
}

static PyMethodDef pool_methods[] = {{"enter", (PyCFunction)pool_enter, METH_NOARGS, NULL},
                                     {"leave", (PyCFunction)pool_leave, METH_NOARGS, NULL},
                                     {"used", (PyCFunction)pool_used, METH_NOARGS, NULL},
                                     {"delete", (PyCFunction)pool_delete, METH_NOARGS, NULL},
                                     {NULL, NULL, 0, NULL}};

static PyType_Slot pool_slots[] = {{Py_tp_init, pool_init},
                                   {Py_tp_dealloc, pool_dealloc},
                                   {Py_tp_methods, pool_methods},
                                   {Py_tp_doc, (void *)"Blocks of shared memory that torch's allocator gets inside a backward."},
                                   {0, NULL}};

PyType_Spec py_pool_spec = {"phalanx._core.Pool", sizeof(Pool), 0, Py_TPFLAGS_DEFAULT, pool_slots};

static PyObject *after_fork(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  plx_pools_after_fork();
  Py_RETURN_NONE;
}

PyMethodDef py_pool_functions[] = {{"pools_after_fork", after_fork, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
