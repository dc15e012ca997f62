/* Finding blocks: `Segment` of cachecore/index/runs.py and `Table` of cachecore/index/locator.py, whose openings say what
 * lies where. Names are keyed hashes, so their words serve as hash values as they are. */

#include "module.h"

enum {
    BUCKET = 8, /* cells */
    RUN_SHIFT = 13,
    WAVE = 32, /* names whose tags are fetched together: memory answers one about as soon as all */
    PAIRWISE_MAX = 48,
    SLOTS_ON_STACK = 1024,
};

#define RUN_MASK 0xFFFFFFFFu
#define POSITION_MASK ((1u << RUN_SHIFT) - 1)
#define CHECK_MASK 0xFFFFE00000000000u
#define EACH_BYTE 0x0101010101010101u
#define TOP_BITS 0x8080808080808080u

#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

/* The top bit of each byte of the word that is zero. */
static inline uint64_t zero_bytes(uint64_t word)
{
    return ~(((word & ~TOP_BITS) + ~TOP_BITS) | word) & TOP_BITS;
}

static inline int counted(uint64_t top_bits)
{
    return (int)((top_bits >> 7) * EACH_BYTE >> 56);
}

static inline int lowest(uint64_t top_bits)
{
    return counted(((top_bits & -top_bits) - 1) & TOP_BITS);
}

static inline unsigned char tag_of(uint64_t first)
{
    unsigned char tag = (unsigned char)(first >> 56);
    return tag ? tag : 1;
}

static int wrong_arguments(const char *signature)
{
    PyErr_Format(PyExc_TypeError, "expected %s", signature);
    return -1;
}

/* ---- segments ---------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *names; /* a bytearray */
    Py_ssize_t number;
} Segment;

static inline Py_ssize_t names_bytes(const Segment *self)
{
    return PyByteArray_GET_SIZE(self->names);
}

static inline const unsigned char *names_at(const Segment *self, Py_ssize_t position)
{
    return (const unsigned char *)PyByteArray_AS_STRING(self->names) + position * NAME;
}

static PyObject *segment_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Segment *self = (Segment *)type->tp_alloc(type, 0);
    if (self != NULL && (self->names = PyByteArray_FromStringAndSize(NULL, 0)) == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int segment_init(Segment *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"number", NULL};
    return PyArg_ParseTupleAndKeywords(args, kwargs, "n", names, &self->number) ? 0 : -1;
}

static void segment_dealloc(Segment *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->names);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *segment_names(Segment *self, void *unused)
{
    return Py_NewRef(self->names);
}

static int segment_set_names(Segment *self, PyObject *names, void *unused)
{
    if (names == NULL || !PyByteArray_Check(names))
        return wrong_arguments("a bytearray of names");
    Py_SETREF(self->names, Py_NewRef(names));
    return 0;
}

static PyObject *segment_number(Segment *self, void *unused)
{
    return PyLong_FromSsize_t(self->number);
}

static PyObject *segment_blocks(Segment *self, void *unused)
{
    return PyLong_FromSsize_t(names_bytes(self) / NAME);
}

static PyObject *segment_first(Segment *self, void *unused)
{
    Py_ssize_t bytes = names_bytes(self);
    return PyBytes_FromStringAndSize((const char *)names_at(self, 0), bytes < NAME ? bytes : NAME);
}

static PyObject *segment_shared(Segment *self, PyObject *const *args, Py_ssize_t count)
{
    Py_buffer chain;
    Py_ssize_t position = 0, start = 0;
    if (count >= 2 && count <= 3) {
        position = PyLong_AsSsize_t(args[1]);
        start = count == 3 ? PyLong_AsSsize_t(args[2]) : 0;
    }
    if (PyErr_Occurred())
        return NULL;
    if (count < 2 || count > 3 || position < 0 || start < 0)
        return wrong_arguments("shared(chain, position, start=0)"), NULL;
    if (PyObject_GetBuffer(args[0], &chain, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_ssize_t ours = names_bytes(self) / NAME - start, theirs = chain.len / NAME - position;
    Py_ssize_t most = ours < theirs ? ours : theirs;
    if (most > 1)
        most = shared_names(names_at(self, start), (unsigned char *)chain.buf + position * NAME, most);
    PyBuffer_Release(&chain);
    return PyLong_FromSsize_t(most > 1 ? most : 1);
}

static PyObject *segment_equal(Segment *self, PyObject *const *args, Py_ssize_t count)
{
    Py_buffer listed;
    Py_ssize_t start = count == 2 ? PyLong_AsSsize_t(args[1]) : -1, same = 1;
    if (PyErr_Occurred())
        return NULL;
    if (start < 0)
        return wrong_arguments("equal(listed, start)"), NULL;
    if (PyObject_GetBuffer(args[0], &listed, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_ssize_t most = listed.len / NAME, ours = names_bytes(self) / NAME - start;
    const unsigned char *there = listed.buf;
    if (most > ours)
        most = ours;
    while (same < most && memcmp(names_at(self, start + same), there + same * NAME, NAME) == 0)
        same++;
    PyBuffer_Release(&listed);
    return PyLong_FromSsize_t(same);
}

static PyGetSetDef segment_getset[] = {
    {"names", (getter)segment_names, (setter)segment_set_names, "Packed names of the blocks.", NULL},
    {"number", (getter)segment_number, NULL, "The segment's place in its locator's list.", NULL},
    {"blocks", (getter)segment_blocks, NULL, "How many.", NULL},
    {"first", (getter)segment_first, NULL, "The first name.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef segment_methods[] = {
    {"shared", (PyCFunction)(void (*)(void))segment_shared, METH_FASTCALL, "How many blocks of a chain these are."},
    {"equal", (PyCFunction)(void (*)(void))segment_equal, METH_FASTCALL, "How many of the listed blocks these are."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot segment_slots[] = {
    {Py_tp_new, segment_new},
    {Py_tp_init, segment_init},
    {Py_tp_dealloc, segment_dealloc},
    {Py_tp_getset, segment_getset},
    {Py_tp_methods, segment_methods},
    {Py_tp_doc, "Segment(number): consecutive blocks of one chain."},
    {0, NULL},
};

PyType_Spec ropeway_segment_spec = {
    .name = "cachecore.native._native.Segment",
    .basicsize = sizeof(Segment),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = segment_slots,
};

/* ---- the table --------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    unsigned char *tags;
    uint64_t *cells;
    uint64_t mask;      /* one less than there are buckets */
    PyObject *runs;     /* list of segments and None, the locator's own */
    PyObject *overflow; /* name -> run and position, as in a cell */
    PyTypeObject *segment;
} Table;

typedef struct {
    uint64_t first, second;
} Words;

static inline Words words_at(const unsigned char *name)
{
    return (Words){load_u64(name), load_u64(name + 8)};
}

static inline uint64_t tags_of(const Table *self, uint64_t bucket)
{
    return load_u64(self->tags + bucket * BUCKET);
}

static int table_allocate(Table *self, Py_ssize_t buckets)
{
    if (buckets < 1 || (buckets & (buckets - 1)) || buckets > PY_SSIZE_T_MAX / (16 * BUCKET)) {
        PyErr_SetString(PyExc_ValueError, "the number of buckets is a power of two");
        return -1;
    }
    unsigned char *tags = PyMem_RawCalloc((size_t)buckets, BUCKET);
    uint64_t *cells = PyMem_RawMalloc((size_t)buckets * BUCKET * sizeof(uint64_t));
    if (tags == NULL || cells == NULL) {
        PyMem_RawFree(tags);
        PyMem_RawFree(cells);
        PyErr_NoMemory();
        return -1;
    }
    PyMem_RawFree(self->tags);
    PyMem_RawFree(self->cells);
    self->tags = tags;
    self->cells = cells;
    self->mask = (uint64_t)buckets - 1;
    return 0;
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"runs", "buckets", NULL};
    PyObject *runs;
    Py_ssize_t buckets;
    ropeway_state *state = PyModule_GetState(PyType_GetModuleByDef(type, &ropeway_module));
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!n", names, &PyList_Type, &runs, &buckets))
        return NULL;
    Table *self = (Table *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->runs = Py_NewRef(runs);
    self->segment = (PyTypeObject *)Py_NewRef(state->segment);
    self->overflow = PyDict_New();
    if (self->overflow == NULL || table_allocate(self, buckets) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int table_traverse(Table *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->segment);
    Py_VISIT(self->runs);
    Py_VISIT(self->overflow);
    return 0;
}

static int table_clear(Table *self)
{
    Py_CLEAR(self->segment);
    Py_CLEAR(self->runs);
    Py_CLEAR(self->overflow);
    return 0;
}

static void table_dealloc(Table *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    table_clear(self);
    PyMem_RawFree(self->tags);
    PyMem_RawFree(self->cells);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* The segment that an entry points to, if the name stands there; borrowed. NULL where it does not. */
static Segment *confirmed(const Table *self, uint64_t entry, const unsigned char *name)
{
    Py_ssize_t number = (Py_ssize_t)(entry >> RUN_SHIFT & RUN_MASK), position = (Py_ssize_t)(entry & POSITION_MASK);
    if (number >= PyList_GET_SIZE(self->runs))
        return NULL;
    PyObject *run = PyList_GET_ITEM(self->runs, number);
    if (!PyObject_TypeCheck(run, self->segment))
        return NULL;
    Segment *segment = (Segment *)run;
    if ((position + 1) * NAME > names_bytes(segment) || memcmp(names_at(segment, position), name, NAME) != 0)
        return NULL;
    return segment;
}

static PyObject *found(Segment *segment, uint64_t entry)
{
    PyObject *position = PyLong_FromSsize_t((Py_ssize_t)(entry & POSITION_MASK));
    PyObject *pair = position ? PyTuple_New(2) : NULL;
    if (pair == NULL) {
        Py_XDECREF(position);
        return NULL;
    }
    PyTuple_SET_ITEM(pair, 0, Py_NewRef(segment));
    PyTuple_SET_ITEM(pair, 1, position);
    return pair;
}

static PyObject *find_in_overflow(Table *self, const unsigned char *name)
{
    PyObject *key = PyBytes_FromStringAndSize((const char *)name, NAME);
    PyObject *kept = key ? PyDict_GetItemWithError(self->overflow, key) : NULL;
    Py_XDECREF(key);
    uint64_t entry = kept ? PyLong_AsUnsignedLongLong(kept) : 0;
    if (PyErr_Occurred())
        return NULL;
    Segment *segment = kept ? confirmed(self, entry, name) : NULL;
    return segment ? found(segment, entry) : Py_NewRef(Py_None);
}

static PyObject *table_find(Table *self, PyObject *name)
{
    if (!PyBytes_Check(name) || PyBytes_GET_SIZE(name) != NAME)
        return wrong_arguments("a name of 16 bytes"), NULL;
    const unsigned char *bytes = (const unsigned char *)PyBytes_AS_STRING(name);
    Words words = words_at(bytes);
    uint64_t tags = tag_of(words.first) * EACH_BYTE, buckets[2] = {words.first & self->mask, words.second & self->mask};
    PREFETCH(self->tags + buckets[1] * BUCKET);
    for (int choice = 0; choice < 2; choice++) {
        uint64_t alike = zero_bytes(tags_of(self, buckets[choice]) ^ tags);
        for (; alike; alike &= alike - 1) {
            uint64_t cell = self->cells[buckets[choice] * BUCKET + lowest(alike)];
            Segment *segment = confirmed(self, cell, bytes);
            if (segment != NULL)
                return found(segment, cell);
        }
    }
    return PyDict_GET_SIZE(self->overflow) ? find_in_overflow(self, bytes) : Py_NewRef(Py_None);
}

static int overflow_set(Table *self, const unsigned char *name, uint64_t entry)
{
    PyObject *key = PyBytes_FromStringAndSize((const char *)name, NAME), *kept = PyLong_FromUnsignedLongLong(entry);
    int failed = key == NULL || kept == NULL || PyDict_SetItem(self->overflow, key, kept) < 0;
    Py_XDECREF(key);
    Py_XDECREF(kept);
    return failed ? -1 : 0;
}

static int overflow_delete(Table *self, const unsigned char *name)
{
    PyObject *key = PyBytes_FromStringAndSize((const char *)name, NAME);
    int failed = key == NULL || PyDict_DelItem(self->overflow, key) < 0;
    Py_XDECREF(key);
    return failed ? -1 : 0;
}

static int put_one(Table *self, const unsigned char *name, uint64_t entry)
{
    Words words = words_at(name);
    uint64_t bucket = words.first & self->mask, other = words.second & self->mask;
    uint64_t free = zero_bytes(tags_of(self, bucket)), free_there = zero_bytes(tags_of(self, other));
    if (counted(free_there) > counted(free)) {
        bucket = other;
        free = free_there;
    }
    if (!free)
        return overflow_set(self, name, entry);
    uint64_t at = bucket * BUCKET + lowest(free);
    self->tags[at] = tag_of(words.first);
    self->cells[at] = (words.first & CHECK_MASK) | entry;
    return 0;
}

static int take_one(Table *self, const unsigned char *name, uint64_t entry)
{
    Words words = words_at(name);
    uint64_t tags = tag_of(words.first) * EACH_BYTE, buckets[2] = {words.first & self->mask, words.second & self->mask};
    for (int choice = 0; choice < 2; choice++) {
        uint64_t alike = zero_bytes(tags_of(self, buckets[choice]) ^ tags);
        for (; alike; alike &= alike - 1) {
            uint64_t at = buckets[choice] * BUCKET + lowest(alike);
            if (self->cells[at] == ((words.first & CHECK_MASK) | entry)) {
                self->tags[at] = 0;
                return 0;
            }
        }
    }
    return overflow_delete(self, name);
}

/* Does one thing for each of the names, the first of which stands where `entry` points to. */
static int for_each(Table *self, const unsigned char *names, Py_ssize_t total, uint64_t entry,
                    int (*one)(Table *, const unsigned char *, uint64_t))
{
    for (Py_ssize_t start = 0; start < total; start += WAVE) {
        Py_ssize_t stop = start + WAVE < total ? start + WAVE : total;
        for (Py_ssize_t number = start; number < stop; number++) {
            Words words = words_at(names + number * NAME);
            PREFETCH(self->tags + (words.first & self->mask) * BUCKET);
            PREFETCH(self->tags + (words.second & self->mask) * BUCKET);
        }
        for (Py_ssize_t number = start; number < stop; number++)
            if (one(self, names + number * NAME, entry + (uint64_t)number) < 0)
                return -1;
    }
    return 0;
}

static PyObject *for_given(Table *self, PyObject *const *args, Py_ssize_t count,
                           int (*one)(Table *, const unsigned char *, uint64_t))
{
    Py_buffer names;
    if (count != 3)
        return wrong_arguments("(names, number, position)"), NULL;
    uint64_t number = PyLong_AsUnsignedLongLong(args[1]), position = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (PyObject_GetBuffer(args[0], &names, PyBUF_SIMPLE) < 0)
        return NULL;
    int failed = -1;
    if (number > RUN_MASK || position + (uint64_t)(names.len / NAME) > POSITION_MASK + 1)
        PyErr_SetString(PyExc_ValueError, "no cell has room for such a number or position");
    else
        failed = for_each(self, names.buf, names.len / NAME, number << RUN_SHIFT | position, one);
    PyBuffer_Release(&names);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *table_put(Table *self, PyObject *const *args, Py_ssize_t count)
{
    return for_given(self, args, count, put_one);
}

static PyObject *table_take(Table *self, PyObject *const *args, Py_ssize_t count)
{
    return for_given(self, args, count, take_one);
}

static PyObject *table_resize(Table *self, PyObject *wanted)
{
    Py_ssize_t buckets = PyLong_AsSsize_t(wanted);
    if (PyErr_Occurred() || table_allocate(self, buckets) < 0)
        return NULL;
    PyDict_Clear(self->overflow);
    for (Py_ssize_t number = 0; number < PyList_GET_SIZE(self->runs); number++) {
        PyObject *run = PyList_GET_ITEM(self->runs, number);
        if (!PyObject_TypeCheck(run, self->segment))
            continue;
        Segment *segment = (Segment *)run;
        uint64_t entry = (uint64_t)number << RUN_SHIFT;
        if (for_each(self, names_at(segment, 0), names_bytes(segment) / NAME, entry, put_one) < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *table_used(Table *self, PyObject *unused)
{
    Py_ssize_t used = PyDict_GET_SIZE(self->overflow);
    for (uint64_t bucket = 0; bucket <= self->mask; bucket++)
        used += BUCKET - counted(zero_bytes(tags_of(self, bucket)));
    return PyLong_FromSsize_t(used);
}

static PyObject *table_buckets(Table *self, void *unused)
{
    return PyLong_FromUnsignedLongLong(self->mask + 1);
}

static PyObject *table_overflowing(Table *self, void *unused)
{
    return PyLong_FromSsize_t(PyDict_GET_SIZE(self->overflow));
}

static PyGetSetDef table_getset[] = {
    {"buckets", (getter)table_buckets, NULL, "How many there are.", NULL},
    {"overflowing", (getter)table_overflowing, NULL, "Names that found no cell.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef table_methods[] = {
    {"find", (PyCFunction)table_find, METH_O, "The run and position of a block, or None."},
    {"put", (PyCFunction)(void (*)(void))table_put, METH_FASTCALL, "Names stand in a run from a position on."},
    {"take", (PyCFunction)(void (*)(void))table_take, METH_FASTCALL, "Take a `put` back, or a part of one."},
    {"resize", (PyCFunction)table_resize, METH_O, "Start over with so many buckets, from the runs."},
    {"used", (PyCFunction)table_used, METH_NOARGS, "How many names there are. Looks at every bucket."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_traverse, table_traverse},
    {Py_tp_clear, table_clear},
    {Py_tp_getset, table_getset},
    {Py_tp_methods, table_methods},
    {Py_tp_doc, "Table(runs, buckets): where in which of the runs a block stands."},
    {0, NULL},
};

PyType_Spec ropeway_table_spec = {
    .name = "cachecore.native._native.Table",
    .basicsize = sizeof(Table),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = table_slots,
};

/* ---- chains ------------------------------------------------------------------------------------------------------ */

static int distinct_pairwise(const unsigned char *names, Py_ssize_t total)
{
    uint64_t first[PAIRWISE_MAX];
    for (Py_ssize_t number = 0; number < total; number++) {
        unsigned alike = 0;
        first[number] = load_u64(names + number * NAME);
        for (Py_ssize_t other = 0; other < number; other++)
            alike |= first[other] == first[number];
        for (Py_ssize_t other = 0; alike && other < number; other++)
            if (memcmp(names + other * NAME, names + number * NAME, NAME) == 0)
                return 0;
    }
    return 1;
}

/* With twice as many `slots` as names at least, 2**bits of them and all 0. */
static int distinct_hashed(const unsigned char *names, Py_ssize_t total, uint32_t *slots, int bits, const uint64_t *salts)
{
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    for (Py_ssize_t number = 0; number < total; number++) {
        const unsigned char *name = names + number * NAME;
        Words words = words_at(name);
        uint64_t at = (words.first * salts[0] + words.second * salts[1]) >> (64 - bits);
        for (; slots[at]; at = (at + 1) & mask)
            if (memcmp(names + (Py_ssize_t)(slots[at] - 1) * NAME, name, NAME) == 0)
                return 0;
        slots[at] = (uint32_t)number + 1;
    }
    return 1;
}

/* 1, 0, or -1 with an error set. */
static int distinct(const unsigned char *names, Py_ssize_t total, const uint64_t *salts)
{
    uint32_t near[SLOTS_ON_STACK], *slots = near;
    int bits = 1;
    if (total <= PAIRWISE_MAX)
        return distinct_pairwise(names, total);
    while (((Py_ssize_t)1 << bits) < 2 * total)
        bits++;
    if ((Py_ssize_t)1 << bits <= SLOTS_ON_STACK)
        memset(near, 0, sizeof near[0] << bits);
    else if (total > UINT32_MAX - 1 || (slots = PyMem_Calloc((size_t)1 << bits, sizeof *slots)) == NULL)
        return PyErr_NoMemory(), -1;
    int answer = distinct_hashed(names, total, slots, bits, salts);
    if (slots != near)
        PyMem_Free(slots);
    return answer;
}

PyObject *ropeway_well_formed(PyObject *module, PyObject *names)
{
    Py_buffer opened;
    if (PyObject_GetBuffer(names, &opened, PyBUF_SIMPLE) < 0)
        return NULL;
    int answer = 0;
    if (opened.len % NAME == 0)
        answer = distinct(opened.buf, opened.len / NAME, ((ropeway_state *)PyModule_GetState(module))->salts);
    PyBuffer_Release(&opened);
    return answer < 0 ? NULL : PyBool_FromLong(answer);
}

PyObject *ropeway_unknown(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !PyBytes_Check(args[0]) || !PyDict_Check(args[1]))
        return wrong_arguments("unknown(chain, firsts)"), NULL;
    Py_ssize_t total = PyBytes_GET_SIZE(args[0]) / NAME, before = 0;
    for (; before < total; before++) {
        PyObject *name = PyBytes_FromStringAndSize(PyBytes_AS_STRING(args[0]) + before * NAME, NAME);
        int known = name ? PyDict_Contains(args[1], name) : -1;
        Py_XDECREF(name);
        if (known < 0)
            return NULL;
        if (known)
            break;
    }
    return PyLong_FromSsize_t(before);
}
