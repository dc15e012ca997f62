/* What the files of the extension share. */

#ifndef ROPEWAY_MODULE_H
#define ROPEWAY_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { NAME = 16 /* bytes of a block's name */ };

/* Little-endian, as everything that is packed. */
static inline uint64_t load_u64(const unsigned char *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static inline void store_u32(unsigned char *bytes, uint32_t word)
{
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap32(word);
#endif
    memcpy(bytes, &word, 4);
}

/* Names are chained: one equal name proves all before it, so the place where two chains part can be bisected. */
static inline Py_ssize_t shared_names(const unsigned char *here, const unsigned char *there, Py_ssize_t most)
{
    Py_ssize_t low = 1, high = most + 1, middle = most;
    while (low + 1 < high) {
        if (memcmp(here + (middle - 1) * NAME, there + (middle - 1) * NAME, NAME) == 0)
            low = middle;
        else
            high = middle;
        middle = (low + high) / 2;
    }
    return low;
}

extern PyType_Spec ropeway_namer_spec;
extern PyType_Spec ropeway_segment_spec;
extern PyType_Spec ropeway_table_spec;

PyObject *ropeway_pack_tokens(PyObject *module, PyObject *token_ids);
PyObject *ropeway_unknown(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *ropeway_well_formed(PyObject *module, PyObject *names);
PyObject *ropeway_stored(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *ropeway_taken(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *ropeway_depths(PyObject *module, PyObject *const *args, Py_ssize_t count);

typedef struct {
    PyTypeObject *segment;
    uint64_t salts[2]; /* odd; whoever chooses names must not be able to choose where they are looked for */
} ropeway_state;

extern struct PyModuleDef ropeway_module;

#endif
