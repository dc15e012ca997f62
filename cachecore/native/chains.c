/* Chains that are counted: `stored`, `taken` and `depths` of cachecore/index/chains.py.
 *
 * Nodes are a dictionary {first name: (names, {key: count})}, so that what is not done for every request stays in Python.
 */

#include "module.h"

typedef struct {
    PyObject *first;
    PyObject *entry; /* (names, counts): both are borrowed from it */
    PyObject *names;
    PyObject *counts;
} Node;

static void release(Node *node)
{
    Py_CLEAR(node->first);
    Py_CLEAR(node->entry);
}

static int open_entry(Node *node)
{
    PyObject *entry = node->entry;
    if (PyTuple_CheckExact(entry) && PyTuple_GET_SIZE(entry) == 2) {
        node->names = PyTuple_GET_ITEM(entry, 0);
        node->counts = PyTuple_GET_ITEM(entry, 1);
        if (PyBytes_CheckExact(node->names) && PyBytes_GET_SIZE(node->names) >= NAME && PyDict_CheckExact(node->counts))
            return 0;
    }
    PyErr_SetString(PyExc_TypeError, "a node is (names, counts)");
    return -1;
}

/* 1 with the node that has the name at `position`; 0 with that name alone; -1 with nothing. To be released. */
static int node_at(PyObject *nodes, PyObject *chain, Py_ssize_t position, Node *node)
{
    node->entry = NULL;
    node->first = PyBytes_FromStringAndSize(PyBytes_AS_STRING(chain) + position, NAME);
    if (node->first == NULL)
        return -1;
    node->entry = Py_XNewRef(PyDict_GetItemWithError(nodes, node->first));
    if (node->entry != NULL ? open_entry(node) < 0 : PyErr_Occurred() != NULL) {
        release(node);
        return -1;
    }
    return node->entry != NULL;
}

/* How many bytes of the node the chain has from `position` on. */
static Py_ssize_t agreeing(const Node *node, PyObject *chain, Py_ssize_t position)
{
    Py_ssize_t most = PyBytes_GET_SIZE(chain) - position, bytes = PyBytes_GET_SIZE(node->names);
    const unsigned char *here = (const unsigned char *)PyBytes_AS_STRING(node->names);
    const unsigned char *there = (const unsigned char *)PyBytes_AS_STRING(chain) + position;
    return NAME * shared_names(here, there, (bytes < most ? bytes : most) / NAME);
}

static PyObject *names_from(PyObject *names, Py_ssize_t start, Py_ssize_t stop)
{
    if (start == 0 && stop == PyBytes_GET_SIZE(names))
        return Py_NewRef(names);
    return PyBytes_FromStringAndSize(PyBytes_AS_STRING(names) + start, stop - start);
}

/* Takes the references to names and counts, either of which may be NULL with an error set. */
static int put_node(PyObject *nodes, PyObject *first, PyObject *names, PyObject *counts)
{
    PyObject *entry = names && counts ? PyTuple_Pack(2, names, counts) : NULL;
    Py_XDECREF(names);
    Py_XDECREF(counts);
    int failed = entry ? PyDict_SetItem(nodes, first, entry) : -1;
    Py_XDECREF(entry);
    return failed;
}

/* Cuts a node in two. Every chain so far went through both. */
static int split_node(PyObject *nodes, const Node *node, Py_ssize_t at)
{
    PyObject *first = names_from(node->names, at, at + NAME);
    if (first == NULL)
        return -1;
    PyObject *rest = names_from(node->names, at, PyBytes_GET_SIZE(node->names));
    int failed = put_node(nodes, first, rest, PyDict_Copy(node->counts));
    Py_DECREF(first);
    return failed ? -1 : put_node(nodes, node->first, names_from(node->names, 0, at), Py_NewRef(node->counts));
}

/* Adds to the count of a key, and drops it at zero. Returns the count before, or -1. */
static Py_ssize_t add_to(PyObject *counts, PyObject *key, int change)
{
    PyObject *known = PyDict_GetItemWithError(counts, key);
    Py_ssize_t count = known ? PyLong_AsSsize_t(known) : 0;
    if (PyErr_Occurred())
        return -1;
    if (count + change <= 0)
        return known && PyDict_DelItem(counts, key) < 0 ? -1 : count;
    PyObject *changed = PyLong_FromSsize_t(count + change);
    int failed = changed ? PyDict_SetItem(counts, key, changed) : -1;
    Py_XDECREF(changed);
    return failed ? -1 : count;
}

static int add_leaf(PyObject *nodes, PyObject *first, PyObject *key, PyObject *chain, Py_ssize_t position)
{
    PyObject *counts = PyDict_New();
    if (counts != NULL && add_to(counts, key, 1) < 0)
        Py_CLEAR(counts);
    return put_node(nodes, first, names_from(chain, position, PyBytes_GET_SIZE(chain)), counts);
}

static int check_arguments(PyObject *const *args, Py_ssize_t count, Py_ssize_t expected)
{
    if (count == expected && PyDict_CheckExact(args[0]) && PyBytes_CheckExact(args[count - 1])
        && PyBytes_GET_SIZE(args[count - 1]) % NAME == 0)
        return 0;
    PyErr_SetString(PyExc_TypeError, "expected nodes, a key where one is needed, and a chain of whole names");
    return -1;
}

PyObject *ropeway_stored(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (check_arguments(args, count, 3) < 0)
        return NULL;
    PyObject *nodes = args[0], *key = args[1], *chain = args[2];
    Py_ssize_t held = 0;
    for (Py_ssize_t position = 0; position < PyBytes_GET_SIZE(chain);) {
        Node node;
        int found = node_at(nodes, chain, position, &node);
        if (found < 0)
            return NULL;
        Py_ssize_t before = 0, reached = PyBytes_GET_SIZE(chain);
        if (!found) {
            before = add_leaf(nodes, node.first, key, chain, position);
        } else {
            Py_ssize_t bytes = agreeing(&node, chain, position);
            reached = position + bytes;
            if (bytes < PyBytes_GET_SIZE(node.names))
                before = split_node(nodes, &node, bytes);
            if (before == 0)
                before = add_to(node.counts, key, 1);
        }
        release(&node);
        if (before < 0)
            return NULL;
        position = reached;
        held = before ? position : held;
    }
    return PyLong_FromSsize_t(held / NAME);
}

/* Whether the key has stored the chain: 1, 0 or -1. */
static int has_stored(PyObject *nodes, PyObject *key, PyObject *chain)
{
    int found = 1;
    for (Py_ssize_t position = 0; found == 1 && position < PyBytes_GET_SIZE(chain);) {
        Node node;
        if ((found = node_at(nodes, chain, position, &node)) < 0)
            return -1;
        if (found && (found = PyDict_Contains(node.counts, key)) == 1) {
            found = agreeing(&node, chain, position) == PyBytes_GET_SIZE(node.names);
            position += PyBytes_GET_SIZE(node.names);
        }
        release(&node);
    }
    return found;
}

PyObject *ropeway_taken(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (check_arguments(args, count, 3) < 0)
        return NULL;
    PyObject *nodes = args[0], *key = args[1], *chain = args[2];
    int stored = has_stored(nodes, key, chain);
    for (Py_ssize_t position = 0; stored == 1 && position < PyBytes_GET_SIZE(chain);) {
        Node node;
        if ((stored = node_at(nodes, chain, position, &node)) < 0)
            break;
        if (stored) {
            position += PyBytes_GET_SIZE(node.names);
            if (add_to(node.counts, key, -1) < 0 || (!PyDict_GET_SIZE(node.counts) && PyDict_DelItem(nodes, node.first) < 0))
                stored = -1;
        }
        release(&node);
    }
    return stored < 0 ? NULL : PyBool_FromLong(stored);
}

static int set_all(PyObject *depths, PyObject *counts, Py_ssize_t blocks)
{
    PyObject *key, *count, *depth = PyLong_FromSsize_t(blocks);
    Py_ssize_t place = 0;
    int failed = depth == NULL;
    while (!failed && PyDict_Next(counts, &place, &key, &count))
        failed = PyDict_SetItem(depths, key, depth) < 0;
    Py_XDECREF(depth);
    return failed ? -1 : 0;
}

PyObject *ropeway_depths(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (check_arguments(args, count, 2) < 0)
        return NULL;
    PyObject *nodes = args[0], *chain = args[1], *depths = PyDict_New();
    int found = depths != NULL;
    for (Py_ssize_t position = 0; found == 1 && position < PyBytes_GET_SIZE(chain);) {
        Node node;
        found = node_at(nodes, chain, position, &node);
        if (found == 1) {
            Py_ssize_t bytes = agreeing(&node, chain, position);
            position += bytes;
            if (set_all(depths, node.counts, position / NAME) < 0)
                found = -1;
            else
                found = bytes == PyBytes_GET_SIZE(node.names);
        }
        release(&node);
    }
    if (found < 0)
        Py_CLEAR(depths);
    return depths;
}
