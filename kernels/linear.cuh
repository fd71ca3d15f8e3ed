// Weights as operands of the tensor cores.
//
// The product of few tokens and a weight W [N, K] runs as mma m16n8k16: 16 rows of W are the rows of A, 8 tokens the
// columns of B. Lane (g, t), g = lane / 4 and t = lane % 4, holds of A the rows g and g + 8, of B the token g, of the
// result the rows g and g + 8 of the tokens 2t and 2t + 1:
//
//     A   a0 = row g, k lo    a1 = row g + 8, k lo    a2 = row g, k hi    a3 = row g + 8, k hi      two numbers each
//     B   b0 = k lo, token g  b1 = k hi, token g
//
// Which four k of a step a lane holds is free as long as A and B agree. So an item of work is 16 rows x 128 k, and a
// lane owns 32 k of each of its two rows: it decodes them where they are, and takes x in the order in which they come
// out. No weight crosses lanes.
//
// A decoder is a struct with
//     Type                            of x
//     SCALE_BYTES                     of the scales of a row and an item
//     SCALE_STEP                      bytes from the scale of a lane to that of the next one
//     SPREAD_SCALES                   whether the scales may need another place than they are stored at
//     TURNS                           how many pairs of rows are permuted in different ways in shared memory
//     OWN                             whether what a lane reads of an item is one piece of 16 bytes
//     row(g)                          of a tile, which with the row 8 below it is that of the lanes g
//     build(...)                      fill the table of values
//     read(words, row)                what a lane reads of a row and an item, from shared memory
//     load_x, arrange                 the 16 words of x, in the order of multiply
//     unpack(words)                   the first step of decoding
//     multiply(fields, ...)           acc += a tile of 16 rows x tokens
#pragma once
#include "hopper.cuh"
#include "kbit.cuh"

constexpr int ITEM_K = 128;    // k of an item
constexpr int ITEM_ROWS = 16;  // rows of an item
constexpr int TOKENS = 8;

// ---- arithmetic on pairs -----------------------------------------------------------------------------------------

template <typename T>
struct Pair;

template <>
struct Pair<__half> {
    __device__ __forceinline__ static unsigned pack(float low, float high) {
        const __half2 both = __floats2half2_rn(low, high);
        return *reinterpret_cast<const unsigned*>(&both);
    }
    __device__ __forceinline__ static unsigned multiply(unsigned a, unsigned b) {
        const __half2 both = __hmul2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
        return *reinterpret_cast<const unsigned*>(&both);
    }
    // An E4M4 code is the upper byte of half of 2^-4 of its value, subnormals included.
    static constexpr float E4M4_FACTOR = 16.0f;
    __device__ __forceinline__ static unsigned e4m4(unsigned code) { return code * 0x00400040u; }
};

template <>
struct Pair<__nv_bfloat16> {
    __device__ __forceinline__ static unsigned pack(float low, float high) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const unsigned*>(&both);
    }
    __device__ __forceinline__ static unsigned multiply(unsigned a, unsigned b) {
        const __nv_bfloat162 both =
            __hmul2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
        return *reinterpret_cast<const unsigned*>(&both);
    }
    // ... and as bits 3 to 10 of a bfloat16, 2^-116 of its value, subnormals included.
    static constexpr float E4M4_FACTOR = 8.307674973655724e34f;  // 2^116
    __device__ __forceinline__ static unsigned e4m4(unsigned code) { return code * 0x00080008u; }
};

// acc += A * B, 16 x 8 x 16, in fp32.
template <typename T>
__device__ __forceinline__ void mma(
    float (&acc)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    if constexpr (SameType<T, __half>::VALUE)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// ---- what all decoders share ---------------------------------------------------------------------------------------

// The values of a codebook and those of 8-bit scales, passed by value: no upload, nothing to keep alive.
struct Values {
    float power;
    float value[32];  // times `power`
    float map[256];
};

// 16 or 8 bytes of x, unless they are not there: then the registers stay as they are.
__device__ __forceinline__ void read_x(unsigned* w, const uint4* p, bool there) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3])
                 : "l"(p), "r"(unsigned(there)));
}
__device__ __forceinline__ void read_x(unsigned* w, const uint2* p, bool there) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.nc.v2.u32 {%0,%1}, [%2];}"
                 : "+r"(w[0]), "+r"(w[1])
                 : "l"(p), "r"(unsigned(there)));
}

// Spread them over registers.
__device__ __forceinline__ void take(unsigned* w, uint4 v) { w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w; }
__device__ __forceinline__ void take(unsigned* w, uint2 v) { w[0] = v.x, w[1] = v.y; }

// 16 bytes from shared memory, by their address in the window, unless they are not there.
__device__ __forceinline__ void read_line(unsigned* w, unsigned address, bool there) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3])
                 : "r"(address), "r"(unsigned(there)));
}

// One lane of a warp, all of whose lanes are here.
__device__ __forceinline__ bool elected() {
#if __CUDA_ARCH__ >= 900
    return elect_lane();
#else
    return threadIdx.x % WARP == 0;
#endif
}

// barrier_wait for any architecture that has barriers.
__device__ __forceinline__ void ring_wait(unsigned barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
    barrier_wait(barrier, parity);
#elif __CUDA_ARCH__ >= 800
    asm volatile(
        "{ .reg .pred done; again: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;"
        " @!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// 2^-e with e the exponent of `largest`, the largest magnitude of a table: the table then fits the range of half
// precision whatever the codebook.
__device__ __forceinline__ float power_below(float largest) {
    const int exponent = int(__float_as_uint(largest) >> 23);
    return exponent == 0 || exponent > 252 ? 1.0f : __int_as_float((254 - exponent) << 23);
}

// value[lane % (2 HALF)], by selection: where lanes read parameters at different places, they are served one after the
// other.
template <int HALF>
__device__ __forceinline__ float select_value(const float* value, int lane) {
    if constexpr (HALF == 0) {
        return value[0];
    } else {
        const float low = select_value<HALF / 2>(value, lane), high = select_value<HALF / 2>(value + HALF, lane);
        return lane & HALF ? high : low;
    }
}

// Of a codebook, in a plane or by value, number lane % VALUES, times a factor for all: `power`, which brings the
// largest to 1 .. 2. All lanes of a warp are here.
template <int VALUES>
__device__ __forceinline__ float take_value(const float* values, const Values& codebook, float& power) {
    const int lane = threadIdx.x % WARP;
    if (values) {
        wait_for_previous();
        const float value = values[lane % VALUES];
        power = power_below(__uint_as_float(warp_max(__float_as_uint(fabsf(value)))));
        return value * power;
    }
    power = codebook.power;
    return select_value<VALUES / 2>(codebook.value, lane);
}

// ---- shared memory -------------------------------------------------------------------------------------------------

// The table of values stands at a fixed address of the shared window, so that a byte permutation forms the address of
// an entry and no addition is left: entries are 256 bytes apart, byte 1 of the offset is the index, byte 0 the lane,
// which has a copy of its own (no bank conflicts), byte 3 the block's number in its cluster. Entries of 4 bytes leave a
// gap of 128 bytes behind each.
constexpr unsigned TABLE_AT = 2048;
constexpr int ENTRY_STRIDE = 256;

__device__ __forceinline__ unsigned entry_offset(unsigned indices, int byte, unsigned lane_offset) {
    return __byte_perm(indices, lane_offset, 0x7504 | byte << 4);
}

// Entry of the table, BEHIND bytes on.
template <int BEHIND = 0>
__device__ __forceinline__ unsigned entry(unsigned offset) {
    unsigned v;
    asm volatile("ld.shared.u32 %0, [%1+%2];" : "=r"(v) : "r"(offset), "n"(TABLE_AT + BEHIND));
    return v;
}
__device__ __forceinline__ uint2 entry_pair(unsigned offset) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2+%3];" : "=r"(v.x), "=r"(v.y) : "r"(offset), "n"(TABLE_AT));
    return v;
}

__device__ __forceinline__ void store_shared(unsigned address, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ void store_shared(unsigned address, const float (&v)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
}

// To this address of block `rank` of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void store_async(unsigned address, const float (&v)[4], unsigned barrier, unsigned rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .b32 to, counts; mapa.shared::cluster.u32 to, %0, %6; mapa.shared::cluster.u32 counts, %5, %6;"
        " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%1,%2,%3,%4}, [counts]; }" ::"r"(
            address),
        "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier), "r"(rank)
        : "memory");
#endif
}

// The two halves of a barrier of the cluster, behind barriers_ready.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// The same number, of which the compiler does not know where it comes from: it stays in a register.
__device__ __forceinline__ unsigned kept(unsigned v) {
    asm volatile("" : "+r"(v));
    return v;
}

// Write one half, `part`, of entry `index` of a table: WARP copies of the words.
template <int WORDS>
__device__ __forceinline__ void fill_entry(unsigned table, int index, int part, const unsigned (&word)[WORDS]) {
    // The chunks of neighbouring entries are written in different order: no bank conflicts.
    constexpr unsigned CHUNKS = WORDS * WARP / 4 / 2;
    const unsigned at = table + index * ENTRY_STRIDE + (part * CHUNKS + index % CHUNKS) * 16;
#pragma unroll
    for (unsigned i = 0; i < CHUNKS; ++i)
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %1, %2};" ::"r"(at ^ i * 16), "r"(word[0]), "r"(word[WORDS - 1])
                     : "memory");
}

// Entry `index` for one value: in the low half of a word, `part` 0, and 128 bytes on in the high half, `part` 1.
template <typename T>
__device__ __forceinline__ void fill_halves(unsigned table, int index, int part, float v) {
    const unsigned word[1] = {part ? Pair<T>::pack(0.0f, v) : Pair<T>::pack(v, 0.0f)};
    fill_entry<1>(table + part * 128, index, 0, word);
    fill_entry<1>(table + part * 128, index, 1, word);
}

// A whole table of pairs of 16 values, the first of a pair in the upper four bits of the index. Each lane brings a
// value: lane i that of index i % 16.
template <typename T>
__device__ __forceinline__ void fill_pairs(unsigned table, float mine, unsigned thread, unsigned threads) {
    for (unsigned i = thread; i < 2 * 256; i += threads) {
        const int index = i / 2;
        const float first = __shfl_sync(FULL_WARP, mine, index >> 4);
        const float second = __shfl_sync(FULL_WARP, mine, index & 15);
        const unsigned word[1] = {Pair<T>::pack(first, second)};
        fill_entry<1>(table, index, i % 2, word);
    }
}

// ---- results -------------------------------------------------------------------------------------------------------

// Of a bias of x's type (kind 1) or of float32 (kind 2); 0 where there is none.
template <typename T>
__device__ __forceinline__ float bias_at(const void* bias, int kind, int row) {
    if (kind == 0) return 0.0f;
    return kind == 1 ? to_float(static_cast<const T*>(bias)[row]) : static_cast<const float*>(bias)[row];
}

__device__ __forceinline__ void store(__half* y, float v) { *y = __float2half_rn(v); }
__device__ __forceinline__ void store(__nv_bfloat16* y, float v) { *y = __float2bfloat16_rn(v); }
__device__ __forceinline__ void store(float* y, float v) { *y = v; }

// ---- k-bit ---------------------------------------------------------------------------------------------------------

template <typename T, int K, int FORMAT>
struct Kbit {
    using Type = T;
    using Code = typename Absmax<FORMAT>::Code;
    static constexpr int VALUES = 1 << K, ENTRIES = K == 5 ? 32 : 256;
    static constexpr bool GAPS = K == 3 || K == 4;
    static constexpr int SCALE_BYTES = ITEM_K / ROW * sizeof(Code), WORDS = K;
    static constexpr int FIELDS = Field<K>::BITS;
    static constexpr int ITEM_BYTES = ITEM_K * K / 8, LANE_BYTES = ROW * K / 8;
    static constexpr bool SPREAD_SCALES = false;
    // What the sums of multiply lack: a scale of up to 65504 must leave room for the values.
    static constexpr float AFTER = FORMAT == FLOAT16 ? 4.0f : 1.0f;
    static constexpr int SCALE_STEP = sizeof(Code);
    static constexpr int TURNS = 1;
    static constexpr bool OWN = K == 4;

    __device__ __forceinline__ static int row(int g) { return g; }

    // The block of 32 that a lane owns in a row of an item; `row` is the address of that in the shared window, of this
    // lane's part where MINE, and `turn` by how much it is permuted.
    template <bool MINE>
    __device__ __forceinline__ static void read(unsigned (&word)[WORDS], unsigned row, int turn, int t) {
        const unsigned source = MINE ? row : row + ((t * LANE_BYTES) ^ turn);
        if constexpr (K == 4) {
            const uint4 v = shared_at<uint4>(source);
            word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
        } else if constexpr (K == 2) {
            const uint2 v = shared_at<uint2>(source);
            word[0] = v.x, word[1] = v.y;
        } else {
#pragma unroll
            for (int p = 0; p < K; ++p) word[p] = shared_at<unsigned>(source + 4 * p);
        }
    }

    // The same of item `j` of two whose rows, of 128 bytes, are permuted; `from` is where this lane begins in the
    // first, less `behind`.
    __device__ __forceinline__ static void read_turned(unsigned (&word)[WORDS], unsigned from, int j, int behind) {
        static_assert(K == 4, "rows of 64 bytes");
        const uint4 v = shared_at<uint4>((from ^ j * ITEM_BYTES) + behind);
        word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    }

    // The x that a lane needs for an item, of which `left` elements are there; `x` is that of the lane's token.
    __device__ __forceinline__ static void load_x(unsigned (&word)[16], const T* x, bool there, int left, int t) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            read_x(word + 4 * i, reinterpret_cast<const uint4*>(x + t * ROW) + i, there && t * ROW < left);
    }

    // The same from shared memory, `address(i)` being that of element i.
    template <typename Address>
    __device__ __forceinline__ static void take_x(unsigned (&word)[16], const Address& address, int t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) take(word + 4 * i, shared_at<uint4>(address(t * ROW + 8 * i)));
    }

    // For each 8 consecutive elements, which stand in 4 words, the 4 pairs of the table.
    __device__ __forceinline__ static void arrange(unsigned (&x)[16]) {
        if constexpr (K == 5) return;
        constexpr int FAR = K == 2 ? 1 : 2;  // distance of the two words that a pair comes from
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            const unsigned a = x[j], b = x[j + FAR], c = x[j + 3 - FAR], d = x[j + 3];
            x[j] = __byte_perm(a, b, 0x5410), x[j + 3 - FAR] = __byte_perm(a, b, 0x7632);
            x[j + FAR] = __byte_perm(c, d, 0x5410), x[j + 3] = __byte_perm(c, d, 0x7632);
        }
    }

    // Each lane brings a value: lane i that of index i % VALUES. All lanes of a warp are here.
    template <bool ONE>
    __device__ static void build(unsigned table, float mine, unsigned thread, unsigned threads) {
        if constexpr (FORMAT == E4M4 && !ONE) mine *= Pair<T>::E4M4_FACTOR;
        if constexpr (!ONE) mine /= AFTER;
        auto value = [&](int index) { return __shfl_sync(FULL_WARP, mine, index & (VALUES - 1)); };
        for (unsigned i = thread; i < 2 * ENTRIES; i += threads) {
            const int index = i / 2, part = i % 2;
            if constexpr (K == 5) {
                fill_halves<T>(table, index, part, value(index));
            } else if constexpr (K == 2) {
                const float v[4] = {value(index), value(index >> 2), value(index >> 4), value(index >> 6)};
                const unsigned word[2] = {Pair<T>::pack(v[0], v[1]), Pair<T>::pack(v[2], v[3])};
                fill_entry<2>(table, index, part, word);
            } else {
                const float low = value(index), high = value(index >> 4);
                const unsigned word[1] = {Pair<T>::pack(low, high)};
                fill_entry<1>(table, index, part, word);
            }
        }
    }

    __device__ __forceinline__ static unsigned lane_offset(int lane) { return lane * (K == 2 ? 8 : 4); }

    // The planes of a tile, transposed: field n of word w is an index.
    __device__ __forceinline__ static void unpack(const unsigned (&word)[2][WORDS], unsigned (&f)[2][FIELDS]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int p = 0; p < FIELDS; ++p) f[i][p] = p < K ? word[i][p] : 0u;
            transpose_fields<FIELDS>(f[i]);
        }
    }

    // A tile of 16 rows. `scales` is the address of the scale of row g; those of row g + 8 follow `eight` bytes on.
    template <int EIGHTS>
    __device__ __forceinline__ static void multiply(
        const unsigned (&f)[2][FIELDS], const unsigned (&x)[EIGHTS][16], unsigned lane, unsigned scales, unsigned eight,
        float (&acc)[EIGHTS][4]) {
        unsigned scale[2];
        float after[2], part[EIGHTS][4] = {};
        float (&sum)[EIGHTS][4] = FORMAT == FLOAT32 ? part : acc;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Code code = shared_at<Code>(scales + i * eight);
            if constexpr (FORMAT == E4M4) {
                scale[i] = Pair<T>::e4m4(code);
            } else if constexpr (FORMAT == FLOAT16) {
                scale[i] = Pair<T>::pack(__half2float(code), __half2float(code));
            } else {
                // The scales of the four blocks of a row, relative to the largest: half precision lacks the range.
                unsigned largest = __float_as_uint(code) & 0x7f800000u;
                largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
                largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
                largest = min(max(largest, 1u << 23), 252u << 23);
                after[i] = __uint_as_float(largest);
                const float s = code * __uint_as_float((254u << 23) - largest);
                scale[i] = Pair<T>::pack(s, s);
            }
        }
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            unsigned a[2][2];
#pragma unroll
            for (int i = 0; i < 2; ++i) weights(f[i], s, lane, a[i]);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) a[i][h] = Pair<T>::multiply(a[i][h], scale[i]);
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e)
                mma<T>(sum[e], a[0][0], a[1][0], a[0][1], a[1][1], x[e][2 * s], x[e][2 * s + 1]);
        }
        if constexpr (FORMAT == FLOAT32) {
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[e][i] = fmaf(part[e][i], after[i / 2], acc[e][i]);
        }
    }

    // The four unscaled values of step s of a row, from its transposed planes.
    __device__ __forceinline__ static void weights(
        const unsigned (&f)[FIELDS], int s, unsigned lane, unsigned (&pair)[2]) {
        if constexpr (K == 2) {
            const uint2 v = entry_pair(entry_offset(f[s % 2], s / 2, lane));
            pair[0] = v.x, pair[1] = v.y;
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if constexpr (K == 5) {
                    const int w = s % 2 * 4 + 2 * h;
                    pair[h] = entry(entry_offset(f[w], s / 2, lane)) | entry<128>(entry_offset(f[w + 1], s / 2, lane));
                } else {
                    pair[h] = entry(entry_offset(f[s % 2 * 2 + h], s / 2, lane));
                }
            }
        }
    }
};

// ---- tables of 16 values -------------------------------------------------------------------------------------------

template <int BYTES>
struct PieceOf {
    using Type = uint4;
};
template <>
struct PieceOf<8> {
    using Type = uint2;
};

// Four bits an element, the earlier of two in the upper half of a byte; one float32 scale a block, or an 8-bit code of
// it. SUB consecutive elements, 16, 32 or 64, belong to one block: the four lanes of a row share them, so that the sums
// of SUB / 16 steps can be scaled in fp32.
template <typename T, int SUB>
struct Table4 {
    using Type = T;
    static constexpr int VALUES = 16, ENTRIES = 256, SUBS = ITEM_K / SUB;
    static constexpr bool GAPS = true;
    static constexpr int SCALE_BYTES = SUBS * 4, WORDS = 4, FIELDS = 4;
    static constexpr int ITEM_BYTES = ITEM_K / 2, LANE_BYTES = SUB / 8;
    static constexpr bool SPREAD_SCALES = true;
    static constexpr float AFTER = 1.0f;
    static constexpr int SCALE_STEP = 0;
    static constexpr int TURNS = 4;
    static constexpr bool OWN = false;

    // With reads of 8 bytes, half of the lanes meet in a bank if they have neighbouring rows.
    __device__ __forceinline__ static int row(int g) { return SUB == 64 ? (g & 1) | (g & 2) << 1 | (g & 4) >> 1 : g; }

    template <bool>
    __device__ __forceinline__ static void read(unsigned (&word)[WORDS], unsigned row, int turn, int t) {
#pragma unroll
        for (int j = 0; j < SUBS; ++j) {
            const unsigned source = row + ((j * (SUB / 2) + t * LANE_BYTES) ^ turn);
            if constexpr (SUB == 64) {
                const uint2 v = shared_at<uint2>(source);
                word[2 * j] = v.x, word[2 * j + 1] = v.y;
            } else if constexpr (SUB == 32) {
                word[j] = shared_at<unsigned>(source);
            } else {
                const unsigned half = shared_at<unsigned short>(source);
                word[j / 2] = j % 2 ? word[j / 2] | half << 16 : half;
            }
        }
    }

    __device__ __forceinline__ static void read_turned(unsigned (&word)[WORDS], unsigned from, int j, int behind) {
        static_assert(SUB == 64, "pieces of 8 bytes");
#pragma unroll
        for (int i = 0; i < SUBS; ++i) {
            const uint2 v = shared_at<uint2>((from ^ (j * ITEM_BYTES + i * (SUB / 2))) + behind);
            word[2 * i] = v.x, word[2 * i + 1] = v.y;
        }
    }

    __device__ __forceinline__ static void load_x(unsigned (&word)[16], const T* x, bool there, int left, int t) {
        using Piece = typename PieceOf<(SUB > 16 ? 16 : 8)>::Type;
#pragma unroll
        for (int j = 0; j < SUBS; ++j)
#pragma unroll
            for (int c = 0; c < (SUB > 32 ? 2 : 1); ++c)
                read_x(
                    word + j * (SUB / 8) + 4 * c, reinterpret_cast<const Piece*>(x + j * SUB + t * (SUB / 4)) + c,
                    there && j * SUB < left);
    }

    template <typename Address>
    __device__ __forceinline__ static void take_x(unsigned (&word)[16], const Address& address, int t) {
        using Piece = typename PieceOf<(SUB > 16 ? 16 : 8)>::Type;
        constexpr int SIZE = sizeof(Piece) / 4;
#pragma unroll
        for (int i = 0; i < 16 / SIZE; ++i) {
            const int j = i * SIZE / (SUB / 8), c = i * SIZE % (SUB / 8);
            take(word + i * SIZE, shared_at<Piece>(address(j * SUB + t * (SUB / 4) + c * 2)));
        }
    }

    __device__ __forceinline__ static void arrange(unsigned (&)[16]) {}

    template <bool ONE>
    __device__ static void build(unsigned table, float mine, unsigned thread, unsigned threads) {
        fill_pairs<T>(table, mine, thread, threads);
    }

    __device__ __forceinline__ static unsigned lane_offset(int lane) { return lane * 4; }

    // The codes as they are.
    __device__ __forceinline__ static void unpack(const unsigned (&word)[2][WORDS], unsigned (&f)[2][FIELDS]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) f[i / 4][i % 4] = word[i / 4][i % 4];
    }

    template <int EIGHTS>
    __device__ __forceinline__ static void multiply(
        const unsigned (&f)[2][FIELDS], const unsigned (&x)[EIGHTS][16], unsigned lane, unsigned scales, unsigned eight,
        float (&acc)[EIGHTS][4]) {
#pragma unroll
        for (int j = 0; j < SUBS; ++j) {
            float part[EIGHTS][4] = {};
#pragma unroll
            for (int s = j * (SUB / 16); s < (j + 1) * (SUB / 16); ++s) {
                unsigned a[2][2];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    a[i / 2][i % 2] = entry(entry_offset(f[i / 2][s / 2], s % 2 * 2 + i % 2, lane));
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e)
                    mma<T>(part[e], a[0][0], a[1][0], a[0][1], a[1][1], x[e][2 * s], x[e][2 * s + 1]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float scale = shared_at<float>(scales + i * eight + 4 * j);
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e) {
                    acc[e][2 * i] = fmaf(part[e][2 * i], scale, acc[e][2 * i]);
                    acc[e][2 * i + 1] = fmaf(part[e][2 * i + 1], scale, acc[e][2 * i + 1]);
                }
            }
        }
    }
};
