/* The core for Python, but for the pools (module_pool.c): addresses and sizes in, a status out, the GIL released in between. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "module.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "attendance.h"
#include "board.h"
#include "collectives.h"
#include "early.h"
#include "p2p.h"
#include "recorder.h"
#include "reduce.h"
#include "word.h"

typedef struct {
  PyObject_HEAD
  struct plx_group g;
  PyObject *idle; /* called with the seconds waited, from the first second on; may raise */
  int culprit;
  int closed;
  uint64_t background_spin_ns; /* for threads other than the main one */
  int awaited; /* the main thread waits for what another does here */
  /* Counted with the GIL held. The memory goes with the last who is inside, whoever closes the group meanwhile. */
  int inside;           /* threads in an operation; a signal handler's own operation counts again */
  int main_inside;      /* of these, the main thread, which alone runs signal handlers */
  PyObject *let_go;     /* called once, when the group is closed and nobody is inside */
  _Atomic int parked;   /* the process ends: who is inside stays there */
} Group;

static int is_main(void) {
  static _Thread_local int answer = -1; /* asked once per thread: two system calls */
  if (answer < 0) answer = syscall(SYS_gettid) == getpid();
  return answer;
}

/* A thread in the background must not take the core from the one that computes, where a rank has no core to spare. */
static uint64_t spin_of(const Group *self) {
  return is_main() || self->awaited ? self->g.spin_ns : self->background_spin_ns;
}

static void enter(Group *self) {
  self->inside++;
  self->main_inside += is_main();
}

/* After close(): let the memory go, if nobody is inside. Keeps the error that is set. */
static void let_go(Group *self) {
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

/* Take the GIL, on the way out or to ask something. At the end of the process never again: the interpreter would end this
 * thread in the middle of whatever C++ called it, which aborts the process, or its error would be printed to streams
 * that are going. The threads that come here are daemons; the rest was joined before. */
static void come_back(Group *self, PyThreadState *thread) {
  while (atomic_load_explicit(&self->parked, memory_order_acquire)) pause();
  PyEval_RestoreThread(thread);
}

static void leave(Group *self) {
  self->inside--;
  self->main_inside -= is_main();
  let_go(self);
}

/* Waiting: every slice, take the GIL for a moment so that Ctrl-C works and the user hears about long waits. */
struct patience {
  PyThreadState *thread;
  Group *group;
  uint64_t said_ns;
  const int32_t *culprit; /* whom it waits for, as far as is known */
};

static int idle(void *context, uint64_t waited_ns) {
  struct patience *p = context;
  come_back(p->group, p->thread);
  int failed = PyErr_CheckSignals() != 0;
  if (!failed && p->group->idle != NULL && waited_ns >= 1000000000ull && waited_ns - p->said_ns >= 500000000ull) {
    p->said_ns = waited_ns;
    p->group->culprit = *p->culprit;
    PyObject *result = PyObject_CallFunction(p->group->idle, "d", (double)waited_ns * 1e-9);
    failed = result == NULL;
    Py_XDECREF(result);
  }
  p->thread = PyEval_SaveThread();
  return failed;
}

#define BEGIN(self, timeout_ns, spin)                                                                   \
  struct patience patience = {NULL, (self), 0, NULL};                                                   \
  struct plx_wait wait = {UINT64_MAX, (spin), idle, &patience, -1};                                     \
  patience.culprit = &wait.culprit;                                                                     \
  uint64_t begun_ns = plx_now_ns();                                                                     \
  if ((timeout_ns) < UINT64_MAX - begun_ns) wait.deadline_ns = begun_ns + (timeout_ns);                 \
  enter(self);                                                                                          \
  patience.thread = PyEval_SaveThread();

/* Whoever was inside when this process left hears that, and not what woke it. */
#define END(self, code)                                               \
  come_back(self, patience.thread);                                   \
  (self)->culprit = wait.culprit;                                     \
  int answer = (self)->closed && (code) != PLX_OK ? PLX_CLOSED : (code); \
  leave(self);                                                        \
  if ((code) == PLX_INTERRUPTED && PyErr_Occurred()) return NULL;      \
  return PyLong_FromLong(answer);

/* What asks nobody while it waits, if it waits at all. */
#define OUTSIDE_GIL(self, call) \
  enter(self);                  \
  {                             \
    PyThreadState *thread = PyEval_SaveThread(); \
    call;                       \
    come_back(self, thread);    \
  }                             \
  leave(self);

/* A collective's `code` is the call's, made again for as long as the ranks find themselves apart; that they come further
 * in between is a sign of life, so each attempt has the whole time. */
#define COLLECTIVE(self, t, call)                                                                    \
  (self)->g.role = (t).role;                                                                         \
  (self)->g.site = (t).origin.site;                                                                  \
  int code = (call);                                                                                 \
  while (code == PLX_APART) {                                                                        \
    wait.deadline_ns = (t).timeout_ns < UINT64_MAX - plx_now_ns() ? plx_now_ns() + (t).timeout_ns : UINT64_MAX; \
    code = plx_stand_in(&(self)->g, &wait);                                                          \
    if (code == PLX_OK) code = (call);                                                               \
    else plx_give_up(&(self)->g, code);                                                              \
  }

/* Arguments. Every operation ends with (timeout_ns, site, shape). */
static int to_u64(PyObject *o, uint64_t *v) {
  *v = PyLong_AsUnsignedLongLong(o);
  return *v == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static int to_int(PyObject *o, int *v) {
  *v = (int)PyLong_AsLong(o);
  return *v == -1 && PyErr_Occurred() ? -1 : 0;
}

static int to_address(PyObject *o, void **v) {
  uint64_t u;
  if (to_u64(o, &u) != 0) return -1;
  *v = (void *)(uintptr_t)u;
  return 0;
}

struct tail {
  uint64_t timeout_ns;
  uint32_t role; /* PLX_FLAG_* of a collective: the bits of `site` above its lower 16 */
  struct plx_origin origin;
  uint64_t shape[PLX_MAX_DIMS];
};

/* The mapping goes with the group: nothing may be read or written after that. Operations answer PLX_CLOSED; what has
 * another answer raises. */
static int is_open(Group *self) {
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

#define ANSWER_IF_CLOSED(self) \
  if ((self)->closed) return PyLong_FromLong(PLX_CLOSED);

static int to_tail(Group *self, PyObject *const *args, struct tail *t) {
  uint64_t site;
  if (!is_open(self)) return -1;
  if (to_u64(args[0], &t->timeout_ns) != 0 || to_u64(args[1], &site) != 0) return -1;
  Py_ssize_t dims = PyTuple_Check(args[2]) ? PyTuple_Size(args[2]) : 0;
  t->origin.site = (uint32_t)site & 0xffff;
  t->role = (uint32_t)(site >> 16);
  t->origin.ndim = (uint32_t)dims;
  for (Py_ssize_t i = 0; i < dims && i < (Py_ssize_t)PLX_MAX_DIMS; i++)
    if (to_u64(PyTuple_GetItem(args[2], i), &t->shape[i]) != 0) return -1;
  t->origin.shape = t->shape;
  return 0;
}

static int want(Py_ssize_t have, Py_ssize_t need, const char *name) {
  if (have == need) return 0;
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, need, have);
  return -1;
}

/* `world` numbers from a tuple; NULL with an error set. None gives zeros. */
static uint64_t *to_array(PyObject *o, uint32_t world) {
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
    if (to_u64(PyTuple_GetItem(o, i), &v[i]) != 0) {
      free(v);
      return NULL;
    }
  return v;
}

/* A tensor without memory (fake, wrapped, freed) has address 0; to go there would end the process. */
static int has_memory(const void *at, uint64_t size) {
  if (at != NULL || size == 0) return 1;
  PyErr_Format(PyExc_ValueError, "address 0 with a size of %llu: the tensor has no memory", (unsigned long long)size);
  return 0;
}

/* The same for `world` addresses; `given` is the tuple that they came from, or None where this rank has none. */
static int have_memory(PyObject *given, const uint64_t *at, const uint64_t *sizes, uint32_t world) {
  for (uint32_t r = 0; given != Py_None && r < world; r++)
    if (!has_memory((const void *)(uintptr_t)at[r], sizes[r])) return 0;
  return 1;
}

static PyObject *group_barrier(Group *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  if (want(n, 3, "barrier") != 0 || to_tail(self, a, &t) != 0) return NULL;
  BEGIN(self, t.timeout_ns, spin_of(self))
  COLLECTIVE(self, t, plx_barrier(&self->g, &wait, &t.origin))
  END(self, code)
}

static PyObject *group_all_reduce(Group *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *in, *out;
  uint64_t count;
  int dtype, redop, root;
  if (want(n, 9, "all_reduce") != 0 || to_address(a[0], &in) || to_address(a[1], &out) || to_u64(a[2], &count) ||
      to_int(a[3], &dtype) || to_int(a[4], &redop) || to_int(a[5], &root) || to_tail(self, a + 6, &t) ||
      !has_memory(in, count) || !has_memory(out, count))
    return NULL;
  BEGIN(self, t.timeout_ns, spin_of(self))
  COLLECTIVE(self, t, plx_all_reduce(&self->g, &wait, &t.origin, in, out, count, dtype, redop, root))
  END(self, code)
}

static PyObject *group_broadcast(Group *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *data;
  uint64_t bytes;
  int dtype, root;
  if (want(n, 7, "broadcast") != 0 || to_address(a[0], &data) || to_u64(a[1], &bytes) || to_int(a[2], &dtype) ||
      to_int(a[3], &root) || to_tail(self, a + 4, &t) || !has_memory(data, bytes))
    return NULL;
  BEGIN(self, t.timeout_ns, spin_of(self))
  COLLECTIVE(self, t, plx_broadcast(&self->g, &wait, &t.origin, data, bytes, dtype, t.role & PLX_FLAG_STEP ? plx_present_root(&self->g, root) : root))
  END(self, code)
}

/* broadcast_buffers(data, bytes, area, dtype, root, number, timeout_ns, site, shape) */
static PyObject *group_broadcast_buffers(Group *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *data, *area;
  uint64_t bytes, number;
  int dtype, root;
  if (want(n, 9, "broadcast_buffers") != 0 || to_address(a[0], &data) || to_u64(a[1], &bytes) || to_address(a[2], &area) ||
      to_int(a[3], &dtype) || to_int(a[4], &root) || to_u64(a[5], &number) || to_tail(self, a + 6, &t) ||
      !has_memory(data, bytes))
    return NULL;
  BEGIN(self, t.timeout_ns, spin_of(self))
  COLLECTIVE(self, t, plx_broadcast_buffers(&self->g, &wait, &t.origin, data, bytes, area, dtype,
                                            t.role & PLX_FLAG_STEP ? plx_present_root(&self->g, root) : root, number))
  END(self, code)
}

static PyObject *group_reduce_scatter(Group *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *out;
  int dtype, redop;
  if (want(n, 8, "reduce_scatter") != 0 || to_address(a[2], &out) || to_int(a[3], &dtype) || to_int(a[4], &redop) ||
      to_tail(self, a + 5, &t))
    return NULL;
  uint64_t *in = to_array(a[0], self->g.world), *counts = in ? to_array(a[1], self->g.world) : NULL;
  if (counts == NULL || !have_memory(a[0], in, counts, self->g.world) || !has_memory(out, counts[self->g.rank])) {
    free(in);
    free(counts);
    return NULL;
  }
  BEGIN(self, t.timeout_ns, spin_of(self))
  COLLECTIVE(self, t, plx_reduce_scatter(&self->g, &wait, &t.origin, (const void *const *)in, counts, out, dtype, redop))
  free(in);
  free(counts);
  END(self, code)
}

static PyObject *group_gather(Group *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *in;
  int dtype, root;
  if (want(n, 8, "gather") != 0 || to_address(a[0], &in) || to_int(a[3], &dtype) || to_int(a[4], &root) ||
      to_tail(self, a + 5, &t))
    return NULL;
  uint64_t *out = to_array(a[1], self->g.world), *bytes = out ? to_array(a[2], self->g.world) : NULL;
  if (bytes == NULL || !has_memory(in, bytes[self->g.rank]) || !have_memory(a[1], out, bytes, self->g.world)) {
    free(out);
    free(bytes);
    return NULL;
  }
  BEGIN(self, t.timeout_ns, spin_of(self))
  COLLECTIVE(self, t, plx_gather(&self->g, &wait, &t.origin, in, (void *const *)out, bytes, dtype, root))
  free(out);
  free(bytes);
  END(self, code)
}

static PyObject *group_scatter(Group *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *out;
  uint64_t bytes;
  int dtype, root;
  if (want(n, 8, "scatter") != 0 || to_address(a[1], &out) || to_u64(a[2], &bytes) || to_int(a[3], &dtype) ||
      to_int(a[4], &root) || to_tail(self, a + 5, &t))
    return NULL;
  uint64_t *in = to_array(a[0], self->g.world);
  if (in == NULL) return NULL;
  for (uint32_t r = 0; r < self->g.world; r++)
    if ((a[0] != Py_None && !has_memory((void *)(uintptr_t)in[r], bytes)) || !has_memory(out, bytes)) {
      free(in);
      return NULL;
    }
  BEGIN(self, t.timeout_ns, spin_of(self))
  COLLECTIVE(self, t, plx_scatter(&self->g, &wait, &t.origin, (const void *const *)in, out, bytes, dtype, root))
  free(in);
  END(self, code)
}

static PyObject *group_all_to_all(Group *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  int dtype, splits;
  if (want(n, 9, "all_to_all") != 0 || to_int(a[4], &dtype) || to_int(a[5], &splits) || to_tail(self, a + 6, &t)) return NULL;
  uint64_t *v[4] = {NULL, NULL, NULL, NULL};
  for (int i = 0; i < 4; i++)
    if ((v[i] = to_array(a[i], self->g.world)) == NULL) {
      while (i-- > 0) free(v[i]);
      return NULL;
    }
  if (!have_memory(a[0], v[0], v[1], self->g.world) || !have_memory(a[2], v[2], v[3], self->g.world)) {
    for (int i = 0; i < 4; i++) free(v[i]);
    return NULL;
  }
  BEGIN(self, t.timeout_ns, spin_of(self))
  COLLECTIVE(self, t, plx_all_to_all(&self->g, &wait, &t.origin, (const void *const *)v[0], v[1], (void *const *)v[2], v[3], dtype,
                            splits))
  for (int i = 0; i < 4; i++) free(v[i]);
  END(self, code)
}

static PyObject *group_send(Group *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *data;
  uint64_t bytes;
  int dst, tag, dtype;
  if (want(n, 8, "send") != 0 || to_address(a[0], &data) || to_u64(a[1], &bytes) || to_int(a[2], &dst) ||
      to_int(a[3], &tag) || to_int(a[4], &dtype) || to_tail(self, a + 5, &t) || !has_memory(data, bytes))
    return NULL;
  BEGIN(self, t.timeout_ns, spin_of(self))
  int code = plx_send(&self->g, &wait, &t.origin, data, bytes, (uint32_t)dst, (uint32_t)tag, dtype);
  END(self, code)
}

/* The same without waiting; None where that cannot be done. */
static PyObject *group_send_now(Group *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *data;
  uint64_t bytes;
  int dst, tag, dtype;
  if (want(n, 8, "send_now") != 0 || to_address(a[0], &data) || to_u64(a[1], &bytes) || to_int(a[2], &dst) ||
      to_int(a[3], &tag) || to_int(a[4], &dtype) || to_tail(self, a + 5, &t) || !has_memory(data, bytes))
    return NULL;
  BEGIN(self, t.timeout_ns, spin_of(self))
  int code = plx_send_now(&self->g, &wait, &t.origin, data, bytes, (uint32_t)dst, (uint32_t)tag, dtype);
  if (code == PLX_WOULD_WAIT) {
    come_back(self, patience.thread);
    leave(self);
    Py_RETURN_NONE;
  }
  END(self, code)
}

/* A posted receive. Whoever posts it keeps it, and the tensor, until it is over. */
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

static PyType_Spec receive_spec = {"phalanx._core.Receive", sizeof(Receive), 0, Py_TPFLAGS_DEFAULT, receive_slots};

static Receive *to_receive(PyObject *o) {
  if ((destructor)PyType_GetSlot(Py_TYPE(o), Py_tp_dealloc) == receive_dealloc) return (Receive *)o;
  PyErr_SetString(PyExc_TypeError, "expected a Receive");
  return NULL;
}

/* post(receive, data, bytes, src, tag, dtype, timeout_ns, site, shape): its status, -1 while it waits. */
static PyObject *group_post(Group *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  struct tail t;
  void *data;
  uint64_t bytes;
  int src, tag, dtype;
  if (want(n, 9, "post") != 0 || to_address(a[1], &data) || to_u64(a[2], &bytes) || to_int(a[3], &src) ||
      to_int(a[4], &tag) || to_int(a[5], &dtype) || to_tail(self, a + 6, &t) || !has_memory(data, bytes))
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
  int code;
  OUTSIDE_GIL(self, code = plx_post(&self->g, &t.origin, &receive->r))
  return PyLong_FromLong(code);
}

/* drive(receive, limit_ns): wait until it or another posted receive is over, or the limit passes. */
static PyObject *group_drive(Group *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self)
  uint64_t limit_ns;
  if (want(n, 2, "drive") != 0 || to_u64(a[1], &limit_ns) != 0) return NULL;
  Receive *receive = to_receive(a[0]);
  if (receive == NULL) return NULL;
  BEGIN(self, limit_ns, spin_of(self))
  int code = plx_drive(&self->g, &wait, &receive->r);
  END(self, code)
}

static PyObject *group_glance(Group *self, PyObject *unused) {
  (void)unused;
  if (!is_open(self)) return NULL;
  OUTSIDE_GIL(self, plx_glance(&self->g))
  Py_RETURN_NONE;
}

/* Take in messages while nobody waits; returns when a receive is over, or after dismiss(). */
static PyObject *group_attend(Group *self, PyObject *unused) {
  (void)unused;
  if (!is_open(self)) return NULL;
  OUTSIDE_GIL(self, plx_attend(&self->g))
  Py_RETURN_NONE;
}

static PyObject *group_dismiss(Group *self, PyObject *unused) {
  (void)unused;
  if (!is_open(self)) return NULL;
  OUTSIDE_GIL(self, plx_dismiss(&self->g))
  Py_RETURN_NONE;
}

/* ---- what a rank says about itself, and what can be read of the others ---- */

static int to_rank(Group *self, PyObject *o, uint32_t *rank) {
  int r;
  if (to_int(o, &r) != 0 || !is_open(self)) return -1;
  if (r < 0 || r >= (int)self->g.world) {
    PyErr_Format(PyExc_ValueError, "no rank %d in a group of %u", r, self->g.world);
    return -1;
  }
  *rank = (uint32_t)r;
  return 0;
}

static PyObject *group_join(Group *self, PyObject *args) {
  int pid;
  unsigned long long ticks;
  if (!PyArg_ParseTuple(args, "iK", &pid, &ticks) || !is_open(self)) return NULL;
  struct plx_rank *me = plx_rank_of(&self->g, self->g.rank);
  me->pid = pid;
  me->start_ticks = ticks;
  atomic_store_explicit(&me->life, PLX_JOINED, memory_order_release);
  Py_RETURN_NONE;
}

/* Remember a "file:line"; returns its index. The table is a ring: the oldest names are written over. */
static PyObject *group_add_site(Group *self, PyObject *args) {
  const char *text;
  Py_ssize_t length;
  if (!PyArg_ParseTuple(args, "s#", &text, &length) || !is_open(self)) return NULL;
  struct plx_rank *me = plx_rank_of(&self->g, self->g.rank);
  uint32_t at = atomic_fetch_add_explicit(&me->num_sites, 1, memory_order_relaxed) % PLX_SITES;
  if (length > (Py_ssize_t)PLX_SITE_BYTES - 1) { /* the end of a path says more than its beginning */
    text += length - (PLX_SITE_BYTES - 1);
    length = PLX_SITE_BYTES - 1;
  }
  memset(me->sites[at], 0, PLX_SITE_BYTES);
  memcpy(me->sites[at], text, (size_t)length);
  return PyLong_FromUnsignedLong(at);
}

static PyObject *group_set_note(Group *self, PyObject *args) {
  const char *text;
  Py_ssize_t length;
  if (!PyArg_ParseTuple(args, "s#", &text, &length) || !is_open(self)) return NULL;
  struct plx_rank *me = plx_rank_of(&self->g, self->g.rank);
  if (length > (Py_ssize_t)sizeof me->note - 1) length = sizeof me->note - 1;
  memcpy(me->note, text, (size_t)length);
  me->note[length] = 0;
  Py_RETURN_NONE;
}

static PyObject *text_of(const char *bytes, size_t limit) {
  return PyUnicode_DecodeUTF8(bytes, (Py_ssize_t)strnlen(bytes, limit), "replace");
}

/* (life, pid, start_ticks, step, finished, note) of a rank. */
static PyObject *group_state(Group *self, PyObject *arg) {
  uint32_t rank;
  if (to_rank(self, arg, &rank) != 0) return NULL;
  struct plx_rank *r = plx_rank_of(&self->g, rank);
  PyObject *note = text_of(r->note, sizeof r->note);
  if (note == NULL) return NULL;
  /* Who leaves in order says so in two words, this one first. */
  unsigned life = atomic_load(&r->left_after) != 0 ? PLX_LEFT : atomic_load(&r->life);
  return Py_BuildValue("IiKKKN", life, (int)r->pid, (unsigned long long)r->start_ticks,
                       (unsigned long long)atomic_load(&r->step), (unsigned long long)atomic_load(&r->finished), note);
}

/* The flight recorder of a rank, oldest first: tuples
 * (seq, kind, dtype, redop, root, peer, count, shape, enter_ns, leave_ns, status, site). */
static PyObject *group_records(Group *self, PyObject *arg) {
  uint32_t rank;
  if (to_rank(self, arg, &rank) != 0) return NULL;
  struct plx_rank *owner = plx_rank_of(&self->g, rank);
  PyObject *list = PyList_New(0);
  uint64_t end = atomic_load(&owner->next_record), begin = end > PLX_RECORDS ? end - PLX_RECORDS : 0;
  for (uint64_t at = begin; list != NULL && at < end; at++) {
    struct plx_record r;
    if (!plx_record_read(owner, at, &r)) continue;
    uint32_t dims = r.ndim < PLX_MAX_DIMS ? r.ndim : PLX_MAX_DIMS;
    PyObject *shape = PyTuple_New(dims), *site = text_of(owner->sites[r.site % PLX_SITES], PLX_SITE_BYTES);
    for (uint32_t i = 0; shape != NULL && i < dims; i++) PyTuple_SetItem(shape, i, PyLong_FromUnsignedLongLong(r.shape[i]));
    PyObject *item = shape != NULL && site != NULL
                         ? Py_BuildValue("KiiiiiKNKKiN", (unsigned long long)atomic_load(&r.seq), (int)r.kind, (int)r.dtype, (int)r.redop,
                                         (int)r.root, (int)r.peer, (unsigned long long)r.count, shape,
                                         (unsigned long long)r.enter_ns, (unsigned long long)atomic_load(&r.leave_ns),
                                         (int)r.status, site)
                         : NULL;
    if (item == NULL || PyList_Append(list, item) != 0) Py_CLEAR(list);
    Py_XDECREF(item);
  }
  return list;
}

/* From now on collectives are steps of operations that the caller records with begin_record and end_record. */
static PyObject *group_hide_steps(Group *self, PyObject *unused) {
  (void)unused;
  self->g.quiet = 1;
  Py_RETURN_NONE;
}

/* Whether the main thread waits for what comes next, on whatever thread that is: then it may spin. */
static PyObject *group_set_awaited(Group *self, PyObject *arg) {
  int awaited = PyObject_IsTrue(arg);
  if (awaited < 0) return NULL;
  self->awaited = awaited;
  Py_RETURN_NONE;
}

/* begin_record(seq, kind, dtype, redop, root, peer, count, site, shape): the number to pass to end_record. */
static PyObject *group_begin_record(Group *self, PyObject *const *a, Py_ssize_t n) {
  struct tail t;
  struct plx_call call = {0};
  int kind, dtype, redop, root, peer;
  uint64_t number;
  if (want(n, 9, "begin_record") != 0 || to_u64(a[0], &call.seq) || to_int(a[1], &kind) || to_int(a[2], &dtype) ||
      to_int(a[3], &redop) || to_int(a[4], &root) || to_int(a[5], &peer) || to_tail(self, a + 6, &t))
    return NULL;
  call.count = t.timeout_ns; /* the tail's first number, whatever it means */
  call.kind = (uint16_t)kind;
  call.dtype = (uint8_t)dtype;
  call.redop = (uint8_t)redop;
  call.root = root;
  plx_record_begin(&self->g, &call, t.origin.site, peer, t.origin.ndim, t.origin.shape, &number);
  return PyLong_FromUnsignedLongLong(number);
}

static PyObject *group_end_record(Group *self, PyObject *args) {
  unsigned long long number;
  int status;
  if (!PyArg_ParseTuple(args, "Ki", &number, &status) || !is_open(self)) return NULL;
  plx_record_end(&self->g, number, status);
  Py_RETURN_NONE;
}

/* (code, rank) that ended the group, or (0, 0). */
static PyObject *group_get_poison(Group *self, PyObject *unused) {
  (void)unused;
  if (!is_open(self)) return NULL;
  uint64_t p = atomic_load(&self->g.header->poison);
  return Py_BuildValue("iI", (int)(p & 0xff), (unsigned)(p >> 8));
}

static PyObject *group_set_poison(Group *self, PyObject *args) {
  int code;
  unsigned rank;
  if (!PyArg_ParseTuple(args, "iI", &code, &rank) || !is_open(self)) return NULL;
  return PyLong_FromLong(plx_poison(&self->g, code, rank));
}

/* The program has called a collective that another thread will carry out; see plx_issue. Also on a closed group. */
static PyObject *group_issue(Group *self, PyObject *unused) {
  (void)unused;
  plx_issue(&self->g);
  Py_RETURN_NONE;
}

/* That thread has carried it out, well or not. */
static PyObject *group_carried_out(Group *self, PyObject *unused) {
  (void)unused;
  plx_carried_out(&self->g);
  Py_RETURN_NONE;
}

static PyObject *group_alive(Group *self, PyObject *arg) {
  uint32_t rank;
  if (to_rank(self, arg, &rank) != 0) return NULL;
  return PyBool_FromLong(plx_peer_alive(&self->g, rank));
}

static PyObject *group_set_heaps(Group *self, PyObject *args) {
  PyObject *addresses;
  unsigned long long bytes;
  if (!PyArg_ParseTuple(args, "OK", &addresses, &bytes)) return NULL;
  uint64_t *v = to_array(addresses, self->g.world);
  if (v == NULL) return NULL;
  free(self->g.heaps);
  self->g.heaps = (unsigned char **)v;
  self->g.heap_bytes = bytes;
  Py_RETURN_NONE;
}

/* Heap blocks: a rank lets block `index` go; a block is free when all have. */
static PyObject *group_release(Group *self, PyObject *arg) {
  uint64_t index;
  if (to_u64(arg, &index) != 0) return NULL;
  if (!self->closed && index < PLX_BLOCKS)
    atomic_store_explicit(&plx_rank_of(&self->g, self->g.rank)->released[index], 1, memory_order_release);
  Py_RETURN_NONE;
}

static PyObject *group_claim(Group *self, PyObject *arg) {
  uint64_t index;
  if (to_u64(arg, &index) != 0) return NULL;
  if (!self->closed && index < PLX_BLOCKS)
    atomic_store_explicit(&plx_rank_of(&self->g, self->g.rank)->released[index], 0, memory_order_release);
  Py_RETURN_NONE;
}

static PyObject *group_is_released(Group *self, PyObject *arg) {
  uint64_t index;
  if (to_u64(arg, &index) != 0) return NULL;
  int all = !self->closed && index < PLX_BLOCKS;
  for (uint32_t r = 0; all && r < self->g.world; r++)
    all = atomic_load_explicit(&plx_rank_of(&self->g, r)->released[index], memory_order_acquire);
  return PyBool_FromLong(all);
}

/* From now on training steps may do without ranks that wait at another collective. All ranks say so together. */
static PyObject *group_allow_uneven(Group *self, PyObject *unused) {
  (void)unused;
  self->g.uneven = 1;
  Py_RETURN_NONE;
}

/* The ranks that were out of the latest step. */
static PyObject *group_get_absent(PyObject *object, void *unused) {
  const struct plx_group *g = &((Group *)object)->g;
  (void)unused;
  PyObject *list = PyList_New(0);
  for (uint32_t r = 0; list != NULL && r < g->world; r++) {
    PyObject *rank = g->absent[r] ? PyLong_FromUnsignedLong(r) : NULL;
    if (rank != NULL && PyList_Append(list, rank) != 0) Py_CLEAR(list);
    Py_XDECREF(rank);
  }
  return list;
}

/* How many steps some ranks were out of, since all met. */
static PyObject *group_get_missed(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(((Group *)self)->g.missed);
}

static PyObject *group_leave_in_order(Group *self, PyObject *unused) {
  (void)unused;
  if (!is_open(self)) return NULL;
  plx_leave_in_order(&self->g);
  Py_RETURN_NONE;
}

/* close(let_go): leave. Peers that wait for us hear it at once, and so do our own threads. The mapping itself belongs to
 * the symmetric memory, which is called back as soon as none of them is inside: now, or when the last of them comes out.
 * close(None): the process ends. The mapping stays, and our threads where they are. */
static PyObject *group_close(Group *self, PyObject *callable) {
  if (self->closed) Py_RETURN_NONE;
  struct plx_rank *me = plx_rank_of(&self->g, self->g.rank);
  atomic_store_explicit(&me->life, PLX_LEFT, memory_order_release);
  plx_futex_wake_all(plx_low_half(&me->step));
  self->closed = 1;
  if (callable == Py_None) {
    atomic_store_explicit(&self->parked, 1, memory_order_release);
    Py_RETURN_NONE;
  }
  if (self->inside != 0) plx_poison(&self->g, PLX_PEER_LOST, self->g.rank);
  plx_mail_end(&self->g);
  Py_INCREF(callable);
  self->let_go = callable;
  let_go(self);
  Py_RETURN_NONE;
}

/* settle(timeout_ns): whether no thread is inside, at the latest when time is up. A signal handler does not wait for the
 * operation that it interrupted. */
static PyObject *group_settle(Group *self, PyObject *arg) {
  uint64_t timeout_ns, begun_ns = plx_now_ns();
  if (to_u64(arg, &timeout_ns) != 0) return NULL;
  while (self->inside > (is_main() ? self->main_inside : 0) && plx_now_ns() - begun_ns < timeout_ns) {
    Py_BEGIN_ALLOW_THREADS
    nanosleep(&(struct timespec){0, 200000}, NULL);
    Py_END_ALLOW_THREADS
    if (PyErr_CheckSignals() != 0) return NULL;
  }
  return PyBool_FromLong(self->inside == 0);
}

/* In a forked child: forget, touch nothing that is shared. */
static PyObject *group_abandon(Group *self, PyObject *unused) {
  (void)unused;
  self->closed = 1;
  Py_RETURN_NONE;
}

static int group_init(PyObject *object, PyObject *args, PyObject *kwargs) {
  Group *self = (Group *)object;
  unsigned long long base, bytes, spin_ns, background_spin_ns;
  unsigned rank;
  PyObject *pidfds, *idle_fn;
  (void)kwargs;
  if (!PyArg_ParseTuple(args, "KKIKKO!O", &base, &bytes, &rank, &spin_ns, &background_spin_ns, &PyTuple_Type, &pidfds,
                        &idle_fn))
    return -1;
  struct plx_group *g = &self->g;
  g->base = (unsigned char *)(uintptr_t)base;
  g->header = (struct plx_header *)g->base;
  if (plx_group_check(g->base, bytes) != PLX_OK || rank >= g->header->world ||
      PyTuple_Size(pidfds) != (Py_ssize_t)g->header->world) {
    PyErr_SetString(PyExc_ValueError, "the shared memory was not written by this version of Phalanx, or not for this group");
    return -1;
  }
  g->rank = rank;
  g->world = g->header->world;
  g->stage_bytes = g->header->stage_bytes;
  g->crowded = (int)g->header->crowded;
  g->spin_ns = spin_ns;
  self->background_spin_ns = background_spin_ns;
  g->seq = UINT64_MAX; /* the gate at which all meet for the first time is number 0, and what people call begins at 1 */
  g->pidfds = calloc(g->world, sizeof *g->pidfds);
  g->mail = plx_mail_open(g->world);
  if (g->pidfds == NULL || g->mail == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (uint32_t r = 0; r < g->world; r++)
    if (to_int(PyTuple_GetItem(pidfds, r), &g->pidfds[r]) != 0) return -1;
  Py_INCREF(idle_fn);
  self->idle = idle_fn == Py_None ? NULL : idle_fn;
  if (idle_fn == Py_None) Py_DECREF(idle_fn);
  return 0;
}

static int group_traverse(PyObject *object, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(((Group *)object)->idle);
  Py_VISIT(((Group *)object)->let_go);
  return 0;
}

static int group_clear(PyObject *object) {
  Py_CLEAR(((Group *)object)->idle);
  Py_CLEAR(((Group *)object)->let_go);
  return 0;
}

static void group_dealloc(PyObject *object) {
  Group *self = (Group *)object;
  PyTypeObject *type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  group_clear(object);
  plx_mail_close(self->g.mail, self->g.world);
  free(self->g.pidfds);
  free(self->g.heaps);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
}

static PyObject *group_get_culprit(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromLong(((Group *)self)->culprit);
}

static PyObject *group_get_seq(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(((Group *)self)->g.seq);
}

static PyObject *group_get_crowded(PyObject *self, void *unused) {
  (void)unused;
  return PyBool_FromLong(((Group *)self)->g.crowded);
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))group_##name, METH_FASTCALL, NULL}
static PyMethodDef group_methods[] = {
    FAST(barrier), FAST(all_reduce), FAST(broadcast), FAST(broadcast_buffers), FAST(reduce_scatter), FAST(gather), FAST(scatter),
    FAST(all_to_all), FAST(send), FAST(send_now), FAST(post), FAST(drive),
    {"glance", (PyCFunction)group_glance, METH_NOARGS, NULL},
    {"attend", (PyCFunction)group_attend, METH_NOARGS, NULL},
    {"dismiss", (PyCFunction)group_dismiss, METH_NOARGS, NULL},
    {"join", (PyCFunction)group_join, METH_VARARGS, NULL},
    {"add_site", (PyCFunction)group_add_site, METH_VARARGS, NULL},
    {"set_note", (PyCFunction)group_set_note, METH_VARARGS, NULL},
    {"state", (PyCFunction)group_state, METH_O, NULL},
    {"records", (PyCFunction)group_records, METH_O, NULL},
    {"hide_steps", (PyCFunction)group_hide_steps, METH_NOARGS, NULL},
    FAST(begin_record),
    {"set_awaited", (PyCFunction)group_set_awaited, METH_O, NULL},
    {"end_record", (PyCFunction)group_end_record, METH_VARARGS, NULL},
    {"poison", (PyCFunction)group_get_poison, METH_NOARGS, NULL},
    {"set_poison", (PyCFunction)group_set_poison, METH_VARARGS, NULL},
    {"issue", (PyCFunction)group_issue, METH_NOARGS, NULL},
    {"carried_out", (PyCFunction)group_carried_out, METH_NOARGS, NULL},
    {"alive", (PyCFunction)group_alive, METH_O, NULL},
    {"set_heaps", (PyCFunction)group_set_heaps, METH_VARARGS, NULL},
    {"claim", (PyCFunction)group_claim, METH_O, NULL},
    {"release", (PyCFunction)group_release, METH_O, NULL},
    {"is_released", (PyCFunction)group_is_released, METH_O, NULL},
    {"allow_uneven", (PyCFunction)group_allow_uneven, METH_NOARGS, NULL},
    {"leave_in_order", (PyCFunction)group_leave_in_order, METH_NOARGS, NULL},
    {"close", (PyCFunction)group_close, METH_O, NULL},
    {"settle", (PyCFunction)group_settle, METH_O, NULL},
    {"abandon", (PyCFunction)group_abandon, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef group_getset[] = {{"culprit", group_get_culprit, NULL, NULL, NULL},
                                     {"seq", group_get_seq, NULL, NULL, NULL},
                                     {"crowded", group_get_crowded, NULL, NULL, NULL},
                                     {"absent", group_get_absent, NULL, NULL, NULL},
                                     {"missed", group_get_missed, NULL, NULL, NULL},
                                     {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot group_slots[] = {{Py_tp_init, group_init},
                                    {Py_tp_traverse, group_traverse},
                                    {Py_tp_clear, group_clear},
                                    {Py_tp_dealloc, group_dealloc},
                                    {Py_tp_methods, group_methods},
                                    {Py_tp_getset, group_getset},
                                    {Py_tp_doc, (void *)"A rank's side of the shared memory of one group."},
                                    {0, NULL}};

static PyType_Spec group_spec = {"phalanx._core.Group", sizeof(Group), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, group_slots};

/* ---- the board of buckets ---- */

typedef struct {
  PyObject_HEAD
  struct plx_board b;
  Group *group;
} Board;

static int board_open(Board *self) { return is_open(self->group); }

static PyObject *board_begin(Board *self, PyObject *const *a, Py_ssize_t n) {
  (void)a;
  if (want(n, 0, "begin") != 0 || !board_open(self)) return NULL;
  plx_board_begin(&self->b);
  Py_RETURN_NONE;
}

/* Mark a bucket complete, at an offset of this rank's heap, then reduce whatever is complete everywhere. Returns how many slices this rank still owes. */
static PyObject *board_ready(Board *self, PyObject *const *a, Py_ssize_t n) {
  int bucket;
  uint64_t offset;
  uint64_t slice[2]; /* the third and fourth argument, if there are any: the elements that this rank needs */
  if (n != 4 && want(n, 2, "ready") != 0) return NULL;
  if (to_int(a[0], &bucket) != 0 || to_u64(a[1], &offset) != 0 || !board_open(self)) return NULL;
  if (n == 4 && (to_u64(a[2], &slice[0]) != 0 || to_u64(a[3], &slice[1]) != 0)) return NULL;
  int code = n == 4 ? plx_board_ready_slice(&self->b, (uint32_t)bucket, offset, slice[0], slice[1])
                    : plx_board_ready(&self->b, (uint32_t)bucket, offset);
  if (code != PLX_OK) {
    PyErr_Format(PyExc_ValueError, "no bucket %d, or it lies outside the heap, or it has no such slice", bucket);
    return NULL;
  }
  uint32_t left;
  OUTSIDE_GIL(self->group, left = plx_board_poll(&self->b))
  return PyLong_FromUnsignedLong(left);
}

static PyObject *board_finish(Board *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self->group)
  struct tail t;
  if (want(n, 3, "finish") != 0 || to_tail(self->group, a, &t) != 0) return NULL;
  struct plx_call call = {.seq = self->b.round, .count = self->b.num_buckets, .kind = PLX_GRADIENTS, .root = -1};
  struct plx_record *record = plx_record_enter(&self->group->g, &call, t.origin.site, -1, t.origin.ndim, t.origin.shape);
  BEGIN(self->group, t.timeout_ns, spin_of(self->group))
  int code = plx_board_finish(&self->b, &wait);
  if (code == PLX_APART)
    self->group->g.resumed = record;
  else
    plx_record_leave(&self->group->g, record, code);
  if (code == PLX_MISMATCH) plx_close_turn(&self->group->g, &wait); /* it may be there that ranks parted: then it tells so */
  END(self->group, code)
}

/* After finish() returned PLX_APART: the mean over the ranks that are in this round. A collective. */
static PyObject *board_meet(Board *self, PyObject *const *a, Py_ssize_t n) {
  ANSWER_IF_CLOSED(self->group)
  struct tail t;
  if (want(n, 3, "meet") != 0 || to_tail(self->group, a, &t) != 0) return NULL;
  BEGIN(self->group, t.timeout_ns, spin_of(self->group))
  COLLECTIVE(self->group, t, plx_board_meet(&self->b, &wait, &t.origin))
  END(self->group, code)
}

/* How many rounds have begun; a rank that was out of some takes the others' number before the next one begins. */
static PyObject *board_get_round(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLong(((Board *)self)->b.round);
}

static int board_set_round(PyObject *self, PyObject *value, void *unused) {
  uint64_t round;
  (void)unused;
  if (value == NULL || to_u64(value, &round) != 0) return -1;
  ((Board *)self)->b.round = (uint32_t)round;
  return 0;
}

/* Board(group, offset of the flags in the heap, ((count, dtype, redop), ...)): the same on every rank. */
static int board_init(PyObject *object, PyObject *args, PyObject *kwargs) {
  Board *self = (Board *)object;
  PyObject *group, *buckets;
  unsigned long long flags;
  (void)kwargs;
  if (!PyArg_ParseTuple(args, "OKO!", &group, &flags, &PyTuple_Type, &buckets)) return -1;
  PyTypeObject *type = Py_TYPE(group);
  if ((destructor)PyType_GetSlot(type, Py_tp_dealloc) != group_dealloc || ((Group *)group)->closed ||
      ((Group *)group)->g.heaps == NULL) {
    PyErr_SetString(PyExc_ValueError, "a board needs an open group whose heap is mapped");
    return -1;
  }
  struct plx_board *b = &self->b;
  b->g = &((Group *)group)->g;
  b->flags = flags;
  b->num_buckets = (uint32_t)PyTuple_Size(buckets);
  b->buckets = calloc(b->num_buckets + 1, sizeof *b->buckets);
  if (b->buckets == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  Py_INCREF(group);
  self->group = (Group *)group;
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
  if (flags + plx_board_bytes(b->num_buckets) > b->g->heap_bytes) {
    PyErr_SetString(PyExc_ValueError, "the flags lie outside the heap");
    return -1;
  }
  return 0;
}

static void board_dealloc(PyObject *object) {
  Board *self = (Board *)object;
  PyTypeObject *type = Py_TYPE(object);
  free(self->b.buckets);
  Py_XDECREF((PyObject *)self->group);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
}

#define BOARD_FAST(name) {#name, (PyCFunction)(void (*)(void))board_##name, METH_FASTCALL, NULL}
static PyMethodDef board_methods[] = {
    BOARD_FAST(begin), BOARD_FAST(ready), BOARD_FAST(finish), BOARD_FAST(meet), {NULL, NULL, 0, NULL}};
static PyGetSetDef board_getset[] = {{"round", board_get_round, board_set_round, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot board_slots[] = {{Py_tp_init, board_init},
                                    {Py_tp_dealloc, board_dealloc},
                                    {Py_tp_methods, board_methods},
                                    {Py_tp_getset, board_getset},
                                    {Py_tp_doc, (void *)"Buckets in the shared heap, reduced as soon as all ranks have them."},
                                    {0, NULL}};

static PyType_Spec board_spec = {"phalanx._core.Board", sizeof(Board), 0, Py_TPFLAGS_DEFAULT, board_slots};

static PyObject *core_board_bytes(PyObject *module, PyObject *arg) {
  int buckets;
  (void)module;
  if (to_int(arg, &buckets) != 0) return NULL;
  return PyLong_FromSize_t(plx_board_bytes((uint32_t)buckets));
}

/* ---- module functions ---- */

static PyObject *core_map(PyObject *module, PyObject *args) {
  int fd;
  unsigned long long bytes;
  (void)module;
  if (!PyArg_ParseTuple(args, "iK", &fd, &bytes)) return NULL;
  void *at = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (at == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
  return PyLong_FromVoidPtr(at);
}

/* Map more of the file of which `at` maps the beginning: the mapping stands for a descriptor that need not stay open. */
static PyObject *core_map_again(PyObject *module, PyObject *args) {
  unsigned long long at, bytes;
  (void)module;
  if (!PyArg_ParseTuple(args, "KK", &at, &bytes)) return NULL;
  /* mremap(2): an old size of zero makes a second mapping of the same shared pages. */
  void *whole = mremap((void *)(uintptr_t)at, 0, (size_t)bytes, MREMAP_MAYMOVE);
  if (whole == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
  return PyLong_FromVoidPtr(whole);
}

static PyObject *core_unmap(PyObject *module, PyObject *args) {
  unsigned long long at, bytes;
  (void)module;
  if (!PyArg_ParseTuple(args, "KK", &at, &bytes)) return NULL;
  if (munmap((void *)(uintptr_t)at, (size_t)bytes) != 0) return PyErr_SetFromErrno(PyExc_OSError);
  Py_RETURN_NONE;
}

/* Give the pages of a part of a shared mapping back to the system; they read as zero afterwards. */
static PyObject *core_discard(PyObject *module, PyObject *args) {
  unsigned long long at, bytes;
  (void)module;
  if (!PyArg_ParseTuple(args, "KK", &at, &bytes)) return NULL;
  if (madvise((void *)(uintptr_t)at, (size_t)bytes, MADV_REMOVE) != 0) return PyErr_SetFromErrno(PyExc_OSError);
  Py_RETURN_NONE;
}

static PyObject *core_group_bytes(PyObject *module, PyObject *args) {
  unsigned world;
  unsigned long long stage, channel;
  (void)module;
  if (!PyArg_ParseTuple(args, "IKK", &world, &stage, &channel)) return NULL;
  return PyLong_FromSize_t(plx_group_bytes(world, (size_t)stage, (size_t)channel));
}

static PyObject *core_format(PyObject *module, PyObject *args) {
  unsigned long long at, stage, channel;
  unsigned world;
  int crowded;
  (void)module;
  if (!PyArg_ParseTuple(args, "KIKKi", &at, &world, &stage, &channel, &crowded)) return NULL;
  if (plx_group_format((void *)(uintptr_t)at, world, (size_t)stage, (size_t)channel, crowded) != PLX_OK) {
    PyErr_SetString(PyExc_ValueError, "a group needs 1 to 1024 ranks, and stages and channels of whole pages");
    return NULL;
  }
  Py_RETURN_NONE;
}

static PyObject *core_can_reduce(PyObject *module, PyObject *args) {
  int dtype, redop;
  (void)module;
  if (!PyArg_ParseTuple(args, "ii", &dtype, &redop)) return NULL;
  return PyBool_FromLong(plx_reduce_kernel(dtype, redop) != NULL);
}

/* dst = src[0] op src[1] op ...: the kernel alone, for tests and for measurement. */
static PyObject *core_reduce(PyObject *module, PyObject *args) {
  unsigned long long dst, count;
  PyObject *sources;
  int dtype, redop;
  (void)module;
  if (!PyArg_ParseTuple(args, "KO!Kii", &dst, &PyTuple_Type, &sources, &count, &dtype, &redop)) return NULL;
  plx_reduce_fn kernel = plx_reduce_kernel(dtype, redop);
  if (kernel == NULL || PyTuple_Size(sources) < 1) {
    PyErr_SetString(PyExc_ValueError, "no such reduction");
    return NULL;
  }
  uint32_t n = (uint32_t)PyTuple_Size(sources);
  uint64_t *src = to_array(sources, n);
  if (src == NULL) return NULL;
  Py_BEGIN_ALLOW_THREADS
  kernel((void *)(uintptr_t)dst, (const void *const *)src, n, (size_t)count);
  Py_END_ALLOW_THREADS
  free(src);
  Py_RETURN_NONE;
}

/* The word at that address, or NULL with an error set. */
static _Atomic uint64_t *word_at(unsigned long long address) {
  if (address == 0 || address % sizeof(uint64_t) != 0) {
    PyErr_SetString(PyExc_ValueError, "a word lies at a multiple of 8, and not at 0");
    return NULL;
  }
  return (_Atomic uint64_t *)(uintptr_t)address;
}

static PyObject *core_load_word(PyObject *module, PyObject *args) {
  unsigned long long address;
  (void)module;
  if (!PyArg_ParseTuple(args, "K", &address)) return NULL;
  const _Atomic uint64_t *word = word_at(address);
  return word == NULL ? NULL : PyLong_FromUnsignedLongLong(plx_word_load(word));
}

static PyObject *core_store_word(PyObject *module, PyObject *args) {
  unsigned long long address, value;
  (void)module;
  if (!PyArg_ParseTuple(args, "KK", &address, &value)) return NULL;
  _Atomic uint64_t *word = word_at(address);
  if (word == NULL) return NULL;
  plx_word_store(word, value);
  Py_RETURN_NONE;
}

static PyObject *core_compare_exchange_word(PyObject *module, PyObject *args) {
  unsigned long long address, expected, desired;
  (void)module;
  if (!PyArg_ParseTuple(args, "KKK", &address, &expected, &desired)) return NULL;
  _Atomic uint64_t *word = word_at(address);
  return word == NULL ? NULL : PyLong_FromUnsignedLongLong(plx_word_compare_exchange(word, expected, desired));
}

static PyMethodDef core_methods[] = {{"map", core_map, METH_VARARGS, NULL},
                                     {"map_again", core_map_again, METH_VARARGS, NULL},
                                     {"unmap", core_unmap, METH_VARARGS, NULL},
                                     {"discard", core_discard, METH_VARARGS, NULL},
                                     {"group_bytes", core_group_bytes, METH_VARARGS, NULL},
                                     {"format", core_format, METH_VARARGS, NULL},
                                     {"board_bytes", core_board_bytes, METH_O, NULL},
                                     {"can_reduce", core_can_reduce, METH_VARARGS, NULL},
                                     {"reduce", core_reduce, METH_VARARGS, NULL},
                                     {"load_word", core_load_word, METH_VARARGS, NULL},
                                     {"store_word", core_store_word, METH_VARARGS, NULL},
                                     {"compare_exchange_word", core_compare_exchange_word, METH_VARARGS, NULL},
                                     {NULL, NULL, 0, NULL}};

static int core_exec(PyObject *module) {
  PyObject *type = PyType_FromSpec(&group_spec);
  if (type == NULL || PyModule_AddObject(module, "Group", type) != 0) return -1;
  type = PyType_FromSpec(&board_spec);
  if (type == NULL || PyModule_AddObject(module, "Board", type) != 0) return -1;
  type = PyType_FromSpec(&receive_spec);
  if (type == NULL || PyModule_AddObject(module, "Receive", type) != 0) return -1;
  if (plx_add_pool(module) != 0) return -1;
  static const struct {
    const char *name;
    long value;
  } numbers[] = {{"VERSION", PLX_VERSION}, {"MAX_WORLD", PLX_MAX_WORLD}, {"BLOCKS", PLX_BLOCKS}, {"PAGE", PLX_PAGE}};
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
    if (PyModule_AddIntConstant(module, numbers[i].name, numbers[i].value) != 0) return -1;
  return 0;
}

static PyModuleDef_Slot core_slots[] = {{Py_mod_exec, core_exec}, {0, NULL}};
static struct PyModuleDef core_module = {PyModuleDef_HEAD_INIT, "phalanx._core", "The shared-memory core of Phalanx.", 0,
                                         core_methods, core_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&core_module); }
