// Products of up to 64 tokens, quantized by blocks of 32 k, and q4_k's weights on Hopper (sm_90a). Codes times inner
// scales are integers up to 945, and halves hold them, as they do the codes of tokens: so wgmma of halves gives sums of
// 32 k that are exact, and that are numbers already. What is left is an fma for each of them, by the scale of a token.
//
//     TMA --full[stage]--> codes to registers, halves, wgmma: 64 rows x 64 tokens x 32 k; fma --empty[stage]--> TMA
//     copiers: scales and minima --full[stage]--^
//
// A stage is 256 k, a block of q4_k. Two warpgroups multiply: they have rows of their own, TILES times 64, or take
// stages in turns, and their sums are added in the end, in their order. A tile of a stage is nine groups of wgmma, each
// under way while the sums of the one before are scaled and added: minima times what the tokens' codes add up to, and
// eight times 32 k.
//
// The contract is that of kbitcupy/products/integers.py, with less room at the ends of float32: see
// kbitcupy/products/integer_halves.py.
#include "linear/int8.cuh"
#include "linear/integer_tiles.cuh"

// Of the host (kbitcupy/products/integer_halves.py), ahead of this source: HALVES_TOKENS = 64; RECORD_K = 256 of a
// stage; RECORD_BYTES beside the tokens' codes, of which the scales come first; TABLE_ROW, bytes of a row in a table;
// HALVES_STAGES, the most of a ring; HalvesCut.
constexpr int CONSUMERS = 2 * WARPGROUP;    // threads that multiply
constexpr int COPIERS = WARPGROUP - WARP;   // threads that make tables
constexpr int BLOCKS = RECORD_K / 32;       // that have an inner scale
constexpr int SUMS = HALVES_TOKENS / 2;     // of a thread and 64 rows
constexpr int CODE_BYTES = RECORD_K / 2;    // of a row in a stage
constexpr int X_BOX = HALVES_TOKENS * 128;  // bytes of the tokens' halves of 64 k
constexpr int X_BYTES = RECORD_K / 64 * X_BOX, X_STAGE = X_BYTES + RECORD_BYTES;
constexpr int PARTS_AT = X_BYTES + BLOCKS * HALVES_TOKENS * 4, PART_BYTES = HALVES_TOKENS * BLOCKS * 2;
// Of a row of a table: inner scales as halves, those of odd blocks divided by 16; minima as bfloat16; d and -dmin.
constexpr int SCALE_ROW = BLOCKS * 2, FACTOR_ROW = 8;
static_assert(2 * SCALE_ROW + FACTOR_ROW == TABLE_ROW, "the host reckons with the same table");

// ---- PTX -----------------------------------------------------------------------------------------------------------

// a b + c, rounded once, subnormal numbers kept.
__device__ __forceinline__ float fma_kept(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}

// sum (+)= a * b for 64 rows x 64 tokens x 16 k of T; the old sum counts only where KEEP.
#define WGMMA_KEEPING(type)                                                                                      \
    asm volatile("{ .reg .pred keep; setp.ne.b32 keep, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type \
                 "." type " {" LIST32 "}, {%32, %33, %34, %35}, %36, keep, 1, 1, 0; }"                           \
                 : SUMS32(sum, 0)                                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(KEEP))
template <typename T, int KEEP>
__device__ __forceinline__ void wgmma_keeping(float (&sum)[SUMS], const unsigned (&a)[4], unsigned long long b) {
    if constexpr (SameType<T, __half>::VALUE) WGMMA_KEEPING("f16");
    else WGMMA_KEEPING("bf16");
}

// The descriptor of an operand of wgmma as the tokens' parts lie: of eight k 64 tokens, 16 bytes each.
__device__ __forceinline__ unsigned long long parts_descriptor(unsigned address) {
    return static_cast<unsigned long long>(8u) << 32 | (PART_BYTES >> 4) << 16 | (address & 0x3ffffu) >> 4;
}

// Bytes that lie beside each other, multiples of 16; they count at `barrier`.
__device__ __forceinline__ void copy_run(unsigned target, const void* from, unsigned bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void store_words(unsigned address, const unsigned (&v)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

// A word of weights; the bytes around it come to the L2 cache, as those beside it are next.
__device__ __forceinline__ unsigned load_word_of_line(const unsigned* from) {
    unsigned v;
    asm volatile("ld.global.nc.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(from));
    return v;
}

// ---- stages --------------------------------------------------------------------------------------------------------

// Places that are filled and emptied in turns, each with a barrier for full and one for empty.
struct Places {
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
    __device__ __forceinline__ void init(int fillers, int readers) const {
        for (int i = 0; i < stages; ++i) {
            barrier_init(barriers + 16 * i, fillers);
            barrier_init(barriers + 16 * i + 8, readers);
        }
    }
};

// Bytes 0 and 1 or 2 and 3 of a word, up to 63 each, as numbers of T: FIRST and the byte, less FIRST.
template <typename T>
__device__ __forceinline__ unsigned small_numbers(unsigned word, int pair) {
    constexpr bool HALF = SameType<T, __half>::VALUE;  // 1024 and the byte; else 128
    const unsigned raised = __byte_perm(word, HALF ? 0x64646464u : 0x43434343u, pair ? 0x4342 : 0x4140);
    return Word<T>::bits(__hadd2(Word<T>::as(raised), Word<T>::as(HALF ? 0xe400e400u : 0xc300c300u)));
}

// Makes the tables of a thread block. A thread has every COPIERS-th row; what it fetches of the next stage waits in
// registers until the stage before has been multiplied.
struct TableMaker {
    static constexpr int HELD = 3;
    const unsigned *factors, *inner;  // of all rows: a word and three for each block
    int rows, own;                    // of the thread block; the thread's first one
    unsigned begin, step, last;  // blocks: the first of its rows, how far to the next one, the first of the last row
    unsigned held[HELD][4];

    // What is beyond all rows is not stored, or of no use.
    __device__ __forceinline__ void load(unsigned stage) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const unsigned at = min(begin + i * step, last) + stage;
            held[i][0] = load_word_of_line(factors + at);
#pragma unroll
            for (int w = 0; w < 3; ++w) held[i][1 + w] = load_word_of_line(inner + 3ull * at + w);
        }
    }
    __device__ __forceinline__ void store(unsigned table) const {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int row = own + i * COPIERS;
            if (row >= rows) return;
            const unsigned low = held[i][1], high = held[i][2], rest = held[i][3];
            const unsigned scale[2] = {low & 0x3f3f3f3fu, (rest & 0x0f0f0f0fu) | (low >> 2 & 0x30303030u)};
            const unsigned least[2] = {high & 0x3f3f3f3fu, (rest >> 4 & 0x0f0f0f0fu) | (high >> 2 & 0x30303030u)};
            unsigned of_scales[4], of_minima[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                of_scales[j] = Word<__half>::multiply(small_numbers<__half>(scale[j / 2], j % 2), 0x2c003c00u);
                of_minima[j] = small_numbers<__nv_bfloat16>(least[j / 2], j % 2);
            }
            store_words(table + row * SCALE_ROW, of_scales);
            store_words(table + (rows + row) * SCALE_ROW, of_minima);
            const float factor[2] = {Word<__half>::get(held[i][0], 0), -Word<__half>::get(held[i][0], 1)};
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(table + 2 * rows * SCALE_ROW + row * FACTOR_ROW),
                         "f"(factor[0]), "f"(factor[1])
                         : "memory");
        }
    }
};

// ---- the product of a warpgroup ------------------------------------------------------------------------------------

// Codes of 32 k as operand A of two times 16 k, times their inner scales: UPPER or lower halves of the bytes of words
// of rows g and g + 8, then those of the 16 k behind. `by` has both scales, each twice.
template <int UPPER>
__device__ __forceinline__ void decode(unsigned (&a)[2][4], const unsigned (&word)[4], const unsigned (&by)[2]) {
    constexpr unsigned MASK = UPPER ? 0x00f000f0u : 0x000f000fu;
    unsigned less[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) less[i] = Word<__half>::multiply(by[i], 0xe400e400u);  // -1024
#pragma unroll
    for (int w = 0; w < 4; ++w)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            unsigned raised;  // 1024 and the code, or 16 of it
            asm("lop3.b32 %0, %1, %2, 0x64006400, 0xea;" : "=r"(raised) : "r"(odd ? word[w] >> 8 : word[w]), "n"(MASK));
            a[w / 2][2 * odd + w % 2] = Word<__half>::bits(
                __hfma2(Word<__half>::as(raised), Word<__half>::as(by[w % 2]), Word<__half>::as(less[w % 2])));
        }
}

// Where a warp finds what belongs to a tile of its rows: the lane's row g in a table, and its row of matrices of codes.
struct TileAt {
    unsigned inner, minima, factors;  // in a table
    unsigned codes, piece;            // of a stage of codes; which 16 bytes come first, in the swizzle
    unsigned scales;                  // of tokens

    __device__ __forceinline__ TileAt(int own, int rows) {
        const unsigned lane = opaque(threadIdx.x % WARP), g = lane / 4, t = lane % 4;
        inner = X_STAGE + (own + g) * SCALE_ROW;
        minima = X_STAGE + (rows + own + g) * SCALE_ROW + 4 * t;
        factors = X_STAGE + 2 * rows * SCALE_ROW + (own + g) * FACTOR_ROW;
        codes = (own + lane % 16) * CODE_BYTES, piece = lane / 16 ^ lane % 8;
        scales = X_BYTES + 16 * t;
    }
};

// Minima of rows g and g + 8, as operand A of the tokens' parts, and the factor of both.
struct Minima {
    unsigned a[1][4];
    float less[2];

    __device__ __forceinline__ void fetch(unsigned data, const TileAt& at, int i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            a[0][h] = a[0][2 + h] = shared_at<unsigned>(data + at.minima + (64 * i + 8 * h) * SCALE_ROW);
            less[h] = shared_at<float>(data + at.factors + (64 * i + 8 * h) * FACTOR_ROW + 4);
        }
    }
    __device__ __forceinline__ void multiply(unsigned data, float (&to)[SUMS]) {
        fence_operands(to);
        wgmma_begin();
        wgmma_keeping<__nv_bfloat16, 0>(to, a[0], parts_descriptor(data + PARTS_AT));
        wgmma_keeping<__nv_bfloat16, 1>(to, a[0], parts_descriptor(data + PARTS_AT + 2 * PART_BYTES));
        wgmma_commit();
    }
};

// What a warpgroup adds up of its tiles and all tokens in the stages of its part of k.
template <int TILES>
__device__ __forceinline__ void multiply_halves(
    Places codes, Places given, int stages, int part, int parts, int first, int rows, unsigned nothing,
    float (&total)[TILES][SUMS]) {
    const TileAt at(first + threadIdx.x % WARPGROUP / WARP * 16, rows);
    codes.step(part), given.step(part);
    for (int stage = part; stage < stages; stage += parts) {
        barrier_wait(codes.full(), codes.phase);
        barrier_wait(given.full(), given.phase);
        const unsigned data = given.data(), from = codes.data() + at.codes;
        float sum[2][SUMS];
        Minima minima;
        minima.fetch(data, at, 0);
        minima.multiply(data, sum[0]);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            float of_block[SUMS];
            unsigned scale[2], a[2][2][4], word[4];
            // Codes of blocks u and u + 1, and their scales.
            auto fetch = [&](int u) {
                load_matrices(word, (from + 64 * i * CODE_BYTES) + ((at.piece ^ u) << 4));
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    scale[h] = shared_at<unsigned>(data + at.inner + (64 * i + 8 * h) * SCALE_ROW + 2 * u);
            };
            fetch(0);
            // Block u is under way, and what was ahead of it has come: the minima, or block u - 1. Behind the last one
            // the minima of the next tile are. What is read here has time until it is needed.
#pragma unroll
            for (int u = 0; u <= BLOCKS; ++u) {
                const int number = i * (BLOCKS + 1) + u;
                float (&to)[SUMS] = sum[(number + 1) % 2], (&come)[SUMS] = sum[number % 2], e[HALVES_TOKENS / 4];
                const float less[2] = {minima.less[0], minima.less[1]};
                if (u > 0) {
                    const unsigned scales = data + at.scales + (u - 1) * (HALVES_TOKENS * 4);
#pragma unroll
                    for (int q = 0; q < 4; ++q) {
                        const float4 four = shared_at<float4>(scales + 64 * q);
                        e[4 * q] = four.x, e[4 * q + 1] = four.y, e[4 * q + 2] = four.z, e[4 * q + 3] = four.w;
                    }
                }
                if (u < BLOCKS) {
                    const unsigned selector = u % 2 ? 0x3232 : 0x1010;
                    const unsigned by[2] = {__byte_perm(scale[0], 0, selector), __byte_perm(scale[1], 0, selector)};
                    if (u % 2 == 0) decode<0>(a[u % 2], word, by);
                    else decode<1>(a[u % 2], word, by);
                    if (u % 2 && u + 1 < BLOCKS) fetch(u + 1);
                    fence_operands(a[u % 2]);
                    fence_operands(to);
                    wgmma_begin();
                    const unsigned long long x = wgmma_descriptor(data + u / 2 * X_BOX) + u % 2 * 4;
                    wgmma_keeping<__half, 0>(to, a[u % 2][0], x);
                    wgmma_keeping<__half, 1>(to, a[u % 2][1], x + 2);
                    wgmma_commit();
                } else if (i + 1 < TILES) {
                    minima.fetch(data, at, i + 1);
                    minima.multiply(data, to);
                }
                if (number + 1 < TILES * (BLOCKS + 1)) wgmma_wait<1>();
                else wgmma_wait<0>();
                fence_operands(come);
                if (u == 0) fence_operands(minima.a);
                else fence_operands(a[(u + 1) % 2]);
#pragma unroll
                for (int j = 0; j < SUMS; ++j) {
                    if (u == 0) total[i][j] = fma_kept(come[j], less[j / 2 % 2], total[i][j]);
                    else if (u == 1) of_block[j] = multiply_ieee(come[j], e[j / 4 * 2 + j % 2]);
                    else of_block[j] = fma_kept(come[j], e[j / 4 * 2 + j % 2], of_block[j]);
                }
            }
            const unsigned factors = data + at.factors + 64 * i * FACTOR_ROW;
            const float factor[2] = {shared_at<float>(factors), shared_at<float>(factors + 8 * FACTOR_ROW)};
#pragma unroll
            for (int j = 0; j < SUMS; ++j) total[i][j] = fma_kept(of_block[j], factor[j / 2 % 2], total[i][j]);
        }
        // Sums that the last of what was read here is in: the copy engine would not wait for a load in its queue.
        const unsigned after = __float_as_uint(total[TILES - 1][SUMS - 1]);
        barrier_arrive(ordered_after(codes.empty(), after, nothing));
        barrier_arrive(ordered_after(given.empty(), after, nothing));
        codes.step(parts), given.step(parts);
    }
}

// Keeps sums where the ring was, [part][token][row], of rows from `first` on.
template <int TILES>
__device__ __forceinline__ void store_sums(const float (&total)[TILES][SUMS], unsigned sums, int first, int pitch) {
    const int lane = threadIdx.x % WARP, own = first + threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < SUMS; ++j) {
            const int token = j / 4 * 8 + lane % 4 * 2 + j % 2, row = own + 64 * i + j / 2 % 2 * 8;
            store_shared(sums + (token * pitch + row) * 4, total[i][j]);
        }
}

// Adds the sums of all parts, in their order, and writes the outputs of a thread block.
__device__ __forceinline__ void write_outputs(
    const Rescaling& rescaling, unsigned sums, int parts, int of_block, int first_row, void* __restrict__ y, int tokens,
    int rows, int y_kind) {
    const int pitch = of_block + 4, eights = of_block / 8;
    const bool aligned = reinterpret_cast<unsigned long long>(y) % 16 == 0 && rows % 8 == 0;
    for (int item = threadIdx.x; item < tokens * eights; item += CONSUMERS) {
        const int token = item / eights, of = item % eights * 8, row = first_row + of;
        if (row >= rows) continue;
        float v[8] = {};
        for (int part = 0; part < parts; ++part)
#pragma unroll
            for (int h = 0; h < 8; h += 4) {
                const float4 four = shared_at<float4>(sums + ((part * HALVES_TOKENS + token) * pitch + of + h) * 4);
                const float some[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) v[h + i] = part == 0 ? some[i] : add_ieee(v[h + i], some[i]);
            }
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (row + i < rows) v[i] = add_ieee(v[i], rescaling.bias_of(row + i));
        const long long at = static_cast<long long>(token) * rows + row;
        if (y_kind == FLOAT32_BIAS) {
            float* const target = static_cast<float*>(y) + at;
            for (int i = 0; i < 8; ++i)
                if (row + i < rows) target[i] = v[i];
        } else {
            unsigned word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                word[i] = y_kind == FLOAT16_BIAS ? Word<__half>::pack(v[2 * i], v[2 * i + 1])
                                                 : Word<__nv_bfloat16>::pack(v[2 * i], v[2 * i + 1]);
            unsigned short* const target = static_cast<unsigned short*>(y) + at;
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

// ---- the kernel ----------------------------------------------------------------------------------------------------

// TILES: of 64 rows, of a warpgroup.
template <int TILES>
__global__ void __launch_bounds__(CONSUMERS + WARPGROUP, 1) multiply_half_codes(
    const __grid_constant__ TensorMap x_map,  // halves [tokens, K], boxes of 128 bytes x HALVES_TOKENS
    const __grid_constant__ TensorMap w_map,  // codes [rows, K / 2], boxes of 128 bytes x the rows of a thread block
    const HalvesCut cut,
    void* __restrict__ y,                       // [tokens, rows] of the type that y_kind names
    const unsigned char* __restrict__ records,  // of tokens, [K / RECORD_K]
    const unsigned* __restrict__ factors,       // d and dmin, two halves, [rows, K / RECORD_K]
    const unsigned* __restrict__ inner,         // inner scales and minima, 12 bytes, beside them
    const void* __restrict__ bias,              // [rows] of the type that bias_kind names, or null
    int tokens, int rows, int stages, int bias_kind, int y_kind, unsigned nothing) {
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long barriers[4 * HALVES_STAGES];
    const unsigned ring0 = (shared_address(memory) + 1023u) & ~1023u, barriers0 = shared_address(barriers);
    Places codes{ring0, barriers0, cut.code_stages, cut.rows * CODE_BYTES};
    Places given{
        ring0 + cut.code_stages * cut.rows * CODE_BYTES, barriers0 + 16 * HALVES_STAGES, cut.stages, cut.stage_bytes};
    const int parts = cut.parts, first_row = blockIdx.x * cut.rows;
    if (threadIdx.x == 0) {
        codes.init(1, CONSUMERS / parts);
        given.init(1 + COPIERS, CONSUMERS / parts);
        fence_barrier_init();
    }
    __syncthreads();
    const int warp = warp_number();
    if (threadIdx.x >= CONSUMERS) {
        lower_registers<40>();
        const int thread = static_cast<int>(threadIdx.x) - CONSUMERS - WARP;
        if (thread == -WARP) {
            int asked = 0;  // stages of codes
            auto copy_codes = [&] {
                barrier_expect(codes.full(), cut.rows * CODE_BYTES);
                copy_box(codes.data(), &w_map, asked * CODE_BYTES, first_row, codes.full());
                codes.step(1), ++asked;
            };
            while (asked < min(stages, cut.code_stages)) copy_codes();
            wait_for_previous();
            for (int stage = 0; stage < stages; ++stage) {
                barrier_wait(given.empty(), given.phase ^ 1);
                barrier_expect(given.full(), X_STAGE);
#pragma unroll
                for (int box = 0; box < RECORD_K / 64; ++box)
                    copy_box(given.data() + box * X_BOX, &x_map, stage * (2 * RECORD_K) + box * 128, 0, given.full());
                copy_run(
                    given.data() + X_BYTES, records + static_cast<long long>(stage) * RECORD_BYTES, RECORD_BYTES,
                    given.full());
                given.step(1);
                // Codes that have been multiplied lay beside what has just been overwritten.
                if (stage >= cut.stages && asked < stages) {
                    barrier_wait(codes.empty(), codes.phase ^ 1);
                    copy_codes();
                }
            }
        } else if (thread >= 0) {
            const unsigned blocks = stages;
            TableMaker maker{
                factors, inner, cut.rows, thread, (first_row + thread) * blocks, COPIERS * blocks, (rows - 1) * blocks};
            maker.load(0);
            for (int stage = 0; stage < stages; ++stage) {
                barrier_wait(given.empty(), given.phase ^ 1);
                maker.store(given.data() + X_STAGE);
                barrier_arrive(given.full());
                given.step(1);
                if (stage + 1 < stages) maker.load(stage + 1);
            }
        }
        return;
    }
    raise_registers<232>();
    const int warpgroup = warp / 4, part = parts > 1 ? warpgroup : 0;
    const int first = parts > 1 ? 0 : warpgroup * TILES * 64, pitch = cut.rows + 4;
    float total[TILES][SUMS] = {};
    multiply_halves<TILES>(codes, given, stages, part, parts, first, cut.rows, nothing, total);
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");  // nobody reads stages any more
    store_sums<TILES>(total, ring0 + part * HALVES_TOKENS * pitch * 4, first, pitch);
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
    const Rescaling rescaling{nullptr, nullptr, bias, bias_kind};
    wait_for_previous();
    write_outputs(rescaling, ring0, parts, cut.rows, first_row, y, tokens, rows, y_kind);
}
