// Products of up to 16 int8 tokens with integer codes, which are read in place, once, and multiplied by integer tensor
// cores. The contract is that of kbitcupy/products/integers.py; the host is kbitcupy/products/integer_stream.py.
//
//     codes   --boxes of 16 rows x 128 bytes, TMA or cp.async--> a ring of each warp --and, shift--> a of mma
//     tokens  --in the order of fragments (linear/integer_activations.cuh)--> registers ----------------> b of mma
//     numbers --quantized by each block (linear/integer_tokens.cuh), shared memory--> the same, of very few tokens
//     scales  --a tile ahead in registers--> shared memory, float32
//     sums    --ring of tiles in shared memory--> one warp adds up those of all --> y
//
// A team of warps has a tile of 16 rows at a time, and each warp of it a share of K, whose tokens stay in its registers
// while it goes through one tile after the other; of a longer K there are phases, and what a tile has so far is kept.
// A slot of the ring is asked for again as soon as it has been read. No warp waits for another but where a tile's sums
// are added up, some tiles later.
//
// The first slots are asked for while tokens are still being quantized: by another launch all of them, but of q4_k; by
// the block itself one of each warp, and the others when its numbers have arrived. With more than 64 KB under way on a
// multiprocessor, or with lines brought to the L2 cache beforehand, everything comes later, tokens first of all: that,
// tokens in shared memory, and warps of a block that wait for all of them, were 8 us of the first version,
// 28672 x 8192 on an H200.
//
// Sums of a unit, elements that share all scales, are exact: codes of 4 bits stand in the upper half of a byte, where
// they count 16 times what they are; an mma begins with the bits of a float whose last bit counts 1, or 1/16, and the
// sum is read as a float less that number. Unsigned ones whose units are their own may stand in the lower half as well.
// A zero point is taken off there, times the sum of the tokens' codes. Where all of a row is one unit, sums stay
// integers to the end. What a table has for codes is two bytes each, which two mma add up (Pairs).
#include "linear/integer_stream_sums.cuh"

// Of the host, ahead of this source: struct IntegerWeight and struct Cut; numbers of `added`, of dtypes, of codes
// (NEIGHBOURS4, HALVES4, PAIRS4, BYTES8, and of what has blocks of 256 as Blocks: MINIMA4 as HALVES4; TABLE4 as
// NEIGHBOURS4 and TABLE_HALVES4 as HALVES4, into a table), of units (SHARES, LONG_UNIT) and of a bias; STREAM_THREADS,
// the most of a block; of eight tokens SHARE_OF_EIGHT, of sixteen SHARE_OF_SIXTEEN, k of a warp; FEW_REGISTERS for a
// block that quantizes tokens (linear/integer_tokens.cu); SPLIT, thread blocks of a cluster that have the same rows and
// other parts of K (linear/integer_stream_split.cu). SUMS_RING tiles have room for their sums, which are added up
// SUMS_LATER tiles later. MINIMA_OF_BLOCK words for the minima of 256 k of q4_k, those of a unit MINIMA_STEP words
// behind those of the one before: so lanes meet in no bank.

#ifndef CLUSTER_BOUNDS
#define CLUSTER_BOUNDS
#endif

// The shared memory of a block, and the barriers in it, by their addresses: of the slots of a warp, and of the sums of
// a team, where they are written and where they have been read.
template <typename Of, typename Scale, int RECORD_BYTES, int EIGHTS>
struct Memory {
    static constexpr int SUMS = EIGHTS * WARP;  // of a warp and tile, in pieces of 16 bytes
    static constexpr int RING = SUMS_RING, LATER = SUMS_LATER;
    unsigned char* start;
    const Cut& cut;
    int warp, team, member;

    __device__ __forceinline__ unsigned ring() const { return shared_address(start) + warp * cut.ring * SLOT_BYTES; }
    __device__ __forceinline__ float* scales() const {
        return reinterpret_cast<float*>(start + cut.scales_at + warp * Scale::BYTES);
    }
    __device__ __forceinline__ unsigned* records() const {
        return reinterpret_cast<unsigned*>(start + cut.records_at + warp * RECORD_BYTES);
    }
    __device__ __forceinline__ float4* sums(int slot, int of) const {
        return reinterpret_cast<float4*>(start + cut.sums_at) + ((team * RING + slot) * cut.warps + of) * SUMS;
    }
    __device__ __forceinline__ float4* kept(int tile) const {
        return reinterpret_cast<float4*>(start + cut.kept_at) + (team * cut.kept + tile) * SUMS;
    }
    __device__ __forceinline__ unsigned full() const {
        return shared_address(start + cut.barriers_at) + warp * cut.ring * 8;
    }
    __device__ __forceinline__ unsigned written(int slot) const {
        return shared_address(start + cut.barriers_at) +
               (cut.warps * cut.teams * cut.ring + (team * RING + slot) * 2) * 8;
    }
    __device__ __forceinline__ unsigned read(int slot) const { return written(slot) + 8; }

    __device__ __forceinline__ void begin(int lane) const {
        if (lane == 0) {
            for (int i = 0; i < cut.ring; ++i) barrier_init(full() + 8 * i, BULK ? 1 : WARP);
            if (member == 0)
                for (int i = 0; i < RING; ++i) barrier_init(written(i), cut.warps * WARP), barrier_init(read(i), WARP);
            if constexpr (BULK) fence_barrier_init();
        }
        __syncwarp();
    }
};

__device__ __forceinline__ int rank_in_cluster() {
#if __CUDA_ARCH__ >= 900
    if constexpr (SPLIT > 1) return block_in_cluster();
#endif
    return 0;
}

// Adds up what the blocks of a cluster have kept of the tiles of a team, in their order, and finishes every SPLIT-th
// tile.
template <int UNIT, int EIGHTS, typename M, typename F>
__device__ __forceinline__ void join_cluster(const M& memory, int rank, int count, int lane, const F& finish) {
#if __CUDA_ARCH__ >= 900
    cluster_sync();
    for (int i = memory.member; i < count * EIGHTS; i += memory.cut.warps) {
        const int tile = i / EIGHTS, e = i % EIGHTS;
        if (tile % SPLIT != rank) continue;
        const unsigned from = shared_address(memory.kept(tile) + e * WARP + lane);
        float4 total{};
#pragma unroll
        for (int part = 0; part < SPLIT; ++part) {
            const uint4 v = load_cluster<uint4>(cluster_address(from, part));
            const float4 sums =
                make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
            if (part == 0) total = sums;
            else join<UNIT>(total, sums);
        }
        finish(tile, e, total);
    }
    cluster_sync();  // others may still read sums here
#endif
}

// What is done between finding out where tokens lie and asking for them.
template <typename F>
struct Waiting : F {
    static constexpr bool WAITS = true;
    __device__ __forceinline__ explicit Waiting(const F& wait) : F(wait) {}
};

struct NoWait {
    static constexpr bool WAITS = false;
    __device__ __forceinline__ void operator()() const {}
};

// A tile of the team, the phase, and which of the warps adds up its sums: in all phases the same.
struct Turn {
    int tile, phase, warp;

    __device__ __forceinline__ void step(int tiles, int warps) {
        if (++warp == warps) warp = 0;
        if (++tile == tiles) tile = 0, warp = 0, ++phase;
    }
};

// The most registers. Where tokens have scales of 32, blocks of quantize_few_integers that wait for this product to end
// find room beside it; but sixteen tokens beside a table's INNER scales would be spilled for that.
__device__ __forceinline__ constexpr int most_registers(int codes, int unit, int added, bool q8, int eights) {
    const int threads = most_threads(codes, unit, added, eights);
    if (q8 && (added != INNER || eights <= 1)) return (65536 - FEW_REGISTERS) / threads;
    return threads > 256 ? 128 : 255;
}

#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 4)
#define STREAM_BOUNDS(codes, unit, added, q8, eights) __maxnreg__(most_registers(codes, unit, added, q8, eights))
#else
#define STREAM_BOUNDS(codes, unit, added, q8, eights) __launch_bounds__(most_threads(codes, unit, added, eights), 1)
#endif

// UNIT: SHARES where groups are whole shares, or several. TOKENS: in eights; 0 for one token.
template <int CODES, int UNIT, int ADDED_, bool Q8, bool SIGNED, int TOKENS>
__global__ void CLUSTER_BOUNDS STREAM_BOUNDS(CODES, UNIT, ADDED_, Q8, TOKENS) stream_integers(
    const __grid_constant__ IntegerWeight w,  // of [channels, depth]
    const __grid_constant__ Cut cut,
    const __grid_constant__ TensorMap map,  // of codes: boxes of 16 rows x 128 bytes, in their swizzle
    const void* numbers,  // tokens, [tokens, depth] of the type that x_kind names, which blocks quantize; or null
    const unsigned char* a, const float* token_scale, const int* sums,  // see Tokens
    const void* ids,   // of experts: each product has one, and a row of thread blocks; or null, as with Of::BLOCKS
    const void* bias,  // [channels] of the type that bias_kind names; 0 for none
    void* y,           // [tokens, channels] of the type that y_kind names
    int channels, int tokens, int padded, int depth, int experts,
    int slots,       // products of a token
    int scale_step,  // 0 where all tokens have one scale
    unsigned flip,   // what turns over the highest bit of codes, in all bytes
    int less,        // ... and what codes are lower by after that
    int bias_kind, int y_kind, int x_kind,
    int id_bytes) {  // of each of the ids, which are int32 or int64
#if __CUDA_ARCH__ >= 800
    constexpr bool ALONE = TOKENS == 0;
    constexpr int EIGHTS = ALONE ? 1 : TOKENS;
    constexpr int INSIDE = UNIT == SHARES ? 0 : UNIT;  // of a share
    using Of = Slot<CODES, UNIT, ADDED_, EIGHTS, ALONE>;
    using Scale = typename ScalesOf<Of, CODES, INSIDE, ADDED_>::Type;
    constexpr int BESIDE = Of::INNER || Of::BLOCKS ? NOTHING : ADDED_;  // what each unit has beside its scale
    using Entry = Record<BESIDE, Q8>;
    static_assert(!ALONE || (Q8 && Of::SHARE == WARP * SIXTEEN), "a turn of OwnShares is a share");
    constexpr int SUM_PIECES = INSIDE ? Of::SHARE / (INSIDE ? INSIDE : 1) * 8 * EIGHTS * Entry::WORDS : 0;  // at which
    constexpr int RECORD = (SUM_PIECES + (Of::MINIMA ? Of::SHARE / 256 * EIGHTS * WARP * 4 : 0)) * 4;
    const int lane = threadIdx.x % WARP, warp = warp_number(), g = lane / 4, t = lane % 4, own_row = Of::row(g);
    const int team = warp / cut.warps, member = warp % cut.warps;
    const int rank = rank_in_cluster(), share = rank * cut.warps + member;  // of the warp, among those of a phase
    const int teams = gridDim.x / SPLIT;                                    // with one number in their blocks
    const int tiles = (channels + ROWS_OF_TILE - 1) / ROWS_OF_TILE, step = teams * cut.teams;
    const int first = team * teams + blockIdx.x / SPLIT, count = first < tiles ? (tiles - first + step - 1) / step : 0;
    unsigned char* const start = dynamic_memory();
    using Parts = Memory<Of, Scale, RECORD, EIGHTS>;
    constexpr int RING = Parts::RING, LATER = Parts::LATER;
    const Parts memory{start + (-shared_address(start) & 1023u), cut, warp, team, member};
    memory.begin(lane);

    int above = 0;  // rows of the experts before
    if (!Of::BLOCKS && ids != nullptr) {
        wait_for_previous();
        const unsigned long long at = reinterpret_cast<unsigned long long>(ids) + 1ull * blockIdx.y * id_bytes;
        const int low = static_cast<int>(load_word(at)), high = id_bytes == 4 ? low >> 31 : load_word(at + 4);
        const long long expert = static_cast<long long>(high) << 32 | static_cast<unsigned>(low);
        if (expert < 0 || expert >= experts) return;
        above = static_cast<int>(expert) * channels;
    }
    Feed<Of> feed{w, map, cut, experts * channels, depth / (Of::BYTES ? 1 : 2), lane, memory.ring(), memory.full()};
    feed.first = above + first * ROWS_OF_TILE, feed.step = step * ROWS_OF_TILE, feed.count = count;
    feed.column = share * (Of::SLOTS * ROW_BYTES);
    feed.begin(cut.phases);
    Scale ahead;
    // With blocks numbers are worked out anew where they are used, if registers are few.
    constexpr bool ANEW = Of::BLOCKS && (EIGHTS == 2 || ALONE || Of::MINIMA || ADDED_ == INNER);
    const auto anew = [](int v) { return ANEW ? static_cast<int>(opaque(static_cast<unsigned>(v))) : v; };
    auto load_scales = [&](int tile, int phase) {
        const int mine = anew(lane), row = min((first + tile * step) * ROWS_OF_TILE + mine / 2, channels - 1);
        const int k = phase < cut.phases ? (phase * SPLIT * cut.warps + share) * Of::SHARE : depth;
        if constexpr (Scale::BYTES != 0) ahead.load(w, cut, above + row, min(k, depth), depth, mine % 2);
    };
    load_scales(0, 0);
    __syncthreads();                                    // all barriers are there
    if (!Of::INNER && numbers == nullptr) feed.fill();  // q4_k's many loads of scales would wait behind it
    // Tokens that the block quantizes itself. An odd number of them in a fragment, so that lanes meet in no bank.
    constexpr int SUMMED = UNIT == SHARES ? LONG_UNIT : UNIT;
    const auto quantized = [&] {
        const int reach = (depth + 127) / 128 * 128, units = Q8 ? (depth + Q8_BLOCK - 1) / Q8_BLOCK : 1;
        unsigned char* const codes = start + cut.tokens_at;
        float* const scales = reinterpret_cast<float*>(codes + reach * (tokens | 1));
        int* const behind = reinterpret_cast<int*>(scales + units * (tokens | 1));
        return Fragments<layout_of(CODES, UNIT), SUMMED, Q8>{
            codes, scales, behind, reinterpret_cast<unsigned*>(start + cut.sums_at), tokens | 1};
    };
    const auto first_token = [&] {
        return Of::BLOCKS || ids == nullptr ? 0 : static_cast<int>(opaque(blockIdx.y)) / slots;
    };
    // Found anew where tokens are read: it would take registers all the time.
    const auto given = [&] {
        const int every = opaque(padded);
        if constexpr (EIGHTS == 1)
            if (numbers != nullptr) {
                const auto own = quantized();
                return Tokens{own.codes, own.scales, own.sums, own.padded, 0, tokens};
            }
        return Tokens{a, token_scale, sums, every, first_token(), tokens};
    };
    const unsigned zero = unsigned(cut.whole) >> 1;  // see zero_after
    const auto begin_tokens = [&] {
        wait_for_previous();
        launch_dependents();
    };
    // Where another launch quantizes up to eight tokens by blocks it is waited for in the loop: to find out all that
    // does not depend on them would take .3 us behind it. More tokens leave no registers for that; nor do those with
    // one scale, beside whose products blocks that quantize rows find room, but for long units with zero points.
    // STAGED: there the first scales come to shared memory while it is waited for, and where tokens lie is known by
    // then. For short units that is no gain: products by q4_0 would take 3 % longer.
    constexpr bool STAGED = EIGHTS == 1 && INSIDE >= 128 && ADDED_ == ZERO_POINTS;
    constexpr bool LATE = EIGHTS == 1 && (Q8 || STAGED);
    // The scales at hand to shared memory, and those of the tile behind them asked for.
    const auto stage_scales = [&](const Turn& next, bool unusual) {
        if constexpr (Scale::BYTES != 0) {
            __syncwarp();  // all lanes have read those of the tile before
            const int mine = anew(lane);
            if constexpr (Of::POWERS && !Of::PAIRED) {
                if (unusual) ahead.store(w, memory.scales(), mine / 2, mine % 2, less);
                else ahead.store(w, memory.scales(), mine / 2, mine % 2, less, true);
            } else {
                ahead.store(w, memory.scales(), mine / 2, mine % 2, less);
            }
            __syncwarp();
            load_scales(next.tile, next.phase);
        }
    };
    if constexpr (!LATE) begin_tokens();
    if constexpr (EIGHTS == 1) {
        if (numbers != nullptr) {
            constexpr int HELD = Q8 ? 4 : 2;
            if constexpr (STAGED) begin_tokens();
            const auto shares = [&] {
                if constexpr (ALONE) return OwnShares{warp};
                else return Shares(tokens);
            }();  // before there is anything to wait for, with blocks
            if constexpr (Q8) begin_tokens();
            const long long first = static_cast<long long>(first_token()) * depth;
            int asked = 1;  // slots: the others do not delay numbers, and come while these are quantized
            const auto fill = [&](unsigned arrived) {
#pragma unroll 1
                for (; asked < cut.ring; ++asked) feed.fetch(asked, zero_after(arrived, zero));
            };
            if (x_kind == FLOAT16_BIAS)
                quantized().template quantize<HELD>(
                    static_cast<const __half*>(numbers) + first, shares, tokens, depth, fill);
            else if (x_kind == BFLOAT16_BIAS)
                quantized().template quantize<HELD>(
                    static_cast<const __nv_bfloat16*>(numbers) + first, shares, tokens, depth, fill);
            else
                quantized().template quantize<(HELD + 1) / 2>(
                    static_cast<const float*>(numbers) + first, shares, tokens, depth, fill);
            fill(0);
            // The turns of one token are the shares of the only team: a warp reads what it has quantized itself.
            if (ALONE && cut.teams == 1) __syncwarp();
            else __syncthreads();
        }
    }
    if (STAGED && numbers == nullptr) {
        Turn second{0, 0, 0};
        second.step(count, cut.warps);
        stage_scales(second, false);
    }
    float2 of_token[EIGHTS];
    int2 of_codes[EIGHTS];
    const Output output{
        bias,
        bias_kind,
        y_kind,
        channels,
        tokens,
        less,
        depth,
        above,
        static_cast<char*>(y) + static_cast<long long>(blockIdx.y) * channels * (y_kind == FLOAT32_BIAS ? 4 : 2)};
    const Pairs<CODES, Of::TABLE && (EIGHTS == 1 || (BULK && ADDED_ != INNER)), Of::PAIRED>
        pairs;  // sixteen tokens leave no register
    unsigned x[EIGHTS][Of::SHARE / FRAGMENT_K][4];
    // Of one token lanes have units 2t and 2t + 1 of eight, else tokens.
    const float* own_scales = memory.scales() + 2 * own_row * Scale::WORDS + (ALONE ? 2 * t * ROWS_OF_TILE : 0);
    // Registers that four words take side by side would spill beside those of sixteen tokens.
    constexpr bool TOGETHER = EIGHTS == 1 || (BULK && ADDED_ != INNER);
    const unsigned part = Of::part(lane);
    const unsigned* own_records = memory.records() + 2 * t * (ALONE ? 8 : 1) * Entry::WORDS;
    Turn now{0, 0, 0}, before{0, 0, 0};
    // EARLY: a tile's first slot is taken before its scales come to shared memory, which takes long with powers of two.
    constexpr bool EARLY = Of::POWERS && !Of::PAIRED;
    for (int pass = 0; pass < cut.phases * anew(count) + LATER; ++pass) {
        if (pass < cut.phases * anew(count)) {
            if (now.tile == 0) {
                if (LATE && !STAGED && pass == 0 && numbers == nullptr) begin_tokens();
                const int k = (now.phase * SPLIT * cut.warps + share) * Of::SHARE;
                const Tokens own = given();
                Records<Of, INSIDE, BESIDE, Q8, EIGHTS> records;
                // Records are few, and waited for first.
                if constexpr (STAGED) {
                    const auto wait = [&] {
                        if (pass == 0 && numbers == nullptr) begin_tokens();
                    };
                    const auto load_records = [&] { records.load(own, k, depth, lane, Waiting(wait)); };
                    load_tokens<Of, EIGHTS>(x, own, k, depth, lane, Waiting(load_records));
                    if (pass == 0) load_whole<UNIT, Q8, true>(of_token, of_codes, own, scale_step, t);
                    records.store(memory.records(), own.count, lane);
                } else if constexpr (Of::BLOCKS) {
                    records.load(own, k, anew(depth), anew(lane), NoWait{});
                    load_tokens<Of, EIGHTS>(x, own, k, anew(depth), anew(lane), NoWait{});
                    records.store(memory.records(), own.count, anew(lane));
                } else {
                    records.load(own, k, depth, lane, NoWait{});
                    load_tokens<Of, EIGHTS>(x, own, k, depth, lane, NoWait{});
                    if (Of::INNER && pass == 0 && numbers == nullptr) feed.fill();  // tokens do not wait behind it
                    records.store(memory.records(), own.count, lane);
                }
                if constexpr (ALONE) spread_units(x[0], g);
                if (!STAGED && pass == 0) load_whole<UNIT, Q8, false>(of_token, of_codes, own, scale_step, t);
            }
            now.step(count, cut.warps);
            unsigned early[2][8];
            if constexpr (EARLY) feed.template take<TOGETHER>(early, part, own_row, t, zero);
            bool unusual = false;  // whether FIRST times a power of this tile may not be finite, or one is subnormal
            if constexpr (Of::POWERS) {
                const unsigned zero_later = static_cast<unsigned>(feed.row) >> 31;  // after that slot was asked for
                unusual = __any_sync(FULL_WARP, ahead.unusual(zero_later));
            }
            if (!STAGED || pass != 0 || numbers != nullptr) stage_scales(now, unusual);
            Sums<Of, INSIDE, BESIDE, Q8, SIGNED, EIGHTS, ALONE> sum;
            sum.clear();
            if constexpr (Of::MINIMA)  // while codes are awaited
#pragma unroll
                for (int block = 0; block < Scale::BLOCKS; ++block)
                    sum.add_minima(
                        memory.scales() + Scale::MINIMA + block * MINIMA_OF_BLOCK + t * MINIMA_STEP + 2 * g,
                        memory.scales() + 2 * own_row + Scale::FACTORS + block * ROWS_OF_TILE,
                        memory.records() + SUM_PIECES + (block * EIGHTS * WARP + lane) * 4);
#pragma unroll
            for (int slot = 0; slot < Of::SLOTS; ++slot) {
                unsigned word[2][8];
                if (EARLY && slot == 0)
#pragma unroll
                    for (int i = 0; i < 16; ++i) word[i / 8][i % 8] = early[i / 8][i % 8];
                else feed.template take<TOGETHER>(word, part, own_row, t, zero);
                const auto multiply = [&](bool large) {
#pragma unroll
                    for (int i = 0; i < Of::STEPS; ++i) {
                        unsigned fragment[Of::PARTS][4];
                        Of::fragment(fragment, word, i, flip, pairs);
                        sum.add(slot * Of::STEPS + i, fragment, x, own_records, own_scales, large);
                    }
                };
                if constexpr (Of::POWERS) {
                    if (unusual) multiply(true);
                    else multiply(false);
                    continue;
                }
#pragma unroll
                for (int i = 0; i < Of::STEPS; ++i) {
                    unsigned fragment[Of::PARTS][4];
                    Of::fragment(fragment, word, i, flip, pairs);
                    if constexpr (ALONE) sum.add_unit(slot * Of::STEPS + i, fragment, x[0], own_records, own_scales);
                    else sum.add(slot * Of::STEPS + i, fragment, x, own_records, own_scales);
                }
            }
            const int slot = pass % RING;
            barrier_wait(memory.read(slot), (pass / RING & 1) ^ 1);
            sum.store(memory.sums(slot, member), lane);
            barrier_arrive(memory.written(slot));
        }
        if (pass < LATER) continue;
        if (before.warp == member) {
            const int slot = (pass - LATER) % RING, row = (first + before.tile * step) * ROWS_OF_TILE + own_row;
            barrier_wait(memory.written(slot), (pass - LATER) / RING & 1);
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e) {
                float2 scale = of_token[e];
                if constexpr (STAGED) scale = make_float2(usable(scale.x), usable(scale.y));
                const float4* from = memory.sums(slot, 0) + e * WARP + lane;
                float4 total = *from;
                if constexpr (UNIT == SHARES)
                    total = output.of_groups(
                        w, cut, given(), from, EIGHTS * WARP, Of::SHARE, before.phase * cut.warps, scale, row,
                        8 * e + 2 * t);
                else
#pragma unroll 4
                    for (int i = 1; i < cut.warps; ++i) join<UNIT>(total, from[i * EIGHTS * WARP]);
                // Of a tile always the same warp: it has kept the sums itself.
                float4& kept = memory.kept(before.tile)[e * WARP + lane];
                if (before.phase != 0) join<UNIT>(total, kept);
                if (SPLIT > 1 || before.phase != cut.phases - 1) {
                    kept = total;
                    continue;
                }
                if constexpr (ALONE) total = sum_of_columns(total);
                output.template store<UNIT, Q8>(w, cut, total, scale, of_codes[e], row, 8 * e + 2 * t);
            }
            barrier_arrive(memory.read(slot));
        }
        before.step(count, cut.warps);
    }
    if constexpr (SPLIT > 1) {
        static_assert(Q8 && UNIT != SHARES, "tokens have no scale to be multiplied by in the end");
        const auto finish = [&](int tile, int e, const float4& total) {
            const int row = (first + tile * step) * ROWS_OF_TILE + own_row;
            output.template store<UNIT, Q8>(w, cut, total, of_token[0], of_codes[0], row, 8 * e + 2 * t);
        };
        join_cluster<UNIT, EIGHTS>(memory, rank, count, lane, finish);
    }
#endif
}
