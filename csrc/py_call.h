/* The files that know Python share this of a group: its type, and what happens around an operation of it. Addresses and
 * sizes come in, a status goes out, and the GIL is released in between. */
#ifndef PY_CALL_H
#define PY_CALL_H

#include <unistd.h>

#include "futex.h"
#include "py_arguments.h"
#include "recorder.h"

typedef struct {
  PyObject_HEAD
  struct plx_group g;
  PyObject *idle; /* called with the seconds waited, from the first second on; may raise */
  int failed_rank;
  int closed;
  uint64_t background_spin_ns; /* the spin time of threads other than the main one */
  int awaited; /* the main thread waits for what another does here */
  /* This is counted with the GIL held. The memory goes with the last thread that is inside, whichever closes the group
   * meanwhile. */
  int inside;           /* threads in an operation; a signal handler's own operation counts again */
  int main_inside;      /* the main thread among these, which alone runs signal handlers */
  PyObject *let_go;     /* called once, when the group is closed and no thread is inside */
  _Atomic int parked;   /* the process ends: threads that are inside stay there */
} PyGroup;

/* Return whether this is the thread that runs signal handlers. */
int py_is_main(void);
/* Let the memory go after close(), if no thread is inside. This keeps the error that is set. */
void py_let_go(PyGroup *self);

/* Return how long this thread may spin. A background thread must not take the core from the one that computes, where a
 * rank has no core to spare. */
static inline uint64_t py_spin_of(const PyGroup *self, int is_main) {
  return is_main || self->awaited ? self->g.spin_ns : self->background_spin_ns;
}

static inline void py_enter(PyGroup *self, int is_main) {
  self->inside++;
  self->main_inside += is_main;
}

static inline void py_leave(PyGroup *self, int is_main) {
  self->inside--;
  self->main_inside -= is_main;
  if (self->closed) py_let_go(self);
}

/* Take the GIL, on the way out or to ask something. At the end of the process this never returns: the interpreter would
 * end this thread in the middle of the C++ code that called it, which aborts the process, or its error would be printed
 * to streams that are going. The threads that come here are daemons; the rest was joined before. */
static inline void py_come_back(PyGroup *self, PyThreadState *thread) {
  while (atomic_load_explicit(&self->parked, memory_order_acquire)) pause();
  PyEval_RestoreThread(thread);
}

/* While waiting, every slice, take the GIL for a moment so that Ctrl-C works and the user hears about long waits. */
struct patience {
  PyThreadState *thread;
  PyGroup *group;
  uint64_t said_ns;
  const int32_t *failed_rank; /* the rank that it waits for, as far as is known */
};

int py_idle(void *context, uint64_t waited_ns);

struct tail {
  uint64_t timeout_ns;
  struct plx_origin origin;
  uint64_t shape[PLX_MAX_DIMS];
};

/* Return whether the group is open; if not, ClosedError is set. */
int py_is_open(PyGroup *self);
/* Read the last three arguments of an operation: (timeout_ns, call_site, shape). */
int py_to_tail(PyGroup *self, PyObject *const *args, struct tail *t);
/* Check that it is a rank of the group. */
int py_to_rank(PyGroup *self, PyObject *o, uint32_t *rank);

#define ANSWER_IF_CLOSED(self) \
  if ((self)->closed) return PyLong_FromLong(PLX_CLOSED);

#define BEGIN(self, timeout_ns)                                                           \
  struct patience patience = {NULL, (self), 0, NULL};                                     \
  int is_main = py_is_main();                                                             \
  struct plx_wait wait = {UINT64_MAX, py_spin_of(self, is_main), py_idle, &patience, -1}; \
  patience.failed_rank = &wait.failed_rank;                                               \
  uint64_t begun_ns = plx_now_ns();                                                       \
  if ((timeout_ns) < UINT64_MAX - begun_ns) wait.deadline_ns = begun_ns + (timeout_ns);   \
  py_enter(self, is_main);                                                                \
  patience.thread = PyEval_SaveThread();

/* Threads that were inside when this process left hear that, and not what woke them. */
#define END(self, code)                                                  \
  py_come_back(self, patience.thread);                                   \
  (self)->failed_rank = wait.failed_rank;                                \
  int answer = (self)->closed && (code) != PLX_OK ? PLX_CLOSED : (code); \
  py_leave(self, is_main);                                               \
  if ((code) == PLX_INTERRUPTED && PyErr_Occurred()) return NULL;        \
  return PyLong_FromLong(answer);

/* This is for calls that ask nothing while they wait, if they wait at all. */
#define OUTSIDE_GIL(self, call)                  \
  {                                              \
    int is_main = py_is_main();                  \
    py_enter(self, is_main);                     \
    PyThreadState *thread = PyEval_SaveThread(); \
    call;                                        \
    py_come_back(self, thread);                  \
    py_leave(self, is_main);                     \
  }

#endif
