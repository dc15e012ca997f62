/* cachecore.prompts.native._chats: the messages of a chat, cut and found without a loop in Python. Its twins are
 * `python_read_messages` of outlines.py, `Cutter._split_regular` of segments.py and `python_walk` of naming.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct {
    PyObject *role, *content, *children, *chain;
} names;

static int is_text(PyObject *value)
{
    return value != NULL && PyUnicode_CheckExact(value) && PyUnicode_READY(value) == 0;
}

/* The role and the text of a message, borrowed: 1, or 0 where it is more or less than these or begins with a line
 * that is not read, or -1 for an error. */
static int read_message(const names *known, PyObject *message, PyObject *unread, PyObject **role, PyObject **text)
{
    if (!PyDict_CheckExact(message) || PyDict_GET_SIZE(message) != 2)
        return 0;
    *role = PyDict_GetItemWithError(message, known->role);
    *text = PyDict_GetItemWithError(message, known->content);
    if (PyErr_Occurred())
        return -1;
    if (!is_text(*role) || !is_text(*text) || PyUnicode_GET_LENGTH(*text) == 0)
        return 0;
    if (PyUnicode_CompareWithASCIIString(*role, "system") != 0)
        return 1;
    Py_ssize_t begins = PyUnicode_Tailmatch(*text, unread, 0, PY_SSIZE_T_MAX, -1);
    return begins < 0 ? -1 : begins == 0;
}

static PyObject *read_messages(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyUnicode_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "read_messages(variables, messages, unread: str)");
        return NULL;
    }
    PyObject *messages = args[1], *read = NULL;
    Py_ssize_t size = PyList_CheckExact(messages) ? PyList_GET_SIZE(messages) : 0;
    if (size == 0)
        Py_RETURN_NONE;
    PyObject *shape = PyTuple_New(size + 1), *texts = PyList_New(size);
    if (shape == NULL || texts == NULL)
        goto done;
    PyTuple_SET_ITEM(shape, 0, Py_NewRef(args[0]));
    for (Py_ssize_t number = 0; number < size; number++) {
        PyObject *role, *text;
        PyObject *message = PyList_GET_ITEM(messages, number);
        int is_plain = read_message(PyModule_GetState(module), message, args[2], &role, &text);
        if (is_plain <= 0) {
            read = is_plain < 0 ? NULL : Py_NewRef(Py_None);
            goto done;
        }
        PyTuple_SET_ITEM(shape, number + 1, Py_NewRef(role));
        PyList_SET_ITEM(texts, number, Py_NewRef(text));
    }
    read = PyTuple_Pack(2, shape, texts);
done:
    Py_XDECREF(shape);
    Py_XDECREF(texts);
    return read;
}

typedef struct {
    PyObject *befores, *leasts, *head, *join;
    Py_ssize_t long_characters, characters_max, long_texts_max, long_texts;
} rules;

/* One segment: a new reference, None where it has to be looked at another way, or NULL. */
static PyObject *cut_one(rules *cut, PyObject *value, Py_ssize_t number)
{
    PyObject *before = PyList_GET_ITEM(cut->befores, number), *segment;
    if (!is_text(value) || !is_text(before)) {
        PyErr_SetString(PyExc_TypeError, "texts are strings");
        return NULL;
    }
    Py_ssize_t size = PyUnicode_GET_LENGTH(value);
    if (size >= cut->long_characters) {
        if (size > cut->characters_max || ++cut->long_texts > cut->long_texts_max)
            Py_RETURN_NONE;
        PyObject *parts[] = {before, value};
        segment = PyObject_Vectorcall(cut->join, parts, 2, NULL);
        if (segment == NULL || !is_text(segment))
            return segment;
    } else {
        Py_ssize_t at = PyUnicode_Find(value, cut->head, 0, size, 1);
        if (at == -2)
            return NULL;
        if (at >= 0)
            Py_RETURN_NONE;
        segment = PyUnicode_Concat(before, value);
    }
    Py_ssize_t least = segment == NULL ? -1 : PyLong_AsSsize_t(PyList_GET_ITEM(cut->leasts, number));
    if (segment == NULL || (least == -1 && PyErr_Occurred())) {
        Py_XDECREF(segment);
        return NULL;
    }
    if (PyUnicode_GET_LENGTH(segment) < least)
        Py_SETREF(segment, Py_NewRef(Py_None));
    return segment;
}

static PyObject *cut(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 9 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1]) || !PyList_CheckExact(args[2]) ||
        !PyUnicode_Check(args[3]) || !PyList_CheckExact(args[8])) {
        PyErr_SetString(PyExc_TypeError, "cut(opening: list, befores: list, leasts: list, head: str, join, "
                                         "long_characters: int, characters_max: int, long_texts_max: int, texts: list)");
        return NULL;
    }
    PyObject *opening = args[0], *texts = args[8];
    rules cut = {args[1], args[2], args[3], args[4], PyLong_AsSsize_t(args[5]), PyLong_AsSsize_t(args[6]),
                 PyLong_AsSsize_t(args[7]), 0};
    if (PyErr_Occurred())
        return NULL;
    Py_ssize_t first = PyList_GET_SIZE(opening), size = PyList_GET_SIZE(cut.leasts);
    if (PyList_GET_SIZE(cut.befores) != size + 1 || PyList_GET_SIZE(texts) < size) {
        PyErr_SetString(PyExc_ValueError, "one text for each place");
        return NULL;
    }
    PyObject *segments = PyList_New(first + size + 1);
    if (segments == NULL)
        return NULL;
    for (Py_ssize_t number = 0; number < first; number++)
        PyList_SET_ITEM(segments, number, Py_NewRef(PyList_GET_ITEM(opening, number)));
    for (Py_ssize_t number = 0; number < size; number++) {
        PyObject *segment = cut_one(&cut, PyList_GET_ITEM(texts, number), number);
        if (segment == NULL || segment == Py_None) {
            Py_DECREF(segments);
            return segment;
        }
        PyList_SET_ITEM(segments, first + number, segment);
    }
    PyList_SET_ITEM(segments, first + size, Py_NewRef(PyList_GET_ITEM(cut.befores, size)));
    return segments;
}

/* Appends a node's chain and returns the child for a segment: a new reference; NULL where there is none, or an error. */
static PyObject *step(const names *known, PyObject *node, PyObject *segment, PyObject *chains)
{
    PyObject *children = PyObject_GetAttr(node, known->children), *child = NULL;
    if (children == NULL)
        return NULL;
    if (PyDict_CheckExact(children))
        child = Py_XNewRef(PyDict_GetItemWithError(children, segment));
    else
        PyErr_SetString(PyExc_TypeError, "children are in a dictionary");
    Py_DECREF(children);
    PyObject *chain = child == NULL ? NULL : PyObject_GetAttr(child, known->chain);
    if (chain == NULL || PyList_Append(chains, chain) < 0)
        Py_CLEAR(child);
    Py_XDECREF(chain);
    return child;
}

static PyObject *walk(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyList_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "walk(node, segments, chains: list)");
        return NULL;
    }
    PyObject *segments = PySequence_Fast(args[1], "segments are a sequence");
    if (segments == NULL)
        return NULL;
    PyObject *node = Py_NewRef(args[0]);
    for (Py_ssize_t number = 0; number < PySequence_Fast_GET_SIZE(segments); number++) {
        PyObject *segment = PySequence_Fast_GET_ITEM(segments, number);
        PyObject *child = step(PyModule_GetState(module), node, segment, args[2]);
        if (child == NULL)
            break;
        Py_SETREF(node, child);
    }
    Py_DECREF(segments);
    if (PyErr_Occurred())
        Py_CLEAR(node);
    return node;
}

static int execute(PyObject *module)
{
    names *known = PyModule_GetState(module);
    known->role = PyUnicode_InternFromString("role");
    known->content = PyUnicode_InternFromString("content");
    known->children = PyUnicode_InternFromString("children");
    known->chain = PyUnicode_InternFromString("chain");
    return known->role && known->content && known->children && known->chain ? 0 : -1;
}

static int clear(PyObject *module)
{
    names *known = PyModule_GetState(module);
    Py_CLEAR(known->role);
    Py_CLEAR(known->content);
    Py_CLEAR(known->children);
    Py_CLEAR(known->chain);
    return 0;
}

static void release(void *module)
{
    clear(module);
}

static PyMethodDef methods[] = {
    {"read_messages", (PyCFunction)(void (*)(void))read_messages, METH_FASTCALL, "Shape and texts of messages."},
    {"cut", (PyCFunction)(void (*)(void))cut, METH_FASTCALL, "Segments of a prompt, each of which ends with a text."},
    {"walk", (PyCFunction)(void (*)(void))walk, METH_FASTCALL, "The deepest node on the path of segments."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cachecore.prompts.native._chats",
    .m_doc = "The messages of a chat, cut and found.",
    .m_size = sizeof(names),
    .m_methods = methods,
    .m_slots = slots,
    .m_clear = clear,
    .m_free = release,
};

PyMODINIT_FUNC PyInit__chats(void)
{
    return PyModuleDef_Init(&module);
}
