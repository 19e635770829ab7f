/* This file gives Python the shared reducer. */
#include "reducer.h"

#include <stdlib.h>

#include "agreement.h"
#include "py_types.h"

typedef struct {
  PyObject_HEAD
  struct plx_reducer b;
  PyGroup *group;
} PyReducer;

static int reducer_open(PyReducer *self) { return py_is_open(self->group); }

static PyObject *reducer_begin(PyReducer *self, PyObject *const *a, Py_ssize_t n) {
  (void)a;
  if (py_want(n, 0, "begin") != 0 || !reducer_open(self)) return NULL;
  plx_reducer_begin(&self->b);
  Py_RETURN_NONE;
}

/* Mark a bucket complete, at an offset of this rank's heap, then reduce whatever is complete everywhere. Returns how many
 * slices this rank still owes. */
static PyObject *reducer_ready(PyReducer *self, PyObject *const *a, Py_ssize_t n) {
  int bucket;
  uint64_t offset;
  uint64_t slice[2]; /* the third and fourth argument, if there are any: the elements that this rank needs */
  if (n != 4 && py_want(n, 2, "ready") != 0) return NULL;
  if (py_to_int(a[0], &bucket) != 0 || py_to_u64(a[1], &offset) != 0 || !reducer_open(self)) return NULL;
  if (n == 4 && (py_to_u64(a[2], &slice[0]) != 0 || py_to_u64(a[3], &slice[1]) != 0)) return NULL;
  int code = n == 4 ? plx_reducer_ready_slice(&self->b, (uint32_t)bucket, offset, slice[0], slice[1])
                    : plx_reducer_ready(&self->b, (uint32_t)bucket, offset);
  if (code != PLX_OK) {
    PyErr_Format(PyExc_ValueError, "no bucket %d, or it lies outside the heap, or it has no such slice", bucket);
    return NULL;
  }
  uint32_t left;
  OUTSIDE_GIL(self->group, left = plx_reducer_poll(&self->b))
  return PyLong_FromUnsignedLong(left);
}

/* finish(timeout_ns, call_site) */
static PyObject *reducer_finish(PyReducer *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self->group)
  struct plx_group *g = &self->group->g;
  uint64_t timeout_ns, call_site;
  if (py_want(n, 2, "finish") != 0 || py_to_u64(a[0], &timeout_ns) != 0 || py_to_u64(a[1], &call_site) != 0) return NULL;
  struct plx_origin origin = {.call_site = (uint32_t)call_site};
  struct plx_call call = {.seq = self->b.round, .count = self->b.num_buckets, .kind = PLX_GRADIENTS, .root = -1};
  struct plx_record *record = plx_record_enter(g, &call, &origin, -1);
  BEGIN(self->group, timeout_ns)
  int code = plx_reducer_finish(&self->b, &wait);
  plx_record_leave(g, record, code);
  if (code == PLX_MISMATCH) plx_close_phase(g, &wait); /* it may be there that ranks parted: then it tells so */
  END(self->group, code)
}

/* Reducer(group, offset of the flags in the heap, ((count, dtype, redop), ...)): the same on every rank. */
static int reducer_init(PyObject *object, PyObject *args, PyObject *kwargs) {
  PyReducer *self = (PyReducer *)object;
  PyObject *group, *buckets;
  unsigned long long flags;
  (void)kwargs;
  if (!PyArg_ParseTuple(args, "OKO!", &group, &flags, &PyTuple_Type, &buckets)) return -1;
  PyTypeObject *type = Py_TYPE(group);
  if ((destructor)PyType_GetSlot(type, Py_tp_dealloc) != py_group_dealloc || ((PyGroup *)group)->closed ||
      ((PyGroup *)group)->g.heaps == NULL) {
    PyErr_SetString(PyExc_ValueError, "a reducer needs an open group whose heap is mapped");
    return -1;
  }
  struct plx_reducer *b = &self->b;
  b->g = &((PyGroup *)group)->g;
  b->flags = flags;
  b->num_buckets = (uint32_t)PyTuple_Size(buckets);
  b->buckets = calloc(b->num_buckets + 1, sizeof *b->buckets);
  if (b->buckets == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  Py_INCREF(group);
  self->group = (PyGroup *)group;
  for (uint32_t i = 0; i < b->num_buckets; i++) {
    unsigned long long count;
    int dtype, redop;
    PyObject *item = PyTuple_GetItem(buckets, i);
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "Kii", &count, &dtype, &redop)) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a bucket is (count, dtype, redop)");
      return -1;
    }
    struct plx_bucket k = {count, plx_dtype_size(dtype), plx_reduce_kernel(dtype, redop), 0, 1, 0, 0};
    if (k.kernel == NULL || count * k.width > b->g->heap_bytes) {
      PyErr_Format(PyExc_ValueError, "bucket %u: no such reduction, or it is larger than the heap", i);
      return -1;
    }
    b->buckets[i] = k;
  }
  if (flags + plx_reducer_bytes(b->num_buckets) > b->g->heap_bytes) {
    PyErr_SetString(PyExc_ValueError, "the flags lie outside the heap");
    return -1;
  }
  return 0;
}

static void reducer_dealloc(PyObject *object) {
  PyReducer *self = (PyReducer *)object;
  PyTypeObject *type = Py_TYPE(object);
  free(self->b.buckets);
  Py_XDECREF((PyObject *)self->group);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
}

#define REDUCER_FAST(name) {#name, (PyCFunction)(void (*)(void))reducer_##name, METH_FASTCALL, NULL}
static PyMethodDef reducer_methods[] = {
    REDUCER_FAST(begin), REDUCER_FAST(ready), REDUCER_FAST(finish), {NULL, NULL, 0, NULL}};

static PyType_Slot reducer_slots[] = {{Py_tp_init, reducer_init},
                                    {Py_tp_dealloc, reducer_dealloc},
                                    {Py_tp_methods, reducer_methods},
                                    {Py_tp_doc, (void *)"Buckets in the shared heap, reduced as soon as all ranks have them."},
                                    {0, NULL}};

PyType_Spec py_reducer_spec = {"phalanx._core.Reducer", sizeof(PyReducer), 0, Py_TPFLAGS_DEFAULT, reducer_slots};
