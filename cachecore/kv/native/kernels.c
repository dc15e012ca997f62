/* cachecore.kv.native._kernels: turns and quantizers, each in one pass over memory. The .pyi says the rest.
 *
 * Compiled without contraction, it gives the same bits on every machine; torch's twins, which fuse a product and a sum
 * where they can, may differ in the last one. All of it runs without the interpreter's lock. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if !defined(__GNUC__) || defined(__clang__) || !defined(__x86_64__) || !defined(__gnu_linux__)
#define WIDE
#elif __GNUC__ >= 12
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDE __attribute__((target_clones("avx2", "default")))
#endif

/* Into the clones, and so compiled as they are. */
#define INLINE static inline __attribute__((always_inline))

enum { DIM_MAX = 1024 }; /* a multiple of eight */
enum { FP32 = 0, BF16 = 1 };

static const float TINY = 1e-30f;
/* Added and taken away again, it rounds to the nearest whole number, ties to even, below 2^22. */
static const float ROUNDER = 12582912.0f;

typedef struct {
    const float *cos, *sin;
    Py_ssize_t heads, pairs, offset;
    int interleaved;
} turns_t;

INLINE float from_bits(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

INLINE uint32_t to_bits(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

INLINE float from_bf16(uint16_t half) { return from_bits((uint32_t)half << 16); }

/* To the nearest, ties to even; what is no number stays none. */
INLINE uint16_t to_bf16(float number)
{
    uint32_t bits = to_bits(number);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

INLINE void load(float *restrict vector, const void *restrict source, Py_ssize_t at, Py_ssize_t dim, int dtype)
{
    if (dtype == FP32) {
        memcpy(vector, (const float *)source + at, (size_t)dim * sizeof(float));
        return;
    }
    const uint16_t *halves = (const uint16_t *)source + at;
    for (Py_ssize_t i = 0; i < dim; i++)
        vector[i] = from_bf16(halves[i]);
}

INLINE void store(const float *restrict vector, void *restrict target, Py_ssize_t at, Py_ssize_t dim, int dtype)
{
    if (dtype == FP32) {
        memcpy((float *)target + at, vector, (size_t)dim * sizeof(float));
        return;
    }
    uint16_t *halves = (uint16_t *)target + at;
    for (Py_ssize_t i = 0; i < dim; i++)
        halves[i] = to_bf16(vector[i]);
}

/* One vector, in place. */
INLINE void turn_vector(float *restrict vector, const turns_t *turns, Py_ssize_t token, Py_ssize_t head)
{
    Py_ssize_t pairs = turns->pairs, row = (token * turns->heads + (turns->heads > 1 ? head : 0)) * pairs;
    const float *restrict cos = turns->cos + row, *restrict sin = turns->sin + row;
    float *restrict first = vector + turns->offset;
    if (turns->interleaved) {
        for (Py_ssize_t i = 0; i < pairs; i++) {
            float x = first[2 * i], y = first[2 * i + 1];
            first[2 * i] = x * cos[i] - y * sin[i];
            first[2 * i + 1] = y * cos[i] + x * sin[i];
        }
        return;
    }
    float *restrict second = first + pairs;
    for (Py_ssize_t i = 0; i < pairs; i++) {
        float x = first[i], y = second[i];
        first[i] = x * cos[i] - y * sin[i];
        second[i] = y * cos[i] + x * sin[i];
    }
}

WIDE static void turn_all(const void *source, void *target, int dtype, Py_ssize_t tokens, Py_ssize_t heads,
                          Py_ssize_t dim, const turns_t *turns)
{
    float vector[DIM_MAX];
    for (Py_ssize_t token = 0; token < tokens; token++)
        for (Py_ssize_t head = 0; head < heads; head++) {
            Py_ssize_t at = (token * heads + head) * dim;
            load(vector, source, at, dim, dtype);
            if (turns->pairs)
                turn_vector(vector, turns, token, head);
            store(vector, target, at, dim, dtype);
        }
}

/* ---- Hadamard ---------------------------------------------------------------------------------------------------- */

typedef float eight_t __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t eight_bits_t __attribute__((vector_size(32), aligned(4), may_alias));
typedef int8_t eight_bytes_t __attribute__((vector_size(8)));

INLINE eight_t choose(eight_bits_t mask, eight_t yes, eight_t no)
{
    return (eight_t)(((eight_bits_t)yes & mask) | ((eight_bits_t)no & ~mask));
}

INLINE eight_t lesser(eight_t x, eight_t y) { return choose(x < y, x, y); }
INLINE eight_t greater(eight_t x, eight_t y) { return choose(x > y, x, y); }
INLINE eight_t magnitude_of(eight_t x) { return (eight_t)((eight_bits_t)x & 0x7fffffff); }
INLINE eight_t all(float number) { return number - (eight_t){0}; }

/* A bit of each mask, the first the least: one product brings them together in its topmost byte. */
INLINE uint8_t packed(eight_bits_t masks)
{
    eight_bytes_t bytes = __builtin_convertvector(masks, eight_bytes_t);
    uint64_t word;
    memcpy(&word, &bytes, 8);
    return (uint8_t)(((word & 0x0101010101010101) * 0x0102040810204080) >> 56);
}

/* In pairs: the same order of adding on every machine. */
INLINE float sum_of(eight_t x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

/* Of eights: rows of the transform. */
static const eight_t EIGHT[8] = {
    {1, 1, 1, 1, 1, 1, 1, 1},     {1, -1, 1, -1, 1, -1, 1, -1}, {1, 1, -1, -1, 1, 1, -1, -1},
    {1, -1, -1, 1, 1, -1, -1, 1}, {1, 1, 1, 1, -1, -1, -1, -1}, {1, -1, 1, -1, -1, 1, -1, 1},
    {1, 1, -1, -1, -1, -1, 1, 1}, {1, -1, -1, 1, -1, 1, 1, -1},
};

INLINE void spread_narrow(float *vector, Py_ssize_t dim, Py_ssize_t block)
{
    for (Py_ssize_t half = 1; half < block; half *= 2)
        for (Py_ssize_t start = 0; start < dim; start += 2 * half)
            for (Py_ssize_t i = start; i < start + half; i++) {
                float x = vector[i], y = vector[i + half];
                vector[i] = x + y;
                vector[i + half] = x - y;
            }
}

INLINE void spread_wide(eight_t *eights, Py_ssize_t count, Py_ssize_t block)
{
    for (Py_ssize_t start = 0; start < count; start++) {
        eight_t from = eights[start], sums = from[0] * EIGHT[0];
        for (int j = 1; j < 8; j++)
            sums += from[j] * EIGHT[j];
        eights[start] = sums;
    }
    for (Py_ssize_t half = 1; half < block; half *= 2)
        for (Py_ssize_t start = 0; start < count; start += 2 * half)
            for (Py_ssize_t i = start; i < start + half; i++) {
                eight_t x = eights[i], y = eights[i + half];
                eights[i] = x + y;
                eights[i + half] = x - y;
            }
}

/* The orthogonal transform of blocks as long as the largest power of two that divides `dim`, in place. */
INLINE void spread_out(float *vector, Py_ssize_t dim)
{
    Py_ssize_t block = dim & -dim;
    if (block < 8)
        spread_narrow(vector, dim, block);
    else
        spread_wide((eight_t *)vector, dim / 8, block / 8);
    float scale = 1.0f / sqrtf((float)block);
    for (Py_ssize_t i = 0; i < dim; i++)
        vector[i] *= scale;
}

/* ---- codes of one vector ----------------------------------------------------------------------------------------- */

/* Of what is not negative, the bits are ordered as the numbers are; whole numbers have a fast maximum. */
INLINE float largest_of(const float *restrict vector, Py_ssize_t dim)
{
    uint32_t most = 0;
    for (Py_ssize_t i = 0; i < dim; i++) {
        uint32_t bits = to_bits(vector[i]) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return from_bits(most);
}

/* Stores the scale that brings the largest magnitude to `limit`; what to multiply by. What is no number stays none. */
INLINE float inverse_scale(const float *vector, Py_ssize_t dim, float limit, uint16_t *scale)
{
    float largest = largest_of(vector, dim);
    *scale = to_bf16((largest < TINY ? TINY : largest) * (float)((1.0 + 1.0 / 256.0) / limit));
    return 1.0f / from_bf16(*scale);
}

INLINE void to_int8(float *restrict vector, uint8_t *restrict codes, uint16_t *scales, Py_ssize_t dim)
{
    float inverse = inverse_scale(vector, dim, 127.0f, scales);
    for (Py_ssize_t i = 0; i < dim; i++)
        codes[i] = (uint8_t)(int8_t)(int32_t)(vector[i] * inverse + ROUNDER - ROUNDER);
}

INLINE void from_int8(const uint8_t *codes, const uint16_t *scales, float *restrict vector, Py_ssize_t dim)
{
    float scale = from_bf16(scales[0]);
    for (Py_ssize_t i = 0; i < dim; i++)
        vector[i] = (float)(int8_t)codes[i] * scale;
}

/* E4M3: to the nearest, ties to even; below 2^-6 in steps of 2^-9. */
INLINE void to_float8(float *restrict vector, uint8_t *restrict codes, uint16_t *scales, Py_ssize_t dim)
{
    float inverse = inverse_scale(vector, dim, 448.0f, scales);
    for (Py_ssize_t i = 0; i < dim; i++) {
        float number = vector[i] * inverse;
        uint32_t bits = to_bits(number) & 0x7fffffff, sign = (to_bits(number) >> 24) & 0x80;
        uint32_t normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
        uint32_t small = (uint32_t)(int32_t)(from_bits(bits) * 512.0f + ROUNDER - ROUNDER);
        uint32_t code = bits < (121u << 23) ? small : normal;
        codes[i] = (uint8_t)(sign | (bits > 0x7f800000 ? 0x7f : code));
    }
}

INLINE void from_float8(const uint8_t *codes, const uint16_t *scales, float *restrict vector, Py_ssize_t dim)
{
    float scale = from_bf16(scales[0]);
    for (Py_ssize_t i = 0; i < dim; i++) {
        uint32_t code = codes[i] & 0x7f, sign = (uint32_t)(codes[i] & 0x80) << 24;
        float normal = from_bits((code << 20) + (120u << 23)), small = (float)(int32_t)code * (1.0f / 512.0f);
        float number = code < 8 ? small : normal;
        number = code == 0x7f ? from_bits(0x7fc00000) : number;
        vector[i] = from_bits(to_bits(number) | sign) * scale;
    }
}

/* The nearest of 16 levels, as whole numbers. */
INLINE eight_t int4_codes(eight_t numbers, float lowest, float inverse)
{
    eight_t codes = (numbers - lowest) * inverse + ROUNDER - ROUNDER;
    return lesser(greater(codes, all(0.0f)), all(15.0f));
}

INLINE float int4_error(const eight_t *eights, Py_ssize_t count, float lowest, float step)
{
    eight_t error = {0};
    float inverse = 1.0f / step;
    for (Py_ssize_t i = 0; i < count; i++) {
        eight_t off = int4_codes(eights[i], lowest, inverse) * step + lowest - eights[i];
        error += off * off;
    }
    return sum_of(error);
}

/* `vector` has room for `dim` rounded up to eights; what is beyond is as the first number, and so adds its error to all
 * ranges alike. */
INLINE void to_int4(float *vector, uint8_t *restrict codes, uint16_t *scales, Py_ssize_t dim)
{
    static const float ranges[3] = {1.0f, 0.96f, 0.92f};
    spread_out(vector, dim);
    Py_ssize_t count = (dim + 7) / 8, half = dim / 2;
    for (Py_ssize_t i = dim; i < 8 * count; i++)
        vector[i] = vector[0];
    eight_t *eights = (eight_t *)vector, lows = eights[0], highs = eights[0];
    for (Py_ssize_t i = 1; i < count; i++) {
        lows = lesser(eights[i], lows);
        highs = greater(eights[i], highs);
    }
    float low = lows[0], high = highs[0], least = 0.0f;
    for (int i = 1; i < 8; i++) {
        low = lows[i] < low ? lows[i] : low;
        high = highs[i] > high ? highs[i] : high;
    }
    float middle = (low + high) / 2, width = high - low < TINY ? TINY : high - low;
    for (int i = 0; i < 3; i++) {
        uint16_t lowest = to_bf16(middle - width * (ranges[i] / 2)), step = to_bf16(width * (ranges[i] / 15));
        float error = int4_error(eights, count, from_bf16(lowest), from_bf16(step));
        if (i == 0 || error < least) {
            least = error;
            scales[0] = lowest;
            scales[1] = step;
        }
    }
    float lowest = from_bf16(scales[0]), inverse = 1.0f / from_bf16(scales[1]);
    for (Py_ssize_t i = 0; i < count; i++)
        eights[i] = int4_codes(eights[i], lowest, inverse);
    for (Py_ssize_t i = 0; i < half; i++)
        codes[i] = (uint8_t)((int32_t)vector[i] | (int32_t)vector[i + half] << 4);
}

INLINE void from_int4(const uint8_t *codes, const uint16_t *scales, float *restrict vector, Py_ssize_t dim)
{
    float lowest = from_bf16(scales[0]), step = from_bf16(scales[1]);
    Py_ssize_t half = dim / 2;
    for (Py_ssize_t i = 0; i < half; i++) {
        vector[i] = (float)(codes[i] & 15) * step + lowest;
        vector[i + half] = (float)(codes[i] >> 4) * step + lowest;
    }
    spread_out(vector, dim);
}

/* Of a unit normal: the best 8 levels' positive half, and the bounds between them. */
static const float LEVELS[4] = {0.2451f, 0.7560f, 1.3439f, 2.1520f};
static const float BOUNDS[3] = {0.50055f, 1.04995f, 1.74795f};

/* By how much levels chosen at these bounds reduce the squared error; `factor` makes them do so. */
INLINE float fit(const eight_t *eights, Py_ssize_t count, const float *bounds, float *factor)
{
    eight_t products = {0}, squares = {0};
    for (Py_ssize_t i = 0; i < count; i++) {
        eight_t magnitudes = magnitude_of(eights[i]), levels = all(LEVELS[0]);
        for (int j = 0; j < 3; j++)
            levels += choose(magnitudes > bounds[j], all(LEVELS[j + 1] - LEVELS[j]), all(0.0f));
        products += magnitudes * levels;
        squares += levels * levels;
    }
    float product = sum_of(products), square = sum_of(squares);
    *factor = product / square;
    return product * product / square;
}

INLINE void to_levels(float *vector, uint8_t *restrict codes, uint16_t *scales, Py_ssize_t dim)
{
    static const float stretches[2] = {0.93f, 1.12f};
    spread_out(vector, dim);
    Py_ssize_t count = dim / 8;
    eight_t *eights = (eight_t *)vector, squares = {0};
    for (Py_ssize_t i = 0; i < count; i++)
        squares += eights[i] * eights[i];
    float size = sqrtf(sum_of(squares) / (float)dim), inverse = 1.0f / (size < TINY ? TINY : size);
    for (Py_ssize_t i = 0; i < count; i++)
        eights[i] *= inverse;
    float suggested = largest_of(vector, dim) * 0.305f + 0.2f, most = -1.0f, bounds[3] = {0};
    for (int kind = 0; kind < 2; kind++) {
        float tried[3], factor;
        for (int j = 0; j < 3; j++)
            tried[j] = BOUNDS[j] * (suggested * stretches[kind]);
        float gain = fit(eights, count, tried, &factor);
        if (gain > most) {
            most = gain;
            scales[0] = to_bf16(factor * size);
            memcpy(bounds, tried, sizeof bounds);
        }
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        eight_t magnitudes = magnitude_of(eights[i]);
        eight_bits_t first = magnitudes > bounds[0], second = magnitudes > bounds[1], third = magnitudes > bounds[2];
        codes[i] = packed((first & ~second) | third); /* levels 1 and 3 */
        codes[count + i] = packed(second);
        codes[2 * count + i] = packed(eights[i] < 0.0f);
    }
}

INLINE void from_levels(const uint8_t *codes, const uint16_t *scales, float *restrict vector, Py_ssize_t dim)
{
    const eight_bits_t ones = {1, 2, 4, 8, 16, 32, 64, 128};
    float scale = from_bf16(scales[0]);
    Py_ssize_t count = dim / 8;
    eight_t *eights = (eight_t *)vector;
    for (Py_ssize_t i = 0; i < count; i++) {
        eight_bits_t low = (ones & codes[i]) != 0, high = (ones & codes[count + i]) != 0;
        eight_bits_t negative = (ones & codes[2 * count + i]) != 0;
        eight_t upper = choose(low, all(LEVELS[3]), all(LEVELS[2]));
        eight_t lower = choose(low, all(LEVELS[1]), all(LEVELS[0]));
        eight_t levels = choose(high, upper, lower) * scale;
        eights[i] = choose(negative, -levels, levels);
    }
    spread_out(vector, dim);
}

/* ---- all vectors ------------------------------------------------------------------------------------------------- */

enum { INT8 = 0, FLOAT8 = 1, INT4 = 2, LLOYD_MAX3 = 3, KINDS = 4 };

static const int SCALES[KINDS] = {1, 1, 2, 1};

INLINE Py_ssize_t code_bytes(int kind, Py_ssize_t dim)
{
    return kind == INT4 ? dim / 2 : kind == LLOYD_MAX3 ? 3 * dim / 8 : dim;
}

typedef struct {
    int kind, dtype;
    Py_ssize_t tokens, heads, dim;
    turns_t turns;
} shape_t;

WIDE static void quantize_all(const void *source, uint8_t *codes, uint16_t *scales, const shape_t *shape)
{
    float vector[DIM_MAX];
    Py_ssize_t dim = shape->dim, bytes = code_bytes(shape->kind, dim);
    for (Py_ssize_t token = 0; token < shape->tokens; token++)
        for (Py_ssize_t head = 0; head < shape->heads; head++) {
            load(vector, source, (token * shape->heads + head) * dim, dim, shape->dtype);
            if (shape->turns.pairs)
                turn_vector(vector, &shape->turns, token, head);
            switch (shape->kind) {
            case INT8: to_int8(vector, codes, scales, dim); break;
            case FLOAT8: to_float8(vector, codes, scales, dim); break;
            case INT4: to_int4(vector, codes, scales, dim); break;
            default: to_levels(vector, codes, scales, dim); break;
            }
            codes += bytes;
            scales += SCALES[shape->kind];
        }
}

WIDE static void dequantize_all(const uint8_t *codes, const uint16_t *scales, void *target, const shape_t *shape)
{
    float vector[DIM_MAX];
    Py_ssize_t dim = shape->dim, bytes = code_bytes(shape->kind, dim);
    for (Py_ssize_t token = 0; token < shape->tokens; token++)
        for (Py_ssize_t head = 0; head < shape->heads; head++) {
            switch (shape->kind) {
            case INT8: from_int8(codes, scales, vector, dim); break;
            case FLOAT8: from_float8(codes, scales, vector, dim); break;
            case INT4: from_int4(codes, scales, vector, dim); break;
            default: from_levels(codes, scales, vector, dim); break;
            }
            if (shape->turns.pairs)
                turn_vector(vector, &shape->turns, token, head);
            store(vector, target, (token * shape->heads + head) * dim, dim, shape->dtype);
            codes += bytes;
            scales += SCALES[shape->kind];
        }
}

/* ---- for Python -------------------------------------------------------------------------------------------------- */

static int check(const shape_t *shape)
{
    const turns_t *turns = &shape->turns;
    int packs = shape->kind == INT4 ? 2 : shape->kind == LLOYD_MAX3 ? 8 : 1;
    if (shape->kind >= 0 && shape->kind < KINDS && (shape->dtype == FP32 || shape->dtype == BF16) && shape->tokens >= 0
        && shape->heads >= 0 && shape->dim >= 1 && shape->dim <= DIM_MAX && shape->dim % packs == 0 && turns->pairs >= 0
        && turns->offset >= 0 && turns->offset + 2 * turns->pairs <= shape->dim
        && (turns->heads == 1 || turns->heads == shape->heads))
        return 1;
    PyErr_SetString(PyExc_ValueError, "vectors, or turns, of a shape that is not taken");
    return 0;
}

#define SHAPE "nnn" /* tokens, heads, dim */
#define TURNS "nnnnnp" /* cos, sin, heads, pairs, offset, interleaved */
#define SHAPE_ARGS(s) &(s).tokens, &(s).heads, &(s).dim
#define TURNS_ARGS(s) &(s).turns.cos, &(s).turns.sin, &(s).turns.heads, &(s).turns.pairs, &(s).turns.offset, \
                      &(s).turns.interleaved

static PyObject *turn(PyObject *module, PyObject *args)
{
    shape_t shape = {0};
    void *source, *target;
    if (!PyArg_ParseTuple(args, "nni" SHAPE TURNS, &source, &target, &shape.dtype, SHAPE_ARGS(shape),
                          TURNS_ARGS(shape)))
        return NULL;
    if (!check(&shape))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    turn_all(source, target, shape.dtype, shape.tokens, shape.heads, shape.dim, &shape.turns);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *quantize(PyObject *module, PyObject *args)
{
    shape_t shape;
    void *source, *codes, *scales;
    if (!PyArg_ParseTuple(args, "ininn" SHAPE TURNS, &shape.kind, &source, &shape.dtype, &codes, &scales,
                          SHAPE_ARGS(shape), TURNS_ARGS(shape)))
        return NULL;
    if (!check(&shape))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    quantize_all(source, codes, scales, &shape);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *dequantize(PyObject *module, PyObject *args)
{
    shape_t shape;
    void *codes, *scales, *target;
    if (!PyArg_ParseTuple(args, "innni" SHAPE TURNS, &shape.kind, &codes, &scales, &target, &shape.dtype,
                          SHAPE_ARGS(shape), TURNS_ARGS(shape)))
        return NULL;
    if (!check(&shape))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    dequantize_all(codes, scales, target, &shape);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"turn", turn, METH_VARARGS, "Turn pairs of dimensions."},
    {"quantize", quantize, METH_VARARGS, "Turn, then quantize."},
    {"dequantize", dequantize, METH_VARARGS, "Dequantize, then turn."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) { return PyModule_AddIntConstant(module, "DIM_MAX", DIM_MAX); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_kernels", .m_size = 0, .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&definition); }
