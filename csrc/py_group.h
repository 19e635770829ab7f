/* These methods of a group lie in files of their own; their contracts are in _core.pyi. */
#ifndef PY_GROUP_H
#define PY_GROUP_H

#include "py_call.h"

#define PY_FAST(name) PyObject *py_group_##name(PyGroup *self, PyObject *const *a, Py_ssize_t n);
#define PY_PLAIN(name) PyObject *py_group_##name(PyGroup *self, PyObject *arg);
/* py_collectives.c, py_messages.c, py_state.c */
PY_FAST(all_reduce)
PY_FAST(all_to_all)
PY_FAST(barrier)
PY_FAST(begin_record)
PY_FAST(broadcast)
PY_FAST(broadcast_buffers)
PY_FAST(gather)
PY_FAST(post)
PY_FAST(progress)
PY_FAST(reduce_scatter)
PY_FAST(scatter)
PY_FAST(send)
PY_FAST(send_now)
PY_FAST(set_timeout)
PY_PLAIN(add_call_site)
PY_PLAIN(alive)
PY_PLAIN(carried_out)
PY_PLAIN(claim)
PY_PLAIN(end_record)
PY_PLAIN(get_failure)
PY_PLAIN(get_poison)
PY_PLAIN(hide_steps)
PY_PLAIN(is_released)
PY_PLAIN(issue)
PY_PLAIN(join)
PY_PLAIN(poll)
PY_PLAIN(progress_thread)
PY_PLAIN(records)
PY_PLAIN(release)
PY_PLAIN(set_awaited)
PY_PLAIN(set_exit_reason)
PY_PLAIN(set_failure)
PY_PLAIN(set_heaps)
PY_PLAIN(set_poison)
PY_PLAIN(state)
PY_PLAIN(stop_progress_thread)
PY_PLAIN(take_ended)
/* Let go of the receives that nobody has taken, when no thread is inside any more. */
void py_drop_ended(PyGroup *self);
#undef PY_FAST
#undef PY_PLAIN

#endif
