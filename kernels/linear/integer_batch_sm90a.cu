// Products of up to 64 int8 tokens and weights of 4-bit integer codes whose scales belong to short groups, on Hopper
// (sm_90a): every 32 or 64 k a sum of integers becomes a number, and that is most of the work. So it is
// mma.sync that multiplies, not wgmma: its sums begin with a number that stands beside them, for nothing.
//
//     TMA --full[stage]--> codes to registers, bytes, mma: 16 rows x 8 tokens x UNIT k, scaled and added in float32
//     copiers: scales, zero points --full[stage]--^                                     --empty[stage]--> TMA, copiers
//
// A thread block has up to 16 tiles of 16 rows, all of K, and all tokens. Its eight warps are row groups, up to TILES
// tiles each, times k groups, which take stages of 256 k in turns; in the end their sums are added in their order.
//
// The sum of a unit begins at BEGIN, the bits of 1.5 * 2^23, and so it is the bits of a number, that and the sum: no
// conversion. Where scales are halves, or products of a half and six bits, scale times BEGIN is exact, and one fma
// gives the product of scale and sum, rounded once; otherwise BEGIN is subtracted first.
//
// The contract is that of kbitcupy/products/integers.py, terms of units being added in the order of k, parts of k in
// theirs.
#include "linear/int8.cuh"
#include "linear/integer_beside.cuh"

// Of the host (kbitcupy/products/integer_batch.py), ahead of this source: BATCH_TOKENS = 64; BATCH_K = 256 of a stage,
// and BATCH_STAGES, the most of a ring; how codes lie, HALVES4, PAIRS4; what is taken off them, CONSTANT, POINTS,
// MINIMA; BatchCut.
constexpr int CONSUMERS = 8 * WARP;        // threads that multiply
constexpr int COPIERS = WARPGROUP - WARP;  // threads that make tables
constexpr int BATCH_ROW = BATCH_K / 2;     // bytes of codes of a row in a stage
constexpr unsigned BEGIN = 0x4b400000u;
constexpr float BEGIN_NUMBER = 12582912.0f;

// a b + c, rounded once, subnormal numbers kept.
__device__ __forceinline__ float fma_kept(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}

// d = a * b + c, where c are four words that stay.
__device__ __forceinline__ void mma_from(
    int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const unsigned (&c)[4]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// d += a * b, 16 x 8 x 8, of numbers of which eleven bits count: a[0] row g at k t, a[1] row g + 8, a[2] and a[3] the
// same at k t + 4; b0, b1 column g at k t and t + 4.
__device__ __forceinline__ void mma_eleven_bits(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The first eleven bits of a number, and what is left of it.
__device__ __forceinline__ void split_bits(float x, unsigned& high, unsigned& low) {
    high = __float_as_uint(x) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
}

// ORDER     HALVES4: of 32 k lower nibbles of 16 bytes, then the upper ones; PAIRS4: of 64 k those of 32 bytes
// UNIT      k that share a scale: 32 or 64
// ADDED     CONSTANT: codes are less 8; POINTS: less a zero point of the group; MINIMA: less nothing, and a number
//           times the sum of the tokens' codes is added
// BLOCKED   whether tokens have a scale for 32 k, not one
// EXACT     whether scales times BEGIN are exact: those of GGUF's types
// TILES     of 16 rows, that a warp has at the most; some have one less
template <int ORDER_, int UNIT_, int ADDED_, bool BLOCKED_, bool EXACT_, int TILES_>
struct Batch {
    static constexpr int ORDER = ORDER_, UNIT = UNIT_, ADDED = ADDED_, TILES = TILES_;
    static constexpr bool BLOCKED = BLOCKED_, EXACT = EXACT_;
    static constexpr int TOKENS = BATCH_TOKENS, EIGHTS = TOKENS / 8, UNITS = BATCH_K / UNIT, STEPS = UNIT / 32;
    static constexpr int WORDS = STEPS == 1 && ORDER == PAIRS4 ? 2 : STEPS;  // of a row that a lane has of a unit
    // A table has for each row its scales of a stage, with zero points beside them, or minima behind and their factor;
    // banks differ by row.
    static constexpr int ENTRY = ADDED == POINTS ? 8 : 4, MINIMA_AT = UNITS * ENTRY;
    static constexpr int ROW_ENTRIES = (ADDED == MINIMA ? 2 : 1) * UNITS * ENTRY;
    static constexpr int PITCH = ROW_ENTRIES + (ROW_ENTRIES % 32 == 0 ? ENTRY : 0);
    static_assert(ADDED != MINIMA || PITCH == ROW_ENTRIES + ENTRY, "the factor of minima has a place");
    // A stage: tokens, codes, numbers of tokens, a table.
    static constexpr int X_BOX = TOKENS * 128, NUMBERS = UNITS * TOKENS * 4;
    static constexpr int SCALES_AT = 2 * X_BOX, SUMS_AT = SCALES_AT + (BLOCKED ? NUMBERS : 0);
    static constexpr int CODES_AT = (SUMS_AT + (ADDED == MINIMA ? NUMBERS : 0) + 1023) / 1024 * 1024;
    static constexpr int COPIED = SUMS_AT + (ADDED == MINIMA ? NUMBERS : 0);  // but for codes
    // Tiles whose codes are bytes at a time, and eights of tokens that are fetched together.
    static constexpr int AT_ONCE = STEPS == 1 ? TILES : 2, TOGETHER = STEPS == 1 ? 2 : 1;
    static constexpr bool SIXTEENTHS = ADDED == CONSTANT;  // codes are multiplied where the upper half of a byte is
};

// The stages of a thread block, each with a barrier for full and one for empty.
struct BatchRing {
    unsigned data0, barriers;
    int stages, bytes;
    unsigned stage = 0, phase = 0;

    __device__ __forceinline__ unsigned data() const { return data0 + stage * bytes; }
    __device__ __forceinline__ unsigned full() const { return barriers + 16 * stage; }
    __device__ __forceinline__ unsigned empty() const { return barriers + 16 * stage + 8; }
    __device__ __forceinline__ void step(int by) {
        stage += by;
        if (stage >= stages) stage -= stages, phase ^= 1;
    }
};

// ---- tables of a stage ---------------------------------------------------------------------------------------------

// Makes the tables of a thread block. A thread has every COPIERS-th row, or entry; what it fetches waits in registers
// until the stage before has been multiplied. Few instructions between a fetch and the next are what counts here.
template <typename S>
struct TableCopier {
    static constexpr bool BY_ROW = S::ADDED != POINTS;
    static constexpr int HELD = BY_ROW ? 3 : 5, WORDS = BY_ROW ? 4 : 2;
    static constexpr int ACROSS = BY_ROW ? 1 : S::UNITS, ROW_STEP = COPIERS / ACROSS;  // entries of a row; rows between
    static_assert(COPIERS % ACROSS == 0, "entries of a thread belong to one unit");
    const Beside& beside;
    int rows, row, unit;           // of the thread block; the thread's first row and its unit
    unsigned begin, limit, share;  // where the scales of that row begin; the last place there is
    unsigned held[HELD][WORDS], place;

    __device__ __forceinline__
    TableCopier(const Beside& beside, int first_row, int rows, int all_rows, int thread, int share)
        : beside(beside), rows(rows), row(thread / ACROSS), unit(thread % ACROSS), share(share) {
        begin = (first_row + row) * beside.per_row;
        limit = all_rows * beside.per_row - (S::ADDED == CONSTANT ? S::UNITS : 1);
    }
    __device__ __forceinline__ int chunks() const { return (rows + HELD * ROW_STEP - 1) / (HELD * ROW_STEP); }
    // Of entry i. What is beyond a row, or all rows, is multiplied by zeros, or not stored.
    __device__ __forceinline__ unsigned at(int i) const { return min(place + i * ROW_STEP * beside.per_row, limit); }
    __device__ __forceinline__ void load(int stage, int chunk) {
        place = begin + chunk * HELD * ROW_STEP * beside.per_row;
        if constexpr (S::ADDED == CONSTANT) place += stage * S::UNITS;
        else if constexpr (S::ADDED == MINIMA) place += stage;
        else place += share == 1 ? stage * S::UNITS + unit : (stage * S::UNITS + unit) / share;
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            if constexpr (S::ADDED == CONSTANT) {  // eight halves
                load_line(held[i], static_cast<const uint4*>(beside.scale) + at(i) / 8);
            } else if constexpr (S::ADDED == MINIMA) {  // d and dmin; scales and minima of six bits in 12 bytes
                const unsigned* packed = static_cast<const unsigned*>(beside.zero) + 3ull * at(i);
                held[i][0] = load_line(static_cast<const unsigned*>(beside.scale) + at(i));
#pragma unroll
                for (int w = 0; w < 3; ++w) held[i][1 + w] = load_line(packed + w);
            } else {
                held[i][0] = load_line(Beside::word_at(beside.scale, at(i), beside.scale_bytes()));
                if (beside.zero_kind != NO_POINTS)
                    held[i][1] = load_line(Beside::word_at(beside.zero, at(i), beside.point_bytes()));
            }
        }
    }
    // A word, or four; the 256 bytes around them come to the L2 cache, as those beside them are next.
    __device__ __forceinline__ static unsigned load_line(const unsigned* from) {
        unsigned v;
        asm volatile("ld.global.nc.L2::256B.u32 %0, [%1];" : "=r"(v) : "l"(from));
        return v;
    }
    __device__ __forceinline__ static void load_line(unsigned (&word)[4], const uint4* from) {
        asm volatile("ld.global.nc.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                     : "l"(from));
    }
    __device__ __forceinline__ void store(int chunk, unsigned table) const {
        const int first = row + chunk * HELD * ROW_STEP;
        const unsigned target = table + first * S::PITCH + unit * S::ENTRY;
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            if (first + i * ROW_STEP >= rows) return;
            const unsigned to = target + i * ROW_STEP * S::PITCH;
            const unsigned (&word)[WORDS] = held[i];
            if constexpr (S::ADDED == CONSTANT) {
#pragma unroll
                for (int h = 0; h < 8; ++h) store_shared(to + 4 * h, Word<__half>::get(word[h / 2], h % 2));
            } else if constexpr (S::ADDED == MINIMA) {
                const float d = Word<__half>::get(word[0], 0), less = -Word<__half>::get(word[0], 1);
                const unsigned low = word[1], high = word[2], rest = word[3];
#pragma unroll
                for (int h = 0; h < 8; ++h) {
                    const unsigned s = h < 4 ? low & 0x3f3f3f3fu : rest & 0x0f0f0f0fu | low >> 2 & 0x30303030u;
                    const unsigned m = h < 4 ? high & 0x3f3f3f3fu : rest >> 4 & 0x0f0f0f0fu | high >> 2 & 0x30303030u;
                    store_shared(to + 4 * h, d * static_cast<float>(s >> h % 4 * 8 & 0xff));
                    store_shared(to + S::MINIMA_AT + 4 * h, static_cast<float>(m >> h % 4 * 8 & 0xff));
                }
                store_shared(to + 2 * S::MINIMA_AT, less);
            } else {
                store_shared(to, beside.scale_of(word[0], at(i)), beside.points_of(word[1], at(i)));
            }
        }
    }
};

// ---- the product of a warp -----------------------------------------------------------------------------------------

// Adds minima times sums of tokens' codes and their scales, of a stage: minima are integers of six bits, of which those
// of a row have one factor, and the numbers of tokens come in two parts of eleven bits.
template <typename S, int MINE>
__device__ __forceinline__ void add_minima(
    float (&total)[MINE][S::EIGHTS][4], unsigned minima, unsigned factors, unsigned scales, unsigned sums) {
    unsigned a[MINE][4];
    float factor[MINE][2];
#pragma unroll
    for (int i = 0; i < 4 * MINE; ++i)
        a[i / 4][i % 4] = shared_at<unsigned>(minima + (i / 4 * 16 + i % 2 * 8) * S::PITCH + i / 2 % 2 * 16);
#pragma unroll
    for (int i = 0; i < 2 * MINE; ++i) factor[i / 2][i % 2] = shared_at<float>(factors + 8 * i * S::PITCH);
    float of_token[2][2];
    auto fetch = [&](int j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned at = (4 * h * S::TOKENS + 8 * j) * 4;
            const float sum = __int2float_rn(shared_at<int>(sums + at));
            of_token[j % 2][h] = S::BLOCKED ? multiply_ieee(sum, shared_at<float>(scales + at)) : sum;
        }
    };
    fetch(0);
#pragma unroll
    for (int j = 0; j < S::EIGHTS; ++j) {
        if (j + 1 < S::EIGHTS) fetch(j + 1);
        unsigned high[2], low[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) split_bits(of_token[j % 2][h], high[h], low[h]);
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            float d[4] = {};
            mma_eleven_bits(d, a[i], low[0], low[1]);
            mma_eleven_bits(d, a[i], high[0], high[1]);
#pragma unroll
            for (int c = 0; c < 4; ++c) total[i][j][c] = fma_kept(d[c], factor[i][c / 2], total[i][j][c]);
        }
    }
}

// The sum of a unit, in the bits of `number`, counts: BEGIN comes off, and scales go on.
template <typename S>
__device__ __forceinline__ float added_to(float sum, float number, float scale, float less, float of_token) {
    const float term = S::EXACT ? fma_kept(number, scale, less) : number - BEGIN_NUMBER;
    if constexpr (S::BLOCKED) return fma_kept(S::EXACT ? term : multiply_ieee(term, scale), of_token, sum);
    else return S::EXACT ? add_ieee(sum, term) : fma_kept(term, scale, sum);
}

// Words of codes of 16 rows and a unit as operands A: the lane's of row g, and of row g + 8.
template <typename S>
__device__ __forceinline__ void decode_tile(
    unsigned (&a)[S::STEPS][4], const unsigned (&word)[S::WORDS][2], int shift, unsigned flipped,
    const unsigned (&points)[2]) {
#pragma unroll
    for (int i = 0; i < 2 * S::STEPS; ++i) {
        const int s = i / 2, h = i % 2;
        if constexpr (S::ORDER == PAIRS4) {
            a[s][h] = word[0][h] >> shift & 0x0f0f0f0fu, a[s][2 + h] = word[1][h] >> shift & 0x0f0f0f0fu;
        } else if constexpr (S::ADDED == CONSTANT) {
            a[s][h] = cut_bytes<0xf0f0f0f0u>(word[s][h] << 4, flipped);
            a[s][2 + h] = cut_bytes<0xf0f0f0f0u>(word[s][h], flipped);
        } else {
            a[s][h] = cut_bytes<0x0f0f0f0fu>(word[s][h], flipped) - points[h] ^ RAISED;
            a[s][2 + h] = cut_bytes<0x0f0f0f0fu>(word[s][h] >> 4, flipped) - points[h] ^ RAISED;
        }
    }
}

// What a warp adds up of MINE tiles and all tokens, in the stages of its k group; it goes where the ring was: [k
// group][token][row].
template <typename S, int MINE>
__device__ __forceinline__ void multiply_batch(
    BatchRing ring, const BatchCut& cut, int k_group, int k_groups, int stages, int first, unsigned flipped,
    unsigned nothing) {
    float total[MINE][S::EIGHTS][4] = {};
    const unsigned lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    // Where the lane's row of a matrix begins, and its numbers.
    const unsigned codes =
        S::CODES_AT + (S::WORDS == 1 ? (first + lane) * BATCH_ROW + (lane % 8 << 4)
                                     : (first + lane % 16) * BATCH_ROW + ((lane / 16 ^ lane % 8) << 4));
    const unsigned x = S::TOGETHER == 2 ? (lane / 16 * 8 + lane % 8) * 128 + ((lane / 8 % 2 ^ lane % 8) << 4)
                                        : lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4);
    const unsigned entries = cut.table_at + (first + g) * S::PITCH;
    const unsigned begin[4] = {opaque(BEGIN), opaque(BEGIN), opaque(BEGIN), opaque(BEGIN)};
    ring.step(k_group);
    for (int stage = k_group; stage < stages; stage += k_groups) {
        barrier_wait(ring.full(), ring.phase);
        const unsigned data = ring.data();
        constexpr int MOST = S::AT_ONCE;
        unsigned word[MOST][S::WORDS][2], points[MOST][2] = {};
        float next[MOST][2];
        // Codes of tiles from `tile` on of a unit, scales, and what stands beside them.
        auto fetch_codes = [&](int tile, int unit) {
            const int at = unit * S::STEPS;
            const unsigned from = (data + codes + tile * 16 * BATCH_ROW) ^ (S::WORDS == 1 ? at : at & ~1) << 4;
#pragma unroll
            for (int i = 0; i < MOST && tile + i < MINE; i += S::WORDS == 1 ? 2 : 1) {
                if constexpr (S::WORDS == 1) {  // two tiles
                    unsigned four[4];
                    load_matrices(four, from + i * 16 * BATCH_ROW);
#pragma unroll
                    for (int h = 0; h < 4; ++h)
                        if (i + h / 2 < MOST) word[i + h / 2][0][h % 2] = four[h];
                } else {
#pragma unroll
                    for (int w = 0; w < S::WORDS; w += 2)
                        load_matrices(word[i][w], (from + i * 16 * BATCH_ROW) ^ w << 4);
                }
            }
#pragma unroll
            for (int i = 0; i < 2 * MOST && tile + i / 2 < MINE; ++i) {
                const unsigned entry = data + entries + (tile * 16 + 8 * i) * S::PITCH + unit * S::ENTRY;
                if constexpr (S::ADDED == POINTS) {
                    const uint2 v = shared_at<uint2>(entry);
                    next[i / 2][i % 2] = __uint_as_float(v.x), points[i / 2][i % 2] = v.y;
                } else {
                    next[i / 2][i % 2] = shared_at<float>(entry);
                }
            }
        };
        if constexpr (S::STEPS == 1) fetch_codes(0, 0);
#pragma unroll 1
        for (int unit = 0; unit < S::UNITS; ++unit) {
            const int at = unit * S::STEPS;  // times 32 k
#pragma unroll
            for (int tile = 0; tile < MINE; tile += S::AT_ONCE) {
                if constexpr (S::STEPS > 1) fetch_codes(tile, unit);
                unsigned a[MOST][S::STEPS][4];
                float scale[MOST][2], less[MOST][2];
#pragma unroll
                for (int i = 0; i < MOST && tile + i < MINE; ++i) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) scale[i][h] = next[i][h], less[i][h] = next[i][h] * -BEGIN_NUMBER;
                    decode_tile<S>(a[i], word[i], at % 2 * 4, flipped, points[i]);
                }
                const unsigned tokens = (data + at / 4 * S::X_BOX + x) ^ at % 4 << 5;
                constexpr int FETCHES = (S::STEPS + 1) / 2;
                // Of two fetches in turns: 16 tokens and 32 k, or 8 tokens and 64 k each; scales of these tokens.
                unsigned fetched[2][FETCHES][4];
                float of_token[2][S::TOGETHER][2] = {};
                auto fetch = [&](int j) {
                    const int to = j / S::TOGETHER % 2;
#pragma unroll
                    for (int s = 0; s < S::STEPS; s += 2)
                        load_matrices(fetched[to][s / 2], (tokens + j * 1024) ^ s << 5);
#pragma unroll
                    for (int n = 0; n < S::TOGETHER; ++n) {
                        if constexpr (S::BLOCKED) {
                            const uint2 v =
                                shared_at<uint2>(data + S::SCALES_AT + (unit * S::TOKENS + (j + n) * 8 + 2 * t) * 4);
                            of_token[to][n][0] = __uint_as_float(v.x), of_token[to][n][1] = __uint_as_float(v.y);
                        }
                    }
                };
                fetch(0);
#pragma unroll
                for (int j = 0; j < S::EIGHTS; j += S::TOGETHER) {
                    // What is fetched here is not fetched earlier: there are no registers for all of it.
                    if (j > 0) __syncwarp();
                    if (j + S::TOGETHER < S::EIGHTS) fetch(j + S::TOGETHER);
                    else if constexpr (S::STEPS == 1) fetch_codes(0, (unit + 1) % S::UNITS);
                    const unsigned (&b)[FETCHES][4] = fetched[j / S::TOGETHER % 2];
#pragma unroll
                    for (int n = 0; n < S::TOGETHER; ++n) {
                        const float (&e)[2] = of_token[j / S::TOGETHER % 2][n];
#pragma unroll
                        for (int i = 0; i < MOST && tile + i < MINE; ++i) {
                            int d[4];
#pragma unroll
                            for (int s = 0; s < S::STEPS; ++s) {
                                const int pair = S::TOGETHER == 2 ? n : s % 2;
                                const unsigned b0 = b[s / 2][2 * pair], b1 = b[s / 2][2 * pair + 1];
                                if (s == 0) mma_from(d, a[i][s], b0, b1, begin);
                                else mma_s8(d, a[i][s], b0, b1);
                            }
                            float (&sum)[4] = total[tile + i][j + n];
#pragma unroll
                            for (int c = 0; c < 4; ++c)
                                sum[c] = added_to<S>(
                                    sum[c], __int_as_float(d[c]), scale[i][c / 2], less[i][c / 2], e[c % 2]);
                        }
                    }
                }
            }
        }
        if constexpr (S::ADDED == MINIMA)
            add_minima<S, MINE>(
                total, data + entries + S::MINIMA_AT + t * 4, data + entries + 2 * S::MINIMA_AT,
                data + S::SCALES_AT + (t * S::TOKENS + g) * 4, data + S::SUMS_AT + (t * S::TOKENS + g) * 4);
        // Sums that the last of what was read here is in: the copy engine would not wait for a load in its queue.
        barrier_arrive(ordered_after(ring.empty(), __float_as_uint(total[MINE - 1][S::EIGHTS - 1][3]), nothing));
        ring.step(k_groups);
    }
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
    const int rows = 16 * cut.tiles + 4;
    const unsigned to = ring.data0 + ((k_group * S::TOKENS + 2 * t) * rows + first + g) * 4;
#pragma unroll
    for (int j = 0; j < S::EIGHTS; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const unsigned token = to + (8 * j + e) * rows * 4;
#pragma unroll
            for (int i = 0; i < 2 * MINE; ++i) store_shared(token + 32 * i, total[i / 2][j][i % 2 * 2 + e]);
        }
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

template <int ORDER, int UNIT, int ADDED, bool BLOCKED, bool EXACT, int TILES>
__global__ void __launch_bounds__(CONSUMERS + WARPGROUP, 1) batch_integers(
    const __grid_constant__ TensorMap x_map,  // int8 [tokens, pitch], boxes of 128 bytes x TOKENS
    const __grid_constant__ TensorMap w_map,  // codes [rows, K / 2], boxes of 128 bytes x the rows of a thread block
    const __grid_constant__ TensorMap e_map,  // BLOCKED: float32 [units, tokens or more], boxes of 256 bytes x UNITS
    const __grid_constant__ TensorMap s_map,  // MINIMA: int32 beside them, sums of the tokens' codes
    const BatchCut cut,
    void* __restrict__ y,                   // [tokens, rows] of the type that y_kind names
    const float* __restrict__ token_scale,  // [tokens], or [1] where token_step is 0; not of BLOCKED
    const void* __restrict__ scale,         // [rows, per_row]
    const void* __restrict__ zero,          // beside scales: zero points, q4_k's inner scales; or null
    const void* __restrict__ bias,          // [rows] of the type that bias_kind names, or null
    int tokens, int rows, int depth, int per_row,
    int share,  // POINTS: units that share a scale
    int token_step, int scale_kind, int zero_kind, int lowest, int middle, int bias_kind, int y_kind,
    unsigned nothing) {
    using S = Batch<ORDER, UNIT, ADDED, BLOCKED, EXACT, TILES>;
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[2 * BATCH_STAGES];
    const unsigned ring0 = (shared_address(memory) + 1023u) & ~1023u;
    BatchRing ring{ring0, shared_address(barriers), cut.stages, cut.stage_bytes};
    const int row_groups = cut.row_groups, k_groups = CONSUMERS / WARP / row_groups;
    const int of_block = 16 * cut.tiles, first_row = blockIdx.x * of_block;
    const int stages = (depth + BATCH_K - 1) / BATCH_K;
    if (threadIdx.x == 0) {
        for (int i = 0; i < cut.stages; ++i) {
            barrier_init(ring.barriers + 16 * i, 1 + COPIERS);
            barrier_init(ring.barriers + 16 * i + 8, WARP * row_groups);
        }
        fence_barrier_init();
    }
    __syncthreads();
    const int warp = warp_number(), lane = threadIdx.x % WARP;
    if (threadIdx.x >= CONSUMERS) {
        lower_registers<40>();
        const int thread = static_cast<int>(threadIdx.x) - CONSUMERS - WARP;
        if (thread == -WARP) {
            const unsigned bytes = S::COPIED + of_block * BATCH_ROW;
            const int ahead = min(stages, cut.stages);
            for (int stage = 0; stage < ahead; ++stage) {
                const unsigned barrier = ring.barriers + 16 * stage;
                barrier_expect(barrier, bytes);
                copy_box(ring.data0 + stage * ring.bytes + S::CODES_AT, &w_map, stage * BATCH_ROW, first_row, barrier);
            }
            wait_for_previous();
            for (int stage = 0; stage < stages; ++stage) {
                if (stage >= ahead) {
                    barrier_wait(ring.empty(), ring.phase ^ 1);
                    barrier_expect(ring.full(), bytes);
                    copy_box(ring.data() + S::CODES_AT, &w_map, stage * BATCH_ROW, first_row, ring.full());
                }
#pragma unroll
                for (int box = 0; box < 2; ++box)
                    copy_box(ring.data() + box * S::X_BOX, &x_map, stage * BATCH_K + box * 128, 0, ring.full());
                if constexpr (BLOCKED) copy_box(ring.data() + S::SCALES_AT, &e_map, 0, stage * S::UNITS, ring.full());
                if constexpr (ADDED == MINIMA)
                    copy_box(ring.data() + S::SUMS_AT, &s_map, 0, stage * S::UNITS, ring.full());
                ring.step(1);
            }
        } else if (thread >= 0) {
            const Beside beside{scale, zero, scale_kind, zero_kind, lowest, middle, static_cast<unsigned>(per_row)};
            TableCopier<S> copier(beside, first_row, of_block, rows, thread, share);
            const int chunks = copier.chunks();
            copier.load(0, 0);
            for (int stage = 0; stage < stages; ++stage) {
                barrier_wait(ring.empty(), ring.phase ^ 1);
#pragma unroll 1
                for (int chunk = 0; chunk < chunks; ++chunk) {
                    copier.store(chunk, ring.data() + cut.table_at);
                    const bool last = chunk == chunks - 1;
                    if (!last || stage + 1 < stages) copier.load(stage + last, last ? 0 : chunk + 1);
                }
                barrier_arrive(ring.full());
                ring.step(1);
            }
        }
        return;
    }
    raise_registers<232>();
    // Warps of a scheduler have row groups of more and of fewer tiles.
    const int k_group = warp / row_groups;
    const int row_group = warp / max(4, row_groups) % 2 ? row_groups - 1 - warp % row_groups : warp % row_groups;
    const int base = cut.tiles / row_groups, rest = cut.tiles % row_groups;
    const int mine = base + (row_group < rest), first = 16 * (row_group * base + min(row_group, rest));
    const unsigned flipped =
        opaque(ADDED == CONSTANT ? (lowest < 0 ? 0u : RAISED) : RAISED | (lowest < 0 ? 0x08080808u : 0u));
    if (mine == TILES) multiply_batch<S, TILES>(ring, cut, k_group, k_groups, stages, first, flipped, nothing);
    else multiply_batch<S, TILES - 1>(ring, cut, k_group, k_groups, stages, first, flipped, nothing);

    const int pitch = of_block + 4;
    wait_for_previous();
    const Rescaling rescaling{token_scale, nullptr, bias, bias_kind};
    const int eights = of_block / 8;
    const int width = y_kind == FLOAT32_BIAS ? 4 : 2;
    const bool aligned = reinterpret_cast<unsigned long long>(y) % 16 == 0 && rows % 8 == 0;
    for (int item = threadIdx.x; item < tokens * eights; item += CONSUMERS) {
        const int token = item / eights, of = item % eights * 8, row = first_row + of;
        if (row >= rows) continue;
        float v[8] = {};
        for (int part = 0; part < k_groups; ++part) {
            const unsigned from = ring0 + ((part * S::TOKENS + token) * pitch + of) * 4;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float4 four = shared_at<float4>(from + 16 * h);
                v[4 * h] += four.x, v[4 * h + 1] += four.y, v[4 * h + 2] += four.z, v[4 * h + 3] += four.w;
            }
        }
        float e = S::SIXTEENTHS ? 0.0625f : 1.0f;
        if constexpr (!BLOCKED) {
            const float given = rescaling.of_token(static_cast<long long>(token) * token_step);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = multiply_ieee(S::SIXTEENTHS ? multiply_ieee(v[i], e) : v[i], given);
        } else if (S::SIXTEENTHS) {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = multiply_ieee(v[i], e);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (row + i < rows) v[i] = add_ieee(v[i], rescaling.bias_of(row + i));
        const long long at = static_cast<long long>(token) * rows + row;
        if (width == 4) {
            float* target = static_cast<float*>(y) + at;
            if (aligned) {
                *reinterpret_cast<float4*>(target) = make_float4(v[0], v[1], v[2], v[3]);
                *reinterpret_cast<float4*>(target + 4) = make_float4(v[4], v[5], v[6], v[7]);
            } else {
                for (int i = 0; i < 8; ++i)
                    if (row + i < rows) target[i] = v[i];
            }
        } else {
            unsigned word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                word[i] = y_kind == FLOAT16_BIAS ? Word<__half>::pack(v[2 * i], v[2 * i + 1])
                                                 : Word<__nv_bfloat16>::pack(v[2 * i], v[2 * i + 1]);
            unsigned short* target = static_cast<unsigned short*>(y) + at;
            if (aligned) {
                *reinterpret_cast<uint4*>(target) = make_uint4(word[0], word[1], word[2], word[3]);
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (row + i < rows) target[i] = static_cast<unsigned short>(word[i / 2] >> i % 2 * 16);
            }
        }
    }
}
