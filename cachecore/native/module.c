/* cachecore.native._native: what a gateway does block by block, in C. `cachecore/native/__init__.py` says the rest. */

#include "module.h"

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **kept)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL)
        return -1;
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    if (kept != NULL && !failed)
        *kept = (PyTypeObject *)Py_NewRef(type);
    Py_DECREF(type);
    return failed;
}

/* From Python's hash of texts, which differs from process to process. */
static int draw_salts(ropeway_state *state)
{
    static const char *texts[2] = {"ropeway", "cachecore"};
    for (int place = 0; place < 2; place++) {
        PyObject *text = PyUnicode_FromString(texts[place]);
        Py_hash_t hash = text ? PyObject_Hash(text) : -1;
        Py_XDECREF(text);
        if (hash == -1)
            return -1;
        state->salts[place] = (uint64_t)hash | 1;
    }
    return 0;
}

static int execute(PyObject *module)
{
    ropeway_state *state = PyModule_GetState(module);
    if (draw_salts(state) < 0)
        return -1;
    if (add_type(module, &ropeway_namer_spec, NULL) < 0 || add_type(module, &ropeway_segment_spec, &state->segment) < 0)
        return -1;
    return add_type(module, &ropeway_table_spec, NULL);
}

static int traverse(PyObject *module, visitproc visit, void *arg)
{
    Py_VISIT(((ropeway_state *)PyModule_GetState(module))->segment);
    return 0;
}

static int clear(PyObject *module)
{
    Py_CLEAR(((ropeway_state *)PyModule_GetState(module))->segment);
    return 0;
}

static PyMethodDef methods[] = {
    {"pack_tokens", ropeway_pack_tokens, METH_O, "Token ids, four bytes each."},
    {"depths", (PyCFunction)(void (*)(void))ropeway_depths, METH_FASTCALL, "Leading blocks of a chain that each key holds."},
    {"stored", (PyCFunction)(void (*)(void))ropeway_stored, METH_FASTCALL, "Count a chain once more for a key."},
    {"taken", (PyCFunction)(void (*)(void))ropeway_taken, METH_FASTCALL, "Take back one count of a chain."},
    {"unknown", (PyCFunction)(void (*)(void))ropeway_unknown, METH_FASTCALL, "How many blocks come before a known one."},
    {"well_formed", ropeway_well_formed, METH_O, "Whether bytes are whole names, none of them twice."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

struct PyModuleDef ropeway_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cachecore.native._native",
    .m_doc = "Naming and finding blocks, in C.",
    .m_size = sizeof(ropeway_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&ropeway_module);
}
