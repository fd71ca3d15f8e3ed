// Products of up to 8 tokens, in int8 or floats of 16 bits, and ternary weights, whose codes are read in place, once,
// by the copy engine (from Hopper on). How codes are multiplied is said in linear/ternary_stream.cu; what differs is
// who has what: a warp has rows of its own and goes along them, so that it waits for no other warp, and the tokens are
// in shared memory for all warps of a block.
//
//     codes  --TMA, boxes of rows x 128 bytes, two at a time--> stages of the warp --16 B a lane--> mma
//     tokens --once--> pieces [step, load, token, t] of 16 bytes -----------------------------------> mma
//
// Two neighbouring boxes at a time, as memory gives lines that follow each other faster: 28672 x 8192 took 20 us by
// pieces of 64 bytes of a row, 17.3 by 128, 15.5 by 256. Where rows are few, a team of warps shares them, each has a
// part of the boxes, and their sums meet at the end.
//
// Where groups along K have scales, a lane takes 8 bytes of each 128 k, so that the four lanes of a row have the same
// group, and adds up the terms of its own outputs, from the first to the last.
#pragma once
#include "linear/fragments.cuh"
#include "linear/quantize.cuh"
#include "linear/ternary_operands.cuh"
#include "linear/token_codes.cuh"

// Of the host (kbitcupy/products/ternary_rows.py), ahead of this source: STEP, k of 64 bytes of codes; ROW_THREADS of a
// block; MOST_ROW_STAGES; MOST_SLOTS of a token; LANES, see linear/rms_norm.cuh; struct Group, see linear/experts.cu;
// FLOAT32_BIAS and its like.
constexpr int LINE = 128, SWIZZLE_UNIT = 1024, BOX_BYTES = ROWS * LINE, BOXES = 2, STAGE_BYTES = BOXES * BOX_BYTES,
              LINE_STEPS = LINE / STEP_BYTES, TARGET_UNIT = 128;

// Of 128 k with groups: how fields become sums. Which sum has a field, in what units, and whether the field is moved to
// the place of the one below. A sum begins with the bits of a float that becomes larger by it, in units of its last
// bit, less what the codes of the token add up to.
template <int GROUP>
struct Sums {
    static constexpr int COUNT = GROUP == 32 ? 4 : 2, GROUPS = BLOCK / GROUP;
    __device__ __forceinline__ static constexpr int of(int field) { return GROUP == 32 ? field : field / 2; }
    __device__ __forceinline__ static constexpr bool moves(int field) { return GROUP != 32 && field % 2; }
    __device__ __forceinline__ static constexpr int unit(int sum) { return 1 << (GROUP == 32 ? 2 : 4) * sum; }
    // The bits of 1.5 * 2^23 / unit: the last one counts 1 / unit, and the sum is below 2^22.
    __device__ __forceinline__ static constexpr int base(int sum) {
        return 0x4b400000 - ((GROUP == 32 ? 2 : 4) * sum << 23);
    }
    __device__ __forceinline__ static int begin(int group, int of_codes) {
        const int sum = group % GROUPS;
        return base(sum) - unit(sum) * of_codes;
    }
};

constexpr uint4 NOTHING{0, 0, 0, 0};

// sum = first + a * b, as mma_bytes has them.
__device__ __forceinline__ void mma_begin(
    int (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const uint4& first) {
#if __CUDA_ARCH__ >= 900
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=r"(sum[0]), "=r"(sum[1]), "=r"(sum[2]), "=r"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(first.x), "r"(first.y), "r"(first.z),
          "r"(first.w));
#endif
}

// The sums of the groups of 128 k, which become terms and are added to the totals.
//
// USABLE  whether all scales are known to be finite and not negative
// u, l   codes of rows g and g + 8       b      their tokens, of two fields each
// begin  what sums of each group begin with, see Sums
template <int GROUP, bool USABLE>
__device__ __forceinline__ void add_groups(
    float (&total)[4], const uint2& u, const uint2& l, const uint4 (&b)[2], const uint4 (&begin)[BLOCK / GROUP],
    const float (&of_token)[2], const float (&upper)[BLOCK / GROUP], const float (&lower)[BLOCK / GROUP]) {
    using Of = Sums<GROUP>;
    int sum[Of::COUNT][4];
#pragma unroll
    for (int f = 0; f < FIELDS; ++f) {
        const int place = Of::moves(f) ? f - 1 : f, by = 2 * (f - place);
        const unsigned mask = 0x03030303u << 2 * place;
        const uint4 four = b[f / 2];
        const unsigned a[4] = {u.x >> by & mask, l.x >> by & mask, u.y >> by & mask, l.y >> by & mask};
        const unsigned b0 = f % 2 ? four.z : four.x, b1 = f % 2 ? four.w : four.y;
        if (f > 0 && Of::of(f) == Of::of(f - 1)) mma_bytes<false>(sum[Of::of(f)], a, b0, b1);
        else
            mma_begin(
                sum[Of::of(f)], a, b0, b1, Of::of(f) < Of::GROUPS ? begin[min(Of::of(f), Of::GROUPS - 1)] : NOTHING);
    }
#pragma unroll
    for (int i = 0; i < Of::GROUPS; ++i) {
        const float of_group[2] = {USABLE ? upper[i] : usable(upper[i]), USABLE ? lower[i] : usable(lower[i])};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int bits = GROUP == 128 ? sum[0][e] + (sum[1][e] >> 4) : sum[i][e];
            const float number = __fsub_rn(__int_as_float(bits), __int_as_float(Of::base(i)));
            total[e] = ieee::add(total[e], ieee::multiply(ieee::multiply(number, of_token[e % 2]), of_group[e / 2]));
        }
    }
}

// Lines of a row. Tokens have room for as many, though what is behind their end counts for nothing: codes there are 0.
__device__ __forceinline__ int lines_of(int depth) { return (depth / FIELDS + LINE - 1) / LINE; }

// ---- warps
// -----------------------------------------------------------------------------------------------------------

// Rows that a warp multiplies in a pass: the number of the first one in the matrix of the tensor map, and how many.
struct Span {
    long long first;
    int count;
};

// How the work of a thread block is cut, by the host.
struct Cut {
    int share;    // warps of a team that have the same rows, at most as many as a row has lines; with groups 1
    int stages;   // of a warp
    int of_pass;  // rows of a pass at the most, those of a box
    int ahead;    // lines that are in the L2 cache, or on the way, when the kernel ahead ends
};

// What a warp fetches: its lines of the rows of its passes.
template <int GROUP>
struct Fetcher {
    static constexpr int PER_BLOCK = GROUP == 0 ? 0 : BLOCK / (GROUP == 0 ? 1 : GROUP);  // scales of 128 k
    static constexpr int LINE_BLOCKS = LINE_STEPS * 2, BLOCKS = BOXES * LINE_BLOCKS;     // times 128 k
    static constexpr int ROW_SCALES = BLOCKS * PER_BLOCK * 4;                            // bytes of a stage
    // ... of all rows, from a multiple of what TMA writes to.
    __device__ __forceinline__ static unsigned scales_of(int rows) {
        return (rows * ROW_SCALES + TARGET_UNIT - 1) / TARGET_UNIT * TARGET_UNIT;
    }

    const TensorMap* map;
    const TensorMap* scales;                   // GROUP: boxes of of_pass x ROW_SCALES
    unsigned codes_at, scales_at, full, zero;  // addresses of stages and of their barriers; 0
    int depth, stages, of_pass, scale_bytes, first_line, lines, pieces, passes;
    int pass = 0, piece = 0, to = 0;  // the next one

    // memory: the stages of all warps, then all their scales; behind them is room for tokens.
    __device__ __forceinline__ Fetcher(
        const TensorMap* map, const TensorMap* scales, unsigned memory, unsigned barriers, int depth, const Cut& cut,
        int mate, int passes, unsigned zero)
        : map(map),
          scales(scales),
          zero(zero),
          depth(depth),
          stages(cut.stages),
          of_pass(cut.of_pass),
          scale_bytes(scales_of(cut.of_pass)) {
        const int warp = warp_number(), all = lines_of(depth);
        codes_at = memory + warp * stages * STAGE_BYTES;
        scales_at = memory + ROW_WARPS * stages * STAGE_BYTES + warp * stages * scale_bytes;
        full = barriers + warp * MOST_ROW_STAGES * 8;
        first_line = all * mate / cut.share, lines = all * (mate + 1) / cut.share - first_line;
        pieces = (lines + BOXES - 1) / BOXES, this->passes = passes;
        if (threadIdx.x % WARP == 0) {
            for (int i = 0; i < stages; ++i) barrier_init(full + 8 * i, 1);
            fence_barrier_init();
        }
        __syncwarp();
    }
    __device__ __forceinline__ static unsigned bytes_of(const Cut& cut) {
        return ROW_WARPS * cut.stages * (STAGE_BYTES + scales_of(cut.of_pass));
    }
    // Fetch the next piece behind what was `read` from the stage. `span_of` gives the rows of a pass.
    template <typename S>
    __device__ __forceinline__ void fetch(const S& span_of, unsigned read) {
        if (pass < passes) {
            const Span span = span_of(pass);
            const int there = min(BOXES, lines - piece * BOXES), line = first_line + piece * BOXES;
            if (elect_lane()) {
                const unsigned target = codes_at + to * STAGE_BYTES, barrier = full + 8 * to;
                barrier_expect(barrier, of_pass * (there * LINE + ROW_SCALES) + zero_after(read, zero));
                for (int i = 0; i < there; ++i)
                    copy_box(target + i * BOX_BYTES, map, (line + i) * LINE, static_cast<int>(span.first), barrier);
                if constexpr (GROUP != 0)
                    copy_box(
                        scales_at + to * scale_bytes, scales, line * (ROW_SCALES / BOXES), static_cast<int>(span.first),
                        barrier);
            }
            if (++piece == pieces) piece = 0, ++pass;
            if (++to == stages) to = 0;
        }
    }
    // The first pieces, as many as there are stages.
    template <typename S>
    __device__ __forceinline__ void start(const S& span_of) {
        for (int i = 0; i < stages; ++i) fetch(span_of, 0);
    }
    // Bring lines from `first` on to the L2 cache: what the kernel ahead writes passes through it.
    template <typename S>
    __device__ __forceinline__ void prefetch(const S& span_of, int ahead, int first = 0) const {
        if (passes > 0 && elect_lane())
            for (int i = first; i < min(lines, ahead); ++i)
                prefetch_box(map, (first_line + i) * LINE, static_cast<int>(span_of(0).first));
    }
};

// Which row of each half of a pass lane (g, t) has: rows are exchanged so that those which are read together meet in no
// bank.
template <int GROUP>
__device__ __forceinline__ int own_row() {
    const int g = threadIdx.x % WARP / 4;
    return GROUP == 0 ? g % 2 * 4 + g / 2 : g % 4 * 2 + g / 4;
}

// Where a warp finds tokens in shared memory: pieces [step, load, token, t] of 16 bytes; of groups what their sums
// begin with, of one token and groups from 64 on [depth / GROUP], else [depth / GROUP, t] for each of a lane's four;
// and this lane's two scales.
struct Staged {
    unsigned column;        // of this lane, in the first piece
    int of_load;            // bytes from load to load
    unsigned begin, zeros;  // zeros: the address of 16 bytes of them
    bool single, finite;    // whether there is one token; whether all are finite, of floats
    float of_token[2];
};

// The lane's pieces of the token that it shows to mma. Columns beyond the last token repeat it: they are not written.
__device__ __forceinline__ Staged staged_at(unsigned staged, int tokens) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    return {
        staged + min(g, tokens - 1) * MEMBER_BYTES + t * CHUNK, tokens * MEMBER_BYTES, 0, 0, tokens == 1, false, {}};
}

// Codes as numbers below the least normal one, or just above it, which tensor cores multiply exactly: field f counts
// 4^f times the least number there is. That takes half the instructions of making trits of them (Floats), but sums are
// of codes, t + 1, times numbers: less the sum of the numbers, where that is finite.
//
//     UP    times which tokens are multiplied for that: bfloat16's least number is 2^-133, and sums of products with it
//           would have few bits
//     DOWN  times which its sums are what they should be
template <typename T>
struct Subnormals {
    using Sum = float;
    static constexpr int LOADS = 2 * FIELDS;
    static constexpr float UP = 1.0f, DOWN = 0x1p24f;

    __device__ __forceinline__ static void multiply(
        Sum (&sum)[FIELDS][4], const uint4& u, const uint4& l, const uint4 (&b)[LOADS]) {
        const unsigned upper[4] = {u.x, u.y, u.z, u.w}, lower[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned odd_upper = upper[i] >> 8, odd_lower = lower[i] >> 8;
#pragma unroll
            for (int f = 0; f < FIELDS; ++f) {
                const unsigned mask = 0x00030003u << 2 * f;
                const uint4& four = b[f * 2 + i / 2];
                mma_floats<T>(
                    sum[f], {upper[i] & mask, lower[i] & mask, odd_upper & mask, odd_lower & mask},
                    i % 2 == 0 ? four.x : four.z, i % 2 == 0 ? four.y : four.w);
            }
        }
    }
    __device__ __forceinline__ static Sum total(const Sum (&sum)[FIELDS][4], int e) {
        return DOWN * Floats<__half>::total(sum, e);
    }
};
template <>
constexpr float Subnormals<__nv_bfloat16>::UP = 0x1p100f;
template <>
constexpr float Subnormals<__nv_bfloat16>::DOWN = 0x1p33f;

// How floats of T are multiplied, and how where they are finite.
template <typename By>
struct FiniteOf {
    using Type = By;
};
template <typename T>
struct FiniteOf<Floats<T>> {
    using Type = Subnormals<T>;
};

// Where a lane's pieces of a step lie, behind its first one.
template <typename By>
struct PiecesOf {
    __device__ __forceinline__ static unsigned at(unsigned first, int step, int load, int of_load) {
        return first + (step * By::LOADS + load) * of_load;
    }
};

// Steps of two lines that have been read, as far as they are there.
template <typename By>
__device__ __forceinline__ void add_lines(
    typename By::Sum (&sum)[FIELDS][4], const uint4 (&u)[BOXES * LINE_STEPS], const uint4 (&l)[BOXES * LINE_STEPS],
    unsigned b_at, int of_load, int there) {
#pragma unroll
    for (int s = 0; s < BOXES * LINE_STEPS; ++s) {
        if (s / LINE_STEPS >= there) break;
        uint4 b[By::LOADS];
#pragma unroll
        for (int j = 0; j < By::LOADS; ++j) b[j] = shared_at<uint4>(PiecesOf<By>::at(b_at, s, j, of_load));
        By::multiply(sum, u[s], l[s], b);
    }
}

// Two lines of rows without groups.
template <typename By, typename S>
__device__ __forceinline__ void add_stage(
    typename By::Sum (&sum)[FIELDS][4], Fetcher<0>& fetcher, const S& span_of, unsigned here, unsigned b_at,
    int of_load, int there, bool finite) {
    const int own = own_row<0>(), t = threadIdx.x % 4;
    uint4 u[BOXES * LINE_STEPS], l[BOXES * LINE_STEPS];
    unsigned read = 0;
#pragma unroll
    for (int s = 0; s < BOXES * LINE_STEPS; ++s) {
        const unsigned at = here + s / LINE_STEPS * BOX_BYTES + ((s % LINE_STEPS * 4 + t) ^ own) * CHUNK;
        u[s] = shared_at<uint4>(at), l[s] = shared_at<uint4>(at + 8 * LINE);
        read |= u[s].w | l[s].w;
    }
    __syncwarp();
    fetcher.fetch(span_of, read);
    if (!SameType<By, typename FiniteOf<By>::Type>::VALUE && finite)
        add_lines<typename FiniteOf<By>::Type>(sum, u, l, b_at, of_load, there);
    else add_lines<By>(sum, u, l, b_at, of_load, there);
}

__device__ __forceinline__ unsigned largest_word(const uint4& v) { return max(max(v.x, v.y), max(v.z, v.w)); }
__device__ __forceinline__ float word_of(const uint4& v, int i) {
    return __uint_as_float(i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w);
}

// ... and with groups.
template <int GROUP, typename S>
__device__ __forceinline__ void add_stage_of_groups(
    float (&total)[4], Fetcher<GROUP>& fetcher, const S& span_of, unsigned here, unsigned scales, const Staged& tokens,
    int piece) {
    using Of = Fetcher<GROUP>;
    constexpr int PER_BLOCK = Of::PER_BLOCK, COUNT = Of::LINE_BLOCKS;
    const int own = own_row<GROUP>(), t = threadIdx.x % 4;
    unsigned read = 0;
#pragma unroll
    for (int line = 0; line < BOXES; ++line) {
        uint2 u[COUNT], l[COUNT];
        uint4 of_upper[PER_BLOCK], of_lower[PER_BLOCK];  // scales
        unsigned most = 0;                               // bits of the largest, or of what is none
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const unsigned at = here + line * BOX_BYTES + ((i * 2 + t / 2) ^ own) * CHUNK + t % 2 * 8;
            u[i] = shared_at<uint2>(at), l[i] = shared_at<uint2>(at + 8 * LINE);
            read |= u[i].y | l[i].y;
        }
#pragma unroll
        for (int j = 0; j < PER_BLOCK; ++j) {
            const unsigned at = scales + (line * PER_BLOCK + j) * CHUNK;
            of_upper[j] = shared_at<uint4>(at + min(own, fetcher.of_pass - 1) * Of::ROW_SCALES);
            of_lower[j] = shared_at<uint4>(at + min(own + 8, fetcher.of_pass - 1) * Of::ROW_SCALES);
            most = max(most, max(largest_word(of_upper[j]), largest_word(of_lower[j])));
        }
        if (line == BOXES - 1) {
            __syncwarp();
            fetcher.fetch(span_of, read | most);
        }
        const int block = (piece * BOXES + line) * COUNT, blocks = fetcher.depth / BLOCK - block;
        const auto add = [&](int i, bool all_usable) {
            const unsigned b_at = tokens.column + (block + i) * 2 * tokens.of_load;
            const uint4 b[2] = {shared_at<uint4>(b_at), shared_at<uint4>(b_at + tokens.of_load)};
            uint4 begin[PER_BLOCK];
#pragma unroll
            for (int j = 0; j < PER_BLOCK; ++j)
                begin[j] = shared_at<uint4>(tokens.begin + (((block + i) * PER_BLOCK + j) * 4 + t) * CHUNK);
            float upper[PER_BLOCK], lower[PER_BLOCK];
#pragma unroll
            for (int j = 0; j < PER_BLOCK; ++j) {
                upper[j] = word_of(of_upper[(i * PER_BLOCK + j) / 4], (i * PER_BLOCK + j) % 4);
                lower[j] = word_of(of_lower[(i * PER_BLOCK + j) / 4], (i * PER_BLOCK + j) % 4);
            }
            if (all_usable) add_groups<GROUP, true>(total, u[i], l[i], b, begin, tokens.of_token, upper, lower);
            else add_groups<GROUP, false>(total, u[i], l[i], b, begin, tokens.of_token, upper, lower);
        };
        // Whole lines of good scales: without branches in between blocks are computed side by side.
        if (blocks >= COUNT && __all_sync(FULL_WARP, most < 0x7f800000u)) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) add(i, true);
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (i < blocks) add(i, false);
        }
    }
}

// ... and of a single token, with groups of which a line has up to 8: a column of mma for each of them, in which the
// token is where the group is, and zeros elsewhere. So the four lanes of a row share the terms of the groups.
template <int GROUP, typename S>
__device__ __forceinline__ void add_stage_of_one(
    float (&total)[4], Fetcher<GROUP>& fetcher, const S& span_of, unsigned here, unsigned scales, const Staged& token,
    int piece) {
    using Fetched = Fetcher<GROUP>;
    using Of = Sums<GROUP>;
    constexpr int PER_BLOCK = Fetched::PER_BLOCK, COUNT = Fetched::LINE_BLOCKS, SUMS = GROUP == 128 ? 2 : 1;
    const int own = own_row<GROUP>(), lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    unsigned read = 0;
#pragma unroll
    for (int line = 0; line < BOXES; ++line) {
        uint2 u[COUNT], l[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const unsigned at = here + line * BOX_BYTES + ((i * 2 + t / 2) ^ own) * CHUNK + t % 2 * 8;
            u[i] = shared_at<uint2>(at), l[i] = shared_at<uint2>(at + 8 * LINE);
            read |= u[i].y | l[i].y;
        }
        // Of groups 2 t and 2 t + 1; with four of them lanes t = 2 and 3 have those of others, and nobody asks them.
        const unsigned scale_at = scales + line * PER_BLOCK * CHUNK + 2 * t % (COUNT * PER_BLOCK) * 4;
        const uint2 upper = shared_at<uint2>(scale_at + min(own, fetcher.of_pass - 1) * Fetched::ROW_SCALES);
        const uint2 lower = shared_at<uint2>(scale_at + min(own + 8, fetcher.of_pass - 1) * Fetched::ROW_SCALES);
        read |= upper.y | lower.y;
        if (line == BOXES - 1) {
            __syncwarp();
            fetcher.fetch(span_of, read);
        }
        const int block = (piece * BOXES + line) * COUNT, blocks = fetcher.depth / BLOCK - block;
        int sum[SUMS][4] = {};
        const uint2 begin = shared_at<uint2>(token.begin + (block * PER_BLOCK + 2 * t) * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[0][e] = static_cast<int>(e % 2 ? begin.y : begin.x);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {  // behind the end of rows codes are 0
#pragma unroll
            for (int f = 0; f < FIELDS; ++f) {
                const int column = i * PER_BLOCK + f / 2 % PER_BLOCK;
                const uint4 four = shared_at<uint4>(
                    g == column ? token.column + ((block + i) * 2 + f / 2) * token.of_load : token.zeros);
                const int place = Of::moves(f) ? f - 1 : f, by = 2 * (f - place);
                const unsigned mask = 0x03030303u << 2 * place;
                mma_bytes<false>(
                    sum[f / 2 % SUMS],
                    {u[i].x >> by & mask, l[i].x >> by & mask, u[i].y >> by & mask, l[i].y >> by & mask},
                    f % 2 ? four.z : four.x, f % 2 ? four.w : four.y);
            }
        }
        float term[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int bits = GROUP == 128 ? sum[0][e] + (sum[SUMS - 1][e] >> 4) : sum[0][e];
            const float number = __fsub_rn(__int_as_float(bits), __int_as_float(Of::base(GROUP == 128 ? 0 : e % 2)));
            const unsigned scale = e / 2 ? (e % 2 ? lower.y : lower.x) : (e % 2 ? upper.y : upper.x);
            term[e] = ieee::multiply(ieee::multiply(number, token.of_token[0]), usable(__uint_as_float(scale)));
        }
        const auto add = [&](int i) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                total[2 * half] =
                    ieee::add(total[2 * half], __shfl_sync(FULL_WARP, term[2 * half + i % 2], (lane & ~3) + i / 2));
        };
        if (blocks >= COUNT) {
#pragma unroll
            for (int i = 0; i < COUNT * PER_BLOCK; ++i) add(i);
        } else {
#pragma unroll
            for (int i = 0; i < COUNT * PER_BLOCK; ++i)
                if (i / PER_BLOCK < blocks) add(i);
        }
    }
}

// What a lane has of a row and a token in the end: a sum, or with groups the total of their terms.
template <typename By, int GROUP>
struct ResultOf {
    using Type = float;
};
template <typename By>
struct ResultOf<By, 0> {
    using Type = typename By::Sum;
};

// All passes of a warp. `begin` is called ahead of each, with its rows; `finish` gets them and the lane's results: of
// own rows (0, 0, 1, 1) of each half, own_row, and tokens 2 t + (0, 1, 0, 1).
template <typename By, int GROUP, typename S, typename B, typename F>
__device__ __forceinline__ void multiply_spans(
    Fetcher<GROUP>& fetcher, const S& span_of, const B& begin, const F& finish) {
    int from = 0;
    unsigned phase = 0;
    const unsigned own_line = fetcher.codes_at + own_row<GROUP>() * LINE;
#pragma unroll 1
    for (int pass = 0; pass < fetcher.passes; ++pass) {
        const Span span = span_of(pass);
        const Staged tokens = begin(pass, span);
        typename By::Sum sum[FIELDS][4] = {};
        float total[4] = {-0.0f, -0.0f, -0.0f, -0.0f};  // added to a number they change nothing
        const int of_line = LINE_STEPS * By::LOADS * tokens.of_load;
        unsigned b_at = tokens.column + fetcher.first_line * of_line;
#pragma unroll 1
        for (int piece = 0; piece < fetcher.pieces; ++piece, b_at += BOXES * of_line) {
            barrier_wait(fetcher.full + 8 * from, phase);
            const unsigned here = own_line + from * STAGE_BYTES;
            if constexpr (GROUP == 0) {
                add_stage<By>(
                    sum, fetcher, span_of, here, b_at, tokens.of_load, fetcher.lines - piece * BOXES, tokens.finite);
            } else {
                const unsigned scales = fetcher.scales_at + from * fetcher.scale_bytes;
                bool done = false;
                if constexpr (GROUP >= 64)
                    if (tokens.single)
                        add_stage_of_one<GROUP>(total, fetcher, span_of, here, scales, tokens, piece), done = true;
                if (!done) add_stage_of_groups<GROUP>(total, fetcher, span_of, here, scales, tokens, piece);
            }
            if (++from == fetcher.stages) from = 0, phase ^= 1;
        }
        if constexpr (GROUP == 0) {
            typename By::Sum totals[4];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                totals[e] = tokens.finite ? FiniteOf<By>::Type::total(sum, e) : By::total(sum, e);
            finish(pass, span, totals);
        } else {
            finish(pass, span, total);
        }
    }
}

// ---- one weight
// --------------------------------------------------------------------------------------------------------

// The passes over the rows of a team.
struct Spans {
    long long first, last;
    int of_pass;

    __device__ __forceinline__ Span operator()(int pass) const {
        const long long row = first + pass * of_pass;
        return Span{row, static_cast<int>(min(last - row, static_cast<long long>(of_pass)))};
    }
};

// Asks for the first codes, of so many stages or of all that are left, where that has not been done ahead of the wait
// for the previous kernel.
template <int GROUP>
struct Start {
    Fetcher<GROUP>& fetcher;
    const Spans& span_of;
    bool waits;

    __device__ __forceinline__ void operator()(int stages) const {
        for (int i = 0; i < stages && waits; ++i) fetcher.fetch(span_of, 0);
    }
};

// Products of a thread block's share of `rows` rows and up to TOKENS tokens.
//
// base    the first row of the weight in the matrix of the map
// waits   whether weights may have been written by the kernel ahead
// stage   called by all threads: brings the tokens to an address, and calls what it is given when they are on their way
// of_row  the scale and the bias of a row
// store   gets which of the lane's two tokens it is, its number, that of the row, the sum or total, scale and bias
template <typename By, int GROUP, typename G, typename R, typename F>
__device__ __forceinline__ void multiply_rows(
    const TensorMap* map, const TensorMap* scales, long long base, long long rows, int tokens, int depth,
    const Cut& cut, bool waits, const G& stage, const R& of_row, const F& store) {
    __shared__ alignas(8) unsigned long long barriers[ROW_WARPS * MOST_ROW_STAGES];
    const long long begin = base + rows * blockIdx.x / gridDim.x, end = base + rows * (blockIdx.x + 1) / gridDim.x;
    const int count = static_cast<int>(end - begin), teams = ROW_WARPS / cut.share;
    const int team = warp_number() / cut.share, mate = warp_number() % cut.share;
    const long long first = begin + count * team / teams, last = begin + count * (team + 1) / teams;
    const unsigned memory = (shared_address(dynamic_memory()) + SWIZZLE_UNIT - 1) / SWIZZLE_UNIT * SWIZZLE_UNIT;
    const Spans span_of{first, last, cut.of_pass};
    const int passes = static_cast<int>(last - first + cut.of_pass - 1) / cut.of_pass;
    Fetcher<GROUP> fetcher(map, scales, memory, shared_address(barriers), depth, cut, mate, passes, tokens >> 16);
    if (waits) {
        fetcher.prefetch(span_of, cut.ahead);
    } else {
        fetcher.start(span_of);
        if (cut.ahead > 0) fetcher.prefetch(span_of, cut.ahead, cut.stages * BOXES);
    }
    wait_for_previous();
    launch_dependents();
    const unsigned staged = memory + Fetcher<GROUP>::bytes_of(cut);
    Staged all = staged_at(staged, tokens);
    stage(staged, all, Start<GROUP>{fetcher, span_of, waits});
    float scale[2], bias[2];
    const int own = own_row<GROUP>(), t = threadIdx.x % 4;
    multiply_spans<By, GROUP>(
        fetcher, span_of,
        [&](int, const Span& span) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                of_row(span.first + min(own + 8 * half, span.count - 1), scale[half], bias[half]);
            return all;
        },
        [&](int, const Span& span, typename ResultOf<By, GROUP>::Type(&totals)[4]) {
            using Sum = typename By::Sum;
            if constexpr (GROUP == 0) {
                if (cut.share > 1) {
                    // All that this warp fetched has been read: its stages have room for the sums.
                    const unsigned own_sums = fetcher.codes_at + threadIdx.x % WARP * sizeof(totals);
                    if (mate > 0) store_shared(own_sums, totals);
                    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(cut.share * WARP) : "memory");
                    for (int i = 1; i < cut.share && mate == 0; ++i)
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            totals[e] += shared_at<Sum>(own_sums + i * cut.stages * STAGE_BYTES + e * sizeof(Sum));
                }
            }
            if (mate > 0) return;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int m = 2 * t + e % 2, row = own + e / 2 * 8;
                if (m < tokens && row < span.count)
                    store(e % 2, m, span.first + row, totals[e], scale[e / 2], bias[e / 2]);
            }
        });
}

// Pieces of fragments (linear/fragments.cuh) of some tokens to shared memory, by all threads.
template <int LOADS, typename F>
__device__ __forceinline__ void stage_fragments(
    unsigned staged, const unsigned char* a, int groups, int tokens, int depth, const F& number_of) {
    const int lane = threadIdx.x % WARP, m = lane / 4, loads = (depth + STEP - 1) / STEP * LOADS;
    if (m < tokens) {
        const long long p = number_of(m);
        const unsigned char* from = a + p / TOKENS * FRAGMENT_BYTES + (p % TOKENS * 4 + lane % 4) * CHUNK;
        const unsigned to = staged + lane * CHUNK;
#pragma unroll 8
        for (int i = threadIdx.x / WARP; i < loads; i += ROW_WARPS)
            copy_async<CHUNK>(
                to + i * tokens * MEMBER_BYTES, from + static_cast<long long>(i) * groups * FRAGMENT_BYTES);
    }
    commit_copies();
}

// Products of tokens of int8. `stage`, as of multiply_rows, also sets the sum of codes and the scale of each of the
// lane's two tokens.
template <typename By, typename T, typename G>
__device__ __forceinline__ void multiply_int8(
    const TensorMap* map, const float* __restrict__ scale, const void* __restrict__ bias, T* __restrict__ y,
    long long channels, int tokens, int depth, int scale_step, int bias_kind, const Cut& cut, bool waits,
    const int (&own_sum)[2], const float (&own_scale)[2], const G& stage) {
    multiply_rows<By, 0>(
        map, nullptr, 0, channels, tokens, depth, cut, waits, stage,
        [&](long long row, float& of, float& added) {
            of = usable(load_scale(scale + row * scale_step));
            added = bias_of(bias, bias_kind, row);
        },
        [&](int e, int m, long long row, int sum, float of, float added) {
            const float scaled = By::scaled(sum, own_sum[e], own_scale[e], of);
            from_float(y[m * channels + row], ieee::add(scaled, added));
        });
}

// ... of those that the kernel ahead leaves in fragments.
template <typename T>
__device__ __forceinline__ void multiply_fragments(
    const TensorMap* map, const unsigned char* a, const int* token_sum, const float* token_scale,
    const float* __restrict__ scale, const void* __restrict__ bias, T* __restrict__ y, long long channels, int tokens,
    int depth, int token_step, int scale_step, int bias_kind, const Cut& cut) {
    const int t = threadIdx.x % 4;
    int own_sum[2];
    float own_scale[2];
    multiply_int8<Integers<T>>(
        map, scale, bias, y, channels, tokens, depth, scale_step, bias_kind, cut, false, own_sum, own_scale,
        [&](unsigned staged, Staged&, const Start<0>& start) {
            start(cut.stages);
            stage_fragments<FIELDS>(staged, a, 1, tokens, depth, [](int m) { return static_cast<long long>(m); });
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int m = min(2 * t + e, tokens - 1);
                own_sum[e] = token_sum[m], own_scale[e] = usable(token_scale[m * token_step]);
            }
            wait_copies<0>();
            __syncthreads();
        });
}

template <typename T>
__global__ void __launch_bounds__(ROW_THREADS, 1) rows_ternary(
    const unsigned char* a,           // fragments
    const int* token_sum,             // [tokens] sums of their codes
    const float* token_scale,         // [tokens], or [1] if they share it
    const float* __restrict__ scale,  // [channels], or [1] if they share it
    const void* __restrict__ bias,    // [channels] of the type that bias_kind names, or null
    T* __restrict__ y,                // [tokens, channels]
    long long channels, int tokens, int depth, int token_step, int scale_step, int bias_kind, int share, int stages,
    int of_pass,
    const __grid_constant__ TensorMap map) {  // of codes: boxes of of_pass x LINE
#if __CUDA_ARCH__ >= 900
    multiply_fragments(
        &map, a, token_sum, token_scale, scale, bias, y, channels, tokens, depth, token_step, scale_step, bias_kind,
        Cut{share, stages, of_pass});
#endif
}

// What sums of groups begin with, from the sums of their codes [groups, TOKENS], by all threads; see Staged.
template <int GROUP>
__device__ __forceinline__ void stage_begin(unsigned begin, const int* group_sums, int groups, int tokens) {
    if (GROUP >= 64 && tokens == 1) {
        for (int i = threadIdx.x; i < groups; i += ROW_THREADS)
            store_shared(begin + i * 4, __int_as_float(Sums<GROUP>::begin(i, group_sums[i * TOKENS])));
        return;
    }
    for (int i = threadIdx.x; i < groups * 4; i += ROW_THREADS) {
        const int2 both = load_written(reinterpret_cast<const int2*>(group_sums) + i);
        const int first = Sums<GROUP>::begin(i / 4, both.x), second = Sums<GROUP>::begin(i / 4, both.y);
        const int four[4] = {first, second, first, second};
        store_shared(begin + i * CHUNK, four);
    }
}

// The same with scales of groups along K.
template <typename T, int GROUP>
__global__ void __launch_bounds__(ROW_THREADS, 1) rows_ternary_groups(
    const unsigned char* a,         // fragments in octets
    const int* group_sums,          // [ceil(depth / GROUP), TOKENS], see store_group_sums
    const float* token_scale,       // [tokens], or [1] if they share it
    const void* __restrict__ bias,  // [channels] of the type that bias_kind names, or null
    T* __restrict__ y,              // [tokens, channels]
    long long channels, int tokens, int depth, int token_step, int bias_kind, int stages, int of_pass,
    const __grid_constant__ TensorMap map,  // of codes: boxes of of_pass x LINE
    const __grid_constant__ TensorMap
        scales) {  // of [channels, depth / GROUP] in float32: boxes of of_pass x ROW_SCALES
#if __CUDA_ARCH__ >= 900
    const int t = threadIdx.x % 4;
    multiply_rows<Integers<T>, GROUP>(
        &map, &scales, 0, channels, tokens, depth, Cut{1, stages, of_pass}, false,
        [&](unsigned staged, Staged& all, const Start<GROUP>& start) {
            start(stages);
            stage_fragments<FIELDS>(staged, a, 1, tokens, depth, [](int m) { return static_cast<long long>(m); });
            // 16 bytes of zeros, and what the sums of groups begin with.
            all.zeros = staged + (depth + STEP - 1) / STEP * FIELDS * tokens * MEMBER_BYTES,
            all.begin = all.zeros + CHUNK;
            if (threadIdx.x < 4) store_shared(all.zeros + threadIdx.x * 4, 0.0f);
            stage_begin<GROUP>(all.begin, group_sums, depth / GROUP, tokens);
#pragma unroll
            for (int e = 0; e < 2; ++e) all.of_token[e] = usable(token_scale[min(2 * t + e, tokens - 1) * token_step]);
            wait_copies<0>();
            __syncthreads();
        },
        [&](long long row, float& of, float& added) { of = 0, added = bias_of(bias, bias_kind, row); },
        [&](int, int m, long long row, float total, float, float added) {
            from_float(y[m * channels + row], ieee::add(total, added));
        });
#endif
}

// Asks for codes while one token comes: for a stage when its numbers have been asked for, for the others when they have
// come.
struct Stages {
    const Start<0>& start;
    int count;

    __device__ __forceinline__ void operator()(int come) const { start(come ? count - 1 : 1); }
};

// The products of one token, which comes in this launch.
//
// bring     called by all threads: brings the codes of the token to an address, and what those of each warp add up to;
//           calls Stages as quantize_tokens does `asked`
// scale_of  gives the scale of the token, behind a barrier
template <typename T, typename B, typename S>
__device__ __forceinline__ void multiply_token(
    const TensorMap* map, const float* scale, const void* bias, T* y, long long channels, int depth, int scale_step,
    int bias_kind, const Cut& cut, const B& bring, const S& scale_of) {
    __shared__ __align__(16) int sums[ROW_WARPS];
    int own_sum = 0;
    float own_scale = 0;
    multiply_rows<Integers<T>, 0>(
        map, nullptr, 0, channels, 1, depth, cut, true,
        [&](unsigned staged, Staged&, const Start<0>& start) {
            bring(staged, sums, Stages{start, cut.stages});
            __syncthreads();
#pragma unroll
            for (int w = 0; w < ROW_WARPS; ++w) own_sum += sums[w];
            own_scale = usable(scale_of());
        },
        [&](long long row, float& of, float& added) {
            of = usable(load_scale(scale + row * scale_step));
            added = bias_of(bias, bias_kind, row);
        },
        [&](int, int, long long row, int sum, float of, float added) {
            from_float(y[row], ieee::add(Integers<T>::scaled(sum, own_sum, own_scale, of), added));
        });
}

// The same of one token of floats, which is quantized on the way: one launch. The first codes are brought to the L2
// cache ahead of the wait for the kernel before, then comes the token, and behind it the copies: with more under way
// the token comes later.
template <typename T>
__global__ void __launch_bounds__(ROW_THREADS, 1) rows_ternary_quantized(
    const T* x,                       // [depth]; this and the next from a multiple of 16 bytes on
    const float* norm,                // [depth] of RMSNorm, or null
    const float* __restrict__ scale,  // [channels], or [1] if they share it
    const void* __restrict__ bias,    // [channels] of the type that bias_kind names, or null
    T* __restrict__ y,                // [channels]
    double norm_share, double norm_eps, long long channels, int depth, int scale_step, int bias_kind, int normalizes,
    float eps, int lowest, int highest, int away, int share, int stages, int of_pass, int ahead,
    const __grid_constant__ TensorMap map) {  // of codes: boxes of of_pass x LINE
#if __CUDA_ARCH__ >= 900
    __shared__ float token_scale;
    multiply_token<T>(
        &map, scale, bias, y, channels, depth, scale_step, bias_kind, Cut{share, stages, of_pass, ahead},
        [&](unsigned staged, int (&sums)[ROW_WARPS], const Stages& asked) {
            quantize_tokens<T, 4, 1>(
                OneToken{staged, sums, token_scale}, [&](int m) { return x + static_cast<long long>(m) * depth; }, 1,
                depth, Quantizer{eps, lowest, highest, away},
                RootMeanSquare{normalizes != 0, norm, norm_share, norm_eps}, asked);
        },
        [&] { return token_scale; });
#endif
}

// ... and of one token that is int8 already, by all threads: neighbours stay together, so that bytes only move. What
// the bytes of each warp add up to goes to `sums`; `asked` as in quantize_tokens.
template <typename F>
__device__ __forceinline__ void stage_bytes(
    unsigned staged, const signed char* x, int depth, int (&sums)[ROW_WARPS], const F& asked) {
#if __CUDA_ARCH__ >= 800
    constexpr int HELD = 2, OF_WARP = WARP * CHUNK;  // pieces of a thread; k of a warp together
    // A warp's lanes (load, t) have the pieces of two steps, in the order in which they lie in shared memory.
    const int lane = threadIdx.x % WARP, t = lane % 4, load = lane / 4;
    const int in_warp = load / FIELDS * STEP + t / 2 * BLOCK + load % FIELDS * 32 + t % 2 * CHUNK;
    const auto place = [&](int i) { return i * ROW_WARPS + static_cast<int>(threadIdx.x) / WARP; };
    uint4 v[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int k = place(i) * OF_WARP + in_warp;
        v[i] = NOTHING;
        if (k < depth) v[i] = load_written(reinterpret_cast<const uint4*>(x + k));
    }
    asked(0);
    int sum = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        int word[4];
        word[0] = v[i].x, word[1] = v[i].y, word[2] = v[i].z, word[3] = v[i].w;
#pragma unroll
        for (int w = 0; w < 4; ++w) sum = __dp4a(word[w], 0x01010101, sum);
        if (place(i) * OF_WARP + in_warp < depth) store_shared(staged + place(i) * OF_WARP + lane * CHUNK, word);
    }
    sum = __reduce_add_sync(FULL_WARP, sum);
    if (lane == 0) sums[threadIdx.x / WARP] = sum;
    asked(1);
#endif
}

template <typename T>
__global__ void __launch_bounds__(ROW_THREADS, 1) rows_ternary_int8(
    const signed char* x,             // [depth], from a multiple of 16 bytes on
    const float* token_scale,         // [1]
    const float* __restrict__ scale,  // [channels], or [1] if they share it
    const void* __restrict__ bias,    // [channels] of the type that bias_kind names, or null
    T* __restrict__ y,                // [channels]
    long long channels, int depth, int scale_step, int bias_kind, int share, int stages, int of_pass, int ahead,
    const __grid_constant__ TensorMap map) {  // of codes: boxes of of_pass x LINE
#if __CUDA_ARCH__ >= 900
    float of_token = 0;
    multiply_token<T>(
        &map, scale, bias, y, channels, depth, scale_step, bias_kind, Cut{share, stages, of_pass, ahead},
        [&](unsigned staged, int (&sums)[ROW_WARPS], const Stages& asked) {
            of_token = *token_scale;  // needed later: codes are asked for meanwhile
            stage_bytes(staged, x, depth, sums, asked);
        },
        [&] { return of_token; });
#endif
}

// ---- floats of 16 bits
// ---------------------------------------------------------------------------------------------------

// Of a token: what its numbers add up to, and their magnitudes times Subnormals<T>::UP.
struct FloatSums {
    float sum, magnitude;
};

// Tokens, times UP or not, as pieces, see arrange_floats (linear/ternary_stream.cu), by all threads, and their sums.
// `row_of` gives the row of x that a token is. Behind the end of rows they are zero.
template <bool RAISED, typename T, typename F>
__device__ __forceinline__ void stage_floats(
    unsigned staged, const T* x, int tokens, int depth, const F& row_of, FloatSums (&sums)[MOST_SLOTS]) {
    __shared__ FloatSums of_warp[2][ROW_WARPS];
    constexpr float UP = Subnormals<T>::UP;
    constexpr bool SCALES = RAISED && UP != 1;
    const unsigned short* bits = reinterpret_cast<const unsigned short*>(x);
    const int of_token = lines_of(depth) * LINE_STEPS * (STEP / 4);
    const bool aligned = reinterpret_cast<unsigned long long>(x) % 8 == 0;
    for (int m = 0; m < tokens; ++m) {
        const unsigned short* row = bits + row_of(m) * depth;
        FloatSums own{0, 0};
#pragma unroll 4
        for (int i = threadIdx.x; i < of_token; i += ROW_THREADS) {
            const int k = i * 4, at = k % STEP, field = at % 128 / 32, t = at / 128 * 2 + at % 32 / 16,
                      word = at % 16 / 4;
            const int load = k / STEP * 2 * FIELDS + field * 2 + word / 2;
            unsigned low = 0, high = 0;
            if (k < depth && aligned) {
                const uint2 four = *reinterpret_cast<const uint2*>(row + k);
                low = __byte_perm(four.x, four.y, 0x5410), high = __byte_perm(four.x, four.y, 0x7632);
            } else if (k < depth) {
                low = row[k] | row[k + 2] << 16, high = row[k + 1] | row[k + 3] << 16;
            }
            float v[4] = {Word<T>::get(low, 0), Word<T>::get(low, 1), Word<T>::get(high, 0), Word<T>::get(high, 1)};
            if constexpr (SCALES) {
#pragma unroll
                for (int e = 0; e < 4; ++e) v[e] = ieee::multiply(v[e], UP), own.magnitude += fabsf(v[e]);
                low = Word<T>::pack(v), high = Word<T>::pack(v + 2);
            }
            own.sum += (v[0] + v[1]) + (v[2] + v[3]);
            store_shared(staged + (load * tokens + m) * MEMBER_BYTES + t * CHUNK + word % 2 * 8, low, high);
        }
        if constexpr (RAISED) {
#pragma unroll
            for (int step = WARP / 2; step > 0; step /= 2) {
                own.sum += __shfl_xor_sync(FULL_WARP, own.sum, step);
                if constexpr (SCALES) own.magnitude += __shfl_xor_sync(FULL_WARP, own.magnitude, step);
            }
            if (threadIdx.x % WARP == 0) of_warp[m % 2][threadIdx.x / WARP] = own;
            __syncthreads();
            if (threadIdx.x == 0) {
                const FloatSums(&all)[ROW_WARPS] = of_warp[m % 2];
                FloatSums total{0, 0};
#pragma unroll
                for (int w = 0; w < ROW_WARPS; w += 4) {
                    total.sum += (all[w].sum + all[w + 1].sum) + (all[w + 2].sum + all[w + 3].sum);
                    if constexpr (SCALES)
                        total.magnitude +=
                            (all[w].magnitude + all[w + 1].magnitude) + (all[w + 2].magnitude + all[w + 3].magnitude);
                }
                if constexpr (SCALES) total.sum *= 1 / UP;
                else total.magnitude = fabsf(total.sum);
                sums[m] = total;
            }
        }
    }
    __syncthreads();
}

// Whether tokens are finite, as far as their sums show it, and large enough for their products with subnormal numbers
// not to be some themselves; otherwise they are staged as they are.
template <typename T, typename F>
__device__ __forceinline__ bool stage_tokens(
    unsigned staged, const T* x, int tokens, int depth, const F& row_of, FloatSums (&sums)[MOST_SLOTS]) {
    stage_floats<true>(staged, x, tokens, depth, row_of, sums);
    bool good = true;
    for (int m = 0; m < tokens && good; ++m) {
        good = sums[m].magnitude < __int_as_float(0x7f800000);
        if (Subnormals<T>::UP != 1) good = good && (sums[m].magnitude > 0x1p50f || sums[m].magnitude == 0);
    }
    if (Subnormals<T>::UP != 1 && !good) {
        __syncthreads();
        stage_floats<false>(staged, x, tokens, depth, row_of, sums);
    }
    return good;
}

// What the sum of codes is less by then.
__device__ __forceinline__ float less_of(const FloatSums (&sums)[MOST_SLOTS], int m, bool finite) {
    return finite ? sums[m].sum : 0.0f;
}

template <typename T>
__global__ void __launch_bounds__(ROW_THREADS, 1) rows_ternary_floats(
    const T* x,                       // [tokens, depth]
    const float* __restrict__ scale,  // [channels], or [1] if they share it
    const void* __restrict__ bias,    // [channels] of the type that bias_kind names, or null
    T* __restrict__ y,                // [tokens, channels]
    long long channels, int tokens, int depth, int scale_step, int bias_kind, int share, int stages, int of_pass,
    const __grid_constant__ TensorMap map) {  // of codes: boxes of of_pass x LINE
#if __CUDA_ARCH__ >= 900
    __shared__ FloatSums sums[MOST_SLOTS];
    bool finite = false;
    multiply_rows<Floats<T>, 0>(
        &map, nullptr, 0, channels, tokens, depth, Cut{share, stages, of_pass, stages * BOXES}, true,
        [&](unsigned staged, Staged& all, const Start<0>& start) {
            start(stages);
            const auto row_of = [](int m) { return static_cast<long long>(m); };
            all.finite = finite = stage_tokens(staged, x, tokens, depth, row_of, sums);
        },
        [&](long long row, float& of, float& added) {
            of = usable(load_scale(scale + row * scale_step));
            added = bias_of(bias, bias_kind, row);
        },
        [&](int, int m, long long row, float sum, float of, float added) {
            from_float(
                y[m * channels + row], ieee::add(Floats<T>::scaled(sum - less_of(sums, m, finite), 0, 0, of), added));
        });
#endif
}

// ---- experts
// -------------------------------------------------------------------------------------------------------------

// Products of a token, number blockIdx.y, with the experts that it chose, of a share of their channels; where it has
// weights for them, those are added up at the end. Warps take spans of rows, of one expert after the other.
//
// stage   called by all threads when the first codes are on their way: brings the token, or one for each of its slots,
// to
//         an address
// scaled  the product of a slot from the sum and the scale of a row
// joined  the sum over slots, with the next of them
template <typename By, typename T, typename Id, typename G, typename C, typename J>
__device__ __forceinline__ void multiply_slots(
    const TensorMap* map, const Id* ids, const float* weights, const float* scale, T* y, long long experts,
    long long channels, int depth, int slots, int own_tokens, int scale_step, long long expert_step, const Cut& cut,
    const G& stage, const C& scaled, const J& joined) {
    __shared__ alignas(8) unsigned long long barriers[ROW_WARPS * MOST_ROW_STAGES];
    __shared__ int expert_of[MOST_SLOTS];
    const int begin = static_cast<int>(channels * blockIdx.x / gridDim.x);
    const int count = static_cast<int>(channels * (blockIdx.x + 1) / gridDim.x) - begin;
    const int spans = (count + cut.of_pass - 1) / cut.of_pass, warp = warp_number();
    const long long first_product = static_cast<long long>(blockIdx.y) * slots;
    const unsigned memory = (shared_address(dynamic_memory()) + SWIZZLE_UNIT - 1) / SWIZZLE_UNIT * SWIZZLE_UNIT;
    const unsigned staged = memory + Fetcher<0>::bytes_of(cut);
    const int tokens = own_tokens ? slots : 1;
    const unsigned products =
        staged + lines_of(depth) * LINE_STEPS * By::LOADS * tokens * MEMBER_BYTES;  // [slots, count]
    wait_for_previous();
    launch_dependents();
    if (threadIdx.x < slots) {
        const Id id = ids[first_product + threadIdx.x];
        expert_of[threadIdx.x] = id >= Id(0) && id < Id(experts) ? static_cast<int>(id) : -1;
    }
    __syncthreads();
    const auto slot_of = [&](int pass) { return (pass * ROW_WARPS + warp) / spans; };
    const auto span_of = [&](int pass) {
        const int expert = max(expert_of[slot_of(pass)], 0), first = (pass * ROW_WARPS + warp) % spans * cut.of_pass;
        return Span{expert * channels + begin + first, min(cut.of_pass, count - first)};
    };
    const int passes = max(0, slots * spans - warp + ROW_WARPS - 1) / ROW_WARPS;
    Fetcher<0> fetcher(map, nullptr, memory, shared_address(barriers), depth, cut, 0, passes, slots >> 16);
    fetcher.start(span_of);
    const bool finite = stage(staged, tokens);

    const int own = own_row<0>(), t = threadIdx.x % 4;
    float of_row[2];
    multiply_spans<By, 0>(
        fetcher, span_of,
        [&](int pass, const Span& span) {
            const int slot = slot_of(pass), expert = max(expert_of[slot], 0);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const long long row = span.first - expert * channels + min(own + 8 * half, span.count - 1);
                of_row[half] = usable(load_scale(scale + expert * expert_step + row * scale_step));
            }
            Staged at = staged_at(staged, 1);  // the token in all columns, of which the first one counts
            at.finite = finite;
            at.column += (own_tokens ? slot : 0) * MEMBER_BYTES, at.of_load *= tokens;
            return at;
        },
        [&](int pass, const Span& span, typename By::Sum(&totals)[4]) {
            const int slot = slot_of(pass), expert = expert_of[slot];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (t > 0 || own + 8 * half >= span.count) continue;
                const float product = expert < 0 ? 0.0f : scaled(slot, totals[2 * half], of_row[half]);
                const long long n = span.first - max(expert, 0) * channels + own + 8 * half;
                if (weights == nullptr) from_float(y[(first_product + slot) * channels + n], product);
                else store_shared(products + (slot * count + static_cast<int>(n) - begin) * 4, product);
            }
        });
    if (weights == nullptr) return;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += ROW_THREADS) {
        float sum = 0;
        for (int slot = 0; slot < slots; ++slot)
            sum = joined(slot, sum, weights[first_product + slot], shared_at<float>(products + (slot * count + i) * 4));
        from_float(y[blockIdx.y * channels + begin + i], sum);
    }
}

template <typename T, typename Id>
__global__ void __launch_bounds__(ROW_THREADS, 1) slots_ternary_floats(
    const T* x,                       // [tokens, depth], or one for each slot
    const Id* ids,                    // [tokens, slots]
    const float* weights,             // [tokens, slots], or null
    const float* __restrict__ scale,  // [experts, channels], or [experts] or [1] where they share it
    T* __restrict__ y,                // [tokens, slots, channels], or with weights [tokens, channels]
    long long experts, long long channels, long long expert_step, int depth, int slots, int own_tokens, int scale_step,
    int stages, int of_pass,
    const __grid_constant__ TensorMap map) {  // of codes: boxes of of_pass x LINE
#if __CUDA_ARCH__ >= 900
    __shared__ FloatSums sums[MOST_SLOTS];
    bool finite = false;
    multiply_slots<Floats<T>>(
        &map, ids, weights, scale, y, experts, channels, depth, slots, own_tokens, scale_step, expert_step,
        Cut{1, stages, of_pass},
        [&](unsigned staged, int tokens) {
            const auto row_of = [&](int m) { return static_cast<long long>(blockIdx.y) * tokens + m; };
            finite = stage_tokens(staged, x, tokens, depth, row_of, sums);
            return finite;
        },
        [&](int slot, float sum, float of) { return (sum - less_of(sums, own_tokens ? slot : 0, finite)) * of; },
        [](int, float sum, float weight, float product) { return fmaf(weight, product, sum); });
#endif
}

// ... and of tokens that are quantized on the way. What is added up has NumPy's bits.
template <typename T, typename Id>
__global__ void __launch_bounds__(ROW_THREADS, 1) slots_ternary_quantized(
    const T* x,                       // [tokens, depth], or one for each slot, from a multiple of 16 bytes on
    const Id* ids,                    // [tokens, slots]
    const float* weights,             // [tokens, slots], or null
    const float* __restrict__ scale,  // [experts, channels], or [experts] or [1] where they share it
    T* __restrict__ y,                // [tokens, slots, channels], or with weights [tokens, channels]
    long long experts, long long channels, long long expert_step, int depth, int slots, int own_tokens, int scale_step,
    float eps, int lowest, int highest, int away, int stages, int of_pass,
    const __grid_constant__ TensorMap map) {  // of codes: boxes of of_pass x LINE
#if __CUDA_ARCH__ >= 900
    __shared__ Quantized quantized[TOKENS];
    multiply_slots<Integers<T>>(
        &map, ids, weights, scale, y, experts, channels, depth, slots, own_tokens, scale_step, expert_step,
        Cut{1, stages, of_pass},
        [&](unsigned staged, int tokens) {
            const auto own = [&](int m) { return x + (static_cast<long long>(blockIdx.y) * tokens + m) * depth; };
            quantize_tokens<T, 2, 2>(
                FewTokens{staged, tokens, quantized}, own, tokens, depth, Quantizer{eps, lowest, highest, away},
                RootMeanSquare{false, nullptr, 0, 0}, [](int) {});
            __syncthreads();
            return false;
        },
        [&](int slot, int sum, float of) {
            const int m = own_tokens ? slot : 0;
            return Integers<T>::scaled(sum, quantized[m].sum, usable(quantized[m].scale), of);
        },
        [](int slot, float sum, float weight, float product) {
            const float term = ieee::multiply(product, weight);
            return slot == 0 ? term : ieee::add(sum, term);
        });
#endif
}

// The same for a mixture of experts with many tokens: a thread block takes up to TOKENS products of one expert, as
// group_tokens (linear/experts.cu) has sorted them, and a part of its channels.
template <typename Y, typename T>
__global__ void __launch_bounds__(ROW_THREADS, 1) rows_ternary_experts(
    const T* x,                       // [ceil(products / divisor), depth]
    const float* __restrict__ scale,  // [experts, channels], or [experts] or [1] where they share it
    const Group* groups,              // [gridDim.y]
    const int* order,                 // [products]
    Y* __restrict__ y,                // [products, channels]
    long long channels, int depth, int divisor, int scale_step, long long expert_step, int stages, int of_pass,
    const __grid_constant__ TensorMap map) {  // of codes: boxes of of_pass x LINE
#if __CUDA_ARCH__ >= 900
    __shared__ FloatSums sums[MOST_SLOTS];
    wait_for_previous();
    launch_dependents();
    const Group group = groups[blockIdx.y];
    if (group.expert < 0) {  // of products of no expert, or of no products
        const long long first = channels * blockIdx.x / gridDim.x, last = channels * (blockIdx.x + 1) / gridDim.x;
        for (int m = 0; m < group.count; ++m)
            for (long long n = first + threadIdx.x; n < last; n += ROW_THREADS)
                from_float(y[order[group.first + m] * channels + n], 0.0f);
        return;
    }
    const float* scales = scale + group.expert * expert_step;
    const long long base = group.expert * channels;
    bool finite = false;
    multiply_rows<Floats<T>, 0>(
        &map, nullptr, base, channels, group.count, depth, Cut{1, stages, of_pass}, false,
        [&](unsigned staged, Staged& all, const Start<0>&) {
            const auto row_of = [&](int m) { return static_cast<long long>(order[group.first + m] / divisor); };
            all.finite = finite = stage_tokens(staged, x, group.count, depth, row_of, sums);
        },
        [&](long long row, float& of, float& added) {
            of = usable(load_scale(scales + (row - base) * scale_step));
            added = 0;
        },
        [&](int, int m, long long row, float sum, float of, float) {
            from_float(y[order[group.first + m] * channels + row - base], (sum - less_of(sums, m, finite)) * of);
        });
#endif
}

// ... and of tokens that are quantized on the way, of which a block keeps the numbers in registers.
template <typename Y, typename T>
__global__ void __launch_bounds__(ROW_THREADS, 1) rows_ternary_experts_quantized(
    const T* x,                       // [ceil(products / divisor), depth], from a multiple of 16 bytes on
    const float* __restrict__ scale,  // [experts, channels], or [experts] or [1] where they share it
    const Group* groups,              // [gridDim.y]
    const int* order,                 // [products]
    Y* __restrict__ y,                // [products, channels]
    long long channels, int depth, int divisor, int scale_step, long long expert_step, float eps, int lowest,
    int highest, int away, int stages, int of_pass,
    const __grid_constant__ TensorMap map) {  // of codes: boxes of of_pass x LINE
#if __CUDA_ARCH__ >= 900
    __shared__ Quantized quantized[TOKENS];
    __shared__ int product[TOKENS];
    wait_for_previous();
    launch_dependents();
    const Group group = groups[blockIdx.y];
    if (threadIdx.x < group.count) product[threadIdx.x] = order[group.first + threadIdx.x];
    __syncthreads();
    if (group.expert < 0) {  // of products of no expert, or of no products
        const long long first = channels * blockIdx.x / gridDim.x, last = channels * (blockIdx.x + 1) / gridDim.x;
        for (int m = 0; m < group.count; ++m)
            for (long long n = first + threadIdx.x; n < last; n += ROW_THREADS)
                from_float(y[product[m] * channels + n], 0.0f);
        return;
    }
    const float* scales = scale + group.expert * expert_step;
    const long long base = group.expert * channels;
    const int t = threadIdx.x % 4;
    Quantized own[2];
    multiply_rows<Integers<T>, 0>(
        &map, nullptr, base, channels, group.count, depth, Cut{1, stages, of_pass}, false,
        [&](unsigned staged, Staged&, const Start<0>&) {
            const auto row_of = [&](int m) { return x + static_cast<long long>(product[m] / divisor) * depth; };
            const FewTokens to{staged, group.count, quantized};
            const Quantizer by{eps, lowest, highest, away};
            const RootMeanSquare norm{false, nullptr, 0, 0};
            if (depth <= 2 * RUN) quantize_tokens<T, 2, 2>(to, row_of, group.count, depth, by, norm, [](int) {});
            else quantize_tokens<T, 4, 1>(to, row_of, group.count, depth, by, norm, [](int) {});
            __syncthreads();
#pragma unroll
            for (int e = 0; e < 2; ++e) own[e] = quantized[min(2 * t + e, group.count - 1)];
        },
        [&](long long row, float& of, float& added) {
            of = usable(load_scale(scales + (row - base) * scale_step));
            added = 0;
        },
        [&](int e, int m, long long row, int sum, float of, float) {
            from_float(
                y[product[m] * channels + row - base], Integers<T>::scaled(sum, own[e].sum, usable(own[e].scale), of));
        });
#endif
}
