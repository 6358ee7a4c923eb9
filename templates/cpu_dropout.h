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

// Philox-4x32-7 (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3) serves 16 weights: queries m and m + 8 of a group of 16, and
// keys n, n + 1, n + 8, n + 9, n + 16 to n + 25 of a group of 32. A weight has one byte of 32 bits. Lanes are queries; the words of a group
// of keys are kept.
struct Dropout {
    uint32_t seed_low, seed_high;
    Word b, h, row;
    Bool upper;  // queries m of a pair
    int32_t group = -1;
    Word words[4][4];  // of two neighbouring keys, and of those 8, 16 and 24 later

    Dropout(int64_t seed, Int b, int32_t h, Int m)
        : seed_low(uint32_t(seed)), seed_high(uint32_t(uint64_t(seed) >> 32)), b(converted<Word::Native>(b.v)), h(uint32_t(h)),
          row(converted<Word::Native>(((m >> 4) * 8 + (m & 7)).v)), upper((m & 8) == 0) {}

    __attribute__((noinline)) void draw(int32_t wanted) {
        group = wanted;
        for (int i = 0; i < 4; ++i) {
            Word w[4] = {row, Word(uint32_t(group * 4 + i)), b, h};
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
            for (int j = 0; j < 4; ++j) {
                const Word bits = w[j] & 0x7F7F7F7F;
                words[i][j] = where(upper, bits, ((bits & 0x7F007F) << 8) | (bits >> 8 & 0x7F007F));
            }
        }
    }

    // Are the weights of a key kept? A weight's byte counts as 128ths; where it is the threshold's, the other byte of its 16 bits decides.
    INLINE Bool keeps(int32_t n, int64_t threshold) {
        if (n >> 5 != group) draw(n >> 5);
        return (words[n >> 1 & 3][n >> 3 & 3] >> (n & 1) * 16 & 0xFFFF) >= uint32_t(threshold);
    }
};

}  // namespace flexpress
