// What cffi's generated code uses of Python's stable ABI, for machines that have Python but not its headers (on Debian and
// Ubuntu they are a package of their own). The stable ABI of 3.11 is frozen: every later CPython exports these functions
// with these signatures. CMakeLists.txt takes the real headers where they are installed.
#ifndef DGR_STABLE_ABI_PYTHON_H
#define DGR_STABLE_ABI_PYTHON_H

#ifndef Py_LIMITED_API
#error "these declarations hold for the limited API alone"
#endif

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#ifdef __cplusplus
#error "cffi's code is C"
#endif

typedef struct _object        PyObject;      // opaque: references are counted by functions
typedef struct _ts            PyThreadState;
typedef ssize_t               Py_ssize_t;

#define PyMODINIT_FUNC __attribute__((visibility("default"))) PyObject *

extern PyObject _Py_NoneStruct;
#define Py_None (&_Py_NoneStruct)

void Py_IncRef(PyObject *);
void Py_DecRef(PyObject *); // NULL is fine in both
#define Py_INCREF(object)  Py_IncRef((PyObject *) (object))
#define Py_DECREF(object)  Py_DecRef((PyObject *) (object))
#define Py_XDECREF(object) Py_DecRef((PyObject *) (object))

PyThreadState * PyEval_SaveThread(void);
void            PyEval_RestoreThread(PyThreadState *);
#define Py_BEGIN_ALLOW_THREADS { PyThreadState * _save = PyEval_SaveThread();
#define Py_END_ALLOW_THREADS     PyEval_RestoreThread(_save); }

int        PyArg_UnpackTuple(PyObject *, const char *, Py_ssize_t, Py_ssize_t, ...);
PyObject * PyErr_Occurred(void);
PyObject * PyImport_ImportModule(const char *);
PyObject * PyLong_FromLong(long);
PyObject * PyLong_FromLongLong(long long);
PyObject * PyLong_FromUnsignedLong(unsigned long);
PyObject * PyLong_FromUnsignedLongLong(unsigned long long);
PyObject * PyLong_FromVoidPtr(void *);
PyObject * PyObject_CallMethod(PyObject *, const char *, const char *, ...);
void *     PyObject_Malloc(size_t);
void       PyObject_Free(void *);
void       Py_FatalError(const char *) __attribute__((noreturn));

#endif
