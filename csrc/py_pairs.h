/* These functions take all pairs of one record before the first has an effect. */
#ifndef PY_PAIRS_H
#define PY_PAIRS_H

#include "py_arguments.h"

/* A thing that is no tuple of two stands here whole as `key`, and `value` is NULL. */
typedef struct {
  PyObject *key, *value;
} Pair;

/* A tuple is taken apart as it comes, so that the next one uses its memory. */
typedef struct {
  Pair *items;
  Py_ssize_t count, room;
} Pairs;

/* Take what iterates over one record's pairs, to its end. Return 0, or -1 with an exception; the pairs that came are
 * there. */
int py_pairs_collect(Pairs *pairs, PyObject *mapped);
void py_pairs_clear(Pairs *pairs);
void py_pairs_free(Pairs *pairs);
/* Return the pairs as Python has them. */
PyObject *py_pairs_list(const Pairs *pairs);
/* End a fold: free `pairs`, and set the list `progress` to how many records and pairs there were, and `other`, whose
 * reference it takes. Return None, or NULL with the exception that there was before, or that this has raised. */
PyObject *py_pairs_end(Pairs *pairs, PyObject *progress, Py_ssize_t records, Py_ssize_t count, PyObject *other);

#endif
