/* The event log holds what a training loop tells of itself: events with times, stored where they survive the process.
 *
 *   word 0       how many there were, written last
 *   byte 64 ...  a ring of (kind, seconds of CLOCK_MONOTONIC, value), each a double
 *
 * Beside a step that streams its parameters through the caches every line of Python is fetched from memory again: what
 * takes 1 us in a loop takes 10 there. So an event is a few stores, and what it means is found out later, many at a time,
 * by the function that is called when `limit` events are new or the time `due` is past. One thread's events count, that
 * of the constructor's caller. */
#include "py_types.h"

#include "futex.h"
#include "word.h"

typedef struct {
  PyObject_HEAD
  _Atomic uint64_t *count; /* NULL once closed */
  double *ring;
  uint64_t capacity, limit, taken;
  double due;
  double begin_update, end_update; /* the kinds that the optimizers' hooks note */
  unsigned long thread;
  int inside; /* `on_due` runs */
  PyObject *on_due;
} EventLog;

/* EventLog(address, capacity, begin_update, end_update, on_due) */
static int log_init(PyObject *object, PyObject *args, PyObject *kwargs) {
  EventLog *self = (EventLog *)object;
  unsigned long long address, capacity;
  PyObject *on_due;
  (void)kwargs;
  if (!PyArg_ParseTuple(args, "KKddO", &address, &capacity, &self->begin_update, &self->end_update, &on_due)) return -1;
  if (address == 0 || address % sizeof(double) != 0 || capacity == 0) {
    PyErr_SetString(PyExc_ValueError, "a log lies at a multiple of 8, and not at 0, and has room for an event");
    return -1;
  }
  self->count = (_Atomic uint64_t *)(uintptr_t)address;
  self->ring = (double *)(uintptr_t)(address + 64);
  self->capacity = capacity;
  self->taken = plx_word_load(self->count);
  self->limit = 1;
  self->due = 0.0;
  self->thread = PyThread_get_thread_ident();
  PyObject *before = self->on_due;
  Py_INCREF(on_due);
  self->on_due = on_due;
  Py_XDECREF(before);
  return 0;
}

/* Hand the new events to `on_due`. What it raises is raised by the mark, too. */
static PyObject *take(EventLog *self) {
  self->inside = 1;
  PyObject *done = PyObject_CallObject(self->on_due, NULL);
  self->inside = 0;
  if (done == NULL) return NULL;
  Py_DECREF(done);
  Py_RETURN_NONE;
}

static double now_s(void) { return (double)plx_now_ns() * 1e-9; }

static PyObject *note(EventLog *self, double kind, double value, double now) {
  if (self->count == NULL || PyThread_get_thread_ident() != self->thread) Py_RETURN_NONE;
  uint64_t number = atomic_load_explicit(self->count, memory_order_relaxed);
  double *event = self->ring + number % self->capacity * 3;
  event[0] = kind;
  event[1] = now;
  event[2] = value;
  plx_word_store(self->count, number + 1);
  if (self->inside || (number + 1 - self->taken < self->limit && now < self->due)) Py_RETURN_NONE;
  return take(self);
}

/* take(): hand the new events to `on_due` now; but not within itself, as a signal's handler may come while it runs, nor
 * once closed, nor on another thread. */
static PyObject *log_take(EventLog *self, PyObject *unused) {
  (void)unused;
  if (self->count == NULL || self->inside || PyThread_get_thread_ident() != self->thread) Py_RETURN_NONE;
  return take(self);
}

/* mark(kind[, value[, now]]) */
static PyObject *log_mark(EventLog *self, PyObject *const *args, Py_ssize_t count) {
  if (count < 1 || count > 3) {
    PyErr_SetString(PyExc_TypeError, "mark(kind[, value[, now]])");
    return NULL;
  }
  double kind = PyFloat_AsDouble(args[0]), value = count > 1 ? PyFloat_AsDouble(args[1]) : 0.0;
  double now = count > 2 ? PyFloat_AsDouble(args[2]) : now_s();
  if (PyErr_Occurred()) return NULL;
  return note(self, kind, value, now);
}

/* These are hooks of torch's optimizers: (optimizer, args, kwargs). The event's value tells optimizers apart. */
static PyObject *log_begin_update(EventLog *self, PyObject *const *args, Py_ssize_t count) {
  return note(self, self->begin_update, count > 0 ? (double)(uintptr_t)args[0] : 0.0, now_s());
}

static PyObject *log_end_update(EventLog *self, PyObject *const *args, Py_ssize_t count) {
  (void)args, (void)count;
  return note(self, self->end_update, 0.0, now_s());
}

/* took(number, limit, due): `on_due` has taken the events up to this number; when to call it again. */
static PyObject *log_took(EventLog *self, PyObject *args) {
  unsigned long long taken, limit;
  double due;
  if (!PyArg_ParseTuple(args, "KKd", &taken, &limit, &due)) return NULL;
  self->taken = taken;
  self->limit = limit;
  self->due = due;
  Py_RETURN_NONE;
}

/* After this nothing is noted any more; the memory may go. */
static PyObject *log_close(EventLog *self, PyObject *unused) {
  (void)unused;
  self->count = NULL;
  self->ring = NULL;
  Py_RETURN_NONE;
}

static int log_traverse(PyObject *object, visitproc visit, void *arg) {
  Py_VISIT(((EventLog *)object)->on_due);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

static int log_clear(PyObject *object) {
  Py_CLEAR(((EventLog *)object)->on_due);
  return 0;
}

static void log_dealloc(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  log_clear(object);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
}

static PyMethodDef log_methods[] = {{"mark", (PyCFunction)(void (*)(void))log_mark, METH_FASTCALL, NULL},
                                    {"begin_update", (PyCFunction)(void (*)(void))log_begin_update, METH_FASTCALL, NULL},
                                    {"end_update", (PyCFunction)(void (*)(void))log_end_update, METH_FASTCALL, NULL},
                                    {"take", (PyCFunction)log_take, METH_NOARGS, NULL},
                                    {"took", (PyCFunction)log_took, METH_VARARGS, NULL},
                                    {"close", (PyCFunction)log_close, METH_NOARGS, NULL},
                                    {NULL, NULL, 0, NULL}};

static PyType_Slot log_slots[] = {{Py_tp_init, log_init},
                                  {Py_tp_dealloc, log_dealloc},
                                  {Py_tp_traverse, log_traverse},
                                  {Py_tp_clear, log_clear},
                                  {Py_tp_methods, log_methods},
                                  {Py_tp_doc, (void *)"Events of a training loop, stored where they survive the process."},
                                  {0, NULL}};

PyType_Spec py_event_log_spec = {"phalanx._core.EventLog", sizeof(EventLog), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                 log_slots};
