/* This file lets Python write what a rank says about itself, and read what the others say. */
#include <stdlib.h>
#include <string.h>

#include "py_group.h"

PyObject *py_group_join(PyGroup *self, PyObject *args) {
  int pid;
  unsigned long long ticks;
  if (!PyArg_ParseTuple(args, "iK", &pid, &ticks) || !py_is_open(self)) return NULL;
  struct plx_rank *me = plx_rank_of(&self->g, self->g.rank);
  me->pid = pid;
  me->start_ticks = ticks;
  atomic_store_explicit(&me->life, PLX_JOINED, memory_order_release);
  Py_RETURN_NONE;
}

/* Return the string that is the one argument, as UTF-8; NULL with an exception set if it is none, or the group is
 * closed. It is not read by "s#", whose symbol has changed: a core that Python 3.13 has built would refuse it in an
 * older Python. */
static const char *py_text_argument(PyGroup *self, PyObject *args, Py_ssize_t *length) {
  PyObject *text;
  if (!PyArg_ParseTuple(args, "U", &text) || !py_is_open(self)) return NULL;
  return PyUnicode_AsUTF8AndSize(text, length);
}

/* Remember a "file:line"; returns its index. The table is a ring: the oldest names are written over. */
PyObject *py_group_add_call_site(PyGroup *self, PyObject *args) {
  Py_ssize_t length;
  const char *text = py_text_argument(self, args, &length);
  if (text == NULL) return NULL;
  struct plx_rank *me = plx_rank_of(&self->g, self->g.rank);
  uint32_t at = atomic_fetch_add_explicit(&me->num_call_sites, 1, memory_order_relaxed) % PLX_CALL_SITES;
  if (length > (Py_ssize_t)PLX_CALL_SITE_BYTES - 1) { /* the end of a path says more than its beginning */
    text += length - (PLX_CALL_SITE_BYTES - 1);
    length = PLX_CALL_SITE_BYTES - 1;
  }
  memset(me->call_sites[at], 0, PLX_CALL_SITE_BYTES);
  memcpy(me->call_sites[at], text, (size_t)length);
  return PyLong_FromUnsignedLong(at);
}

PyObject *py_group_set_exit_reason(PyGroup *self, PyObject *args) {
  Py_ssize_t length;
  const char *text = py_text_argument(self, args, &length);
  if (text == NULL) return NULL;
  struct plx_rank *me = plx_rank_of(&self->g, self->g.rank);
  if (length > (Py_ssize_t)sizeof me->exit_reason - 1) length = sizeof me->exit_reason - 1;
  memcpy(me->exit_reason, text, (size_t)length);
  me->exit_reason[length] = 0;
  Py_RETURN_NONE;
}

static PyObject *py_text_of(const char *bytes, size_t limit) {
  return PyUnicode_DecodeUTF8(bytes, (Py_ssize_t)strnlen(bytes, limit), "replace");
}

/* Return (life, pid, start_ticks, step, finished, exit_reason) of a rank. */
PyObject *py_group_state(PyGroup *self, PyObject *arg) {
  uint32_t rank;
  if (py_to_rank(self, arg, &rank) != 0) return NULL;
  struct plx_rank *r = plx_rank_of(&self->g, rank);
  PyObject *exit_reason = py_text_of(r->exit_reason, sizeof r->exit_reason);
  if (exit_reason == NULL) return NULL;
  return Py_BuildValue("IiKKKN", atomic_load(&r->life), (int)r->pid, (unsigned long long)r->start_ticks,
                       (unsigned long long)atomic_load(&r->step), (unsigned long long)atomic_load(&r->finished), exit_reason);
}

/* Return the flight recorder of a rank, oldest first: tuples (seq, kind, dtype, redop, root, peer, count, shape,
 * enter_ns, leave_ns, status, call_site, flags). */
PyObject *py_group_records(PyGroup *self, PyObject *arg) {
  uint32_t rank;
  if (py_to_rank(self, arg, &rank) != 0) return NULL;
  struct plx_rank *owner = plx_rank_of(&self->g, rank);
  PyObject *list = PyList_New(0);
  uint64_t end = atomic_load(&owner->next_record), begin = end > PLX_RECORDS ? end - PLX_RECORDS : 0;
  for (uint64_t at = begin; list != NULL && at < end; at++) {
    struct plx_record r;
    if (!plx_record_read(owner, at, &r)) continue;
    uint32_t dims = r.ndim < PLX_MAX_DIMS ? r.ndim : PLX_MAX_DIMS;
    PyObject *shape = PyTuple_New(dims);
    PyObject *call_site = py_text_of(owner->call_sites[r.call_site % PLX_CALL_SITES], PLX_CALL_SITE_BYTES);
    for (uint32_t i = 0; shape != NULL && i < dims; i++) PyTuple_SetItem(shape, i, PyLong_FromUnsignedLongLong(r.shape[i]));
    PyObject *item = shape != NULL && call_site != NULL
                         ? Py_BuildValue("KiiiiiKNKKiNi", (unsigned long long)atomic_load(&r.seq), (int)r.kind, (int)r.dtype, (int)r.redop,
                                         (int)r.root, (int)r.peer, (unsigned long long)r.count, shape,
                                         (unsigned long long)r.enter_ns, (unsigned long long)atomic_load(&r.leave_ns),
                                         (int)r.status, call_site, (int)r.flags)
                         : NULL;
    if (item == NULL || PyList_Append(list, item) != 0) Py_CLEAR(list);
    Py_XDECREF(item);
  }
  return list;
}

/* From now on take collectives for steps of operations that the caller records with begin_record and end_record. */
PyObject *py_group_hide_steps(PyGroup *self, PyObject *unused) {
  (void)unused;
  self->g.quiet = 1;
  Py_RETURN_NONE;
}

/* Set whether the main thread waits for what comes next, on whatever thread that is: then it may spin. */
PyObject *py_group_set_awaited(PyGroup *self, PyObject *arg) {
  int awaited = PyObject_IsTrue(arg);
  if (awaited < 0) return NULL;
  self->awaited = awaited;
  Py_RETURN_NONE;
}

/* begin_record(seq, kind, dtype, redop, root, peer, count, call_site, shape): the number to pass to end_record. */
PyObject *py_group_begin_record(PyGroup *self, PyObject *const *a, Py_ssize_t n) {
  struct tail t;
  struct plx_call call = {0};
  int kind, dtype, redop, root, peer;
  uint64_t number;
  if (py_want(n, 9, "begin_record") != 0 || py_to_u64(a[0], &call.seq) || py_to_int(a[1], &kind) || py_to_int(a[2], &dtype) ||
      py_to_int(a[3], &redop) || py_to_int(a[4], &root) || py_to_int(a[5], &peer) || py_to_tail(self, a + 6, &t))
    return NULL;
  call.count = t.timeout_ns; /* the tail's first number, whatever it means */
  call.kind = (uint16_t)kind;
  call.dtype = (uint8_t)dtype;
  call.redop = (uint8_t)redop;
  call.root = root;
  plx_record_begin(&self->g, &call, &t.origin, peer, &number);
  return PyLong_FromUnsignedLongLong(number);
}

PyObject *py_group_end_record(PyGroup *self, PyObject *args) {
  unsigned long long number;
  int status;
  if (!PyArg_ParseTuple(args, "Ki", &number, &status) || !py_is_open(self)) return NULL;
  plx_record_end(&self->g, number, status);
  Py_RETURN_NONE;
}

/* Return the (code, rank) that ended the group, or (0, 0). */
PyObject *py_group_get_poison(PyGroup *self, PyObject *unused) {
  (void)unused;
  if (!py_is_open(self)) return NULL;
  uint64_t p = atomic_load(&self->g.header->poison);
  return Py_BuildValue("iI", (int)(p & 0xff), (unsigned)(p >> 8));
}

PyObject *py_group_set_poison(PyGroup *self, PyObject *args) {
  int code;
  unsigned rank;
  if (!PyArg_ParseTuple(args, "iI", &code, &rank) || !py_is_open(self)) return NULL;
  return PyLong_FromLong(plx_poison(&self->g, code, rank));
}

/* Return why the group is over, as the first rank that said so put it; it is empty if none has, or has yet to finish. */
PyObject *py_group_get_failure(PyGroup *self, PyObject *unused) {
  (void)unused;
  if (!py_is_open(self)) return NULL;
  struct plx_header *h = self->g.header;
  if (atomic_load_explicit(&h->failure_state, memory_order_acquire) != PLX_TOLD) return PyUnicode_FromString("");
  return py_text_of(h->failure, sizeof h->failure);
}

/* Say why the group is over; return False if the text is too long. What is said first stands. */
PyObject *py_group_set_failure(PyGroup *self, PyObject *args) {
  Py_ssize_t length;
  const char *text = py_text_argument(self, args, &length);
  if (text == NULL) return NULL;
  struct plx_header *h = self->g.header;
  if (length > (Py_ssize_t)sizeof h->failure - 1) Py_RETURN_FALSE;
  uint32_t untold = PLX_UNTOLD;
  if (atomic_compare_exchange_strong_explicit(&h->failure_state, &untold, PLX_TELLING, memory_order_relaxed,
                                              memory_order_relaxed)) {
    memcpy(h->failure, text, (size_t)length);
    h->failure[length] = 0;
    atomic_store_explicit(&h->failure_state, PLX_TOLD, memory_order_release);
  }
  Py_RETURN_TRUE;
}

/* Note that the program has called a collective that another thread will carry out; see plx_issue. This works on a
 * closed group, too. */
PyObject *py_group_issue(PyGroup *self, PyObject *unused) {
  (void)unused;
  plx_issue(&self->g);
  Py_RETURN_NONE;
}

/* Note that that thread has carried it out, well or not. */
PyObject *py_group_carried_out(PyGroup *self, PyObject *unused) {
  (void)unused;
  plx_carried_out(&self->g);
  Py_RETURN_NONE;
}

PyObject *py_group_alive(PyGroup *self, PyObject *arg) {
  uint32_t rank;
  if (py_to_rank(self, arg, &rank) != 0) return NULL;
  return PyBool_FromLong(plx_peer_alive(&self->g, rank));
}

PyObject *py_group_set_heaps(PyGroup *self, PyObject *args) {
  PyObject *addresses;
  unsigned long long bytes;
  if (!PyArg_ParseTuple(args, "OK", &addresses, &bytes)) return NULL;
  uint64_t *v = py_to_array(addresses, self->g.world);
  if (v == NULL) return NULL;
  free(self->g.heaps);
  self->g.heaps = (unsigned char **)v;
  self->g.heap_bytes = bytes;
  Py_RETURN_NONE;
}

/* A rank lets block `index` of the heap go; a block is free when all ranks have. */
PyObject *py_group_release(PyGroup *self, PyObject *arg) {
  uint64_t index;
  if (py_to_u64(arg, &index) != 0) return NULL;
  if (!self->closed && index < PLX_BLOCKS)
    atomic_store_explicit(&plx_rank_of(&self->g, self->g.rank)->released[index], 1, memory_order_release);
  Py_RETURN_NONE;
}

PyObject *py_group_claim(PyGroup *self, PyObject *arg) {
  uint64_t index;
  if (py_to_u64(arg, &index) != 0) return NULL;
  if (!self->closed && index < PLX_BLOCKS)
    atomic_store_explicit(&plx_rank_of(&self->g, self->g.rank)->released[index], 0, memory_order_release);
  Py_RETURN_NONE;
}

PyObject *py_group_is_released(PyGroup *self, PyObject *arg) {
  uint64_t index;
  if (py_to_u64(arg, &index) != 0) return NULL;
  int all = !self->closed && index < PLX_BLOCKS;
  for (uint32_t r = 0; all && r < self->g.world; r++)
    all = atomic_load_explicit(&plx_rank_of(&self->g, r)->released[index], memory_order_acquire);
  return PyBool_FromLong(all);
}
