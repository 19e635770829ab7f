/* This file puts the module together: its types, functions and numbers. */
#include "py_types.h"

static int add_type(PyObject *module, const char *name, PyType_Spec *spec) {
  PyObject *type = PyType_FromSpec(spec);
  return type == NULL ? -1 : PyModule_AddObject(module, name, type);
}

static int execute(PyObject *module) {
  if (add_type(module, "Group", &py_group_spec) != 0 || add_type(module, "Reducer", &py_reducer_spec) != 0 ||
      add_type(module, "Receive", &py_receive_spec) != 0 || add_type(module, "Pool", &py_pool_spec) != 0 ||
      add_type(module, "TextSums", &py_sums_spec) != 0 ||
      add_type(module, "EventLog", &py_event_log_spec) != 0)
    return -1;
  if (PyModule_AddFunctions(module, py_memory_functions) != 0 || PyModule_AddFunctions(module, py_pool_functions) != 0 ||
      PyModule_AddFunctions(module, py_ready_functions) != 0 || PyModule_AddFunctions(module, py_fold_functions) != 0 ||
      PyModule_AddFunctions(module, py_crc32_functions) != 0)
    return -1;
  return py_add_numbers(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "phalanx._core", "The shared-memory core of Phalanx.", 0, NULL, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
