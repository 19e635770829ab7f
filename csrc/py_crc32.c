/* This file lets Python compute the CRC-32 of a part of a file. */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "crc32.h"
#include "py_types.h"

enum { BLOCK = 256 << 10 }; /* it stays in the cache of one core between the read and the checksum */

/* crc32_of_range(fd, begin, bytes, crc): the CRC-32 after `bytes` of the file from `begin`, and how many there were. */
static PyObject *core_crc32_of_range(PyObject *module, PyObject *args) {
  int fd, failed = 0;
  unsigned long long begin, bytes, done = 0;
  unsigned crc;
  uint32_t table[256];
  (void)module;
  if (!PyArg_ParseTuple(args, "iKKI", &fd, &begin, &bytes, &crc)) return NULL;
  unsigned char *block = malloc(BLOCK);
  if (block == NULL) return PyErr_NoMemory();
  Py_BEGIN_ALLOW_THREADS
  plx_crc32_table(table);
  while (done < bytes) {
    size_t wanted = bytes - done < BLOCK ? (size_t)(bytes - done) : BLOCK;
    ssize_t got = pread(fd, block, wanted, (off_t)(begin + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) failed = errno;
    if (got <= 0) break;
    crc = plx_crc32(table, crc, block, (size_t)got);
    done += (unsigned long long)got;
  }
  Py_END_ALLOW_THREADS
  free(block);
  if (failed != 0) {
    errno = failed;
    return PyErr_SetFromErrno(PyExc_OSError);
  }
  return Py_BuildValue("IK", crc, done);
}

static PyObject *core_crc32_is_fast(PyObject *module, PyObject *none) {
  (void)module;
  (void)none;
  return PyBool_FromLong(plx_crc32_is_fast());
}

PyMethodDef py_crc32_functions[] = {{"crc32_of_range", core_crc32_of_range, METH_VARARGS, NULL},
                                    {"crc32_is_fast", core_crc32_is_fast, METH_NOARGS, NULL},
                                    {NULL, NULL, 0, NULL}};
