/* Pairs of keys and values into a dict: the inner loop of phalanx.mapreduce, which is the same in Python (fold.py). */
#include "py_types.h"

enum { LIST, ADD, COMBINE };

/* The pairs of one record. A tuple is taken apart as it comes, so that its memory is that of the next. */
typedef struct {
  PyObject **items; /* key and value in turns; what is no tuple of two stands there whole, with NULL behind it */
  Py_ssize_t count, room;
} Pairs;

static void clear(Pairs *pairs) {
  for (Py_ssize_t i = 0; i < 2 * pairs->count; i++) Py_XDECREF(pairs->items[i]);
  pairs->count = 0;
}

static int push(Pairs *pairs, PyObject *key, PyObject *value) {
  if (pairs->count == pairs->room) {
    Py_ssize_t room = pairs->room ? 2 * pairs->room : 64;
    PyObject **items = PyMem_Realloc(pairs->items, (size_t)room * 2 * sizeof *items);
    if (items == NULL) {
      PyErr_NoMemory();
      return -1;
    }
    pairs->items = items;
    pairs->room = room;
  }
  Py_INCREF(key);
  Py_XINCREF(value);
  pairs->items[2 * pairs->count] = key;
  pairs->items[2 * pairs->count + 1] = value;
  pairs->count++;
  return 0;
}

/* What iterates over one record's pairs, to its end. */
static int collect(Pairs *pairs, PyObject *mapped) {
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

static int put(PyObject *values, PyObject *key, PyObject *value, int how, PyObject *combine) {
  PyObject *old = PyDict_GetItemWithError(values, key), *new;
  if (old == NULL && PyErr_Occurred()) return -1;
  if (how == LIST) {
    if (old != NULL) return PyList_Append(old, value);
    new = PyList_New(1);
    if (new == NULL) return -1;
    Py_INCREF(value);
    if (PyList_SetItem(new, 0, value) != 0) {
      Py_DECREF(new);
      return -1;
    }
  } else if (old == NULL) {
    return PyDict_SetItem(values, key, value);
  } else {
    Py_INCREF(old); /* `combine` is anybody's code */
    new = how == ADD ? PyNumber_Add(old, value) : PyObject_CallFunctionObjArgs(combine, old, value, NULL);
    Py_DECREF(old);
    if (new == NULL) return -1;
  }
  int status = PyDict_SetItem(values, key, new);
  Py_DECREF(new);
  return status;
}

/* All of one record, or, with an exception, what is before the mistake. */
static int put_all(PyObject *values, const Pairs *pairs, int how, PyObject *combine) {
  for (Py_ssize_t i = 0; i < pairs->count; i++) {
    PyObject *key = pairs->items[2 * i], *value = pairs->items[2 * i + 1];
    if (value != NULL) {
      if (put(values, key, value, how, combine) != 0) return -1;
      continue;
    }
    PyObject *two = PySequence_Tuple(key); /* anything with two items is a pair */
    if (two == NULL) return -1;
    int status = -1;
    if (PyTuple_Size(two) == 2)
      status = put(values, PyTuple_GetItem(two, 0), PyTuple_GetItem(two, 1), how, combine);
    else
      PyErr_SetString(PyExc_ValueError, "no pair");
    Py_DECREF(two);
    if (status != 0) return -1;
  }
  return 0;
}

/* As Python has them, for who describes the mistake. */
static PyObject *as_list(const Pairs *pairs) {
  PyObject *list = PyList_New(0);
  for (Py_ssize_t i = 0; list != NULL && i < pairs->count; i++) {
    PyObject *key = pairs->items[2 * i], *value = pairs->items[2 * i + 1];
    PyObject *pair = value == NULL ? Py_NewRef(key) : PyTuple_Pack(2, key, value);
    if (pair == NULL || PyList_Append(list, pair) != 0) Py_CLEAR(list);
    Py_XDECREF(pair);
  }
  return list;
}

static int say(PyObject *progress, Py_ssize_t records, Py_ssize_t count, PyObject *mistaken) {
  PyObject *said[3] = {PyLong_FromSsize_t(records), PyLong_FromSsize_t(count), mistaken};
  int status = said[0] == NULL || said[1] == NULL || mistaken == NULL ? -1 : 0;
  for (Py_ssize_t i = 0; i < 3; i++) {
    if (status == 0)
      status = PyList_SetItem(progress, i, said[i]); /* takes the reference */
    else
      Py_XDECREF(said[i]);
  }
  return status;
}

/* fold_pairs(values, mapped, combine, adds, limit, progress): put what `mapped` gives, the pairs of one record after
 * another, into the dict `values`: by combine(old, value); by old + value where `adds`; or, if it is None, into lists;
 * up to the record with which it is `limit` pairs. A record whose pairs cannot all be had leaves no trace; the exception
 * is raised, and another call goes on with the next.
 *
 * progress is a list: how many records were put there, how many pairs, and None, or the pairs of a record that cannot
 * be put: no pairs, no keys, or `combine` has failed. */
static PyObject *core_fold_pairs(PyObject *module, PyObject *args) {
  PyObject *values, *mapped, *combine, *progress, *one;
  Pairs pairs = {NULL, 0, 0};
  Py_ssize_t records = 0, count = 0, limit;
  int adds, status = 0;
  (void)module;
  if (!PyArg_ParseTuple(args, "O!OOpnO!", &PyDict_Type, &values, &mapped, &combine, &adds, &limit, &PyList_Type,
                        &progress))
    return NULL;
  if (!PyIter_Check(mapped) || PyList_Size(progress) != 3) {
    PyErr_SetString(PyExc_TypeError, "fold_pairs(values: dict, mapped: iterator, combine, adds, limit, progress: list of 3)");
    return NULL;
  }
  int how = combine == Py_None ? LIST : adds ? ADD : COMBINE;
  PyObject *mistaken = Py_NewRef(Py_None);
  while (status == 0 && count < limit && (one = PyIter_Next(mapped)) != NULL) {
    status = collect(&pairs, one);
    Py_DECREF(one);
    if (status == 0 && put_all(values, &pairs, how, combine) != 0) {
      PyObject *type, *value, *trace;
      PyErr_Fetch(&type, &value, &trace);
      Py_DECREF(mistaken);
      mistaken = as_list(&pairs);
      PyErr_Clear();
      PyErr_Restore(type, value, trace);
      status = -1;
    } else if (status == 0) {
      records++;
      count += pairs.count;
    }
    clear(&pairs);
  }
  PyMem_Free(pairs.items);
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  if (say(progress, records, count, mistaken) != 0) {
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return PyErr_Occurred() ? NULL : PyErr_NoMemory();
  }
  PyErr_Restore(type, value, trace);
  return type != NULL ? NULL : Py_NewRef(Py_None);
}

PyMethodDef py_fold_functions[] = {{"fold_pairs", core_fold_pairs, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
