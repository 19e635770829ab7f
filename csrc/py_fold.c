/* This is the inner loop of phalanx.mapreduce: it folds pairs of keys and values into a dict, as fold.py does. */
#include "py_pairs.h"
#include "py_types.h"

enum { LIST, ADD, COMBINE };

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
    Py_INCREF(old); /* `combine` may run any code */
    new = how == ADD ? PyNumber_Add(old, value) : PyObject_CallFunctionObjArgs(combine, old, value, NULL);
    Py_DECREF(old);
    if (new == NULL) return -1;
  }
  int status = PyDict_SetItem(values, key, new);
  Py_DECREF(new);
  return status;
}

/* Put all pairs of one record, or, with an exception, those before the mistake. */
static int put_all(PyObject *values, const Pairs *pairs, int how, PyObject *combine) {
  for (Py_ssize_t i = 0; i < pairs->count; i++) {
    PyObject *key = pairs->items[i].key, *value = pairs->items[i].value;
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

/* fold_pairs(values, mapped, combine, adds, limit, progress): put what `mapped` gives, the pairs of one record after
 * another, into the dict `values`: by combine(old, value); by old + value where `adds`; or, if it is None, into lists;
 * up to the record with which it is `limit` pairs. A record whose pairs cannot all be had leaves no trace; the exception
 * is raised, and another call goes on with the next.
 *
 * progress is a list: how many records were put there, how many pairs, and None, or the pairs of a record that cannot
 * be put: no pairs, no keys, or `combine` has failed. */
static PyObject *core_fold_pairs(PyObject *module, PyObject *args) {
  PyObject *values, *mapped, *combine, *progress, *one;
  Pairs pairs = {0};
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
    status = py_pairs_collect(&pairs, one);
    Py_DECREF(one);
    if (status == 0 && put_all(values, &pairs, how, combine) != 0) {
      PyObject *type, *value, *trace;
      PyErr_Fetch(&type, &value, &trace);
      Py_DECREF(mistaken);
      mistaken = py_pairs_list(&pairs);
      PyErr_Clear();
      PyErr_Restore(type, value, trace);
      status = -1;
    } else if (status == 0) {
      records++;
      count += pairs.count;
    }
    py_pairs_clear(&pairs);
  }
  return py_pairs_end(&pairs, progress, records, count, mistaken);
}

PyMethodDef py_fold_functions[] = {{"fold_pairs", core_fold_pairs, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
