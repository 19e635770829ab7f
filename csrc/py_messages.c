/* This file gives Python the messages of point to point. */
#include <stddef.h>

#include "p2p.h"
#include "py_group.h"

PyObject *py_group_send(PyGroup *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *data;
  uint64_t bytes;
  int dst, tag, dtype;
  if (py_want(n, 8, "send") != 0 || py_to_address(a[0], &data) || py_to_u64(a[1], &bytes) || py_to_int(a[2], &dst) ||
      py_to_int(a[3], &tag) || py_to_int(a[4], &dtype) || py_to_tail(self, a + 5, &t) || !py_has_memory(data, bytes))
    return NULL;
  BEGIN(self, t.timeout_ns)
  int code = plx_send(&self->g, &wait, &t.origin, data, bytes, (uint32_t)dst, (uint32_t)tag, dtype);
  END(self, code)
}

/* Send without waiting; return None where that cannot be done. */
PyObject *py_group_send_now(PyGroup *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *data;
  uint64_t bytes;
  int dst, tag, dtype;
  if (py_want(n, 8, "send_now") != 0 || py_to_address(a[0], &data) || py_to_u64(a[1], &bytes) || py_to_int(a[2], &dst) ||
      py_to_int(a[3], &tag) || py_to_int(a[4], &dtype) || py_to_tail(self, a + 5, &t) || !py_has_memory(data, bytes))
    return NULL;
  BEGIN(self, t.timeout_ns)
  int code = plx_send_now(&self->g, &wait, &t.origin, data, bytes, (uint32_t)dst, (uint32_t)tag, dtype);
  if (code == PLX_WOULD_WAIT) {
    py_come_back(self, patience.thread);
    py_leave(self, is_main);
    Py_RETURN_NONE;
  }
  END(self, code)
}

/* This is a posted receive. The caller that posts it keeps it, and the tensor, until it is over. */
typedef struct {
  PyObject_HEAD
  struct plx_receive r;
} Receive;

static PyObject *receive_get_status(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromLong(atomic_load_explicit(&((Receive *)self)->r.status, memory_order_acquire));
}

static PyObject *receive_get_source(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLong(((Receive *)self)->r.from);
}

static void receive_dealloc(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
}

static PyGetSetDef receive_getset[] = {{"status", receive_get_status, NULL, NULL, NULL},
                                       {"source", receive_get_source, NULL, NULL, NULL},
                                       {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot receive_slots[] = {{Py_tp_dealloc, receive_dealloc},
                                      {Py_tp_getset, receive_getset},
                                      {Py_tp_doc, (void *)"A receive that was posted: status -1 until it is over."},
                                      {0, NULL}};

PyType_Spec py_receive_spec = {"phalanx._core.Receive", sizeof(Receive), 0, Py_TPFLAGS_DEFAULT, receive_slots};

static Receive *to_receive(PyObject *o) {
  if ((destructor)PyType_GetSlot(Py_TYPE(o), Py_tp_dealloc) == receive_dealloc) return (Receive *)o;
  PyErr_SetString(PyExc_TypeError, "expected a Receive");
  return NULL;
}

/* post(receive, data, bytes, src, tag, dtype, handed_over, timeout_ns, call_site, shape): its status, -1 while it waits;
 * with `handed_over` take_ended will give it back then. */
PyObject *py_group_post(PyGroup *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *data;
  uint64_t bytes;
  int src, tag, dtype, handed_over;
  if (py_want(n, 10, "post") != 0 || py_to_address(a[1], &data) || py_to_u64(a[2], &bytes) || py_to_int(a[3], &src) ||
      py_to_int(a[4], &tag) || py_to_int(a[5], &dtype) || py_to_int(a[6], &handed_over) || py_to_tail(self, a + 7, &t) ||
      !py_has_memory(data, bytes))
    return NULL;
  Receive *receive = to_receive(a[0]);
  if (receive == NULL) return NULL;
  uint64_t now = plx_now_ns();
  receive->r.data = data;
  receive->r.bytes = bytes;
  receive->r.deadline_ns = t.timeout_ns < UINT64_MAX - now ? now + t.timeout_ns : UINT64_MAX;
  receive->r.src = src;
  receive->r.tag = (uint32_t)tag;
  receive->r.dtype = (uint32_t)dtype;
  receive->r.handed_over = handed_over;
  int code;
  if (handed_over) Py_INCREF(receive); /* for the list of those that have ended, which may be the last to let go of it */
  OUTSIDE_GIL(self, code = plx_post(&self->g, &t.origin, &receive->r))
  if (handed_over && code != PLX_PENDING) Py_DECREF(receive);
  return PyLong_FromLong(code);
}

/* set_timeout(receive, timeout_ns): end the group if the receive is not over by then. */
PyObject *py_group_set_timeout(PyGroup *self, PyObject *const *a, Py_ssize_t n) {
  uint64_t timeout_ns;
  if (py_want(n, 2, "set_timeout") != 0 || py_to_u64(a[1], &timeout_ns) != 0) return NULL;
  Receive *receive = to_receive(a[0]);
  if (receive == NULL) return NULL;
  uint64_t now = plx_now_ns();
  uint64_t deadline_ns = timeout_ns < UINT64_MAX - now ? now + timeout_ns : UINT64_MAX;
  if (!self->closed) OUTSIDE_GIL(self, plx_set_deadline(&self->g, &receive->r, deadline_ns))
  Py_RETURN_NONE;
}

/* progress(receive, limit_ns): wait until it or another posted receive is over, or the limit passes. */
PyObject *py_group_progress(PyGroup *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  uint64_t limit_ns;
  if (py_want(n, 2, "progress") != 0 || py_to_u64(a[1], &limit_ns) != 0) return NULL;
  Receive *receive = to_receive(a[0]);
  if (receive == NULL) return NULL;
  BEGIN(self, limit_ns)
  int code = plx_progress(&self->g, &wait, &receive->r);
  END(self, code)
}

/* Append receives that were to be handed over to the list `to`, if any, and let go of them. */
static int hand_over(struct plx_receive *ended, PyObject *to) {
  int failed = 0;
  while (ended != NULL) {
    PyObject *receive = (PyObject *)(void *)((char *)ended - offsetof(Receive, r));
    ended = ended->next;
    failed |= to != NULL && PyList_Append(to, receive) != 0;
    Py_DECREF(receive);
  }
  return failed;
}

/* take_ended(to): append the receives that are over and were to be handed over; no signal handler runs in between. */
PyObject *py_group_take_ended(PyGroup *self, PyObject *to) {
  if (!py_is_open(self)) return NULL;
  struct plx_receive *ended;
  OUTSIDE_GIL(self, ended = plx_take_ended(&self->g))
  if (hand_over(ended, to) != 0) return NULL;
  Py_RETURN_NONE;
}

void py_drop_ended(PyGroup *self) { hand_over(plx_last_ended(self->g.mailbox), NULL); }

PyObject *py_group_poll(PyGroup *self, PyObject *unused) {
  (void)unused;
  if (!py_is_open(self)) return NULL;
  OUTSIDE_GIL(self, plx_poll_messages(&self->g))
  Py_RETURN_NONE;
}

/* Take in messages while no thread waits; this returns when a receive is over, or after stop_progress_thread(). */
PyObject *py_group_progress_thread(PyGroup *self, PyObject *unused) {
  (void)unused;
  if (!py_is_open(self)) return NULL;
  OUTSIDE_GIL(self, plx_progress_thread(&self->g))
  Py_RETURN_NONE;
}

PyObject *py_group_stop_progress_thread(PyGroup *self, PyObject *unused) {
  (void)unused;
  if (!py_is_open(self)) return NULL;
  OUTSIDE_GIL(self, plx_stop_progress_thread(&self->g))
  Py_RETURN_NONE;
}
