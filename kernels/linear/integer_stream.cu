// Products of up to 16 int8 tokens with integer codes, which are read in place, once, and multiplied by integer tensor
// cores. The contract is that of kbitcupy/products/integers.py; the host is kbitcupy/products/integer_stream.py.
//
//     codes   --16 B a lane of rows g and g + 8--> a ring of a warp in shared memory --> and, shift --> a of mma
//     tokens  --in the order of fragments (linear/integer_activations.cuh)--> shared memory ----------> b of mma
//     scales  --a turn ahead in registers--> shared memory, float32
//
// A team of warps has a tile of 16 rows, and each warp of it every so manieth turn along K: four slots of 64 bytes a
// row, each of which is asked for again as soon as it has been read. Sums of a unit, elements that share all scales,
// are exact: an mma begins with the bits of 1.5 * 2^23, and the sum is read as a float less that number. A zero point
// is taken off there, times the sum of the tokens' codes. Where all of a row is one unit, sums stay integers to the
// end.
//
// Where the tokens are longer than the shared memory, K is gone through in phases, and what a tile has so far is kept.
#include "common/copy.cuh"
#include "common/ieee.cuh"
#include "common/sync.cuh"
#include "linear/integer_activations.cuh"
#include "linear/ternary_mma.cuh"

// Of the host, ahead of this source: struct IntegerWeight and struct Cut; numbers of `added`, of dtypes, of codes
// (NEIGHBOURS4, HALVES4, PAIRS4, BYTES8) and of a bias; STREAM_THREADS, the most of a block.
constexpr int ROWS_OF_TILE = 16, SLOTS = 4, SLOT_BYTES = 1024, MMA_K = 32;
constexpr int BUFFERS = 2;                                 // the most of sums of a team
constexpr int LOWEST_BITS = 0x4b400000, LOWEST = 3 << 22;  // 1.5 * 2^23, whose last bit as a float counts 1

// a / b, given 2^32 / b + 1: exact for a < 2^32 / b.
__device__ __forceinline__ int divided(int a, unsigned reciprocal, int b) {
    return b == 1 ? a : static_cast<int>(__umulhi(static_cast<unsigned>(a), reciprocal));
}

// d = a * b + c for a of 16 x 32 bytes, unsigned or SIGNED, and b of 32 x 8 signed ones.
template <bool SIGNED>
__device__ __forceinline__ void mma_from(
    int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int c0, int c1, int c2, int c3) {
#if __CUDA_ARCH__ >= 800
    if constexpr (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
#endif
}

// ---- weights -----------------------------------------------------------------------------------------------------

// Loads that the compiler neither drops nor moves: it would put ld.global.nc off until the kernel ahead has ended.
__device__ __forceinline__ unsigned load_word(unsigned long long address) {
    unsigned v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}
__device__ __forceinline__ unsigned load_entry(unsigned long long plane, int bytes, long long i) {
    unsigned v;
    if (bytes == 4) return load_word(plane + 4 * i);
    if (bytes == 2) asm volatile("ld.global.u16 %0, [%1];" : "=r"(v) : "l"(plane + 2 * i) : "memory");
    else asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(plane + i) : "memory");
    return v;
}

// An entry of BYTES where `wanted`; else 0.
template <int BYTES>
__device__ __forceinline__ unsigned load_if(unsigned long long address, bool wanted) {
    unsigned v = 0;
    if constexpr (BYTES == 4)
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u32 %0, [%1]; }"
                     : "+r"(v)
                     : "l"(address), "r"(unsigned(wanted))
                     : "memory");
    else if constexpr (BYTES == 2)
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u16 %0, [%1]; }"
                     : "+r"(v)
                     : "l"(address), "r"(unsigned(wanted))
                     : "memory");
    else
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u8 %0, [%1]; }"
                     : "+r"(v)
                     : "l"(address), "r"(unsigned(wanted))
                     : "memory");
    return v;
}

// The entries of units from `unit` on, of which `there` are; `group` units share one.
template <int BYTES, int N>
__device__ __forceinline__ void load_entries(
    unsigned (&v)[N], unsigned long long plane, int unit, int there, const Cut& cut) {
    if (cut.group == 1) {
        const unsigned long long first = plane + static_cast<long long>(unit) * BYTES;
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = load_if<BYTES>(first + i * BYTES, i < there);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
            v[i] = load_if<BYTES>(
                plane + static_cast<long long>(divided(unit + i, cut.per_group, cut.group)) * BYTES, i < there);
    }
}

__device__ __forceinline__ float float_of(unsigned bits, int dtype) {
    if (dtype == FLOAT32_BIAS) return __uint_as_float(bits);
    const unsigned short half = static_cast<unsigned short>(bits);
    return dtype == FLOAT16_BIAS ? to_float(*reinterpret_cast<const __half*>(&half)) : __uint_as_float(bits << 16);
}

__device__ __forceinline__ int integer_of(unsigned bits, int dtype) {
    return dtype == INT8_ENTRIES ? static_cast<signed char>(bits) : static_cast<int>(bits);
}

// Where codes of a warp's slot lie in shared memory, and how they become fragments of four or two mma.
//     OWN     whether a lane reads what it has copied itself
//     STEPS   mma of a slot
template <int CODES, int UNIT>
struct Slot {
    static constexpr bool BYTES = CODES == BYTES8;
    static constexpr bool OWN = UNIT != 32 && (CODES == BYTES8 || (CODES == NEIGHBOURS4 && UNIT != 64));
    static constexpr int STEPS = BYTES ? 2 : 4, DEPTH = STEPS * MMA_K, TURN = SLOTS * DEPTH;
    static constexpr int LAYOUT = OWN                    ? (BYTES ? OWN_BYTES : OWN_NIBBLES)
                                  : CODES == NEIGHBOURS4 ? NIBBLES
                                  : CODES == HALVES4     ? HALVES
                                                         : IN_TURN;
    static constexpr bool WORDS = CODES == NEIGHBOURS4 || CODES == HALVES4;  // of 4 bytes, otherwise of 8

    // The 16-byte piece c of a row g stands in its place c ^ turned(g), so that no two lanes meet in a bank.
    __device__ __forceinline__ static constexpr int turned(int g) {
        return OWN ? 0 : WORDS ? g >> 1 & 3 : (g >> 1 & 1) * 2;
    }
    __device__ __forceinline__ static int place(int g, int t) { return (g * 4 + (t ^ turned(g))) * 16; }

    // The a of all mma of a slot.
    __device__ __forceinline__ static void fragments(
        unsigned (&a)[STEPS][4], const unsigned char* slot, int g, int t, unsigned flip) {
        constexpr unsigned LOW = 0x0f0f0f0fu;
        if constexpr (OWN) {
            const uint4 u = *reinterpret_cast<const uint4*>(slot + place(g, t));
            const uint4 l = *reinterpret_cast<const uint4*>(slot + place(g, t) + SLOT_BYTES / 2);
            const unsigned upper[4] = {u.x, u.y, u.z, u.w}, lower[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                if constexpr (BYTES) {
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        a[s][2 * h] = upper[2 * s + h] ^ flip, a[s][2 * h + 1] = lower[2 * s + h] ^ flip;
                } else {
                    nibbles(a[s], upper[s], lower[s], flip);
                }
            }
        } else if constexpr (WORDS) {
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const unsigned char* at = slot + g * 64 + (s ^ turned(g)) * 16 + t * 4;
                const unsigned u = *reinterpret_cast<const unsigned*>(at);
                const unsigned l = *reinterpret_cast<const unsigned*>(at + SLOT_BYTES / 2);
                nibbles(a[s], u, l, flip);
            }
        } else {
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                const unsigned char* at = slot + g * 64 + ((2 * p + t / 2) ^ turned(g)) * 16 + t % 2 * 8;
                const uint2 u = *reinterpret_cast<const uint2*>(at);
                const uint2 l = *reinterpret_cast<const uint2*>(at + SLOT_BYTES / 2);
                if constexpr (BYTES) {
                    a[p][0] = u.x ^ flip, a[p][1] = l.x ^ flip, a[p][2] = u.y ^ flip, a[p][3] = l.y ^ flip;
                } else {
                    const unsigned both[4] = {u.x, l.x, u.y, l.y};
#pragma unroll
                    for (int i = 0; i < 4; ++i) a[2 * p][i] = both[i] & LOW, a[2 * p + 1][i] = both[i] >> 4 & LOW;
                }
            }
        }
    }

  private:
    __device__ __forceinline__ static void nibbles(unsigned (&a)[4], unsigned upper, unsigned lower, unsigned flip) {
        constexpr unsigned LOW = 0x0f0f0f0fu;
        a[0] = (upper & LOW) ^ flip, a[1] = (lower & LOW) ^ flip;
        a[2] = (upper >> 4 & LOW) ^ flip, a[3] = (lower >> 4 & LOW) ^ flip;
    }
};

// The scales of a turn, of 16 rows, and what stands beside them: a turn ahead in the registers of a warp, of which each
// lane has half a row, then in shared memory, [unit][row].
//     UNIT    elements of a row that share all scales, or what divides them
//     INNER_  whether they are those of q4_k's blocks
//     HALVES  whether they are halves, of which any counts
template <int TURN, int UNIT, int ADDED_, bool INNER_, bool HALVES>
struct Scales {
    static constexpr int UNITS = UNIT ? TURN / UNIT : 1, ENTRIES = UNITS / 2 > 0 ? UNITS / 2 : 1;
    static constexpr int WORDS = ADDED_ == NOTHING ? 1 : 2;  // of an entry in shared memory
    static constexpr int BYTES = UNIT ? UNITS * ROWS_OF_TILE * WORDS * 4 : 0;
    unsigned raw[INNER_ ? 4 : ENTRIES], beside[INNER_ || ADDED_ == NOTHING ? 1 : ENTRIES];

    // Of row `row` and the turn that begins at `k`; what is beyond the end of the row is 0.
    __device__ __forceinline__ void load(
        const IntegerWeight& w, const Cut& cut, long long row, int k, int depth, int half) {
        if constexpr (INNER_) {
            static_assert(TURN == 512 && UNITS == 16, "two blocks of 256");
            k += half * 256;
            raw[0] = raw[1] = raw[2] = raw[3] = 0;
            if (k >= depth) return;
            const long long block = row * (depth / 256) + k / 256;
            raw[0] = load_word(w.scales + 4 * block);
#pragma unroll
            for (int i = 0; i < 3; ++i) raw[1 + i] = load_word(w.beside + 12 * block + 4 * i);
        } else {
            constexpr int EACH = UNIT ? UNIT : 1;
            const int unit = k / EACH + half * ENTRIES, there = (depth - k + EACH - 1) / EACH - half * ENTRIES;
            const unsigned long long scales = w.scales + row * cut.row_bytes;
            const unsigned long long others = w.beside + row * cut.beside_bytes;
            const bool wide = !HALVES && w.scale_dtype == FLOAT32_BIAS;
            if (wide) load_entries<4>(raw, scales, unit, there, cut);
            else load_entries<2>(raw, scales, unit, there, cut);
            if constexpr (ADDED_ == OFFSETS) {
                if (wide) load_entries<4>(beside, others, unit, there, cut);
                else load_entries<2>(beside, others, unit, there, cut);
            }
            if constexpr (ADDED_ == ZERO_POINTS) {
                if (w.beside_dtype == INT32_ENTRIES) load_entries<4>(beside, others, unit, there, cut);
                else load_entries<1>(beside, others, unit, there, cut);
            }
        }
    }

    __device__ __forceinline__ void store(const IntegerWeight& w, float* to, int row, int half, int flipped) const {
        if constexpr (INNER_) {
            const float d = to_float(Word<__half>::element(raw[0], 0)), m = to_float(Word<__half>::element(raw[0], 1));
            // Four inner scales in the bytes of a word, those of the lower sub-blocks and of the upper ones.
            constexpr unsigned SIX = 0x3f3f3f3fu, FOUR = 0x0f0f0f0fu, TWO = 0x30303030u;
            const unsigned scale[2] = {raw[1] & SIX, (raw[3] & FOUR) | (raw[1] >> 2 & TWO)};
            const unsigned least[2] = {raw[2] & SIX, (raw[3] >> 4 & FOUR) | (raw[2] >> 2 & TWO)};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float a = static_cast<float>(scale[i / 4] >> i % 4 * 8 & 255u);
                const float b = static_cast<float>(least[i / 4] >> i % 4 * 8 & 255u);
                reinterpret_cast<float2*>(to)[(half * 8 + i) * ROWS_OF_TILE + place_of(row)] =
                    make_float2(ieee::multiply(d, a), -ieee::multiply(m, b));
            }
        } else if (HALVES || w.scale_dtype == FLOAT16_BIAS) {
            store_entries<FLOAT16_BIAS>(w, to, row, half, flipped);
        } else if (w.scale_dtype == FLOAT32_BIAS) {
            store_entries<FLOAT32_BIAS>(w, to, row, half, flipped);
        } else {
            store_entries<BFLOAT16_BIAS>(w, to, row, half, flipped);
        }
    }

  private:
    // Rows g and g + 8 stand side by side.
    __device__ __forceinline__ static int place_of(int row) { return row % 8 * 2 + row / 8; }

    template <int DTYPE>
    __device__ __forceinline__ void store_entries(
        const IntegerWeight& w, float* to, int row, int half, int flipped) const {
        const int lowest = -(w.is_signed << (w.bits - 1)), highest = lowest + (1 << w.bits) - 1;
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            float scale = float_of(raw[i], DTYPE);
            const int at = (half * ENTRIES + i) * ROWS_OF_TILE + place_of(row);
            if constexpr (ADDED_ == OFFSETS) {
                // Codes are higher by the zero point than what they count.
                scale = ieee::finite(scale);
                const float offset = float_of(beside[i], DTYPE);
                reinterpret_cast<float2*>(to)[at] =
                    make_float2(scale, ieee::subtract(offset, ieee::multiply(scale, static_cast<float>(flipped))));
                continue;
            }
            if (!HALVES && w.positive) scale = usable(scale);
            if constexpr (ADDED_ == ZERO_POINTS) {
                const int zero = min(max(integer_of(beside[i], w.beside_dtype), lowest), highest);
                reinterpret_cast<float2*>(to)[at] = make_float2(scale, __int_as_float(zero + flipped));
            } else {
                to[at] = scale;
            }
        }
    }
};

// ---- tokens ------------------------------------------------------------------------------------------------------

// What is known of a unit of a token, words of an entry: with Q8 its scale; and what the zero point or offset of a row
// is multiplied by, or, where all rows have one zero point, what is taken off a sum.
template <int UNIT, int ADDED_, bool Q8>
struct Record {
    static constexpr int WORDS = Q8 ? 2 : 1;

    __device__ __forceinline__ static void store(unsigned* to, float scale, int sum, int zero) {
        if constexpr (Q8) to[0] = __float_as_uint(scale);
        unsigned& other = to[WORDS - 1];
        if constexpr (ADDED_ == ZERO_POINTS) other = sum;
        else if constexpr (ADDED_ == OFFSETS)
            other = __float_as_uint(Q8 ? ieee::multiply(__int2float_rn(sum), scale) : __int2float_rn(sum));
        else other = __float_as_uint(__int2float_rn(LOWEST + zero * sum));
    }

    unsigned scale[2], other[2];  // of two neighbouring tokens

    __device__ __forceinline__ explicit Record(const unsigned* from) {
        if constexpr (Q8) {
            const uint4 four = *reinterpret_cast<const uint4*>(from);
            scale[0] = four.x, other[0] = four.y, scale[1] = four.z, other[1] = four.w;
        } else {
            const uint2 two = *reinterpret_cast<const uint2*>(from);
            other[0] = two.x, other[1] = two.y;
        }
    }
};

__device__ __forceinline__ float fma_ieee(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}

// Between the sums of neighbouring tokens, so that lanes (g, t) that write those of 2t have banks of their own.
constexpr int PARTIAL_PITCH = ROWS_OF_TILE + 4;

// Sums of 16 rows and 8 EIGHTS tokens of a warp, as mma lays them out.
//     UNITS  units whose scales are in shared memory at a time
template <int UNIT, int UNITS, int ADDED_, bool Q8, int EIGHTS>
struct Sums {
    static constexpr int WORDS = ADDED_ == NOTHING ? 1 : 2, TOKENS = 8 * EIGHTS;
    int part[EIGHTS][4];     // of the unit
    float whole[EIGHTS][4];  // of units that are over

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4 * EIGHTS; ++i) part[i / 4][i % 4] = 0, whole[i / 4][i % 4] = 0.0f;
    }

    // For the warp that adds them up, [token][row].
    __device__ __forceinline__ void store(float* to, int g, int t) const {
#pragma unroll
        for (int i = 0; i < 4 * EIGHTS; ++i) {
            const int e = i / 4, q = i % 4;
            to[(e * 8 + 2 * t + q % 2) * PARTIAL_PITCH + g + q / 2 * 8] =
                UNIT == 0 ? __int_as_float(part[e][q]) : whole[e][q];
        }
    }

    // One mma, number i of the turn, which may begin a unit and may end it.
    //     x        b of the turn, this lane's
    //     records  of the turn, those of tokens 2t and 2t + 1
    //     scales   of the turn, those of rows g and g + 8
    template <bool SIGNED>
    __device__ __forceinline__ void add(
        int i, const unsigned (&a)[4], const unsigned (&b)[EIGHTS][4], const unsigned* records, const float* scales) {
        constexpr int EACH = UNIT ? UNIT : MMA_K;
        const bool begins = UNIT && i * MMA_K % EACH == 0, ends = UNIT && (i + 1) * MMA_K % EACH == 0;
        const int unit = i * MMA_K / EACH;
        float scale[2], other[2];
        if (ends || (begins && ADDED_ == ZERO_POINTS)) {
            const float* at = scales + unit % UNITS * (ROWS_OF_TILE * WORDS);
            if constexpr (WORDS == 2) {
                const float4 both = *reinterpret_cast<const float4*>(at);
                scale[0] = both.x, other[0] = both.y, scale[1] = both.z, other[1] = both.w;
            } else {
                const float2 both = *reinterpret_cast<const float2*>(at);
                scale[0] = both.x, scale[1] = both.y;
            }
        }
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
            const unsigned b0 = b[e][i % 2 * 2], b1 = b[e][i % 2 * 2 + 1];
            int (&c)[4] = part[e];
            unsigned of[2] = {}, beside[2] = {};
            if ((ends && (Q8 || ADDED_ != ZERO_POINTS)) || (begins && ADDED_ == ZERO_POINTS)) {
                const Record<UNIT, ADDED_, Q8> record(
                    records + (unit * TOKENS + e * 8) * Record<UNIT, ADDED_, Q8>::WORDS);
#pragma unroll
                for (int j = 0; j < 2; ++j) of[j] = Q8 ? record.scale[j] : 0, beside[j] = record.other[j];
            }
            if (!begins) {
                mma_from<SIGNED>(c, a, b0, b1, c[0], c[1], c[2], c[3]);
            } else if constexpr (ADDED_ == ZERO_POINTS) {
                const int z0 = __float_as_int(other[0]), z1 = __float_as_int(other[1]);
                const int s0 = beside[0], s1 = beside[1];
                mma_from<SIGNED>(
                    c, a, b0, b1, LOWEST_BITS - z0 * s0, LOWEST_BITS - z0 * s1, LOWEST_BITS - z1 * s0,
                    LOWEST_BITS - z1 * s1);
            } else {
                mma_from<SIGNED>(c, a, b0, b1, LOWEST_BITS, LOWEST_BITS, LOWEST_BITS, LOWEST_BITS);
            }
            if (!ends) continue;
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                // What all rows have as a zero point is taken off with the number that the sum began with.
                const unsigned less = ADDED_ == NOTHING ? beside[q % 2] : LOWEST_BITS;
                float sum = __fsub_rn(__int_as_float(c[q]), __uint_as_float(less));
                if constexpr (Q8) sum = ieee::multiply(sum, __uint_as_float(of[q % 2]));
                whole[e][q] = fma_ieee(sum, scale[q / 2], whole[e][q]);
                if constexpr (ADDED_ == OFFSETS)
                    whole[e][q] = fma_ieee(other[q / 2], __uint_as_float(beside[q % 2]), whole[e][q]);
            }
        }
    }
};

// ---- the kernel --------------------------------------------------------------------------------------------------

// Which turn of which tile a warp has.
struct Cursor {
    int tile, at, begin, end;  // of K: the team's turns begin at `at`, those of the phase at `begin` and before `end`

    // On to the next turns of the team; past the last one of all, `end` is no more than `at`. Whether these are of
    // another tile.
    __device__ __forceinline__ bool step(const Cut& cut, int first, int tiles, int turns) {
        at += cut.warps;
        if (at < end) return false;
        tile += gridDim.x * cut.teams, at = begin;
        if (tile >= tiles) tile = first, at = begin = end, end = min(end + cut.phase, turns);
        return true;
    }
};

__device__ __forceinline__ void copy_if(
    unsigned address, const unsigned char* codes, bool there, unsigned long long policy) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %2, 0;"
        " @p cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %3; }" ::"r"(address),
        "l"(codes), "r"(unsigned(there)), "l"(policy)
        : "memory");
#endif
}

// Two sums of a row: integers in the bits of floats where UNIT is 0.
template <int UNIT>
__device__ __forceinline__ float joined(float a, float b) {
    if constexpr (UNIT == 0) return __int_as_float(__float_as_int(a) + __float_as_int(b));
    else return ieee::add(a, b);
}

// ... of all warps, one after the other.
template <int UNIT>
__device__ __forceinline__ float total_of(const float* partials, int warps, int pitch, int m, int row) {
    const float* from = partials + m * PARTIAL_PITCH + row;
    float total = *from;
#pragma unroll 4
    for (int i = 1; i < warps; ++i) total = joined<UNIT>(total, from[i * pitch]);
    return total;
}

template <int CODES>
constexpr bool SIGNED_OF = CODES == BYTES8;

// What a lane needs to finish the sums of a row.
struct Finish {
    float scale = 0, offset = 0, bias = 0;
    int zero = 0;

    // y but for the bias, where all of the row is one unit.
    __device__ __forceinline__ float of_row(int sum, float of_token, int of_codes, bool adds) const {
        float total = ieee::multiply(ieee::multiply(__int2float_rn(sum - zero * of_codes), of_token), scale);
        if (adds) total = ieee::add(total, ieee::multiply(ieee::multiply(__int2float_rn(of_codes), of_token), offset));
        return total;
    }

    __device__ __forceinline__ void load(
        const IntegerWeight& w, const Cut& cut, bool of_row, long long row, const void* biases, int bias_kind,
        int zero_of_all, int flipped) {
        zero = zero_of_all;
        bias = -0.0f;  // changes no number
        if (bias_kind != 0)
            bias = float_of(
                load_entry(reinterpret_cast<unsigned long long>(biases), bias_kind == FLOAT32_BIAS ? 4 : 2, row),
                bias_kind);
        if (!of_row) return;
        const int bytes = w.scale_dtype == FLOAT32_BIAS ? 4 : 2;
        scale = float_of(load_entry(w.scales + row * cut.row_bytes, bytes, 0), w.scale_dtype);
        if (w.added == OFFSETS) {
            scale = ieee::finite(scale);
            offset = float_of(load_entry(w.beside + row * cut.row_bytes, bytes, 0), w.scale_dtype);
            return;
        }
        if (w.positive) scale = usable(scale);
        if (w.added == ZERO_POINTS) {
            const int lowest = -(w.is_signed << (w.bits - 1));
            const int point = integer_of(
                load_entry(w.beside + row * cut.beside_bytes, w.beside_dtype == INT32_ENTRIES ? 4 : 1, 0),
                w.beside_dtype);
            zero = min(max(point, lowest), lowest + (1 << w.bits) - 1) + flipped;
        }
    }
};

__device__ __forceinline__ void store_as(void* y, int dtype, long long at, float v) {
    if (dtype == FLOAT32_BIAS) static_cast<float*>(y)[at] = v;
    else if (dtype == FLOAT16_BIAS) static_cast<__half*>(y)[at] = __float2half_rn(v);
    else static_cast<__nv_bfloat16*>(y)[at] = __float2bfloat16_rn(v);
}

// What a warp reads of a weight, in the order in which it does, three slots ahead: codes by cp.async, and scales.
//     PARTS  of a turn whose scales come one after the other: all at once they would take more registers than there are
template <typename Of, typename Scale, int PARTS>
struct Feed {
    const IntegerWeight& w;
    const Cut& cut;
    int channels, depth, first, tiles, turns, member, lane;
    Cursor next;
    const unsigned char* source[2];
    unsigned target;
    unsigned long long policy;
    int left, row_bytes, scale_k, scale_row;
    Scale ahead;

    // Where the next turn lies; `elsewhere`: it is not the one behind the last one.
    __device__ __forceinline__ void aim(bool elsewhere) {
        const int from = (next.at + member) * (SLOTS * 64) + lane % 4 * 16;
        left = next.at + member < next.end ? row_bytes - from : 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // rows beyond the last one are computed again and not written
            const long long row = min(next.tile * ROWS_OF_TILE + lane / 4 + 8 * half, channels - 1);
            if (elsewhere) source[half] = reinterpret_cast<const unsigned char*>(w.codes) + row * row_bytes + from;
            else source[half] += cut.warps * (SLOTS * 64);
        }
    }
    __device__ __forceinline__ void aim_scales() {
        scale_k = next.at + member < next.end ? (next.at + member) * Of::TURN : depth;
        scale_row = min(next.tile * ROWS_OF_TILE + lane / 2, channels - 1);
    }
    __device__ __forceinline__ void fetch(int slot) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            copy_if(
                target + slot * SLOT_BYTES + half * (SLOT_BYTES / 2), source[half] + slot * 64, left > slot * 64,
                policy);
        commit_copies();
    }
    __device__ __forceinline__ void fetch_scales() {
        if constexpr (Scale::BYTES != 0) ahead.load(w, cut, scale_row, scale_k, depth, lane % 2);
    }
    __device__ __forceinline__ void begin() {
        aim(true);
        aim_scales();
#pragma unroll
        for (int slot = 0; slot < SLOTS - 1; ++slot) fetch(slot);
        fetch_scales();
    }
    // Before slot `slot` of the ring is read: what was read last is asked for again.
    __device__ __forceinline__ void step(int slot, float* scales, int less) {
        wait_copies<SLOTS - 2>();
        __syncwarp();  // all lanes have read the slot before, and theirs of this one are here
        fetch((slot + SLOTS - 1) % SLOTS);
        if (slot == 0) aim(next.step(cut, first, tiles, turns));
        if (Scale::BYTES != 0 && slot % (SLOTS / PARTS) == 0) {
            ahead.store(w, scales, lane / 2, lane % 2, less);
            __syncwarp();
            if (slot == SLOTS - SLOTS / PARTS) aim_scales();
            else scale_k += Of::TURN / PARTS;
            fetch_scales();
        }
    }
};

// Bring the first bytes of a tile's rows to the L2 cache, which has room for what the ring has none for while tokens
// are quantized and staged.
__device__ __forceinline__ void prefetch_tile(
    unsigned long long plane, long long pitch, int tile, int channels, int bytes, int thread, int threads) {
    const int lines = (min(static_cast<long long>(bytes), pitch) + 127) / 128;
    for (int i = thread; i < ROWS_OF_TILE * lines; i += threads) {
        const long long row = min(tile * ROWS_OF_TILE + i / lines, channels - 1);
        prefetch_l2(reinterpret_cast<const void*>(plane + row * pitch + i % lines * 128));
    }
}

// Tokens of a phase, and what is known of their units, in shared memory.
template <int TURN_X, int TURN_ENTRIES, int UNIT, int ADDED_, bool Q8, int EIGHTS>
__device__ __forceinline__ void stage_tokens(
    unsigned char* x, unsigned* records, const unsigned char* a, const float* token_scale, const int* sums, int begin,
    int end, int tokens, int depth, int zero) {
    using Entry = Record<UNIT, ADDED_, Q8>;
    constexpr int TOKENS = 8 * EIGHTS, PIECES = TURN_X / 16;
    // Fragments end with the last 128 k that there are.
    const int there = (depth + 127) / 128 * (128 / FRAGMENT_K) * (EIGHTS * FRAGMENT_BYTES / 16) - begin * PIECES;
    const uint4* from = reinterpret_cast<const uint4*>(a) + static_cast<long long>(begin) * PIECES;
#pragma unroll 4
    for (int i = threadIdx.x; i < (end - begin) * PIECES; i += blockDim.x)
        if (i / 4 % TOKENS < tokens)
            reinterpret_cast<uint4*>(x)[i] = i < there ? load_written(from + i) : make_uint4(0, 0, 0, 0);
    if constexpr (UNIT != 0) {
        const int units = (depth + UNIT - 1) / UNIT - begin * (TURN_ENTRIES / TOKENS);
#pragma unroll 2
        for (int i = threadIdx.x; i < (end - begin) * TURN_ENTRIES; i += blockDim.x) {
            const bool is_there = i / TOKENS < units && i % TOKENS < tokens;
            const long long at = static_cast<long long>(begin) * TURN_ENTRIES + i;
            int sum = 0;
            float scale = 0.0f;
            if (is_there) sum = load_word(reinterpret_cast<unsigned long long>(sums + at));
            if (is_there && Q8)
                scale = usable(__uint_as_float(load_word(reinterpret_cast<unsigned long long>(token_scale + at))));
            Entry::store(records + i * Entry::WORDS, scale, sum, zero);
        }
    }
}

template <int CODES, int UNIT, int ADDED_, bool Q8, int EIGHTS>
__global__ void __launch_bounds__(STREAM_THREADS, 1) stream_integers(
    const __grid_constant__ IntegerWeight w,  // of [channels, depth]
    const __grid_constant__ Cut cut,
    const unsigned char* a,    // fragments of 8 EIGHTS tokens
    const float* token_scale,  // [tokens]; or [1]; or of units of Q8_BLOCK, [units, 8 EIGHTS]
    const int* sums,           // of codes: [units, 8 EIGHTS], or of tokens
    const void* bias,          // [channels] of the type that bias_kind names; 0 for none
    void* y,                   // [tokens, channels] of the type that y_kind names
    int channels, int tokens, int depth,
    int scale_step,  // 0 where all tokens have one scale
    unsigned flip,   // what turns over the highest bit of codes, in all bytes
    int flipped,     // ... and what it adds to zero points
    int bias_kind, int y_kind) {
#if __CUDA_ARCH__ >= 800
    using Of = Slot<CODES, UNIT>;
    constexpr int PARTS = UNIT == 32 && CODES == NEIGHBOURS4 && ADDED_ != NOTHING ? 4 : 1;
    using Scale = Scales<Of::TURN / PARTS, UNIT, ADDED_, CODES == PAIRS4, CODES == HALVES4>;
    constexpr int TOKENS = 8 * EIGHTS, TURN_X = Of::TURN / FRAGMENT_K * EIGHTS * FRAGMENT_BYTES;
    constexpr int TURN_ENTRIES = UNIT ? PARTS * Scale::UNITS * TOKENS : 0, SUMS = TOKENS * PARTIAL_PITCH;
    constexpr int RECORD = Record<UNIT, ADDED_, Q8>::WORDS;
    __shared__ float scale_of_token[TOKENS];
    __shared__ int sum_of_token[TOKENS];
    __shared__ unsigned long long written[STREAM_THREADS / WARP][BUFFERS], read[STREAM_THREADS / WARP][BUFFERS];
    const int lane = threadIdx.x % WARP, warp = warp_number(), g = lane / 4, t = lane % 4;
    const int team = warp / cut.warps, member = warp % cut.warps, warps = cut.warps * cut.teams;
    const int tiles = (channels + ROWS_OF_TILE - 1) / ROWS_OF_TILE, first = team * gridDim.x + blockIdx.x;
    const int turns = (depth + Of::TURN - 1) / Of::TURN, row_bytes = depth / (Of::BYTES ? 1 : 2);
    const int zero = w.zero + flipped, step = gridDim.x * cut.teams;

    unsigned char* memory = dynamic_memory();
    unsigned char* ring = memory + warp * (SLOTS * SLOT_BYTES);
    float* scales = reinterpret_cast<float*>(memory + warps * (SLOTS * SLOT_BYTES) + warp * Scale::BYTES);
    unsigned char* x = memory + cut.x_at;
    unsigned* records = reinterpret_cast<unsigned*>(memory + cut.records_at);
    float* partials = reinterpret_cast<float*>(memory + cut.partials_at) + team * (cut.buffers * cut.warps * SUMS);
    float* kept = reinterpret_cast<float*>(memory + cut.kept_at) + team * (cut.kept * TOKENS * ROWS_OF_TILE);

    Feed<Of, Scale, PARTS> feed{w, cut, channels, depth, first, tiles, turns, member, lane};
    feed.next = {first, 0, 0, first < tiles ? min(cut.phase, turns) : 0};
    feed.target = shared_address(ring) + Of::place(g, t), feed.policy = passing(), feed.row_bytes = row_bytes;
    feed.begin();
    if (first < tiles) {
        const int thread = member * WARP + lane, threads = cut.warps * WARP;
        prefetch_tile(w.codes, row_bytes, first, channels, cut.prefetched, thread, threads);
        if (UNIT != 0) prefetch_tile(w.scales, cut.row_bytes, first, channels, 128, thread, threads);
        if (UNIT != 0 && ADDED_ != NOTHING)
            prefetch_tile(w.beside, cut.beside_bytes, first, channels, 128, thread, threads);
    }
    if (threadIdx.x < cut.teams * BUFFERS) {
        barrier_init(shared_address(&written[threadIdx.x / BUFFERS][threadIdx.x % BUFFERS]), cut.warps);
        barrier_init(shared_address(&read[threadIdx.x / BUFFERS][threadIdx.x % BUFFERS]), 1);
    }
    wait_for_previous();
    launch_dependents();
    if (threadIdx.x < tokens) {
        const int m = threadIdx.x;
        if (!Q8)
            scale_of_token[m] =
                usable(__uint_as_float(load_word(reinterpret_cast<unsigned long long>(token_scale + m * scale_step))));
        if (UNIT == 0) sum_of_token[m] = load_word(reinterpret_cast<unsigned long long>(sums + m));
    }

    const int row = lane % ROWS_OF_TILE;
    int number = 0;  // of the team's tiles, those of all phases
    for (int begin = 0; begin < turns; begin += cut.phase) {
        const int end = min(begin + cut.phase, turns);
        if (begin != 0) __syncthreads();
        stage_tokens<TURN_X, TURN_ENTRIES, UNIT, ADDED_, Q8, EIGHTS>(
            x, records, a, token_scale, sums, begin, end, tokens, depth, zero);
        __syncthreads();
        for (int tile = first, at_kept = 0; tile < tiles; tile += step, ++number, ++at_kept) {
            // The warps of a team take turns in adding up what all of them have.
            const bool finishes = number % cut.warps == member;
            const int n = min(tile * ROWS_OF_TILE + row, channels - 1);
            Finish finish;
            if (finishes && end == turns) finish.load(w, cut, UNIT == 0, n, bias, bias_kind, zero, flipped);
            Sums<UNIT, Scale::UNITS, ADDED_, Q8, EIGHTS> sum;
            sum.clear();
            for (int at = begin; at < end; at += cut.warps) {
                const int turn = at + member - begin;
                const unsigned char* own_x = x + turn * TURN_X + lane * 16;
                const unsigned* own_records = records + (turn * TURN_ENTRIES + 2 * t) * RECORD;
#pragma unroll
                for (int slot = 0; slot < SLOTS; ++slot) {
                    feed.step(slot, scales, ADDED_ == OFFSETS ? zero : flipped);
                    if (at + member >= end) continue;
                    unsigned fragments[Of::STEPS][4], b[EIGHTS][4];
                    Of::fragments(fragments, ring + slot * SLOT_BYTES, g, t, flip);
#pragma unroll
                    for (int s = 0; s < Of::STEPS; ++s) {
                        const int i = slot * Of::STEPS + s;
                        if (i % 2 == 0)
#pragma unroll
                            for (int e = 0; e < EIGHTS; ++e)
                                to_words(
                                    b[e],
                                    *reinterpret_cast<const uint4*>(own_x + (i / 2 * EIGHTS + e) * FRAGMENT_BYTES));
                        sum.template add<SIGNED_OF<CODES>>(
                            i, fragments[s], b, own_records, scales + 2 * g * Scale::WORDS);
                    }
                }
            }
            const int buffer = number & (cut.buffers - 1), parity = number >> (cut.buffers - 1) & 1;
            const unsigned is_written = shared_address(&written[team][buffer]);
            const unsigned is_read = shared_address(&read[team][buffer]);
            barrier_wait(is_read, parity ^ 1);
            sum.store(partials + (buffer * cut.warps + member) * SUMS, g, t);
            __syncwarp();
            if (lane == 0) barrier_arrive(is_written);
            if (!finishes) continue;
            barrier_wait(is_written, parity);
#pragma unroll 1
            for (int m = lane / ROWS_OF_TILE; m < tokens; m += WARP / ROWS_OF_TILE) {
                float total = total_of<UNIT>(partials + buffer * cut.warps * SUMS, cut.warps, SUMS, m, row);
                if (turns > cut.phase) {
                    float& before = kept[(at_kept * TOKENS + m) * ROWS_OF_TILE + row];
                    if (begin != 0) total = joined<UNIT>(before, total);
                    before = total;
                }
                if (end < turns || tile * ROWS_OF_TILE + row >= channels) continue;
                if constexpr (UNIT == 0)
                    total =
                        finish.of_row(__float_as_int(total), scale_of_token[m], sum_of_token[m], w.added == OFFSETS);
                else if constexpr (!Q8) total = ieee::multiply(total, scale_of_token[m]);
                store_as(y, y_kind, static_cast<long long>(m) * channels + n, ieee::add(total, finish.bias));
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(is_read);
        }
    }
    wait_copies<0>();
#endif
}
