// The tokens of linear_few (linear/small_batch.cu): each warp keeps its part of x in registers.
#pragma once
#include "linear/few_block.cuh"

// x of the k-tiles of a warp, for all tokens of the thread block.
template <typename Kind>
struct FewTokens {
    using Decoder = typename Kind::Decoder;
    using T = typename Kind::T;
    static constexpr int EIGHTS = Kind::EIGHTS, ITEMS = Kind::ITEMS, X_BYTES = Kind::X_BYTES;
    static constexpr int SCALES_OF_ITEM = ITEM_K / 32 * Kind::TOGETHER * 4;
    const FewBlock<Kind>& here;
    unsigned x[ITEMS][EIGHTS][Decoder::X_WORDS];
    // Of each two k-tiles the lane's words, and where x is quantized the scales of its parts.
    typename ByColumns<Decoder>::Own own[Kind::COLUMNS ? ITEMS / 2 : 1];
    typename ByColumns<Decoder>::Scales part_scales[Kind::COLUMNS ? ITEMS / 2 : 1];
    unsigned beside;  // where the last word of x is, X_BESIDE
    // The scales of tokens, for each 32 k of this block those of 8 EIGHTS tokens, in the order in which lanes have
    // them.
    unsigned scales;
    // x in shared memory, from a multiple of 1024 bytes on: for each half of the k-tiles, 64 elements, for each k-tile
    // 8 tokens, in the 128-byte swizzle of TMA. The gap between the halves lets the lanes which read together meet in
    // no bank. One or two tokens are few lines, which most decoders may as well read where they are.
    bool staged;
    // Few tokens come line by line: TMA would bring zeros for those of eight that are not there.
    bool by_lines;
    int second_half;
    unsigned barrier;  // of TMA

    // `my_scales` is the address of the warp's scales of weights.
    __device__ __forceinline__ FewTokens(const FewBlock<Kind>& here, unsigned my_scales) : here(here) {
        const int m = here.group.count, warps = blockDim.x / WARP;
        beside = my_scales + here.g * 32 + 16 + here.t * 4;
        const int sums = Decoder::GAPS ? 0 : Kind::RING * warps * EIGHTS * 512;
        scales = Kind::BLOCKED ? shared_address(here.sums) + sums : 0;
        staged = Kind::HALVES ||
                 (!Kind::COLUMNS && Kind::ONCE && EIGHTS == 1 && here.given.cut.staged && (Kind::FEW_STAGED || m > 2));
        by_lines = Kind::HALVES || (Kind::BY_LINES && m <= 2);
        second_half = here.step * (X_BYTES / 2) + X_GAP;
        barrier = shared_address(here.factor) + X_BARRIERS_AT + here.mate * 8;
    }

    __device__ __forceinline__ void init_barriers() const {
        if (Kind::X_BULK && here.lane == 0 && here.team == 0) barrier_init(barrier, 1);
    }

    __device__ __forceinline__ const T* token_at(int at) const {
        const auto& given = here.given;
        return given.x + here.product_of(here.group.first + at) / (Kind::GROUPED ? given.divisor : 1) * given.k;
    }
    // Where an element of the thread block's k stands in shared memory.
    __device__ __forceinline__ int place_of(int element, int token) const {
        const int half = element / 64 % 2, row = element / ITEM_K * (X_BYTES / 2) + half * second_half + token * 128;
        return row + ((element / 8 % 8 ^ (token + half * 2) % 8) * 16) + element % 8 * 2;
    }

    // ---- by way of shared memory ----

    // Start to copy x there.
    __device__ __forceinline__ void start() const {
        if constexpr (Kind::HALVES) {
            // quantize() reads it
        } else if (Kind::X_BULK && staged && !by_lines) {
            if (here.team == 0 && elect_lane()) fetch_boxes();
        } else if (staged && by_lines) {
            copy_lines();
        } else if (staged) {
            copy_tokens();
        }
    }
    // By TMA; of a team each warp its part.
    __device__ __forceinline__ void fetch_boxes() const {
        const auto& given = here.given;
        const int items = given.cut.items;
        barrier_expect(barrier, items * X_BYTES);
        for (int i = 0; i < items; ++i) {
            // Zeros where they are not its own: what is beyond the row.
            const int item = here.my_item + i, column = item < here.last_item ? item * (ITEM_K * 2) : 2 * given.k;
            const unsigned to = shared_address(here.x_stage) + (here.mate * items + i) * (X_BYTES / 2);
            copy_box(to, given.map_of_x, column, here.group.first, barrier);
            copy_box(to + second_half, given.map_of_x, column + 128, here.group.first, barrier);
        }
    }
    // One or two of them, by all threads.
    __device__ __forceinline__ void copy_lines() const {
        const unsigned to = shared_address(here.x_stage);
        const int pieces = here.step * (ITEM_K / 8), all = (here.last_item - here.first_item) * (ITEM_K / 8);
        for (int i = threadIdx.x; i < here.group.count * pieces; i += blockDim.x) {
            const int token = i >= pieces, piece = i - token * pieces;
            const char* from = reinterpret_cast<const char*>(token_at(token) + (long long)here.first_item * ITEM_K);
            copy_async_or_zero<16>(to + place_of(piece * 8, token), from + piece * 16, piece < all ? 16 : 0);
        }
        commit_copies();
    }
    // Eight of them, each by a warp or two.
    __device__ __forceinline__ void copy_tokens() const {
        const int token = here.warp % TOKENS, warps = blockDim.x / WARP;
        const bool there = token < here.group.count;
        const T* line = token_at(there ? token : 0) + (long long)here.first_item * ITEM_K;
        const char* from = reinterpret_cast<const char*>(line);
        const unsigned to = shared_address(here.x_stage);
        const int pieces = here.step * (ITEM_K / 8);
        const int all = there ? (here.last_item - here.first_item) * (ITEM_K / 8) : 0;
#pragma unroll 4
        for (int i = here.warp / TOKENS * WARP + here.lane; i < pieces; i += warps / TOKENS * WARP)
            copy_async_or_zero<16>(to + place_of(i * 8, token), from + i * 16, i < all ? 16 : 0);
        commit_copies();
    }

    // Wait for what this thread has copied: that came before all weights, but for tokens that another launch quantizes.
    __device__ __forceinline__ void wait_own() const {
        if (!Kind::HALVES && (!Kind::X_BULK || by_lines) && staged) wait_copies<Kind::BLOCKED ? 0 : 1>();
    }
    // Wait for what TMA brings.
    __device__ __forceinline__ void wait_boxes() const {
        if (Kind::X_BULK && !by_lines) barrier_wait(barrier, 0);
    }
    // Read x from there.
    __device__ __forceinline__ void read_stage() {
        constexpr bool WAITS = !Kind::TABLE || Kind::LATE_TABLE;
        const int items = here.given.cut.items;
        const unsigned from = shared_address(here.x_stage) + here.mate * items * (X_BYTES / 2);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int item = min(i, items - 1);  // there may be less of them, and nothing behind
            const auto address = [&](int at) { return from + item * (X_BYTES / 2) + place_of(at, here.my_token); };
            if constexpr (WAITS) {
#pragma unroll
                for (int j = 0; j < Decoder::X_WORDS; ++j) x[i][0][j] = 0;
            }
            // Those of tokens that are not there would be read for nothing, which nothing hides without a table, or
            // where it has been made before.
            const int column = Kind::HALVES ? here.g : here.my_token;
            if (!WAITS || column < here.group.count << Kind::HALVES) Decoder::load_x_shared(x[i][0], address, here.t);
        }
    }

    // ---- tokens in two halves ----

    // A part, what a warp of a team has of a token, is quantized by a warp or a piece of one, a lane sixteen
    // neighbours.
    static constexpr int PART_LANES = ITEMS * (ITEM_K / SIXTEEN), AT_ONCE = WARP / PART_LANES;

    // The part of this lane in a turn, and the first of the warp's.
    __device__ __forceinline__ int part_of(int turn) const { return first_part(turn) + here.lane / PART_LANES; }
    __device__ __forceinline__ int first_part(int turn) const {
        return (turn * int(blockDim.x / WARP) + here.warp) * AT_ONCE;
    }
    // The lane's first element in the thread block's k, and the token, of a part.
    __device__ __forceinline__ int element_of(int part, int& token) const {
        token = part / here.given.cut.warps;
        const int mate = part - token * here.given.cut.warps;
        return mate * here.given.cut.items * ITEM_K + here.lane % PART_LANES * SIXTEEN;
    }
    __device__ __forceinline__ bool has_element() const {
        return here.lane % PART_LANES < here.given.cut.items * (ITEM_K / SIXTEEN);
    }
    // Where the powers of two are by which sums of parts are multiplied.
    __device__ __forceinline__ unsigned powers() const { return shared_address(here.sums) - Kind::POWERS; }

    // Quantize all parts, and store both halves of their numbers.
    __device__ __forceinline__ void quantize() const {
        const int parts = here.group.count * here.given.cut.warps;
#pragma unroll 1
        for (int turn = 0; first_part(turn) < parts; ++turn) {
            SixteenHalves halves;
            quantize(part_of(turn), halves);
            store_halves(part_of(turn), halves, 0), store_halves(part_of(turn), halves, 1);
        }
    }
    __device__ __forceinline__ void quantize(int part, SixteenHalves& halves) const {
        if (here.given.divisor == FLOAT_NUMBERS) quantize<float>(part, halves);
        else if (here.given.divisor == HALF_NUMBERS) quantize<__half>(part, halves);
        else quantize<__nv_bfloat16>(part, halves);
    }
    template <typename X>
    __device__ __forceinline__ void quantize(int part, SixteenHalves& halves) const {
        const auto& given = here.given;
        int token;
        const int k = here.first_item * ITEM_K + element_of(part, token);
        Numbers<X> numbers;
        numbers.clear();
        if (token < here.group.count && has_element() && k < here.last_item * ITEM_K)
            numbers.load(reinterpret_cast<const X*>(given.x) + (long long)(here.group.first + token) * given.k + k);
        unsigned most = halves.quantize(numbers);
#pragma unroll
        for (int step = 2; step < PART_LANES; step *= 2) most = max(most, __shfl_xor_sync(FULL_WARP, most, step));
        const unsigned exponent = halves.exponent_of(most);
        halves.bring_down(exponent);
        if (here.lane % PART_LANES == 0 && token < here.group.count)
            store_shared(powers() + (token * MOST_WARPS + part % given.cut.warps) * 4, Decoder::power_of(exponent));
    }
    __device__ __forceinline__ void store_halves(int part, const SixteenHalves& halves, int second) const {
        int token;
        const int element = element_of(part, token);
        if (token >= here.group.count || !has_element()) return;
        const unsigned to = shared_address(here.x_stage);
#pragma unroll
        for (int octet = 0; octet < 2; ++octet) {
            unsigned word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int e = 8 * octet + 2 * i;
                word[i] = Word<__half>::pack(halves.get(e, second), halves.get(e + 1, second));
            }
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(
                             to + place_of(element + 8 * octet, Decoder::token(2 * token + second))),
                         "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                         : "memory");
        }
    }
    // The sums of both halves of token t, those of rows g and g + 8, as what they stand for.
    __device__ __forceinline__ void join_halves(const float (&acc)[4], float (&sum)[4]) const {
        const float power = shared_at<float>(powers() + (here.t * MOST_WARPS + here.mate) * 4);
#pragma unroll
        for (int i = 0; i < 4; i += 2) sum[i] = fmaf(acc[i + 1], 1.0f / SECOND, acc[i]) * power, sum[i + 1] = 0.0f;
    }

    // ---- from global memory ----

    // Read x of the k-tiles from `item` on.
    __device__ __forceinline__ void fetch(int item) {
        const int count = here.count_at(item);
        if constexpr (Kind::QUANTIZED) {
            if (here.given.divisor == FLOAT_NUMBERS) fetch_own<float>(item, count);
            else fetch_own<__half>(item, count);
        } else if constexpr (Kind::COLUMNS) {
            fetch_own<T>(item, count);
        } else {
            fetch_tokens(item, count);
        }
    }
    // Of numbers as large as X.
    template <typename X>
    __device__ __forceinline__ void fetch_own(int item, int count) {
        const X* const token = reinterpret_cast<const X*>(here.given.x) + (long long)here.group.first * here.given.k;
#pragma unroll
        for (int i = 0; i < ITEMS; i += 2) {
#pragma unroll
            for (unsigned& word : own[i / 2]) word = 0;
            Decoder::load_own(own[i / 2], token + (item + i) * ITEM_K, here.lane, i < count);
        }
    }
    __device__ __forceinline__ void fetch_tokens(int item, int count) {
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
            const bool there = 8 * e + here.my_token < here.group.count;
            const T* token = token_at(there ? 8 * e + here.my_token : 0);
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
                for (int j = 0; j < Decoder::X_WORDS; ++j) x[i][e][j] = 0;
                const int left = here.given.k - (item + i) * ITEM_K;
                Decoder::load_x_global(x[i][e], token + (item + i) * ITEM_K, there && i < count, left, here.t);
            }
        }
    }

    // Bits of all loads of the lane's own words, for zero_after.
    __device__ __forceinline__ unsigned arrived() const {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < (Kind::COLUMNS ? ITEMS / 2 : 1); ++i) bits |= own[i][0] | own[i][Kind::QUANTIZED ? 4 : 0];
        return bits;
    }

    // ---- in registers ----

    // Bring x to the order in which codes come out, and find its sums where the decoder needs them.
    __device__ __forceinline__ void arrange() {
        if constexpr (Kind::QUANTIZED) {
            if (here.given.divisor == FLOAT_NUMBERS) arrange_codes<float>();
            else if (here.given.divisor == HALF_NUMBERS) arrange_codes<__half>();
            else arrange_codes<__nv_bfloat16>();
        } else if constexpr (Kind::COLUMNS) {
#pragma unroll
            for (int i = 0; i < ITEMS; i += 2) Decoder::arrange_own(own[i / 2], x[i][0], x[i + 1][0]);
        } else {
            arrange_tokens();
        }
    }
    template <typename X>
    __device__ __forceinline__ void arrange_codes() {
#pragma unroll
        for (int i = 0; i < ITEMS; i += 2) {
            unsigned codes[4];
            part_scales[i / 2] = Decoder::template quantize<X>(own[i / 2], here.lane, codes);
            Decoder::arrange_own(codes, x[i][0], x[i + 1][0]);
        }
    }
    __device__ __forceinline__ void arrange_tokens() {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e) {
                Decoder::arrange_x(x[i][e]);
                if constexpr (Kind::X_BESIDE)
                    store_shared(beside + (i * EIGHTS + e) * 256, __uint_as_float(x[i][e][16]));
            }
    }

    // ---- scales of integers ----

    // Bring those of this block's k to shared memory.
    __device__ __forceinline__ void store_scales() const {
        if constexpr (Kind::BLOCKED) {
            constexpr int TOGETHER = Kind::TOGETHER, OF_ITEM = ITEM_K / 32;
            const auto& given = here.given;
            const float* const from =
                reinterpret_cast<const float*>(given.order) + (long long)here.first_item * OF_ITEM * given.divisor;
            const int blocks = min(given.cut.share * ITEM_K, given.k - here.first_item * ITEM_K) / 32;
            const int items =
                Kind::ONCE ? here.step : given.cut.share;  // zeros, too, for those of warps that have no own
            for (int i = threadIdx.x; i < items * OF_ITEM * TOGETHER; i += blockDim.x) {
                int block = i / TOGETHER, column = i % TOKENS, eight = i % TOGETHER - column;
                if constexpr (Kind::MATRICES) {  // two blocks of a token stand side by side, and tokens 8 apart as rows
                    const int at = i % (2 * TOGETHER) / 2;
                    block = i / (2 * TOGETHER) * 2 + i % 2, column = at % TOKENS, eight = at - column;
                    if (Kind::TOKEN_ROWS) column = at / 2, eight = at % 2 * TOKENS;
                }
                const int token = eight + Decoder::token(column);
                const bool there = block < blocks && token < here.group.count;
                const float* scale = from + ((long long)block * given.divisor + here.group.first + token);
                float own = there ? *scale : 0.0f;
                if constexpr (Kind::MATRICES) own *= Decoder::token_factor(block);
                store_shared(scales + i * 4, own);
            }
        }
    }
    // Those of a k-tile.
    __device__ __forceinline__ auto scales_of(int item) const {
        if constexpr (Kind::MATRICES)
            return PairedTokenScales{
                scales + (item - here.first_item) * SCALES_OF_ITEM + (Kind::TOKEN_ROWS ? here.g : here.t) * 16};
        else if constexpr (Kind::BLOCKED)
            return TokenScales{scales + (item - here.first_item) * SCALES_OF_ITEM + here.t * 8};
        else return NoTokenScales{};
    }
};
