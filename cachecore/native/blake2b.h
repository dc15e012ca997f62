/* BLAKE2b as RFC 7693 has it, with a key and a `person` string: what hashlib.blake2b(digest_size=, key=, person=) gives.
 *
 * A state may be copied at any time, which is what naming blocks rests on: key and block size are absorbed once.
 */

#ifndef ROPEWAY_BLAKE2B_H
#define ROPEWAY_BLAKE2B_H

#include "module.h"

enum { BLAKE2B_BLOCK = 128, BLAKE2B_KEY_MAX = 64, BLAKE2B_PERSON = 16 };

typedef struct {
    uint64_t chain[8];
    uint64_t absorbed; /* bytes compressed so far; 2**64 of them are out of reach */
    size_t held;       /* bytes in `block`: the last block waits, as it is compressed differently */
    unsigned char block[BLAKE2B_BLOCK];
} blake2b_state;

static const uint64_t BLAKE2B_IV[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

static inline void store_u64(unsigned char *bytes, uint64_t word)
{
    for (int place = 0; place < 8; place++)
        bytes[place] = (unsigned char)(word >> 8 * place);
}

static inline uint64_t rotated_right(uint64_t word, int bits)
{
    return word >> bits | word << (64 - bits);
}

/* The mixing function G of the RFC, on four words of the working vector `v` and two of the message. */
#define BLAKE2B_MIX(a, b, c, d, x, y)        \
    do {                                     \
        v[a] += v[b] + (x);                  \
        v[d] = rotated_right(v[d] ^ v[a], 32); \
        v[c] += v[d];                        \
        v[b] = rotated_right(v[b] ^ v[c], 24); \
        v[a] += v[b] + (y);                  \
        v[d] = rotated_right(v[d] ^ v[a], 16); \
        v[c] += v[d];                        \
        v[b] = rotated_right(v[b] ^ v[c], 63); \
    } while (0)

/* One round: the message's words in the order of a row of the RFC's SIGMA. Spelled out, so that the order is known to
 * the compiler and the working vector stays in registers. */
#define BLAKE2B_ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15) \
    do {                                                                                    \
        BLAKE2B_MIX(0, 4, 8, 12, m[s0], m[s1]);                                             \
        BLAKE2B_MIX(1, 5, 9, 13, m[s2], m[s3]);                                             \
        BLAKE2B_MIX(2, 6, 10, 14, m[s4], m[s5]);                                            \
        BLAKE2B_MIX(3, 7, 11, 15, m[s6], m[s7]);                                            \
        BLAKE2B_MIX(0, 5, 10, 15, m[s8], m[s9]);                                            \
        BLAKE2B_MIX(1, 6, 11, 12, m[s10], m[s11]);                                          \
        BLAKE2B_MIX(2, 7, 8, 13, m[s12], m[s13]);                                           \
        BLAKE2B_MIX(3, 4, 9, 14, m[s14], m[s15]);                                           \
    } while (0)

static void blake2b_compress(blake2b_state *state, const unsigned char *block, int last)
{
    uint64_t m[16], v[16];
    for (int place = 0; place < 16; place++)
        m[place] = load_u64(block + 8 * place);
    memcpy(v, state->chain, sizeof state->chain);
    memcpy(v + 8, BLAKE2B_IV, sizeof BLAKE2B_IV);
    v[12] ^= state->absorbed;
    if (last)
        v[14] = ~v[14];
    BLAKE2B_ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    BLAKE2B_ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
    BLAKE2B_ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4);
    BLAKE2B_ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8);
    BLAKE2B_ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13);
    BLAKE2B_ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9);
    BLAKE2B_ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11);
    BLAKE2B_ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10);
    BLAKE2B_ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5);
    BLAKE2B_ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0);
    BLAKE2B_ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    BLAKE2B_ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
    for (int place = 0; place < 8; place++)
        state->chain[place] ^= v[place] ^ v[place + 8];
}

#undef BLAKE2B_ROUND
#undef BLAKE2B_MIX

static void blake2b_update(blake2b_state *state, const unsigned char *bytes, size_t count)
{
    while (count > BLAKE2B_BLOCK - state->held) {
        size_t room = BLAKE2B_BLOCK - state->held;
        memcpy(state->block + state->held, bytes, room);
        state->absorbed += BLAKE2B_BLOCK;
        blake2b_compress(state, state->block, 0);
        state->held = 0;
        bytes += room;
        count -= room;
    }
    memcpy(state->block + state->held, bytes, count);
    state->held += count;
}

/* `key_bytes` may be 0; `person` has BLAKE2B_PERSON bytes. There is no salt, and one tree of one leaf. */
static void blake2b_init(blake2b_state *state, size_t digest_bytes, const unsigned char *key, size_t key_bytes,
                         const unsigned char *person)
{
    memcpy(state->chain, BLAKE2B_IV, sizeof BLAKE2B_IV);
    state->chain[0] ^= 0x01010000 ^ (uint64_t)key_bytes << 8 ^ (uint64_t)digest_bytes;
    state->chain[6] ^= load_u64(person);
    state->chain[7] ^= load_u64(person + 8);
    state->absorbed = 0;
    state->held = 0;
    if (key_bytes) {
        unsigned char padded[BLAKE2B_BLOCK] = {0};
        memcpy(padded, key, key_bytes);
        blake2b_update(state, padded, sizeof padded);
    }
}

/* The first 16 bytes of the digest. The state is used up. */
static void blake2b_finish(blake2b_state *state, unsigned char *digest)
{
    memset(state->block + state->held, 0, BLAKE2B_BLOCK - state->held);
    state->absorbed += state->held;
    blake2b_compress(state, state->block, 1);
    store_u64(digest, state->chain[0]);
    store_u64(digest + 8, state->chain[1]);
}

#endif
