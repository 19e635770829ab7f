/* This file gives Python the collectives of a group. */
#include <stdlib.h>

#include "call.h"
#include "collectives.h"
#include "early.h"
#include "py_group.h"

PyObject *py_group_barrier(PyGroup *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  if (py_want(n, 3, "barrier") != 0 || py_to_tail(self, a, &t) != 0) return NULL;
  BEGIN(self, t.timeout_ns)
  int code = plx_barrier(&self->g, &wait, &t.origin);
  END(self, code)
}

PyObject *py_group_all_reduce(PyGroup *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *in, *out;
  uint64_t count;
  int dtype, redop, root;
  if (py_want(n, 9, "all_reduce") != 0 || py_to_address(a[0], &in) || py_to_address(a[1], &out) || py_to_u64(a[2], &count) ||
      py_to_int(a[3], &dtype) || py_to_int(a[4], &redop) || py_to_int(a[5], &root) || py_to_tail(self, a + 6, &t) ||
      !py_has_memory(in, count) || !py_has_memory(out, count))
    return NULL;
  BEGIN(self, t.timeout_ns)
  int code = plx_all_reduce(&self->g, &wait, &t.origin, in, out, count, dtype, redop, root);
  END(self, code)
}

PyObject *py_group_broadcast(PyGroup *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *data;
  uint64_t bytes;
  int dtype, root;
  if (py_want(n, 7, "broadcast") != 0 || py_to_address(a[0], &data) || py_to_u64(a[1], &bytes) || py_to_int(a[2], &dtype) ||
      py_to_int(a[3], &root) || py_to_tail(self, a + 4, &t) || !py_has_memory(data, bytes))
    return NULL;
  BEGIN(self, t.timeout_ns)
  int code = plx_broadcast(&self->g, &wait, &t.origin, data, bytes, dtype, root);
  END(self, code)
}

/* broadcast_buffers(data, bytes, area, dtype, root, number, timeout_ns, call_site, shape) */
PyObject *py_group_broadcast_buffers(PyGroup *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *data, *area;
  uint64_t bytes, number;
  int dtype, root;
  if (py_want(n, 9, "broadcast_buffers") != 0 || py_to_address(a[0], &data) || py_to_u64(a[1], &bytes) ||
      py_to_address(a[2], &area) || py_to_int(a[3], &dtype) || py_to_int(a[4], &root) || py_to_u64(a[5], &number) ||
      py_to_tail(self, a + 6, &t) || !py_has_memory(data, bytes))
    return NULL;
  BEGIN(self, t.timeout_ns)
  int code = plx_broadcast_buffers(&self->g, &wait, &t.origin, data, bytes, area, dtype, root, number);
  END(self, code)
}

PyObject *py_group_reduce_scatter(PyGroup *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *out;
  int dtype, redop;
  if (py_want(n, 8, "reduce_scatter") != 0 || py_to_address(a[2], &out) || py_to_int(a[3], &dtype) || py_to_int(a[4], &redop) ||
      py_to_tail(self, a + 5, &t))
    return NULL;
  uint64_t *in = py_to_array(a[0], self->g.world), *counts = in ? py_to_array(a[1], self->g.world) : NULL;
  if (counts == NULL || !py_have_memory(a[0], in, counts, self->g.world) || !py_has_memory(out, counts[self->g.rank])) {
    free(in);
    free(counts);
    return NULL;
  }
  BEGIN(self, t.timeout_ns)
  int code = plx_reduce_scatter(&self->g, &wait, &t.origin, (const void *const *)in, counts, out, dtype, redop);
  free(in);
  free(counts);
  END(self, code)
}

PyObject *py_group_gather(PyGroup *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *in;
  int dtype, root;
  if (py_want(n, 8, "gather") != 0 || py_to_address(a[0], &in) || py_to_int(a[3], &dtype) || py_to_int(a[4], &root) ||
      py_to_tail(self, a + 5, &t))
    return NULL;
  uint64_t *out = py_to_array(a[1], self->g.world), *bytes = out ? py_to_array(a[2], self->g.world) : NULL;
  if (bytes == NULL || !py_has_memory(in, bytes[self->g.rank]) || !py_have_memory(a[1], out, bytes, self->g.world)) {
    free(out);
    free(bytes);
    return NULL;
  }
  BEGIN(self, t.timeout_ns)
  int code = plx_gather(&self->g, &wait, &t.origin, in, (void *const *)out, bytes, dtype, root);
  free(out);
  free(bytes);
  END(self, code)
}

PyObject *py_group_scatter(PyGroup *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *out;
  uint64_t bytes;
  int dtype, root;
  if (py_want(n, 8, "scatter") != 0 || py_to_address(a[1], &out) || py_to_u64(a[2], &bytes) || py_to_int(a[3], &dtype) ||
      py_to_int(a[4], &root) || py_to_tail(self, a + 5, &t))
    return NULL;
  uint64_t *in = py_to_array(a[0], self->g.world);
  if (in == NULL) return NULL;
  for (uint32_t r = 0; r < self->g.world; r++)
    if ((a[0] != Py_None && !py_has_memory((void *)(uintptr_t)in[r], bytes)) || !py_has_memory(out, bytes)) {
      free(in);
      return NULL;
    }
  BEGIN(self, t.timeout_ns)
  int code = plx_scatter(&self->g, &wait, &t.origin, (const void *const *)in, out, bytes, dtype, root);
  free(in);
  END(self, code)
}

PyObject *py_group_all_to_all(PyGroup *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  int dtype, splits;
  if (py_want(n, 9, "all_to_all") != 0 || py_to_int(a[4], &dtype) || py_to_int(a[5], &splits) ||
      py_to_tail(self, a + 6, &t))
    return NULL;
  uint64_t *v[4] = {NULL, NULL, NULL, NULL};
  for (int i = 0; i < 4; i++)
    if ((v[i] = py_to_array(a[i], self->g.world)) == NULL) {
      while (i-- > 0) free(v[i]);
      return NULL;
    }
  if (!py_have_memory(a[0], v[0], v[1], self->g.world) || !py_have_memory(a[2], v[2], v[3], self->g.world)) {
    for (int i = 0; i < 4; i++) free(v[i]);
    return NULL;
  }
  BEGIN(self, t.timeout_ns)
  int code = plx_all_to_all(&self->g, &wait, &t.origin, (const void *const *)v[0], v[1], (void *const *)v[2], v[3], dtype,
                            splits);
  for (int i = 0; i < 4; i++) free(v[i]);
  END(self, code)
}
