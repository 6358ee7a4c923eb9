// Which weights dropout keeps: the same in every kernel, tile and layout of sequences, as it follows from positions alone.
#pragma once

namespace flexpress {

using Word = Vec<uint32_t>;

// the upper and the lower 32 bits of a product: of every other lane, and of those between
INLINE void multiply_words(Word word, uint32_t factor, Word& high, Word& low) {
    typedef uint64_t Wide __attribute__((vector_size(LANES * 4)));
    const Wide pairs = (Wide)word.v, mask = 0xFFFFFFFF - Wide{}, even = (pairs & mask) * factor, odd = (pairs >> 32) * factor;
    high = Word((Word::Native)((even >> 32) | (odd & ~mask)));
    low = Word((Word::Native)((even & mask) | (odd << 32)));
}

INLINE Word turned(Word word, int32_t left) { return word << left | word >> (32 - left); }

// four more words: each is the exclusive or of one, of the next one turned, and of the one after that
INLINE void mix(const Word (&words)[4], int32_t left, Word (&mixed)[4]) {
    for (int i = 0; i < 4; ++i) mixed[i] = words[i] ^ turned(words[(i + 1) % 4], left) ^ words[(i + 2) % 4];
}

// Of 32 numbers, those that are at least `dropped` in their bits up to `bit`: `word` has these bits, `rest` the answer for the bits below.
INLINE Word at_least(Word rest, Word word, int64_t dropped, int32_t bit) {
    return dropped >> bit & 1 ? word & rest : word | rest;
}

// Philox-4x32-7 (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3) serves 64 weights: queries m and m + 8 of 16, and 16 pairs
// of neighbouring keys, 8 apart, of 128. Its words and eight more have 14 bits of every weight, which is kept if that number is at least
// `dropped`. Lanes are queries; what is kept of a group of 128 keys is computed once.
struct Dropout {
    uint32_t seed_low, seed_high;
    Word b, h, row;
    Bool upper;  // queries m of a pair
    int32_t group = -1;
    Word kept[4][2];  // bits, of two neighbouring keys and those 8, 16 ... 56 later, and of those 64 later

    Dropout(int64_t seed, Int b, int32_t h, Int m)
        : seed_low(uint32_t(seed)), seed_high(uint32_t(uint64_t(seed) >> 32)), b(converted<Word::Native>(b.v)), h(uint32_t(h)),
          row(converted<Word::Native>(((m >> 4) * 8 + (m & 7)).v)), upper((m & 8) == 0) {}

    __attribute__((noinline)) void draw(int32_t wanted, int64_t dropped) {
        group = wanted;
        for (int i = 0; i < 4; ++i) {
            Word w[4] = {row, Word(uint32_t(group * 4 + i)), b, h}, x[4], y[4];
            uint32_t key0 = seed_low, key1 = seed_high;
            for (int round = 0; round < 7; ++round, key0 += 0x9E3779B9, key1 += 0xBB67AE85) {
                Word high0, low0, high2, low2;
                multiply_words(w[0], 0xD2511F53, high0, low0);
                multiply_words(w[2], 0xCD9E8D57, high2, low2);
                w[0] = high2 ^ w[1] ^ key0;
                w[1] = low2;
                w[2] = high0 ^ w[3] ^ key1;
                w[3] = low0;
            }
            mix(w, 12, x);
            mix(x, 5, y);
            Word low = Word(0xFFFFFFFFu);
            const Word lower[8] = {x[2], x[0], x[3], x[1], y[2], y[0], y[3], y[1]};
            for (int bit = 0; bit < 8; ++bit) low = at_least(low, lower[bit], dropped, bit);
            low = turned(low, 16);
            for (int half = 0; half < 2; ++half) {
                const int j = 2 * half;
                const Word own[6] = {y[j + 1], y[j], x[j + 1], x[j], w[j + 1], w[j]};
                Word found = low;
                for (int bit = 0; bit < 6; ++bit) found = at_least(found, own[bit], dropped, bit + 8);
                kept[i][half] = where(upper, found, found >> 16);
            }
        }
    }

    // Are the weights of a key kept?
    INLINE Bool keeps(int32_t n, int64_t dropped) {
        if (n >> 7 != group) draw(n >> 7, dropped);
        const int32_t place = (n & 1) * 8 + 7 - (n >> 3 & 7);
        return (kept[n >> 1 & 3][n >> 6 & 1] >> place & 1) != 0;
    }
};

}  // namespace flexpress
