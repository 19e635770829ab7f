/* This file takes the pairs of one record from Python. */
#include "py_pairs.h"

void py_pairs_clear(Pairs *pairs) {
  for (Py_ssize_t i = 0; i < pairs->count; i++) {
    Py_DECREF(pairs->items[i].key);
    Py_XDECREF(pairs->items[i].value);
  }
  pairs->count = 0;
}

void py_pairs_free(Pairs *pairs) {
  py_pairs_clear(pairs);
  PyMem_Free(pairs->items);
  pairs->items = NULL;
}

static int push(Pairs *pairs, PyObject *key, PyObject *value) {
  if (pairs->count == pairs->room) {
    Py_ssize_t room = pairs->room ? 2 * pairs->room : 64;
    Pair *items = PyMem_Realloc(pairs->items, (size_t)room * sizeof *items);
    if (items == NULL) {
      PyErr_NoMemory();
      return -1;
    }
    pairs->items = items;
    pairs->room = room;
  }
  Py_INCREF(key);
  Py_XINCREF(value);
  pairs->items[pairs->count++] = (Pair){key, value};
  return 0;
}

int py_pairs_collect(Pairs *pairs, PyObject *mapped) {
  PyObject *iterator = PyObject_GetIter(mapped), *pair;
  int status = iterator == NULL ? -1 : 0;
  while (status == 0 && (pair = PyIter_Next(iterator)) != NULL) {
    if (PyTuple_CheckExact(pair) && PyTuple_Size(pair) == 2) {
      status = push(pairs, PyTuple_GetItem(pair, 0), PyTuple_GetItem(pair, 1));
    } else {
      status = push(pairs, pair, NULL);
    }
    Py_DECREF(pair);
  }
  Py_XDECREF(iterator);
  return PyErr_Occurred() ? -1 : status;
}

PyObject *py_pairs_list(const Pairs *pairs) {
  PyObject *list = PyList_New(0);
  for (Py_ssize_t i = 0; list != NULL && i < pairs->count; i++) {
    PyObject *key = pairs->items[i].key, *value = pairs->items[i].value;
    PyObject *pair = value == NULL ? Py_NewRef(key) : PyTuple_Pack(2, key, value);
    if (pair == NULL || PyList_Append(list, pair) != 0) Py_CLEAR(list);
    Py_XDECREF(pair);
  }
  return list;
}

static int report(PyObject *progress, Py_ssize_t records, Py_ssize_t count, PyObject *other) {
  PyObject *said[3] = {PyLong_FromSsize_t(records), PyLong_FromSsize_t(count), other};
  int status = said[0] == NULL || said[1] == NULL || other == NULL ? -1 : 0;
  for (Py_ssize_t i = 0; i < 3; i++) {
    if (status == 0)
      status = PyList_SetItem(progress, i, said[i]); /* takes the reference */
    else
      Py_XDECREF(said[i]);
  }
  return status;
}

PyObject *py_pairs_end(Pairs *pairs, PyObject *progress, Py_ssize_t records, Py_ssize_t count, PyObject *other) {
  py_pairs_free(pairs);
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  if (report(progress, records, count, other) != 0) {
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return PyErr_Occurred() ? NULL : PyErr_NoMemory();
  }
  PyErr_Restore(type, value, trace);
  return type != NULL ? NULL : Py_NewRef(Py_None);
}
