// linear_records: y = x W^T of up to 8 tokens with weights of any GGUF type that has a decoder of records, and with
// mixtures of experts, on any GPU from sm_80 on (kbitcupy/products/records.py). KBIT_FORMAT_HEADER has the decoder.
//
//     fields of W --cp.async--> records of 16 rows, a stage a warp --decode--> fragments \\
//     x --once, in the order of fragments--> shared memory ------------------------------------ mma.sync --> sums
//
// Warps are in teams, and a team has every so many-th tile of 16 rows. Its warps share k: each has every warps-th of
// all records (256 elements of the rows), tile after tile, and has the next one under way while it multiplies. Their
// sums go through a ring of places in shared memory, where one warp, another for each tile, adds them up in the order
// of the warps, and only two tiles later: so warps need not keep step.
//
// Split-k: gridDim.y thread blocks share k where x is too long for shared memory; add_partials adds them up.
#include "linear/epilogue.cuh"
#include "linear/gguf_integers.cuh"
#include "linear/integers.cuh"
#include "linear/token_halves.cuh"
#include KBIT_FORMAT_HEADER

// Of the host, ahead of this source, beside what decoder.cuh names: struct RecordPlanes, the addresses of fields; and
//     HALF_NUMBERS, BFLOAT_NUMBERS, FLOAT_NUMBERS  types of x and y for quantized tokens
//     struct RecordCut
//         records                of a row
//         warps                  of a team
//         ring                   tiles of a team whose sums have room, more than LATER
//         table, barriers, x, sums_of_x, scales, sums, stages    where they begin in shared memory
//         gap                    bytes behind two steps of x
//         zero                   0

struct SharedRecord {
    unsigned at, narrow;
    __device__ __forceinline__ unsigned word(int byte) const { return shared_at<unsigned>(at + byte); }
    __device__ __forceinline__ unsigned pair(int byte) const { return shared_at<unsigned short>(at + byte); }
    __device__ __forceinline__ unsigned byte(int byte) const { return shared_at<unsigned char>(at + byte); }
    __device__ __forceinline__ void words(unsigned (&w)[2], int byte) const {
        to_words(w, shared_at<uint2>(at + byte));
    }
    __device__ __forceinline__ void words(unsigned (&w)[4], int byte) const {
        to_words(w, shared_at<uint4>(at + byte));
    }
};
// A decoder's table, and the numbers that it has in registers, since an instruction has room for one constant.
struct SharedTable {
    unsigned at, own[3], kept[3];

    // zero: 0, which the compiler does not know, or it would set registers anew wherever a number is used; nor does it
    // take what depends on the lane for uniform, or it would copy that to a register there.
    template <typename R>
    __device__ __forceinline__ static SharedTable of(unsigned at, unsigned lane, unsigned zero) {
        SharedTable table{at, {lane % 8 * 4 + zero, lane % 16 * 4 + zero, lane % 32 * 4 + zero}};
        if constexpr (R::KEPT)
            for (int i = 0; i < 3; ++i) table.kept[i] = R::kept(i) + (R::LANES ? zero : lane & zero);
        return table;
    }
    // Entry (v >> right) % ENTRIES of a part of the table that begins at word `first`; of an entry there are COPIES, of
    // which a lane reads its own.
    template <int COPIES, int ENTRIES>
    __device__ __forceinline__ unsigned word(int first, unsigned v, int right = 0) const {
        constexpr int STEP = COPIES == 1 ? 2 : COPIES == 8 ? 5 : COPIES == 16 ? 6 : 7;
        static_assert(1 << STEP == 4 * COPIES, "bytes of an entry");
        const unsigned at = right == 0 ? v << STEP : __funnelshift_r(v, v, right - STEP);
        return look_up<COPIES>(first, (at & (ENTRIES - 1) * (4 * COPIES)) | mine<COPIES>());
    }
    // Entry i.
    template <int COPIES>
    __device__ __forceinline__ unsigned entry(int first, unsigned i) const {
        return look_up<COPIES>(first, i * (4 * COPIES) + mine<COPIES>());
    }

  private:
    template <int COPIES>
    __device__ __forceinline__ unsigned mine() const {
        return COPIES == 1 ? 0u : own[COPIES / 16];
    }
    template <int COPIES>
    __device__ __forceinline__ unsigned look_up(int first, unsigned offset) const {
        return shared_at<unsigned>(at + offset + 4 * first);
    }
};

// copy_async_if of 16 bytes, which brings the 128 bytes around them to the L2 cache.
__device__ __forceinline__ void copy_of_line_if(unsigned address, const void* global, bool there) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;}" ::"r"(address),
        "l"(global), "r"(unsigned(there))
        : "memory");
#endif
}

// How a warp copies the records of 16 rows: of field I what a lane copies of the next record. Where pieces go to and
// come from is worked out once: a lane whose first piece is that of row r has of the next ones those of r and a few
// rows more, where a row has a power of two of pieces.
template <typename R, int I, bool COPIED>
struct FieldCopy {
    using Layout = RecordLayout<R>;
    static constexpr int BYTES = R::bytes(I), PIECE = Layout::piece(I), PIECES = BYTES / PIECE;  // of a row
    static constexpr int ALL = ITEM_ROWS * PIECES, COPIES = (ALL + WARP - 1) / WARP;
    static constexpr bool REGULAR = (PIECES & (PIECES - 1)) == 0;
    // The records that neighbouring warps copy lie side by side in a row: the first copy brings what the others of the
    // line want to the L2 cache, where each would read its few sectors from memory by itself.
    static constexpr bool WHOLE_LINE = R::WHOLE_LINES && BYTES < 128;
    static_assert(!WHOLE_LINE || PIECE == 16, "copies of 16 bytes");
    static constexpr int KEPT = REGULAR ? 1 : COPIES;
    const char* source;
    unsigned from[KEPT], to[KEPT];

    __device__ __forceinline__ void begin(const void* field, unsigned number, unsigned pitch, int lane) {
#pragma unroll
        for (int c = 0; c < KEPT; ++c) {
            const int piece = c * WARP + lane, row = piece / PIECES, at = piece % PIECES * PIECE;
            from[c] = row * pitch * BYTES + at, to[c] = row * Layout::stride() + Layout::at(I) + at;
        }
        source = static_cast<const char*>(field) + (unsigned long long)number * BYTES;
        if constexpr (REGULAR) source += from[0], from[0] = 0;
    }
    __device__ __forceinline__ void start(unsigned stage, unsigned pitch, int left, int lane) const {
#pragma unroll
        for (int c = 0; c < COPIES; ++c) {
            constexpr int ROWS = REGULAR ? WARP / PIECES : 0;  // from a copy to the next one
            const unsigned address = stage + to[REGULAR ? 0 : c] + c * ROWS * Layout::stride();
            const char* piece = source + from[REGULAR ? 0 : c] + (unsigned long long)(pitch * BYTES) * (c * ROWS);
            const bool there = c * WARP + lane < min(left, ITEM_ROWS) * PIECES;
            if constexpr (WHOLE_LINE) copy_of_line_if(address, piece, there);
            else copy_async_if<PIECE>(address, piece, there);
        }
    }
    __device__ __forceinline__ unsigned narrow(int, unsigned, int) const { return 0; }
    __device__ __forceinline__ void advance(unsigned records) { source += (unsigned long long)records * BYTES; }
};

// The fields of 2 bytes, of which a lane reads those of its own two rows.
template <typename R, int I>
struct FieldCopy<R, I, false> {
    const unsigned short* source;
    __device__ __forceinline__ void begin(const void* field, unsigned number, unsigned pitch, int lane) {
        source = static_cast<const unsigned short*>(field) + number + (unsigned long long)(lane / 4) * pitch;
    }
    __device__ __forceinline__ void start(unsigned, unsigned, int, int) const {}
    __device__ __forceinline__ unsigned narrow(int i, unsigned pitch, int rows) const {
        return i * 8 < rows ? __ldg(source + (unsigned long long)pitch * (i * 8)) : 0u;
    }
    __device__ __forceinline__ void advance(unsigned records) { source += records; }
};

// Those of field I and all behind it.
template <typename R, int I = 0>
struct FieldCopies {
    static constexpr bool COPIED = RecordLayout<R>::piece(I) != 0;
    FieldCopy<R, I, COPIED> mine;
    FieldCopies<R, I + 1> others;
    __device__ __forceinline__ void begin(const RecordPlanes& planes, unsigned number, unsigned pitch, int lane) {
        mine.begin(reinterpret_cast<const void*>(planes.field[I]), number, pitch, lane);
        others.begin(planes, number, pitch, lane);
    }
    // Start to copy: there are `left` rows, and what others would give stays in their own sums.
    __device__ __forceinline__ void start(unsigned stage, unsigned pitch, int left, int lane) const {
        mine.start(stage, pitch, left, lane), others.start(stage, pitch, left, lane);
    }
    // The fields of 2 bytes of the lane's row i, of which `rows` are there from the first one on.
    __device__ __forceinline__ unsigned narrow(int i, unsigned pitch, int rows) const {
        const unsigned behind = others.narrow(i, pitch, rows);
        return COPIED ? behind : mine.narrow(i, pitch, rows) | behind << 16;
    }
    __device__ __forceinline__ void advance(unsigned records) { mine.advance(records), others.advance(records); }
};
template <typename R>
struct FieldCopies<R, R::FIELDS> {
    __device__ __forceinline__ void begin(const RecordPlanes&, unsigned, unsigned, int) {}
    __device__ __forceinline__ void start(unsigned, unsigned, int, int) const {}
    __device__ __forceinline__ unsigned narrow(int, unsigned, int) const { return 0; }
    __device__ __forceinline__ void advance(unsigned) {}
};

// A decoder for one token.
template <typename R>
struct Columns : R {};
template <typename R>
struct ByColumns {
    static constexpr bool VALUE = false;
};
template <typename R>
struct ByColumns<Columns<R>> {
    static constexpr bool VALUE = true;
};

// Whether there is a bias, and sums of x in two bfloat16 are multiplied by it and factors, see gguf_records.cuh, or
// sums of products begin with sums of x; or these are wanted for more. What one of the codes stands for, which are the
// bits of numbers.
template <typename R>
struct Way {
    static constexpr bool BIASED = R::BIAS != 0, SUMMED = BIASED || R::OFFSETS;
    static constexpr bool APART = BIASED && R::BYTES && !ByColumns<R>::VALUE, BEGUN = BIASED && !APART;
    static constexpr float UNIT = 5.9604644775390625e-8f;  // 2^-24
    // By what sums of x are multiplied.
    static constexpr float OF_SUMS = BIASED ? -R::BIAS * UNIT : UNIT;
    static constexpr int SUBS = RECORD / R::SUB;
};

// Four bytes of a decoder as halves: elements 0 and 2, then 1 and 3.
template <typename R>
__device__ __forceinline__ void halves_of(const R& r, int s, unsigned (&a)[2]) {
    const unsigned codes = r.codes(s);
#pragma unroll
    for (int i = 0; i < 2; ++i) a[i] = __byte_perm(codes, 0, i ? 0x4341 : 0x4240);
}

// Where a lane finds what it multiplies a record with.
struct Beside {
    unsigned x, pitch;  // its part of the record, and from two steps to the next two
    unsigned sums;      // sums of x: of its tokens, or with inner scales of its sub-blocks
    unsigned scales;  // of its tokens: of 32 elements each where they are quantized, of the record where x is bfloat16
};

// Two steps of x have 64 bytes a token, 16 of each lane t. A gap behind all tokens moves the next two, so that threads
// which write neighbouring octets of a token meet in few banks.
__device__ __forceinline__ uint4 x_of(const Beside& beside, int two) {
    return shared_at<uint4>(beside.x + two * beside.pitch);
}

// acc += factor * part, row by row.
__device__ __forceinline__ void add_scaled(float (&acc)[4], const float (&part)[4], int row, float factor) {
    acc[2 * row] = fmaf(part[2 * row], factor, acc[2 * row]);
    acc[2 * row + 1] = fmaf(part[2 * row + 1], factor, acc[2 * row + 1]);
}

// Half of a record of 16 rows, of each of the two rows of a lane; `stage` is the address of row g's.
template <typename R>
__device__ __forceinline__ void load_half(
    R (&r)[2], unsigned stage, const unsigned (&narrow)[2], const SharedTable& table, int t, int half) {
    constexpr int STRIDE = RecordLayout<R>::stride();
#pragma unroll
    for (int i = 0; i < 2; ++i) r[i].load(SharedRecord{stage + i * 8 * STRIDE, narrow[i]}, table, t, half);
}

// The bytes 0 and 2 of a word, which have signs, as bfloat16: what is below the sign from 128 on, less 128 or twice
// that.
__device__ __forceinline__ unsigned signed_pair(unsigned bytes) {
    constexpr unsigned ONE = 0x43004300u;
    return subtract_pairs<__nv_bfloat16>(masked<0x007f007fu>(bytes, ONE), masked<0x00800080u>(bytes, ONE));
}
// sum += factors times sums of x, eight sub-blocks at a time, of which lane t has two.
template <typename R>
__device__ __forceinline__ void take_off(
    const R (&both)[2][2], const Beside& beside, unsigned m, int t, float (&sum)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned a[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) a[i] = signed_pair(both[half][i].two_bytes(0x0100u + t * 0x0202u));
        const uint2 sums = shared_at<uint2>(beside.sums + half * m * 32);
        mma<__nv_bfloat16>(sum, a[0], a[1], a[0], a[1], sums.x, sums.y);
    }
}

// acc += W x of one record of 16 rows; `stage` is the address of row g's. `next` starts to copy the next record to
// the same place, when all has been read from there.
template <typename R, typename Next>
__device__ __forceinline__ void multiply_record(
    unsigned stage, const unsigned (&narrow)[2], const SharedTable& table, const Beside& beside, unsigned m, int t,
    const Next& next, float (&acc)[4]) {
    using Way = ::Way<R>;
    constexpr int STEPS = R::SUB / 16;
    float sum[4] = {}, outer[2];
    R both[2][2];
    load_half(both[0], stage, narrow, table, t, 0), load_half(both[1], stage, narrow, table, t, 1);
    __syncwarp();
    next();
    if constexpr (Way::APART) take_off<R>(both, beside, m, t, sum);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        R(&r)[2] = both[half];
        float part[4];
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            const int j = s / STEPS;
            uint4 four;
            if (s % 2 == 0) four = x_of(beside, half * 4 + s / 2);
            const unsigned sums = beside.sums + (half * (Way::SUBS / 2) + j) * (TOKENS * 4);
            if (s % STEPS == 0) {
#pragma unroll
                for (int i = 0; i < 4; i += 2) {  // a load for each is less than a copy
                    const uint2 begin = Way::BEGUN ? shared_at<uint2>(sums) : uint2{0, 0};
                    part[i] = __uint_as_float(begin.x), part[i + 1] = __uint_as_float(begin.y);
                }
            }
            unsigned a[2][2];
#pragma unroll
            for (int i = 0; i < 2; ++i) halves_of(r[i], s, a[i]);
            mma<__half>(part, a[0][0], a[1][0], a[0][1], a[1][1], s % 2 ? four.z : four.x, s % 2 ? four.w : four.y);
            if (s % STEPS != STEPS - 1) continue;
            uint2 of_x = {};
            if constexpr (R::OFFSETS) of_x = shared_at<uint2>(sums);
            float added[2] = {__uint_as_float(of_x.x), __uint_as_float(of_x.y)};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                add_scaled(sum, part, i, r[i].factor(s * 16 / R::SUB));
                if constexpr (R::OFFSETS) {
                    const float offset = r[i].offset(s * 16 / R::SUB);
                    sum[2 * i] = fmaf(added[0], offset, sum[2 * i]);
                    sum[2 * i + 1] = fmaf(added[1], offset, sum[2 * i + 1]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) outer[i] = r[i].outer();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) add_scaled(acc, sum, i, outer[i]);
}

// The same for one token, where mma has seven columns more: in column s is x of step s of half a record, of which lane
// t then has the sums of two sub-blocks.
template <typename R, typename Next>
__device__ __forceinline__ void multiply_columns(
    unsigned stage, const unsigned (&narrow)[2], const SharedTable& table, const Beside& beside, int t,
    const Next& next, float (&acc)[4]) {
    using Way = ::Way<R>;
    static_assert(R::SUB == 16 && Way::BIASED && !R::OFFSETS, "a sub-block is one step");
    const unsigned g = threadIdx.x % WARP / 4;
    float sum[4] = {}, outer[2];
    R both[2][2];
    load_half(both[0], stage, narrow, table, t, 0), load_half(both[1], stage, narrow, table, t, 1);
    __syncwarp();
    next();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        R(&r)[2] = both[half];
        const uint2 own = shared_at<uint2>(beside.x + (half * 4 + g / 2) * beside.pitch + g % 2 * 8);
        const unsigned sums = beside.sums + (half * 8 + t * 2) * (TOKENS * 4) - t * 8;
        float part[2][4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) part[0][i] = shared_at<float>(sums + i % 2 * (TOKENS * 4));
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            unsigned a[2][2];
#pragma unroll
            for (int i = 0; i < 2; ++i) halves_of(r[i], s, a[i]);
            mma<__half>(part[s % 2], a[0][0], a[1][0], a[0][1], a[1][1], g == s ? own.x : 0u, g == s ? own.y : 0u);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float factor[2];
            r[i].factors(t, factor);
#pragma unroll
            for (int j = 0; j < 2; ++j)
                sum[2 * i + j] = fmaf(part[0][2 * i + j] + part[1][2 * i + j], factor[j], sum[2 * i + j]);
            outer[i] = r[i].outer();
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) add_scaled(acc, sum, i, outer[i]);
}

// The same where inner scales are multiplied with codes: all of a record is one sum. Minima are those of eight
// sub-blocks at a time as bfloat16, times sums of x in two of them, which leave out 2^-17: one more mma.
template <typename R, typename Next>
__device__ __forceinline__ void multiply_inner(
    unsigned stage, const unsigned (&narrow)[2], const SharedTable& table, const Beside& beside, unsigned m, int t,
    const Next& next, float (&acc)[4]) {
    constexpr int STEPS = R::SUB / 16, STRIDE = RecordLayout<R>::stride(), GROUPS = Way<R>::SUBS / 8;
    typename R::Inner inner[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) inner[i].load(SharedRecord{stage + i * 8 * STRIDE, narrow[i]});
    R both[2][2];
    auto load = [&](int half) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            both[half][i].load_codes(SharedRecord{stage + i * 8 * STRIDE, narrow[i]}, table, inner[i], t, half);
    };
    load(0), load(1);
    __syncwarp();
    next();
    float part[4] = {};
    if constexpr (R::OFFSETS) {
        float minima[4] = {};
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            unsigned a[2];  // minima 2 t and 2 t + 1 as bfloat16 from 128 on, less 128
#pragma unroll
            for (int i = 0; i < 2; ++i)
                a[i] = add_pairs<__nv_bfloat16>(
                    __byte_perm(inner[i].minima(group, t >= 2), 0x43434343u, t % 2 ? 0x4342u : 0x4140u), 0xc300c300u);
            const uint2 sums = shared_at<uint2>(beside.sums + group * m * 32);
            mma<__nv_bfloat16>(minima, a[0], a[1], a[0], a[1], sums.x, sums.y);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) add_scaled(acc, minima, i, -inner[i].dmin * Way<R>::UNIT);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        R(&r)[2] = both[half];
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            uint4 four;
            if (s % 2 == 0) four = x_of(beside, half * 4 + s / 2);
            unsigned a[2][2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned codes = r[i].codes(s), scale = r[i].scale(s / STEPS);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    a[i][h] = __byte_perm(codes, 0, h ? 0x4341 : 0x4240) * scale;
                }
            }
            mma<__half>(part, a[0][0], a[1][0], a[0][1], a[1][1], s % 2 ? four.z : four.x, s % 2 ? four.w : four.y);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) add_scaled(acc, part, i, inner[i].d);
}

// The same where lanes have elements of their own (linear/gguf_lanes.cuh): all of a record is one sum, or one for each
// power of two. Minima are those of a lane's sub-blocks, times sums of x in two bfloat16, which leave out 2^-17: one
// more mma for two of them.
template <typename R, typename Next>
__device__ __forceinline__ void multiply_lanes(
    unsigned stage, const unsigned (&narrow)[2], const SharedTable& table, const Beside& beside, int t,
    const Next& next, float (&acc)[4]) {
    constexpr int STRIDE = RecordLayout<R>::stride();
    R r[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) r[i].fetch(SharedRecord{stage + i * 8 * STRIDE, narrow[i]}, t);
    __syncwarp();
    next();
    float part[R::PARTS][4] = {};
#pragma unroll
    for (int s = 0; s < 16; ++s) {
        if (s % 8 == 0) {
#pragma unroll
            for (int i = 0; i < 2; ++i) r[i].look_up(table, s / 8);
        }
        uint4 four;
        if (s % 2 == 0) four = x_of(beside, s / 2);
        unsigned a[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) r[i].scaled(s, a[i]);
        mma<__half>(
            part[R::part(s)], a[0][0], a[1][0], a[0][1], a[1][1], s % 2 ? four.z : four.x, s % 2 ? four.w : four.y);
    }
    if constexpr (R::OFFSETS) {
        float minima[4] = {};
#pragma unroll
        for (int pair = 0; pair < 32 / R::SUB; ++pair) {
            unsigned a[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) a[i] = add_pairs<__nv_bfloat16>(r[i].minima(table, pair), 0xc300c300u);
            const uint2 sums = shared_at<uint2>(beside.sums + pair * 8);
            mma<__nv_bfloat16>(minima, a[0], a[1], a[0], a[1], sums.x, sums.y);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) add_scaled(acc, minima, i, -r[i].dmin * Way<R>::UNIT);
    }
#pragma unroll
    for (int p = R::PARTS - 1; p > 0; --p)
#pragma unroll
        for (int i = 0; i < 4; ++i) part[p - 1][i] = fmaf(part[p][i], R::UNIT, part[p - 1][i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) add_scaled(acc, part[0], i, r[i].d);
}

// Keep the sum of sub-block `sub` of a token for an mma, as two bfloat16: of two sub-blocks the rounded sums, then what
// they leave. Eight of a token take 32 bytes, or those of a lane stand side by side.
template <typename Way, typename R>
__device__ __forceinline__ void store_sum(unsigned sums, int sub, int token, int m, float sum) {
    unsigned to;
    if constexpr (R::LANES) {
        constexpr int OWN = 64 / R::SUB;  // sub-blocks of a lane
        const int k = sub % Way::SUBS * R::SUB, i = R::ORDER == BY_FIELDS ? k % 128 / 32 : k % 64 / R::SUB;
        to = ((sub / Way::SUBS * m + token) * 4 + lane_of<R::ORDER>(k)) * (OWN * 4) + i / 2 * 8 + i % 2 * 2;
    } else {
        to = (sub / 8 * m + token) * 32 + sub % 8 / 2 * 8 + sub % 2 * 2;
    }
    const __nv_bfloat16 rounded = __float2bfloat16_rn(sum);
    const __nv_bfloat16 left = __float2bfloat16_rn(sum - __bfloat162float(rounded));
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(sums + to), "h"(__bfloat16_as_ushort(rounded)) : "memory");
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(sums + to + 4), "h"(__bfloat16_as_ushort(left)) : "memory");
}

// Eight elements of x in the order of fragments, evens and odds of each four in `word`, and the sums of SUB neighbours,
// see Beside: a thread has octets of all tokens.
template <typename R>
struct Arrange {
    using Way = ::Way<R>;
    static constexpr int OCTETS = R::SUB / 8;
    unsigned x, pitch, sums;  // as in Beside
    int m, octet;
    float sum[TOKENS] = {};

    __device__ __forceinline__ void store_words(int token, const unsigned (&word)[4]) const {
        const int k = octet % (RECORD / 8) * 8;
        const unsigned to = x + octet / (RECORD / 8) * (8 * pitch) + token * 64;
        auto place = [&](int k) {
            const int step = step_of<R::ORDER>(k);
            return to + step / 2 * pitch + lane_of<R::ORDER>(k) * 16 + step % 2 * 8;
        };
        if constexpr (R::ORDER == BY_SIXTEEN) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(place(k + 4 * i)), "r"(word[2 * i]),
                             "r"(word[2 * i + 1])
                             : "memory");
        } else {  // two steps of a lane
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(place(k)), "r"(word[0]), "r"(word[1]),
                         "r"(word[2]), "r"(word[3])
                         : "memory");
        }
    }
    // Those of a token, added up over the octets of a sub-block.
    __device__ __forceinline__ void add(int token, float own) {
#pragma unroll
        for (int other = 1; other < OCTETS; other *= 2) own += __shfl_xor_sync(FULL_WARP, own, other);
        sum[token] = own;
    }
    __device__ __forceinline__ void store_sums() const {
        if constexpr (Way::SUMMED) {
            if (octet % OCTETS) return;
            const int sub = octet / OCTETS;
            if constexpr (R::INNER || R::LANES || Way::APART) {
                constexpr float TIMES = Way::APART ? Way::OF_SUMS : 1.0f;
#pragma unroll
                for (int token = 0; token < TOKENS; ++token)
                    if (token < m) store_sum<Way, R>(sums, sub, token, m, sum[token] * TIMES);
            } else {
#pragma unroll
                for (int i = 0; i < TOKENS; i += 4) {
                    const float four[4] = {
                        sum[i] * Way::OF_SUMS, sum[i + 1] * Way::OF_SUMS, sum[i + 2] * Way::OF_SUMS,
                        sum[i + 3] * Way::OF_SUMS};
                    store_shared(sums + (sub * TOKENS + i) * 4, four);
                }
            }
        }
    }
};

// Eight bfloat16 of a record, in two words each of a warp, as halves times a power of two, by which the largest of the
// record is from 2^14 on; what they are to be multiplied with in return. All of a bfloat16 fits into a half down to
// 2^-31 of the largest one, and no more than 2^-39 of that is lost of any.
__device__ __forceinline__ float to_halves(unsigned (&w)[4]) {
    unsigned most = w[0] & 0x7fff7fffu;
#pragma unroll
    for (int i = 1; i < 4; ++i) most = Word<__nv_bfloat16>::largest_or_nan(most, w[i]);
    unsigned exponent = max(most >> 23, most >> 7 & 255u);
#if __CUDA_ARCH__ >= 800
    exponent = __reduce_max_sync(FULL_WARP, exponent);
#endif
    exponent = max(exponent, 15u);  // either power is a normal number
    const float factor = __uint_as_float(268u - exponent << 23);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        w[i] = Word<__half>::pack(
            ieee::multiply(Word<__nv_bfloat16>::get(w[i], 0), factor),
            ieee::multiply(Word<__nv_bfloat16>::get(w[i], 1), factor));
    return __uint_as_float(exponent - 14u << 23);
}

// x of the tokens, `records` of each, to shared memory. `token_at(i)` is where token i's part begins. A warp has a
// record of all of them.
template <typename T, typename R, typename Token>
__device__ __forceinline__ void stage_x(
    const Token& token_at, int m, int records, unsigned x, unsigned x_pitch, unsigned sums, unsigned scales) {
    const uint4* from[TOKENS];
#pragma unroll
    for (int token = 0; token < TOKENS; ++token)
        from[token] = reinterpret_cast<const uint4*>(token_at(min(token, m - 1)));
    for (int octet = threadIdx.x; octet < records * (RECORD / 8); octet += blockDim.x) {
        Arrange<R> arrange{x, x_pitch, sums, m, octet};
        uint4 four[TOKENS];  // all loads before the first use
#pragma unroll
        for (int token = 0; token < TOKENS; ++token)
            if (token < m) four[token] = __ldg(from[token] + octet);
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            if (token >= m) break;
            unsigned w[4];
            to_words(w, four[token]);
            if constexpr (!SameType<T, __half>::VALUE) {
                const float scale = to_halves(w);
                if (octet % WARP == 0) store_shared(scales + (octet / WARP * TOKENS + token) * 4, scale);
            }
            const unsigned word[4] = {
                __byte_perm(w[0], w[1], 0x5410), __byte_perm(w[0], w[1], 0x7632), __byte_perm(w[2], w[3], 0x5410),
                __byte_perm(w[2], w[3], 0x7632)};
            arrange.store_words(token, word);
            if constexpr (Way<R>::SUMMED) {
                float own = 0.0f;
#pragma unroll
                for (int i = 0; i < 4; ++i) own += Word<__half>::get(w[i], 0) + Word<__half>::get(w[i], 1);
                arrange.add(token, own);
            }
        }
        arrange.store_sums();
    }
}

// The same of up to four tokens that are quantized, each of which is in two columns: those of half h of token i in
// column 2 i + h. `depth` elements are from one to the next, and scales those of columns.
template <typename R, typename X>
__device__ __forceinline__ void stage_halves(
    const X* x, long long depth, int m, int records, unsigned to, unsigned x_pitch, unsigned scales) {
    static_assert(!Way<R>::SUMMED, "there are no sums of halves");
    const int all = records * (RECORD / SIXTEEN);
#pragma unroll 1
    for (int begin = 0; begin < all; begin += blockDim.x) {
        const int at = begin + threadIdx.x;
#pragma unroll 1
        for (int token = 0; token < m; ++token) {
            Numbers<X> numbers;
            numbers.load(x + token * depth + min(at, all - 1) * SIXTEEN);
            SixteenHalves halves;
            unsigned most = halves.quantize(numbers);
#pragma unroll
            for (int step = 2; step < RECORD / SIXTEEN; step *= 2)
                most = max(most, __shfl_xor_sync(FULL_WARP, most, step));
            if (at >= all) continue;
            const unsigned exponent = halves.exponent_of(most);
            halves.bring_down(exponent);
            if (at % (RECORD / SIXTEEN) == 0) {
                const float scale = __uint_as_float(exponent - HALF_EXPONENT << 23);
                const unsigned of_token = scales + (at / (RECORD / SIXTEEN) * TOKENS + 2 * token) * 4;
                store_shared(of_token, scale * SECOND), store_shared(of_token + 4, scale);
            }
#pragma unroll
            for (int octet = 0; octet < 2; ++octet) {
                const Arrange<R> arrange{to, x_pitch, 0, 2 * m, 2 * at + octet};
                unsigned word[2][4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int e = 8 * octet + i / 2 * 4 + i % 2;  // and the one two further on
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        word[half][i] = Word<__half>::pack(halves.get(e, half), halves.get(e + 2, half));
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) arrange.store_words(2 * token + half, word[half]);
            }
        }
    }
}
template <typename R>
__device__ __forceinline__ void stage_halves(
    const void* x, int kind, long long from, long long depth, int m, int records, unsigned to, unsigned x_pitch,
    unsigned scales) {
    if (kind == FLOAT_NUMBERS)
        stage_halves<R>(static_cast<const float*>(x) + from, depth, m, records, to, x_pitch, scales);
    else if (kind == HALF_NUMBERS)
        stage_halves<R>(static_cast<const __half*>(x) + from, depth, m, records, to, x_pitch, scales);
    else stage_halves<R>(static_cast<const __nv_bfloat16*>(x) + from, depth, m, records, to, x_pitch, scales);
}

// A sum as a number of a type that is known at run time.
__device__ __forceinline__ void store_as(void* y, int kind, long long at, float v) {
    if (kind == FLOAT_NUMBERS) store(static_cast<float*>(y) + at, v);
    else if (kind == HALF_NUMBERS) store(static_cast<__half*>(y) + at, v);
    else store(static_cast<__nv_bfloat16*>(y) + at, v);
}

// The sums of a tile: 16 bytes a lane, as mma leaves them; how many tiles later they are added up.
constexpr int TILE_SUMS = WARP * 16, LATER = 2;

// GROUPED   W is [experts][n][k] and thread block z takes the products of groups[z], of one expert
// EIGHTS    0, or tokens are quantized: 8 EIGHTS of them at once, or -1: up to four, which are sums of two halves;
//           x and y are then of the types x_kind and y_kind
template <typename T, typename R, bool GROUPED, int EIGHTS>
__global__ void __launch_bounds__(512, 1) linear_records(
    const T* x,                                   // [tokens, k]
    const __grid_constant__ RecordPlanes planes,  // of W
    const float* tensor_scale,                    // [1], or [experts] with a scale_step of 1; null: 1
    const void* bias,                             // [n], see bias_at
    T* y,                                         // [tokens, n]
    float* partial,                               // [gridDim.y, tokens, n] sums in place of y, or null
    const Group* groups,                          // [gridDim.z], GROUPED
    const int* order,                             // [products], GROUPED: product order[i] is entry i of the groups
    int divisor,                                  // GROUPED: product p is that of row p / divisor of x
    int scale_step,                               // GROUPED: expert e has tensor_scale[e * scale_step]
    int bias_kind,                                // see bias_at
    int tokens, int n,                            // rows of x and of W (of one expert)
    int x_kind, int y_kind,                       // EIGHTS
    const __grid_constant__ RecordCut cut) {
#if __CUDA_ARCH__ >= 800
    using Way = ::Way<R>;
    constexpr bool STAGED = EIGHTS > 0, PAIRED = EIGHTS < 0;
    constexpr int SETS = STAGED ? EIGHTS : 1, MANY = SETS * TOKENS;  // sums of eight tokens, and tokens
    // What sums are multiples of. Those of halves are larger, so that second ones of small tokens are normal numbers.
    constexpr float TIMES = PAIRED ? Way::UNIT * SECOND : Way::UNIT;
    constexpr bool SCALED = PAIRED || (!STAGED && !SameType<T, __half>::VALUE);
    extern __shared__ uint4 dynamic[];
    constexpr int STAGE = ITEM_ROWS * RecordLayout<R>::stride();
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int warps = cut.warps, teams = blockDim.x / WARP / warps, team = warp_number() / warps;
    const int warp = warp_number() - team * warps;
    const unsigned base = shared_address(dynamic);
    const SharedTable table = SharedTable::of<R>(base + cut.table, lane, cut.zero);
    launch_dependents();
    if constexpr (R::TABLE > 0) {
        constexpr int COPIED = R::COPIES % 4 ? 1 : 4;
        for (int i = threadIdx.x * COPIED; i < R::TABLE; i += blockDim.x * COPIED) {
            const unsigned word = R::table_word(i);
            if constexpr (COPIED == 1) store_shared(table.at + 4 * i, __uint_as_float(word));
            else asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(table.at + 4 * i), "r"(word) : "memory");
        }
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < teams * cut.ring; ++i)
            barrier_init(base + cut.barriers + i * 16, warps * WARP),
                barrier_init(base + cut.barriers + i * 16 + 8, WARP);
    }
    wait_for_previous();
    const Group group = [&] {
        if constexpr (GROUPED) return groups[blockIdx.z];
        constexpr int MOST = PAIRED ? PAIRED_TOKENS : MANY;
        const int begin = int(blockIdx.z) * MOST;
        return Group{0, begin, min(tokens - begin, MOST), 0};
    }();
    auto product_of = [&](int i) { return (long long)(GROUPED ? order[group.first + i] : group.first + i); };
    const int m = group.count, columns = PAIRED ? 2 * m : m, tiles = (n + ITEM_ROWS - 1) / ITEM_ROWS;
    if (m == 0) return;
    if (GROUPED && group.expert < 0) {
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n * m; i += gridDim.x * blockDim.x) {
            const long long to = product_of(i / n) * n + i % n;
            if (partial) partial[to] = 0.0f;
            else store(y + to, 0.0f);
        }
        return;
    }
    const unsigned records = cut.records;
    const int first = blockIdx.y * records / gridDim.y, last = (blockIdx.y + 1) * records / gridDim.y;
    const unsigned above = GROUPED ? group.expert * unsigned(n) : 0;
    const unsigned x_pitch = columns * 64 + (STAGED ? CODES_GAP : cut.gap);
    const int first_tile = int(blockIdx.x) * teams + team, step = int(gridDim.x) * teams;  // of a team

    // What to copy next, and the rows that are left there.
    int ahead = first + warp, left = n - first_tile * ITEM_ROWS;
    unsigned coming[2] = {};
    const unsigned stages = base + cut.stages + warp_number() * STAGE;
    FieldCopies<R> copies;
    copies.begin(planes, (above + first_tile * ITEM_ROWS) * records + ahead, records, lane);
    auto start = [&] {
        if (left > 0) {
            copies.start(stages, records, left, lane);
#pragma unroll
            for (int i = 0; i < 2; ++i) coming[i] = copies.narrow(i, records, left - g);
            unsigned next = warps;
            ahead += warps;
            if (ahead >= last) {
                ahead -= last - first, left -= step * ITEM_ROWS;
                next += step * ITEM_ROWS * records - (last - first);
            }
            copies.advance(next);
        }
        commit_copies();
    };
    start();
    if constexpr (STAGED) {
        stage_quantized<R, MANY>(
            x, x_kind, ((long long)group.first * records + first) * RECORD, (long long)records * RECORD, m,
            last - first, base + cut.x, x_pitch, base + cut.sums_of_x, base + cut.scales);
    } else if constexpr (PAIRED) {
        stage_halves<R>(
            x, x_kind, ((long long)group.first * records + first) * RECORD, (long long)records * RECORD, m,
            last - first, base + cut.x, x_pitch, base + cut.scales);
    } else {
        stage_x<T, R>(
            [&](int i) { return x + (product_of(i) / (GROUPED ? divisor : 1) * records + first) * RECORD; }, m,
            last - first, base + cut.x, x_pitch, base + cut.sums_of_x, base + cut.scales);
    }
    __syncthreads();
    // Tokens that are not there may be any. With HALVES tokens have two columns, and other lanes have each half.
    constexpr bool HALVES = STAGED && Quantized<R>::HALVES;
    const bool mine = !HALVES || g % 2 == t / 2;
    const unsigned my_x = base + cut.x + min(HALVES ? g / 2 : g, columns - 1) * 64 + t * 16;
    // Bytes of a lane's sums of x, and of a record's; of the scales of a record; parts of x of a record.
    constexpr int OWN_SUMS = STAGED && R::APART ? Quantized<R>::SUB / 2 : !STAGED && R::LANES ? Way::SUBS : 8;
    constexpr bool IN_PARTS = R::INNER || R::LANES || Way::APART;
    constexpr int OF_TOKEN = STAGED ? R::APART ? Quantized<R>::PARTS : 0 : IN_PARTS ? 4 * OWN_SUMS : 0;
    const unsigned my_sums_of_x = base + cut.sums_of_x + t * OWN_SUMS + min(g, m - 1) * OF_TOKEN;
    const unsigned sums_pitch = STAGED     ? Quantized<R>::template BYTES<MANY>
                                : R::LANES ? m * 4 * OWN_SUMS
                                : IN_PARTS ? Way::SUBS / 8 * m * 32
                                           : Way::SUBS * TOKENS * 4;
    constexpr int SCALES = (STAGED ? RECORD / Q8 : 1) * MANY * 4, STEPS_OF_X = STAGED ? 4 : 8;
    const unsigned my_sums = base + cut.sums + team * cut.ring * warps * (SETS * TILE_SUMS) + lane * 16;
    const float of_all = tensor_scale ? tensor_scale[GROUPED ? group.expert * scale_step : 0] : 1.0f;
    // Where sums of tile `pass` go, and the barriers of that place: full, and free.
    const unsigned barriers = base + cut.barriers + team * cut.ring * 16;
    auto sums_of = [&](int place) { return my_sums + place * warps * (SETS * TILE_SUMS); };
    int place = 0, phase = 0, place_before = 0, phase_before = 0;  // of this tile, and of the one that is added up
    int turn = 0;                                                  // the warp that adds up
    const int passes = first_tile < tiles ? (tiles - 1 - first_tile) / step + 1 : 0;
    int item = first + warp;
    for (int pass = 0; pass < passes + LATER; ++pass) {
        if (pass < passes) {
            float acc[SETS][4] = {};
            for (; item < last; item += warps) {
                wait_copies<0>();
                __syncwarp();
                const unsigned stage = stages + g * RecordLayout<R>::stride();
                const unsigned narrow[2] = {coming[0], coming[1]};
                const int at = item - first;
                const unsigned my_scales = base + cut.scales + at * SCALES + t * (HALVES ? 4 : 8);
                const Beside beside{
                    my_x + at * STEPS_OF_X * x_pitch, x_pitch, my_sums_of_x + at * sums_pitch, my_scales};
                if constexpr (STAGED) {
                    multiply_integers<R, SharedRecord, EIGHTS>(stage, narrow, table, beside, m, t, mine, start, acc);
                } else {
                    float of_record[4] = {};
                    float (&to)[4] = SCALED ? of_record : acc[0];
                    if constexpr (R::LANES) multiply_lanes<R>(stage, narrow, table, beside, t, start, to);
                    else if constexpr (ByColumns<R>::VALUE)
                        multiply_columns<R>(stage, narrow, table, beside, t, start, to);
                    else if constexpr (R::INNER) multiply_inner<R>(stage, narrow, table, beside, m, t, start, to);
                    else multiply_record<R>(stage, narrow, table, beside, m, t, start, to);
                    if constexpr (SCALED) {
                        const uint2 scales = shared_at<uint2>(my_scales);
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            acc[0][i] = fmaf(of_record[i], __uint_as_float(i % 2 ? scales.y : scales.x), acc[0][i]);
                    }
                }
            }
            item -= last - first;  // of the next tile
            const unsigned full = barriers + place * 16;
            barrier_wait(full + 8, phase ^ 1);
#pragma unroll
            for (int e = 0; e < SETS; ++e) store_shared(sums_of(place) + (warp * SETS + e) * TILE_SUMS, acc[e]);
            barrier_arrive(full);  // every lane that writes: what checks for races knows of no other order
            if (++place == cut.ring) place = 0, phase ^= 1;
        }
        const int before = pass - LATER;
        if (before < 0) continue;
        if (warp == turn) {
            const unsigned full = barriers + place_before * 16;
            barrier_wait(full, phase_before);
            float sum[SETS][4] = {};
            for (int other = 0; other < warps; ++other)
#pragma unroll
                for (int e = 0; e < SETS; ++e) {
                    const float4 v = shared_at<float4>(sums_of(place_before) + (other * SETS + e) * TILE_SUMS);
                    sum[e][0] += v.x, sum[e][1] += v.y, sum[e][2] += v.z, sum[e][3] += v.w;
                }
            barrier_arrive(full + 8);
            if constexpr (ByColumns<R>::VALUE) {
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    sum[0][i] += sum[0][i + 1];
                    sum[0][i] += __shfl_xor_sync(FULL_WARP, sum[0][i], 1);
                    sum[0][i] += __shfl_xor_sync(FULL_WARP, sum[0][i], 2);
                }
            }
            const int tile = first_tile + before * step;
#pragma unroll
            for (int i = 0; i < 4 * SETS; ++i) {
                if (PAIRED && i % 2) continue;
                const int at = PAIRED ? t : i / 4 * TOKENS + (HALVES ? t + i % 2 * 4 : t * 2 + i % 2);
                const int row = tile * ITEM_ROWS + g + i / 2 % 2 * 8;
                if (at >= m || row >= n) continue;
                const long long to = product_of(at) * n + row;
                const float own = PAIRED ? sum[i / 4][i % 4] + sum[i / 4][i % 4 + 1] : sum[i / 4][i % 4];
                const float product = own * (STAGED ? 1.0f : 1.0f / TIMES) * of_all;
                if (partial) partial[(long long)blockIdx.y * tokens * n + to] = product;
                else if constexpr (STAGED || PAIRED)
                    store_as(y, y_kind, to, product + bias_at<float>(bias, bias_kind, row));
                else store(y + to, product + bias_at<T>(bias, bias_kind, row));
            }
        }
        turn = turn + 1 == warps ? 0 : turn + 1;
        if (++place_before == cut.ring) place_before = 0, phase_before ^= 1;
    }
#endif
}
