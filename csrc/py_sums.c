/* This file adds integers up by text for phalanx.mapreduce: word counts, and whatever else has such pairs. */
#include <errno.h>
#include <string.h>

#include "py_pairs.h"
#include "py_types.h"
#include "sums.h"

#define BATCH 32
#define HEADER 10 /* the header of packed columns: their kinds, and the length of the first (columns.py) */

typedef struct {
  PyObject_HEAD
  struct plx_sums sums;
  char kind; /* the kind of the column of keys: t, text; B, bytes; 0, none yet */
  struct plx_sums_key *keys; /* the keys of a record, on their way in */
  Py_ssize_t room;
} TextSums;

static int check(int status) {
  if (status == 0) return 0;
  PyErr_NoMemory();
  return -1;
}

/* TextSums(seed) is made in tp_new, so that there is no table without memory. */
static PyObject *sums_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  unsigned long long seed;
  (void)kwargs;
  if (!PyArg_ParseTuple(args, "K", &seed)) return NULL;
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  TextSums *self = (TextSums *)allocate(type, 0);
  if (self == NULL) return NULL;
  if (check(plx_sums_init(&self->sums, seed)) != 0) Py_CLEAR(self);
  return (PyObject *)self;
}

static void sums_dealloc(PyObject *object) {
  TextSums *self = (TextSums *)object;
  PyTypeObject *type = Py_TYPE(object);
  plx_sums_free(&self->sums);
  PyMem_Free(self->keys);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
}

static int make_room(TextSums *self, Py_ssize_t count) {
  if (count <= self->room) return 0;
  struct plx_sums_key *keys = PyMem_Realloc(self->keys, (size_t)count * 2 * sizeof *keys);
  if (keys == NULL) return check(-ENOMEM);
  self->keys = keys;
  self->room = count * 2;
  return 0;
}

static uint64_t weight_of(int64_t value) { return value < 0 ? -(uint64_t)value : (uint64_t)value; }

/* Take the key and the value of a pair. Return 1; 0 if it is none that can be here; -1 with an exception. */
static int take_apart(const Pair *pair, char kind, struct plx_sums_key *key) {
  int overflow = 0;
  Py_ssize_t length;
  if (pair->value == NULL || !PyLong_CheckExact(pair->value)) return 0;
  if (kind == 't' ? !PyUnicode_CheckExact(pair->key) : !PyBytes_CheckExact(pair->key)) return 0;
  key->value = PyLong_AsLongLongAndOverflow(pair->value, &overflow);
  if (overflow) return 0;
  if (kind == 't') {
    key->text = PyUnicode_AsUTF8AndSize(pair->key, &length);
    if (key->text == NULL) {
      if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) return -1; /* it has half a surrogate pair */
      PyErr_Clear();
      return 0;
    }
  } else {
    char *bytes;
    if (PyBytes_AsStringAndSize(pair->key, &bytes, &length) != 0) return -1;
    key->text = bytes;
  }
  key->length = (size_t)length;
  return 1;
}

/* Add the pairs of a record, all or none. Return 1; 0 if one cannot be here; -1 with an exception. */
static int add_pairs(TextSums *self, const Pairs *pairs) {
  if (pairs->count == 0) return 1;
  if (make_room(self, pairs->count) != 0) return -1;
  char kind = self->kind ? self->kind : PyBytes_CheckExact(pairs->items[0].key) ? 'B' : 't';
  uint64_t weight = 0;
  size_t length = 0;
  for (Py_ssize_t i = 0; i < pairs->count; i++) {
    int status = take_apart(&pairs->items[i], kind, &self->keys[i]);
    if (status <= 0) return status;
    uint64_t own = weight_of(self->keys[i].value);
    weight = own > UINT64_MAX - weight ? UINT64_MAX : weight + own;
    length += self->keys[i].length;
    plx_sums_meet(&self->sums, &self->keys[i]);
  }
  if (!plx_sums_has_room(&self->sums, weight, length, (size_t)pairs->count)) return 0;
  self->kind = kind;
  for (Py_ssize_t i = 0; i < pairs->count; i++)
    if (check(plx_sums_add(&self->sums, &self->keys[i])) != 0) return -1;
  return 1;
}

/* fold(mapped, limit_bytes, progress): add what `mapped` gives, the pairs of one record after another, up to the record
 * with which that many bytes are held. A record whose pairs cannot all be had leaves no trace; the exception is raised,
 * and another call goes on with the next.
 *
 * progress is a list: how many records were added, how many pairs, and None, or the pairs of a record that is not
 * added, as some are no text (or, in another table, no bytes) with an integer; then it ends there. */
static PyObject *sums_fold(TextSums *self, PyObject *args) {
  PyObject *mapped, *progress, *one;
  Pairs pairs = {0};
  Py_ssize_t records = 0, count = 0, limit;
  int added = 1;
  if (!PyArg_ParseTuple(args, "OnO!", &mapped, &limit, &PyList_Type, &progress)) return NULL;
  if (!PyIter_Check(mapped) || PyList_Size(progress) != 3) {
    PyErr_SetString(PyExc_TypeError, "fold(mapped: iterator, limit_bytes, progress: list of 3)");
    return NULL;
  }
  PyObject *refused = Py_NewRef(Py_None);
  while (added > 0 && plx_sums_peak_bytes(&self->sums) < (size_t)limit && (one = PyIter_Next(mapped)) != NULL) {
    added = py_pairs_collect(&pairs, one) != 0 ? -1 : add_pairs(self, &pairs);
    Py_DECREF(one);
    if (added > 0) {
      records++;
      count += pairs.count;
    } else if (added == 0) {
      Py_DECREF(refused);
      refused = py_pairs_list(&pairs);
    }
    py_pairs_clear(&pairs);
  }
  return py_pairs_end(&pairs, progress, records, count, refused);
}

static size_t width_of(char kind) { return kind == 'b' ? 1 : kind == 'h' ? 2 : kind == 'i' ? 4 : kind == 'q' ? 8 : 0; }

static int64_t read_number(const char *at, size_t width) {
  int8_t byte;
  int16_t half;
  int32_t word;
  int64_t whole;
  switch (width) {
    case 1: return memcpy(&byte, at, 1), byte;
    case 2: return memcpy(&half, at, 2), half;
    case 4: return memcpy(&word, at, 4), word;
    default: return memcpy(&whole, at, 8), whole;
  }
}

static void write_number(char *at, size_t width, int64_t number) {
  memcpy(at, &number, width); /* these are its low bytes, which come first where this runs */
}

static int refuse(const char *why) {
  PyErr_SetString(PyExc_ValueError, why);
  return -1;
}

/* Write the keys of packed columns into what has been checked for room. Return -1 with an exception if there was no
 * memory. */
static int add_columns(TextSums *self, const char *text, const char *numbers, size_t width, size_t count) {
  struct plx_sums_key batch[BATCH];
  for (size_t start = 0; start < count; start += BATCH) {
    size_t most = count - start < BATCH ? count - start : BATCH;
    for (size_t i = 0; i < most; i++) {
      const char *end = start + i + 1 == count ? numbers : memchr(text, '\n', (size_t)(numbers - text));
      batch[i] = (struct plx_sums_key){text, (size_t)(end - text), read_number(numbers + (start + i) * width, width), 0};
      plx_sums_meet(&self->sums, &batch[i]);
      text = end + 1;
    }
    for (size_t i = 0; i < most; i++)
      if (check(plx_sums_add(&self->sums, &batch[i])) != 0) return -1;
  }
  return 0;
}

/* Return whether columns have as many keys as numbers, `count`; else -1 with an exception. */
static int check_columns(const char *text, const char *numbers, size_t count) {
  size_t keys = 1;
  for (const char *at = text; (at = memchr(at, '\n', (size_t)(numbers - at))) != NULL; at++) keys++;
  return keys == count ? 0 : refuse("packed columns have another number of keys than of numbers");
}

/* add(packed): add columns of keys and integers, as pack() gives them. Return how many; 0 if they can't be here. Then
 * nothing is added, nor of columns that are damaged, a ValueError. Cost: the borders between keys are counted first. */
static PyObject *sums_add(TextSums *self, PyObject *packed) {
  char *data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(packed, &data, &size) != 0) return NULL;
  size_t width = size < HEADER ? 0 : width_of(data[1]);
  if (width == 0 || (data[0] != 't' && data[0] != 'B') || (self->kind && self->kind != data[0])) return PyLong_FromLong(0);
  uint64_t text_bytes, weight = 0;
  memcpy(&text_bytes, data + 2, sizeof text_bytes);
  if (text_bytes > (uint64_t)(size - HEADER) || ((uint64_t)(size - HEADER) - text_bytes) % width != 0) {
    refuse("these are no packed columns");
    return NULL;
  }
  const char *text = data + HEADER, *numbers = text + text_bytes;
  size_t count = ((size_t)size - HEADER - (size_t)text_bytes) / width;
  if (check_columns(text, numbers, count) != 0) return NULL;
  for (size_t i = 0; i < count; i++) {
    uint64_t own = weight_of(read_number(numbers + i * width, width));
    weight = own > UINT64_MAX - weight ? UINT64_MAX : weight + own;
  }
  if (!plx_sums_has_room(&self->sums, weight, (size_t)text_bytes, count)) return PyLong_FromLong(0);
  self->kind = data[0];
  if (add_columns(self, text, numbers, width, count) != 0) return NULL;
  return PyLong_FromSize_t(count);
}

static PyObject *sums_sort(TextSums *self, PyObject *unused) {
  (void)unused;
  return check(plx_sums_sort(&self->sums)) != 0 ? NULL : Py_NewRef(Py_None);
}

/* partition(partitions): return the places after the last key of each partition. */
static PyObject *sums_partition(TextSums *self, PyObject *args) {
  Py_ssize_t partitions;
  if (!PyArg_ParseTuple(args, "n", &partitions)) return NULL;
  if (partitions < 1) {
    PyErr_SetString(PyExc_ValueError, "there is at least one partition");
    return NULL;
  }
  size_t *ends = PyMem_Calloc((size_t)partitions, sizeof *ends);
  if (ends == NULL) return PyErr_NoMemory();
  PyObject *list = check(plx_sums_partition(&self->sums, (size_t)partitions, ends)) != 0 ? NULL : PyList_New(partitions);
  for (Py_ssize_t i = 0; list != NULL && i < partitions; i++) {
    PyObject *end = PyLong_FromSize_t(ends[i]);
    if (end == NULL || PyList_SetItem(list, i, end) != 0) Py_CLEAR(list);
  }
  PyMem_Free(ends);
  return list;
}

static int parse_places(TextSums *self, PyObject *args, Py_ssize_t *start, Py_ssize_t *stop) {
  if (!PyArg_ParseTuple(args, "nn", start, stop)) return -1;
  if (self->sums.order != NULL && 0 <= *start && *start <= *stop && (size_t)*stop <= self->sums.ordered) return 0;
  PyErr_SetString(PyExc_IndexError, "keys have places after sort() or partition(), until others come");
  return -1;
}

/* pack(start, stop): return the keys at these places and their sums as columns (columns.py). */
static PyObject *sums_pack(TextSums *self, PyObject *args) {
  Py_ssize_t start, stop;
  if (parse_places(self, args, &start, &stop) != 0) return NULL;
  if (start == stop || self->sums.has_border) {
    PyErr_SetString(PyExc_ValueError, "there are no keys, or one contains what lies between them");
    return NULL;
  }
  size_t count = (size_t)(stop - start), text_bytes = count - 1, length;
  int64_t least = INT64_MAX, most = INT64_MIN, sum;
  for (Py_ssize_t i = start; i < stop; i++) {
    plx_sums_at(&self->sums, (size_t)i, &length, &sum);
    text_bytes += length;
    least = sum < least ? sum : least;
    most = sum > most ? sum : most;
  }
  char kind = INT8_MIN <= least && most <= INT8_MAX     ? 'b'
              : INT16_MIN <= least && most <= INT16_MAX ? 'h'
              : INT32_MIN <= least && most <= INT32_MAX ? 'i'
                                                        : 'q';
  size_t width = width_of(kind);
  PyObject *packed = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(HEADER + text_bytes + count * width));
  if (packed == NULL) return NULL;
  char *data = PyBytes_AsString(packed), *text = data + HEADER, *numbers = text + text_bytes;
  data[0] = self->kind;
  data[1] = kind;
  write_number(data + 2, 8, (int64_t)text_bytes);
  for (Py_ssize_t i = start; i < stop; i++) {
    const char *key = plx_sums_at(&self->sums, (size_t)i, &length, &sum);
    memcpy(text, key, length);
    text += length;
    if (i + 1 < stop) *text++ = '\n';
    write_number(numbers, width, sum);
    numbers += width;
  }
  return packed;
}

/* items(start, stop): return the keys at these places, and their sums, as two lists. */
static PyObject *sums_items(TextSums *self, PyObject *args) {
  Py_ssize_t start, stop;
  if (parse_places(self, args, &start, &stop) != 0) return NULL;
  PyObject *keys = PyList_New(stop - start), *values = PyList_New(stop - start);
  for (Py_ssize_t i = start; keys != NULL && values != NULL && i < stop; i++) {
    size_t length;
    int64_t sum;
    const char *text = plx_sums_at(&self->sums, (size_t)i, &length, &sum);
    PyObject *key = self->kind == 'B' ? PyBytes_FromStringAndSize(text, (Py_ssize_t)length)
                                      : PyUnicode_DecodeUTF8(text, (Py_ssize_t)length, "surrogatepass");
    PyObject *value = PyLong_FromLongLong(sum);
    if (key == NULL || value == NULL) {
      Py_XDECREF(key);
      Py_XDECREF(value);
      Py_CLEAR(keys);
    } else {
      PyList_SetItem(keys, i - start, key); /* takes the reference */
      PyList_SetItem(values, i - start, value);
    }
  }
  PyObject *both = keys == NULL || values == NULL ? NULL : PyTuple_Pack(2, keys, values);
  Py_XDECREF(keys);
  Py_XDECREF(values);
  return both;
}

static PyObject *sums_key_type(TextSums *self, PyObject *unused) {
  (void)unused;
  return Py_NewRef((PyObject *)(self->kind == 'B' ? &PyBytes_Type : &PyUnicode_Type));
}

static PyObject *sums_is_packable(TextSums *self, PyObject *unused) {
  (void)unused;
  return PyBool_FromLong(!self->sums.has_border);
}

static PyObject *sums_held_bytes(TextSums *self, PyObject *unused) {
  (void)unused;
  return PyLong_FromSize_t(plx_sums_peak_bytes(&self->sums));
}

static PyObject *sums_text_bytes(TextSums *self, PyObject *unused) {
  (void)unused;
  return PyLong_FromSize_t(self->sums.text_bytes);
}

static Py_ssize_t sums_length(PyObject *object) { return (Py_ssize_t)((TextSums *)object)->sums.count; }

static PyMethodDef sums_methods[] = {{"fold", (PyCFunction)sums_fold, METH_VARARGS, NULL},
                                     {"add", (PyCFunction)sums_add, METH_O, NULL},
                                     {"sort", (PyCFunction)sums_sort, METH_NOARGS, NULL},
                                     {"partition", (PyCFunction)sums_partition, METH_VARARGS, NULL},
                                     {"pack", (PyCFunction)sums_pack, METH_VARARGS, NULL},
                                     {"items", (PyCFunction)sums_items, METH_VARARGS, NULL},
                                     {"key_type", (PyCFunction)sums_key_type, METH_NOARGS, NULL},
                                     {"is_packable", (PyCFunction)sums_is_packable, METH_NOARGS, NULL},
                                     {"held_bytes", (PyCFunction)sums_held_bytes, METH_NOARGS, NULL},
                                     {"text_bytes", (PyCFunction)sums_text_bytes, METH_NOARGS, NULL},
                                     {NULL, NULL, 0, NULL}};

static PyType_Slot sums_slots[] = {{Py_tp_new, sums_new},
                                   {Py_tp_dealloc, sums_dealloc},
                                   {Py_tp_methods, sums_methods},
                                   {Py_mp_length, sums_length},
                                   {Py_tp_doc, (void *)"Integers added up by text, or by bytes."},
                                   {0, NULL}};

PyType_Spec py_sums_spec = {"phalanx._core.TextSums", sizeof(TextSums), 0, Py_TPFLAGS_DEFAULT, sums_slots};
