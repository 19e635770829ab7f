/* The group is a Python object: it opens with the shared memory and closes once no thread is inside. */
#include <stdlib.h>
#include <time.h>

#include "p2p.h"
#include "py_group.h"
#include "py_types.h"

/* close(let_go): leave. Peers that wait for us hear it at once, and so do our own threads. The mapping itself belongs to
 * the symmetric memory, which is called back as soon as none of them is inside: now, or when the last of them comes out.
 * close(None): the process ends. The mapping stays, and our threads where they are. */
static PyObject *py_group_close(PyGroup *self, PyObject *callable) {
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
  plx_mailbox_end(&self->g);
  Py_INCREF(callable);
  self->let_go = callable;
  py_let_go(self);
  Py_RETURN_NONE;
}

/* settle(timeout_ns): whether no thread is inside, at the latest when time is up. A signal handler does not wait for the
 * operation that it interrupted. */
static PyObject *py_group_settle(PyGroup *self, PyObject *arg) {
  uint64_t timeout_ns, begun_ns = plx_now_ns();
  if (py_to_u64(arg, &timeout_ns) != 0) return NULL;
  while (self->inside > (py_is_main() ? self->main_inside : 0) && plx_now_ns() - begun_ns < timeout_ns) {
    Py_BEGIN_ALLOW_THREADS
    nanosleep(&(struct timespec){0, 200000}, NULL);
    Py_END_ALLOW_THREADS
    if (PyErr_CheckSignals() != 0) return NULL;
  }
  return PyBool_FromLong(self->inside == 0);
}

/* Forget the group in a forked child, and touch nothing that is shared. */
static PyObject *py_group_abandon(PyGroup *self, PyObject *unused) {
  (void)unused;
  self->closed = 1;
  Py_RETURN_NONE;
}

static int group_init(PyObject *object, PyObject *args, PyObject *kwargs) {
  PyGroup *self = (PyGroup *)object;
  unsigned long long base, bytes, spin_ns, background_spin_ns;
  unsigned rank;
  PyObject *pidfds, *stats, *idle_fn;
  (void)kwargs;
  if (!PyArg_ParseTuple(args, "KKIKKO!O!O", &base, &bytes, &rank, &spin_ns, &background_spin_ns, &PyTuple_Type, &pidfds,
                        &PyTuple_Type, &stats, &idle_fn))
    return -1;
  struct plx_group *g = &self->g;
  g->base = (unsigned char *)(uintptr_t)base;
  g->header = (struct plx_header *)g->base;
  if (plx_group_check(g->base, bytes) != PLX_OK || rank >= g->header->world ||
      PyTuple_Size(pidfds) != (Py_ssize_t)g->header->world || PyTuple_Size(stats) != (Py_ssize_t)g->header->world) {
    PyErr_SetString(PyExc_ValueError, "the shared memory was not written by this version of Phalanx, or not for this group");
    return -1;
  }
  g->rank = rank;
  g->world = g->header->world;
  g->stage_bytes = g->header->stage_bytes;
  g->oversubscribed = (int)g->header->oversubscribed;
  g->spin_ns = spin_ns;
  self->background_spin_ns = background_spin_ns;
  g->seq = UINT64_MAX; /* the sync at which all meet for the first time is number 0, and what people call begins at 1 */
  g->pidfds = calloc(g->world, sizeof *g->pidfds);
  g->stats = calloc(g->world, sizeof *g->stats);
  g->mailbox = plx_mailbox_open(g->world);
  if (g->pidfds == NULL || g->stats == NULL || g->mailbox == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (uint32_t r = 0; r < g->world; r++)
    if (py_to_int(PyTuple_GetItem(pidfds, r), &g->pidfds[r]) != 0 || py_to_int(PyTuple_GetItem(stats, r), &g->stats[r]) != 0)
      return -1;
  Py_INCREF(idle_fn);
  self->idle = idle_fn == Py_None ? NULL : idle_fn;
  if (idle_fn == Py_None) Py_DECREF(idle_fn);
  return 0;
}

static int group_traverse(PyObject *object, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(((PyGroup *)object)->idle);
  Py_VISIT(((PyGroup *)object)->let_go);
  return 0;
}

static int group_clear(PyObject *object) {
  Py_CLEAR(((PyGroup *)object)->idle);
  Py_CLEAR(((PyGroup *)object)->let_go);
  return 0;
}

void py_group_dealloc(PyObject *object) {
  PyGroup *self = (PyGroup *)object;
  PyTypeObject *type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  group_clear(object);
  py_drop_ended(self);
  plx_mailbox_close(self->g.mailbox, self->g.world);
  free(self->g.pidfds);
  free(self->g.stats);
  free(self->g.heaps);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
}

static PyObject *py_group_get_failed_rank(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromLong(((PyGroup *)self)->failed_rank);
}

static PyObject *py_group_get_seq(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(((PyGroup *)self)->g.seq);
}

static PyObject *py_group_get_oversubscribed(PyObject *self, void *unused) {
  (void)unused;
  return PyBool_FromLong(((PyGroup *)self)->g.oversubscribed);
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))py_group_##name, METH_FASTCALL, NULL}
static PyMethodDef group_methods[] = {
    FAST(barrier), FAST(all_reduce), FAST(broadcast), FAST(broadcast_buffers), FAST(reduce_scatter), FAST(gather),
    FAST(scatter),
    FAST(all_to_all), FAST(send), FAST(send_now), FAST(post), FAST(progress), FAST(set_timeout),
    {"poll", (PyCFunction)py_group_poll, METH_NOARGS, NULL},
    {"progress_thread", (PyCFunction)py_group_progress_thread, METH_NOARGS, NULL},
    {"stop_progress_thread", (PyCFunction)py_group_stop_progress_thread, METH_NOARGS, NULL},
    {"take_ended", (PyCFunction)py_group_take_ended, METH_O, NULL},
    {"join", (PyCFunction)py_group_join, METH_VARARGS, NULL},
    {"add_call_site", (PyCFunction)py_group_add_call_site, METH_VARARGS, NULL},
    {"set_exit_reason", (PyCFunction)py_group_set_exit_reason, METH_VARARGS, NULL},
    {"state", (PyCFunction)py_group_state, METH_O, NULL},
    {"records", (PyCFunction)py_group_records, METH_O, NULL},
    {"hide_steps", (PyCFunction)py_group_hide_steps, METH_NOARGS, NULL},
    FAST(begin_record),
    {"set_awaited", (PyCFunction)py_group_set_awaited, METH_O, NULL},
    {"end_record", (PyCFunction)py_group_end_record, METH_VARARGS, NULL},
    {"poison", (PyCFunction)py_group_get_poison, METH_NOARGS, NULL},
    {"set_poison", (PyCFunction)py_group_set_poison, METH_VARARGS, NULL},
    {"failure", (PyCFunction)py_group_get_failure, METH_NOARGS, NULL},
    {"set_failure", (PyCFunction)py_group_set_failure, METH_VARARGS, NULL},
    {"issue", (PyCFunction)py_group_issue, METH_NOARGS, NULL},
    {"carried_out", (PyCFunction)py_group_carried_out, METH_NOARGS, NULL},
    {"alive", (PyCFunction)py_group_alive, METH_O, NULL},
    {"set_heaps", (PyCFunction)py_group_set_heaps, METH_VARARGS, NULL},
    {"claim", (PyCFunction)py_group_claim, METH_O, NULL},
    {"release", (PyCFunction)py_group_release, METH_O, NULL},
    {"is_released", (PyCFunction)py_group_is_released, METH_O, NULL},
    {"close", (PyCFunction)py_group_close, METH_O, NULL},
    {"settle", (PyCFunction)py_group_settle, METH_O, NULL},
    {"abandon", (PyCFunction)py_group_abandon, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef group_getset[] = {{"failed_rank", py_group_get_failed_rank, NULL, NULL, NULL},
                                     {"seq", py_group_get_seq, NULL, NULL, NULL},
                                     {"oversubscribed", py_group_get_oversubscribed, NULL, NULL, NULL},
                                     {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot group_slots[] = {{Py_tp_init, group_init},
                                    {Py_tp_traverse, group_traverse},
                                    {Py_tp_clear, group_clear},
                                    {Py_tp_dealloc, py_group_dealloc},
                                    {Py_tp_methods, group_methods},
                                    {Py_tp_getset, group_getset},
                                    {Py_tp_doc, (void *)"A rank's side of the shared memory of one group."},
                                    {0, NULL}};

PyType_Spec py_group_spec = {"phalanx._core.Group", sizeof(PyGroup), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, group_slots};
