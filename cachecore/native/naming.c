/* Naming blocks: `Namer` of cachecore/blocks.py. */

#include "module.h"
#include "blake2b.h"

typedef struct {
    PyObject_HEAD
    Py_ssize_t block_bytes;
    blake2b_state start; /* after the key and what each message begins with */
} Namer;

static PyObject *namer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"key", "person", "start", "block_bytes", NULL};
    Py_buffer key, person, start;
    Py_ssize_t block_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*y*y*n", names, &key, &person, &start, &block_bytes))
        return NULL;
    Namer *self = NULL;
    if (key.len > BLAKE2B_KEY_MAX || person.len != BLAKE2B_PERSON || block_bytes < 1)
        PyErr_SetString(PyExc_ValueError, "a key has 64 bytes at most, a person 16, a block 1 at least");
    else if ((self = (Namer *)type->tp_alloc(type, 0)) != NULL) {
        self->block_bytes = block_bytes;
        blake2b_init(&self->start, NAME, key.buf, (size_t)key.len, person.buf);
        blake2b_update(&self->start, start.buf, (size_t)start.len);
    }
    PyBuffer_Release(&key);
    PyBuffer_Release(&person);
    PyBuffer_Release(&start);
    return (PyObject *)self;
}

static void namer_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Adds the extras of block `number`: item `number` of `extras`, a PySequence_Fast or NULL. */
static int add_extras(blake2b_state *state, PyObject *extras, Py_ssize_t number)
{
    if (extras == NULL)
        return 0;
    if (number >= PySequence_Fast_GET_SIZE(extras)) {
        PyErr_SetString(PyExc_IndexError, "extras for fewer blocks than there are");
        return -1;
    }
    Py_buffer extra;
    if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(extras, number), &extra, PyBUF_SIMPLE) < 0)
        return -1;
    blake2b_update(state, extra.buf, (size_t)extra.len);
    PyBuffer_Release(&extra);
    return 0;
}

/* The tokens' bytes; of a view that does not lie in one piece, a copy's. */
static int open_tokens(PyObject *tokens, Py_buffer *opened)
{
    if (PyObject_GetBuffer(tokens, opened, PyBUF_SIMPLE) == 0)
        return 0;
    if (!PyErr_ExceptionMatches(PyExc_BufferError))
        return -1;
    PyErr_Clear();
    PyObject *copy = PyBytes_FromObject(tokens);
    if (copy == NULL)
        return -1;
    int failed = PyObject_GetBuffer(copy, opened, PyBUF_SIMPLE);
    Py_DECREF(copy);
    return failed;
}

/* Names of all full blocks, packed: each after the one before it when there is a `parent`, else each alone. */
static PyObject *named(Namer *self, const Py_buffer *parent, const Py_buffer *tokens, PyObject *extras)
{
    Py_ssize_t blocks = tokens->len / self->block_bytes;
    PyObject *packed = PyBytes_FromStringAndSize(NULL, blocks * NAME);
    if (packed == NULL)
        return NULL;
    const unsigned char *text = tokens->buf, *before = parent ? parent->buf : NULL;
    size_t before_bytes = parent ? (size_t)parent->len : 0;
    unsigned char *name = (unsigned char *)PyBytes_AS_STRING(packed);
    for (Py_ssize_t number = 0; number < blocks; number++, name += NAME) {
        blake2b_state state = self->start;
        if (parent)
            blake2b_update(&state, before, before_bytes);
        blake2b_update(&state, text + number * self->block_bytes, (size_t)self->block_bytes);
        if (add_extras(&state, extras, number) < 0) {
            Py_DECREF(packed);
            return NULL;
        }
        blake2b_finish(&state, name);
        before = name;
        before_bytes = NAME;
    }
    return packed;
}

static PyObject *name_blocks(Namer *self, PyObject *parent, PyObject *tokens, PyObject *extras)
{
    Py_buffer text, before;
    PyObject *listed = NULL, *packed = NULL;
    if (extras != Py_None && (listed = PySequence_Fast(extras, "extras are a sequence")) == NULL)
        return NULL;
    if (parent != NULL && PyObject_GetBuffer(parent, &before, PyBUF_SIMPLE) < 0)
        goto without_parent;
    if (open_tokens(tokens, &text) == 0) {
        packed = named(self, parent ? &before : NULL, &text, listed);
        PyBuffer_Release(&text);
    }
    if (parent != NULL)
        PyBuffer_Release(&before);
without_parent:
    Py_XDECREF(listed);
    return packed;
}

static PyObject *namer_chain(Namer *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "chain(parent, tokens, extras)");
        return NULL;
    }
    return name_blocks(self, args[0], args[1], args[2]);
}

static PyObject *namer_each(Namer *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "each(tokens, extras)");
        return NULL;
    }
    return name_blocks(self, NULL, args[0], args[1]);
}

/* The id, or -1 as unsigned with an error set. */
static unsigned long long token_id(PyObject *token)
{
    if (PyLong_CheckExact(token))
        return PyLong_AsUnsignedLongLong(token);
    PyObject *number = PyNumber_Index(token);
    unsigned long long id = number ? PyLong_AsUnsignedLongLong(number) : (unsigned long long)-1;
    Py_XDECREF(number);
    return id;
}

static int pack_token(PyObject *token, unsigned char *bytes)
{
    unsigned long long id = token_id(token);
    if (id > UINT32_MAX) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_OverflowError, "a token id has 32 bits");
        return -1;
    }
    store_u32(bytes, (uint32_t)id);
    return 0;
}

PyObject *ropeway_pack_tokens(PyObject *module, PyObject *token_ids)
{
    PyObject *listed = PySequence_Fast(token_ids, "token ids are a sequence");
    if (listed == NULL)
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(listed);
    PyObject *packed = PyBytes_FromStringAndSize(NULL, count * 4);
    for (Py_ssize_t at = 0; packed != NULL && at < PySequence_Fast_GET_SIZE(listed) && at < count; at++)
        if (pack_token(PySequence_Fast_GET_ITEM(listed, at), (unsigned char *)PyBytes_AS_STRING(packed) + 4 * at) < 0)
            Py_CLEAR(packed);
    if (packed != NULL && PySequence_Fast_GET_SIZE(listed) != count) {
        PyErr_SetString(PyExc_RuntimeError, "the token ids changed while they were packed");
        Py_CLEAR(packed);
    }
    Py_DECREF(listed);
    return packed;
}

static PyMethodDef namer_methods[] = {
    {"chain", (PyCFunction)(void (*)(void))namer_chain, METH_FASTCALL, "Names of blocks that follow each other, packed."},
    {"each", (PyCFunction)(void (*)(void))namer_each, METH_FASTCALL, "Names of blocks by themselves, packed."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot namer_slots[] = {
    {Py_tp_new, namer_new},
    {Py_tp_dealloc, namer_dealloc},
    {Py_tp_methods, namer_methods},
    {Py_tp_doc, "Namer(key, person, start, block_bytes): names blocks of tokens under one key."},
    {0, NULL},
};

PyType_Spec ropeway_namer_spec = {
    .name = "cachecore.native._native.Namer",
    .basicsize = sizeof(Namer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = namer_slots,
};
