/* cachecore.prompts.native._words: words of ASCII text, looked up. `cachecore/prompts/words.py` says what words are:
 * each kind here cuts as the regular expression of the same name there, alternative by alternative. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

enum kind { GPT2, GPT2_DIGITS, LETTERS_DIGITS, LETTERS_DIGIT, KINDS };
enum class { OTHER, LETTER, DIGIT, SPACE, LINE /* white space that ends a line */ };

static unsigned char classes[128];

static void fill_classes(void)
{
    for (int code = 0; code < 128; code++) {
        int letter = (code >= 'a' && code <= 'z') || (code >= 'A' && code <= 'Z');
        int space = code == ' ' || (code >= '\t' && code <= '\r');
        classes[code] = letter                             ? LETTER
                        : code >= '0' && code <= '9'       ? DIGIT
                        : code == '\n' || code == '\r'     ? LINE
                        : space                            ? SPACE
                                                           : OTHER;
    }
}

static inline int is_space(unsigned char code)
{
    return classes[code] >= SPACE;
}

static inline const unsigned char *run(const unsigned char *at, const unsigned char *end, enum class class)
{
    while (at < end && classes[*at] == class)
        at++;
    return at;
}

/* The end of 's 't 'm 'd 're 've 'll at an apostrophe; NULL where there is none. */
static const unsigned char *contraction(const unsigned char *at, const unsigned char *end, int any_case)
{
    int fold = any_case ? 0x20 : 0;
    unsigned char first = at + 1 < end ? at[1] | fold : 0, second = at + 2 < end ? at[2] | fold : 0;
    if (first == 's' || first == 't' || first == 'm' || first == 'd')
        return at + 2;
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l'))
        return at + 3;
    return NULL;
}

/* The end of the white space at `at` that is a word. */
static const unsigned char *white_space(const unsigned char *at, const unsigned char *end, enum kind kind)
{
    const unsigned char *stop = at, *line = NULL;
    for (; stop < end && is_space(*stop); stop++)
        if (classes[*stop] == LINE)
            line = stop + 1;
    if (kind >= LETTERS_DIGITS && line != NULL)
        return line;
    if (stop == end || stop - at == 1 || (kind == GPT2_DIGITS && classes[*stop] == DIGIT))
        return stop;
    return stop - 1; /* the last one belongs to what follows */
}

/* The end of the word at `at`. */
static const unsigned char *word_end(const unsigned char *at, const unsigned char *end, enum kind kind)
{
    const unsigned char *stop;
    enum class class = classes[*at], next = at + 1 < end ? classes[at[1]] : SPACE;
    int letters_digits = kind >= LETTERS_DIGITS;
    if (class == LETTER)
        return run(at, end, LETTER);
    if (*at == ' ' && next == LETTER)
        return run(at + 1, end, LETTER);
    if (*at == '\'' && (stop = contraction(at, end, letters_digits)) != NULL)
        return stop;
    if (letters_digits && next == LETTER && (class == OTHER || class == SPACE))
        return run(at + 1, end, LETTER);
    if (class == DIGIT) {
        stop = kind == GPT2 ? end : at + (kind == LETTERS_DIGITS ? 3 : 1);
        return run(at, stop < end ? stop : end, DIGIT);
    }
    if (*at == ' ' && next == DIGIT && kind == GPT2)
        return run(at + 1, end, DIGIT);
    if (class == OTHER || (*at == ' ' && next == OTHER)) {
        stop = run(at + 1, end, OTHER);
        return letters_digits ? run(stop, end, LINE) : stop;
    }
    return white_space(at, end, kind);
}

typedef struct {
    char *bytes;
    Py_ssize_t size, room;
    char small[2048];
} buffer;

static int append(buffer *packed, PyObject *tokens)
{
    if (!PyBytes_CheckExact(tokens)) {
        PyErr_SetString(PyExc_TypeError, "words are looked up as bytes");
        return -1;
    }
    Py_ssize_t size = PyBytes_GET_SIZE(tokens);
    if (size > packed->room - packed->size) {
        Py_ssize_t room = 2 * (packed->room + size);
        char *grown = PyMem_Malloc((size_t)room);
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        memcpy(grown, packed->bytes, (size_t)packed->size);
        if (packed->bytes != packed->small)
            PyMem_Free(packed->bytes);
        packed->bytes = grown;
        packed->room = room;
    }
    memcpy(packed->bytes + packed->size, PyBytes_AS_STRING(tokens), (size_t)size);
    packed->size += size;
    return 0;
}

/* What the dictionary has for a word, or makes of it in its `__missing__`. A new reference. */
static PyObject *look_up(PyObject *words, const unsigned char *at, const unsigned char *stop)
{
    PyObject *word = PyUnicode_New(stop - at, 127);
    if (word == NULL)
        return NULL;
    memcpy(PyUnicode_1BYTE_DATA(word), at, (size_t)(stop - at));
    PyObject *tokens = PyDict_GetItemWithError(words, word);
    if (tokens != NULL)
        Py_INCREF(tokens);
    else if (!PyErr_Occurred())
        tokens = PyObject_GetItem(words, word);
    Py_DECREF(word);
    return tokens;
}

/* The packed token ids of a text, word by word, behind those of a head, if there is one. */
static PyObject *encode_words(enum kind kind, PyObject *text, Py_ssize_t start, PyObject *head, PyObject *words)
{
    const unsigned char *at = PyUnicode_1BYTE_DATA(text) + start;
    const unsigned char *end = PyUnicode_1BYTE_DATA(text) + PyUnicode_GET_LENGTH(text), *stop;
    buffer packed = {.bytes = packed.small, .room = sizeof packed.small};
    PyObject *result = NULL;
    if (head != NULL && append(&packed, head) < 0)
        goto done;
    for (; at < end; at = stop) {
        stop = word_end(at, end, kind);
        PyObject *tokens = look_up(words, at, stop);
        if (tokens == NULL)
            goto done;
        int failed = append(&packed, tokens);
        Py_DECREF(tokens);
        if (failed)
            goto done;
    }
    result = PyBytes_FromStringAndSize(packed.bytes, packed.size);
done:
    if (packed.bytes != packed.small)
        PyMem_Free(packed.bytes);
    return result;
}

static int read_kind(PyObject *number)
{
    long kind = PyLong_AsLong(number);
    if (kind >= 0 && kind < KINDS)
        return (int)kind;
    if (kind != -1 || !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a known kind of words");
    return -1;
}

static PyObject *encode(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyUnicode_Check(args[1]) || !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "encode(kind: int, text: str, words: dict)");
        return NULL;
    }
    int kind = read_kind(args[0]);
    if (kind < 0)
        return NULL;
    if (!PyUnicode_IS_COMPACT_ASCII(args[1])) {
        PyErr_SetString(PyExc_ValueError, "ASCII");
        return NULL;
    }
    return encode_words((enum kind)kind, args[1], 0, NULL, args[2]);
}

/* Where the last added token of a text ends: 0 without one, -1 where it does not, -2 for an error. */
static Py_ssize_t head_end(PyObject *text, PyObject *opening, PyObject *closing)
{
    Py_ssize_t size = PyUnicode_GET_LENGTH(text), last = PyUnicode_Find(text, opening, 0, size, -1);
    if (last < 0)
        return last == -1 ? 0 : last;
    Py_ssize_t at = PyUnicode_Find(text, closing, last, size, 1);
    return at < 0 ? at : at + PyUnicode_GET_LENGTH(closing);
}

static PyObject *encode_headed(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 7 || !PyUnicode_Check(args[2]) || !PyUnicode_Check(args[3]) || !PyDict_Check(args[4]) ||
        !PyDict_Check(args[5])) {
        PyErr_SetString(PyExc_TypeError, "encode_headed(kind: int, text, opening: str, closing: str, heads: dict, "
                                         "words: dict, characters_max: int)");
        return NULL;
    }
    int kind = read_kind(args[0]);
    Py_ssize_t characters_max = kind < 0 ? -1 : PyLong_AsSsize_t(args[6]);
    if (kind < 0 || (characters_max == -1 && PyErr_Occurred()))
        return NULL;
    PyObject *text = args[1], *tokens = NULL;
    if (!PyUnicode_Check(text) || !PyUnicode_IS_COMPACT_ASCII(text))
        Py_RETURN_NONE;
    Py_ssize_t end = head_end(text, args[2], args[3]);
    if (end == -2)
        return NULL;
    if (end == -1 || PyUnicode_GET_LENGTH(text) - end > characters_max)
        Py_RETURN_NONE;
    if (end > 0) {
        PyObject *head = PyUnicode_FromKindAndData(PyUnicode_1BYTE_KIND, PyUnicode_1BYTE_DATA(text), end);
        if (head == NULL)
            return NULL;
        tokens = Py_XNewRef(PyDict_GetItemWithError(args[4], head));
        Py_DECREF(head);
        if (tokens == NULL)
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    PyObject *packed = encode_words((enum kind)kind, text, end, tokens, args[5]);
    Py_XDECREF(tokens);
    return packed;
}

static PyMethodDef methods[] = {
    {"encode", (PyCFunction)(void (*)(void))encode, METH_FASTCALL, "Packed token ids of ASCII text, word by word."},
    {"encode_headed", (PyCFunction)(void (*)(void))encode_headed, METH_FASTCALL, "Those of a known head and a text."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cachecore.prompts.native._words",
    .m_doc = "Words of ASCII text, looked up.",
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__words(void)
{
    fill_classes();
    return PyModuleDef_Init(&module);
}
