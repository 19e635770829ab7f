/* This file lets Python map memory and format it, and use single kernels and words. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "layout.h"
#include "py_types.h"
#include "reduce.h"
#include "reducer.h"
#include "word.h"

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

/* Let the system write a part of a file to its disk now, while this process goes on. No answer is an error. */
static PyObject *core_start_writeback(PyObject *module, PyObject *args) {
  int fd;
  unsigned long long at, bytes;
  (void)module;
  if (!PyArg_ParseTuple(args, "iKK", &fd, &at, &bytes)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  (void)sync_file_range(fd, (off_t)at, (off_t)bytes, SYNC_FILE_RANGE_WRITE);
  Py_END_ALLOW_THREADS
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
  int oversubscribed;
  (void)module;
  if (!PyArg_ParseTuple(args, "KIKKi", &at, &world, &stage, &channel, &oversubscribed)) return NULL;
  if (plx_group_format((void *)(uintptr_t)at, world, (size_t)stage, (size_t)channel, oversubscribed) != PLX_OK) {
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

/* Compute dst = src[0] op src[1] op ...: the kernel alone, for tests and for measurement. */
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
  uint64_t *src = py_to_array(sources, n);
  if (src == NULL) return NULL;
  Py_BEGIN_ALLOW_THREADS
  kernel((void *)(uintptr_t)dst, (const void *const *)src, n, (size_t)count);
  Py_END_ALLOW_THREADS
  free(src);
  Py_RETURN_NONE;
}

/* Return the word at that address, or NULL with an error set. */
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

static PyObject *core_reducer_bytes(PyObject *module, PyObject *arg) {
  int buckets;
  (void)module;
  if (py_to_int(arg, &buckets) != 0) return NULL;
  return PyLong_FromSize_t(plx_reducer_bytes((uint32_t)buckets));
}

PyMethodDef py_memory_functions[] = {{"map", core_map, METH_VARARGS, NULL},
                                     {"map_again", core_map_again, METH_VARARGS, NULL},
                                     {"unmap", core_unmap, METH_VARARGS, NULL},
                                     {"discard", core_discard, METH_VARARGS, NULL},
                                     {"start_writeback", core_start_writeback, METH_VARARGS, NULL},
                                     {"group_bytes", core_group_bytes, METH_VARARGS, NULL},
                                     {"format", core_format, METH_VARARGS, NULL},
                                     {"reducer_bytes", core_reducer_bytes, METH_O, NULL},
                                     {"can_reduce", core_can_reduce, METH_VARARGS, NULL},
                                     {"reduce", core_reduce, METH_VARARGS, NULL},
                                     {"load_word", core_load_word, METH_VARARGS, NULL},
                                     {"store_word", core_store_word, METH_VARARGS, NULL},
                                     {"compare_exchange_word", core_compare_exchange_word, METH_VARARGS, NULL},
                                     {NULL, NULL, 0, NULL}};
