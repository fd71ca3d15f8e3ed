// How codes and scales get from global memory to shared memory in the products of few tokens: stages of k-tiles, filled
// by TMA (boxes of 16 rows x one or two k-tiles) or by cp.async.
#pragma once
#include "common/sync.cuh"
#include "linear/codebook.cuh"
#include "linear/columns.cuh"

// a / b, given 2^32 / b + 1: exact for a < 2^32 / b.
__device__ __forceinline__ unsigned divided(unsigned a, unsigned reciprocal, unsigned b) {
    return b == 1 ? a : __umulhi(a, reciprocal);
}

// Whether weights are copied by TMA, in boxes of k-tiles; not where ptxas gives such kernels a stack.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr bool BULK = true;
#else
constexpr bool BULK = false;
#endif

// a / b of numbers that are not negative, in fewer cycles than a division: exact where a < 2^19.
__device__ __forceinline__ int quotient(int a, int b) { return int(__fdividef(float(a) + 0.5f, float(b))); }

// In the HEAD bytes behind the table of values: two numbers, and the barriers of the copies, two for each warp, and
// those of x.
constexpr int BARRIERS_AT = 64, X_BARRIERS_AT = BARRIERS_AT + 16 * 16;
// ... and where a warp has four of them.
constexpr int MORE_BARRIERS_AT = X_BARRIERS_AT + 16 * 8;
static_assert(MORE_BARRIERS_AT + 16 * 4 * 8 <= HEAD, "four barriers for each of up to 16 warps");
static_assert(X_BARRIERS_AT + 16 * 8 <= HEAD, "a barrier of x for each of up to 16 warps");
// ... and in the FEW_HEAD bytes of linear_few behind these the barriers of its sums: of up to 4 slots of 16 teams.
static_assert(HEAD + 16 * 4 * 16 <= FEW_HEAD, "two barriers of 8 bytes a slot");

// Where the scales of a weight come from, and how those of 16 rows and some k-tiles get to shared memory.
struct ScaleCopy {
    const char* absmax;
    const float* nested_absmax;  // double quantization: float32[blocks / 256], or null
    const float* nested_offset;
    const float* map;  // the values of its 8-bit codes, in shared memory
    long long above;   // rows before the first
    int n, k;
    int width;  // bytes copied at a time, 16, 4 or 1; 0 where they are spread: one float32 for each SUB elements
    int shift;  // log2 of the elements of a block, where they are spread

    // Start to copy: of 16 rows from `row` on, ITEMS k-tiles from `item` on, of which `items` are wanted.
    template <typename Decoder, int ITEMS>
    __device__ __forceinline__ void start(char* stage, int row, int item, int items, int lane) const {
        constexpr int SCALE_BYTES = Decoder::SCALE_BYTES, ROW_BYTES = ITEMS * SCALE_BYTES;
        if (width) {
            // Bytes of a whole row, and of it what follows `item`.
            const long long pitch =
                (long long)k / ITEM_K * SCALE_BYTES + (long long)(k % ITEM_K) * SCALE_BYTES / ITEM_K;
            const int left = int(min((long long)items * SCALE_BYTES, pitch - (long long)item * SCALE_BYTES));
            const char* origin = absmax + (long long)item * SCALE_BYTES;
#pragma unroll 1
            for (int i = lane * width; i < ITEM_ROWS * ROW_BYTES; i += WARP * width) {
                const int at = i % ROW_BYTES;
                const char* source = origin + (above + min(row + i / ROW_BYTES, n - 1)) * pitch + at;
                if (at < left) {
                    if (width == 16) copy_async<16>(shared_address(stage + i), source);
                    else if (width == 4) copy_async<4>(shared_address(stage + i), source);
                    else stage[i] = *source;
                } else {
                    for (int b = 0; b < width; ++b) stage[i + b] = 0;
                }
            }
        } else if constexpr (Decoder::SPREAD_SCALES) {
            constexpr int SUB = ITEM_K * 4 / SCALE_BYTES, PER_ROW = ROW_BYTES / 4,
                          AT_ONCE = PER_ROW < 8 ? PER_ROW / 2 : 4;
#pragma unroll 1
            for (int i = lane; i < ITEM_ROWS * PER_ROW; i += AT_ONCE * WARP) {
                long long block[AT_ONCE];  // -1: not there
#pragma unroll
                for (int u = 0; u < AT_ONCE; ++u) {
                    const int place = i + u * WARP, start = item * ITEM_K + place % PER_ROW * SUB;
                    const bool there = start < k && place % PER_ROW < items * (SCALE_BYTES / 4);
                    block[u] = there ? ((above + min(row + place / PER_ROW, n - 1)) * k + start) >> shift : -1;
                }
                float* target = reinterpret_cast<float*>(stage) + i;
                if (nested_absmax) {
                    unsigned code[AT_ONCE];
                    float outer[AT_ONCE];
#pragma unroll
                    for (int u = 0; u < AT_ONCE; ++u) {  // all loads before the first use
                        const long long at = max(block[u], 0ll);
                        code[u] = reinterpret_cast<const unsigned char*>(absmax)[at],
                        outer[u] = nested_absmax[at / 256];
                    }
                    const float offset = *nested_offset;
#pragma unroll
                    for (int u = 0; u < AT_ONCE; ++u)
                        target[u * WARP] = block[u] < 0 ? 0.0f : __fadd_rn(__fmul_rn(map[code[u]], outer[u]), offset);
                } else {
                    const unsigned* source = reinterpret_cast<const unsigned*>(absmax);
#pragma unroll
                    for (int u = 0; u < AT_ONCE; ++u) {
                        if (block[u] < 0) target[u * WARP] = 0.0f;
                        else copy_async<4>(shared_address(target + u * WARP), source + block[u]);
                    }
                }
            }
        }
    }
};

// Scales that are expanded on their way, where rows are whole k-tiles: each lane brings those of a k-tile of a row and
// of the row 8 below it to shared memory, through registers.
template <typename Decoder>
struct ScaleExpansion {
    static constexpr int SUBS = Decoder::SCALE_BYTES / 4, LEAST_SHIFT = SUBS == 2 ? 6 : SUBS == 4 ? 5 : 4;
    const char* absmax;
    const float* nested_absmax;  // or null
    unsigned map;                // address in the window
    long long above;
    int k, shift;  // as in Scales
    float offset = 0.0f;
    float outer[2] = {};       // the scale, or that of its code
    uint2 code[2] = {{}, {}};  // bytes

    __device__ __forceinline__ void load(int row, int item, bool there) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            outer[i] = 0.0f, code[i] = uint2{};
            const long long at = ((above + row + 8 * i) * k + item * ITEM_K) >> shift;
            if (!there) continue;
            outer[i] = nested_absmax ? nested_absmax[at >> 8] : reinterpret_cast<const float*>(absmax)[at];
            if (!nested_absmax) continue;
            // All blocks of an k-tile are of one outer block.
            if (SUBS == 2 && shift > LEAST_SHIFT)
                code[i].x = 0x0101u * reinterpret_cast<const unsigned char*>(absmax)[at];
            else if (SUBS == 2) code[i].x = *reinterpret_cast<const unsigned short*>(absmax + at);
            else if (SUBS == 4) code[i].x = *reinterpret_cast<const unsigned*>(absmax + at);
            else code[i] = *reinterpret_cast<const uint2*>(absmax + at);
        }
    }

    __device__ __forceinline__ void store(unsigned to, int eight) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < SUBS; ++j) {
                float scale = outer[i];
                if (nested_absmax) {
                    const unsigned byte = (j < 4 ? code[i].x : code[i].y) >> j % 4 * 8 & 255u;
                    scale = __fadd_rn(__fmul_rn(shared_at<float>(map + byte * 4), scale), offset);
                }
                store_shared(to + i * eight + 4 * j, scale);
            }
    }
};

// The same of 6-bit scales of 32 in blocks of 256 (iq4_xs): a lane has a block of 16 rows x ITEMS k-tiles, and makes
// its scales of 32 to floats. Planes: d, a half; scales_l, a word, nibble j the low bits of scale j; scales_h, a short,
// two bits each. In a stage the scales of a k-tile, four of a row, lie row by row: lanes that read or write together
// meet in no bank.
//
// Where k goes through at once, the warps of a team load blocks side by side, whoever needs them, and hand them out in
// shared memory a tile ahead. Were each warp to load its own, few bytes of many rows, loads would take the slots that
// the tables are read in.
template <int ITEMS>
struct InnerScales {
    static constexpr int BLOCK = 2 * ITEM_K, BLOCKS = ITEMS > 1 ? ITEMS / 2 : 1;  // elements; of a row
    static constexpr int SUBS = ITEM_K / 32, ROW = SUBS * 4, EIGHT = 8 * ROW;     // bytes of a row, and of eight
    const char* d;
    const float* low;
    unsigned map;  // there is none
    long long above;
    int k, shift;
    const unsigned short* high = nullptr;
    unsigned held[3] = {};

    // Which row, and which block of it, a lane has; and where its scales begin in a stage.
    __device__ __forceinline__ static int row(int lane) { return lane % ITEM_ROWS; }
    __device__ __forceinline__ static int block(int lane) { return lane / ITEM_ROWS; }
    __device__ __forceinline__ static unsigned place(int lane) { return of_item(2 * block(lane)) + row(lane) * ROW; }
    // Where those of k-tile i of the first row begin.
    __device__ __forceinline__ static constexpr int of_item(int i) { return i * ITEM_ROWS * ROW; }

    __device__ __forceinline__ void load(long long number) {
        held[0] = reinterpret_cast<const unsigned short*>(d)[number];
        held[1] = reinterpret_cast<const unsigned*>(low)[number];
        held[2] = high[number];
    }
    // A block that was loaded, in 8 bytes of shared memory. Two halves become a word here: the compiler would have them
    // so where they are loaded, and wait for them there. CODES: in 16 bytes, its eight scales as codes of a byte, even
    // ones and odd ones, and what makes them floats.
    template <bool CODES>
    __device__ __forceinline__ void hand_out(unsigned to) const {
        if constexpr (CODES) {
            InnerScales now = *this;
#pragma unroll
            for (unsigned& word : now.held) word = opaque(word);
            unsigned code[2];
            now.codes(code);
            const float step = now.step();
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(code[0]), "r"(code[1]), "f"(step),
                         "f"(step * InnerCodes::LESS)
                         : "memory");
            return;
        }
        asm volatile("{ .reg .b32 both; prmt.b32 both, %2, %3, 0x5410; st.shared.v2.u32 [%0], {%1, both}; }" ::"r"(to),
                     "r"(held[1]), "r"(held[0]), "r"(held[2])
                     : "memory");
    }
    __device__ __forceinline__ void take(unsigned from) {
        const uint2 both = shared_at<uint2>(from);
        held[0] = both.y & 0xffffu, held[1] = both.x, held[2] = both.y >> 16;
    }
    // Eight scales of the block, each exact: even ones and odd ones as bytes, then floats.
    __device__ __forceinline__ void codes(unsigned (&code)[2]) const {
        unsigned top = (held[2] | held[2] << 8) & 0x00ff00ffu;
        top = (top | top << 4) & 0x0f0f0f0fu;  // of two scales each
        code[0] = (held[1] & 0x0f0f0f0fu) | (top << 4 & 0x30303030u);
        code[1] = (held[1] >> 4 & 0x0f0f0f0fu) | (top << 2 & 0x30303030u);
    }
    __device__ __forceinline__ float step() const { return Word<__half>::get(held[0], 0); }
    __device__ __forceinline__ void make(float (&scale)[8]) const {
        unsigned code[2];
        codes(code);
        const float factor = step(), less = factor * InnerCodes::LESS;
#pragma unroll
        for (int j = 0; j < 8; ++j) scale[j] = InnerCodes::scale(code[j % 2], j / 2, factor, less);
    }
    // `to` is where this lane's scales begin.
    __device__ __forceinline__ void store(unsigned to) const {
        float scale[8];
        make(scale);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float four[4] = {scale[4 * i], scale[4 * i + 1], scale[4 * i + 2], scale[4 * i + 3]};
            store_shared(to + of_item(i), four);
        }
    }
    // Bring those of rows that may end to a stage.
    __device__ __forceinline__ void copy(char* stage, int row, int n, int item, int items, int lane) {
#pragma unroll 1
        for (int i = lane; i < ITEM_ROWS * ITEMS; i += WARP) {
            const int at = i / ITEM_ROWS, down = i % ITEM_ROWS;
            held[0] = held[1] = held[2] = 0;
            if (at < items) load((above + min(row + down, n - 1)) * (unsigned(k) / BLOCK) + (item + at) / 2);
            float scale[8];
            make(scale);
            const unsigned to = shared_address(stage) + of_item(at) + down * ROW;
#pragma unroll
            for (int j = 0; j < SUBS; ++j) store_shared(to + j * 4, (item + at) % 2 ? scale[SUBS + j] : scale[j]);
        }
    }
};

// How scales that are expanded get to shared memory: NESTED, they may be codes of 8 bits that have scales of their own.
template <typename Decoder, int ITEMS>
struct ExpansionOf {
    using Type = ScaleExpansion<Decoder>;
    static constexpr bool NESTED = true;
};
template <typename T, int ITEMS>
struct ExpansionOf<InnerPairTable<T>, ITEMS> {
    using Type = InnerScales<ITEMS>;
    static constexpr bool NESTED = false;
};
template <typename Base, int ITEMS>
struct ExpansionOf<Blocked<Base>, ITEMS> : ExpansionOf<Base, ITEMS> {};
template <typename Base, int ITEMS>
struct ExpansionOf<Columns<Base>, ITEMS> : ExpansionOf<Base, ITEMS> {};
template <typename Base, int ITEMS>
struct ExpansionOf<IntegerColumns<Base>, ITEMS> : ExpansionOf<Base, ITEMS> {};
template <typename Base, int ITEMS>
struct ExpansionOf<InHalves<Base>, ITEMS> : ExpansionOf<Base, ITEMS> {};

// How the records of integers get to shared memory: the scales of a k-tile of a row, and behind them what stands beside
// scales, each in a plane of its own.
template <typename Decoder>
struct RecordCopy {
    using Scale = typename Decoder::Scale;
    using Zero = typename Decoder::Zero;
    static constexpr int SCALE_PART = Decoder::SCALE_ENTRIES * sizeof(Scale);
    static constexpr int ZERO_PART = Decoder::ZERO_ENTRIES * sizeof(Zero);
    const char *scales, *beside;  // of the first row
    int n, k;
    int block;    // elements of a group where groups are k-tiles or more
    int per_row;  // records of a row
    // Parts of records that are too narrow for asynchronous copies stop here, of two rows.
    static constexpr bool NARROW_SCALES = SCALE_PART < 4, NARROW_ZEROS = ZERO_PART > 0 && ZERO_PART < 4;
    static constexpr bool NARROW = NARROW_SCALES || NARROW_ZEROS;
    unsigned held[2][2];

    __device__ __forceinline__
    RecordCopy(const char* scales, const char* beside, long long above, int n, int k, int block)
        : n(n), k(k), block(block), per_row(Decoder::LONG ? (k - 1) / block + 1 : k / ITEM_K) {
        this->scales = scales + above * entries<Scale, Decoder::SCALE_ENTRIES>() * (long long)sizeof(Scale);
        this->beside = beside + above * entries<Zero, Decoder::ZERO_ENTRIES>() * (long long)sizeof(Zero);
    }

    // Entries of a row of a plane.
    template <typename Entry, int ENTRIES>
    __device__ __forceinline__ int entries() const {
        return Decoder::LONG ? per_row * ENTRIES : k / Decoder::SUB * (ENTRIES != 0);
    }

    // The number of a record in its row.
    __device__ __forceinline__ int of(int item) const {
        return Decoder::LONG ? int(unsigned(item) * ITEM_K / unsigned(block)) : item;
    }

    // Start to copy a whole record, or zeros.
    __device__ __forceinline__ void start(unsigned to, unsigned record, bool there) const {
        if constexpr (!NARROW_SCALES) part<SCALE_PART>(to, scales, record, there);
        if constexpr (ZERO_PART > 0 && !NARROW_ZEROS) part<ZERO_PART>(to + Decoder::ZEROS_AT, beside, record, there);
    }
    template <int BYTES>
    __device__ __forceinline__ void part(unsigned to, const char* plane, unsigned record, bool there) const {
        constexpr int PIECE = piece_of(BYTES);
#pragma unroll
        for (int at = 0; at < BYTES; at += PIECE)
            copy_async_or_zero<PIECE>(to + at, plane + ((long long)record * BYTES + at), there ? PIECE : 0);
    }

    // The same of a row of ITEMS k-tiles that share records two by two: each of four lanes has as many words as there
    // are of them. `record` is that of this lane.
    template <int ITEMS>
    __device__ __forceinline__ void start_paired(unsigned row, unsigned record, int t, int ahead) const {
        static_assert(SCALE_PART == 4 && ZERO_PART == 12, "records of four words");
        constexpr int WORDS = ITEMS / 2;
        const int first = t * WORDS % 4;
        const unsigned to = row + t * WORDS / 4 * (2 * Decoder::SCALE_BYTES) + first * 4;
        const int bytes = t * WORDS / 4 * 2 < ahead ? 4 : 0;
        const char* inner = beside + ((long long)record * 12 + first * 4 - 4);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const char* from = i == 0 && first == 0 ? scales + (long long)record * 4 : inner + 4 * i;
            fetch_word(to + 4 * i, from, bytes);
        }
    }
    // Few bytes of a row at a time: the L2 cache fetches those of the next warps, too.
    static __device__ __forceinline__ void fetch_word(unsigned to, const char* from, int bytes) {
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
                     : "memory");
#endif
    }

    // Load the narrow parts of row `i` of two, or zeros, and later store them.
    __device__ __forceinline__ void load(int i, unsigned record, bool there) {
        if constexpr (NARROW_SCALES) held[i][0] = there ? narrow<SCALE_PART>(scales, record) : 0u;
        if constexpr (NARROW_ZEROS) held[i][1] = there ? narrow<ZERO_PART>(beside, record) : 0u;
    }
    __device__ __forceinline__ void store(int i, unsigned to) const {
        if constexpr (NARROW_SCALES) store_narrow<SCALE_PART>(to, held[i][0]);
        if constexpr (NARROW_ZEROS) store_narrow<ZERO_PART>(to + Decoder::ZEROS_AT, held[i][1]);
    }
    template <int BYTES>
    static __device__ __forceinline__ unsigned narrow(const char* plane, unsigned record) {
        const char* from = plane + (long long)record * BYTES;
        if constexpr (BYTES == 1) return *reinterpret_cast<const unsigned char*>(from);
        else return *reinterpret_cast<const unsigned short*>(from);
    }
    template <int BYTES>
    static __device__ __forceinline__ void store_narrow(unsigned to, unsigned v) {
        if constexpr (BYTES == 1) asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(v) : "memory");
        else asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"((unsigned short)v) : "memory");
    }

    // Copy those of k-tile `item` of 16 rows from `row` on, zeros where the rows end.
    __device__ __forceinline__ void copy(char* stage, int row, int item, int lane) const {
        fill<Scale, Decoder::SCALE_ENTRIES>(stage, scales, row, item, lane);
        fill<Zero, Decoder::ZERO_ENTRIES>(stage + Decoder::ZEROS_AT, beside, row, item, lane);
    }
    template <typename Entry, int ENTRIES>
    __device__ __forceinline__ void fill(char* stage, const char* plane, int row, int item, int lane) const {
        if constexpr (ENTRIES > 0) {
            const int first = of(item) * ENTRIES, all = entries<Entry, ENTRIES>();
#pragma unroll 1
            for (int i = lane; i < ITEM_ROWS * ENTRIES; i += WARP) {
                const int down = i / ENTRIES, at = first + i % ENTRIES;
                const long long source = (long long)min(row + down, n - 1) * all + at;
                Entry* to = reinterpret_cast<Entry*>(stage + down * Decoder::SCALE_BYTES) + i % ENTRIES;
                *to = at < all ? reinterpret_cast<const Entry*>(plane)[source] : Entry(0);
            }
        }
    }
};

// Where there is a table there are none.
struct NoRecords {
    static constexpr bool NARROW = false;
    template <typename... A>
    __device__ __forceinline__ explicit NoRecords(A...) {}
};
template <bool TABLE, typename Decoder>
struct RecordsOf {
    using Type = RecordCopy<Decoder>;
};
template <typename Decoder>
struct RecordsOf<true, Decoder> {
    using Type = NoRecords;
};

// The weights of BOX k-tiles in shared memory: rows as they are stored, or permuted in pieces of 16 bytes as the
// swizzle of TMA for rows of 64 or 128 bytes does it, so that the lanes which read together meet in no bank.
template <typename Decoder, int BOX = 1>
struct WeightStage {
    static constexpr int ROW = BOX * Decoder::ITEM_BYTES, BYTES = ITEM_ROWS * ROW;

    // By what the place of byte `at` of a row is exclusive-ored: the same for a row and the one 8 below it.
    __device__ __forceinline__ static int swizzle(int row) {
        return ROW == 128 ? row % 8 * 16 : row / 2 % Decoder::SWIZZLE_PERIOD * 16;
    }

    // Of a tile the row that with the one 8 below it is that of the lanes g: of those that read 16 bytes together, or
    // 8, the turns must differ in the k-tile's bit, or in the two bits of 32 bytes.
    __device__ __forceinline__ static int row(int g) {
        if (BOX == 1) return Decoder::row(g);
        return Decoder::ONE_READ ? (g & 1) << 2 | g >> 1 : (g & 3) << 1 | g >> 2;
    }

    // Start to copy the part of lane t of a row, of which `left` bytes are there; it may start anywhere if not `wide`.
    __device__ __forceinline__ static void start(
        unsigned slot, const char* source, int left, bool wide, int row, int t) {
        const int size = wide ? 16 : 4;
#pragma unroll 1
        for (int at = t * size; at < min(left, ROW); at += 4 * size) {
            const unsigned to = slot + row * ROW + (at ^ swizzle(row));
            copy_async_if<16>(to, source + at, wide);
            copy_async_if<4>(to, source + at, !wide);
        }
    }
};

// A word of each load by which `Decoder::read` brings the codes of a lane, for zero_after. ptxas issues them in any
// order: were the copy to wait for one alone, it could overtake another that is queued behind it.
template <typename Decoder>
__device__ __forceinline__ unsigned bits_read(const unsigned (&word)[Decoder::WORDS]) {
    constexpr int PIECE = piece_of(Decoder::LANE_BYTES), AT_ONCE = PIECE < 4 ? 1 : PIECE / 4;
    unsigned bits = 0;
#pragma unroll
    for (int p = AT_ONCE - 1; p < Decoder::WORDS; p += AT_ONCE) bits |= word[p];
    return bits;
}

// How a warp copies 16 rows of ITEMS k-tiles that begin at multiples of 16 bytes, to slots of BOX: as few rows at once
// as can be, because each takes a pass through the tags of the L1 cache.
template <typename Decoder, int ITEMS, int BOX = 1>
struct WeightCopy {
    using WeightStage = ::WeightStage<Decoder, BOX>;
    static constexpr int BYTES = ITEMS * Decoder::ITEM_BYTES, PIECES = BYTES / 16;
    static constexpr bool WHOLE = PIECES >= 4 && (PIECES & (PIECES - 1)) == 0;
    static constexpr int AT_ONCE = WHOLE ? WARP / PIECES : 8;

    // The first row and byte that a lane copies.
    __device__ __forceinline__ static int row(int lane) { return lane / (WARP / AT_ONCE); }
    __device__ __forceinline__ static int byte(int lane) { return lane % (WARP / AT_ONCE) * 16; }

    // Where byte `at` of a row of a unit stands in its slots.
    __device__ __forceinline__ static int place(int row, int at) {
        return at / WeightStage::ROW * WeightStage::BYTES + row * WeightStage::ROW +
               (at % WeightStage::ROW ^ WeightStage::swizzle(row));
    }

    // Start to copy; `source` is where this lane begins, and `left` bytes of each row are there.
    __device__ __forceinline__ static void start(unsigned slots, const char* source, int pitch, int left, int lane) {
#pragma unroll
        for (int down = 0; down < ITEM_ROWS; down += AT_ONCE)
#pragma unroll
            for (int at = 0; at < BYTES; at += WARP / AT_ONCE * 16)
                copy_async_if<16>(
                    slots + place(row(lane) + down, byte(lane) + at), source + (long long)down * pitch + at,
                    byte(lane) + at < min(left, BYTES));
    }
};

// Fill the table with the values of the codebook, and return `power` of codebook_value. Waits for the kernel before
// this one when nothing else is left to do.
template <typename Decoder, bool ONE>
__device__ __forceinline__ float fill_table(unsigned table, const float* values, const Values& codebook) {
    if constexpr (Decoder::ENTRIES == 0) {
        wait_for_previous();
        return 1.0f;
    } else if constexpr (InTwoParts<Decoder>::VALUE) {
        const float power = Decoder::fill_in_two(table, values, codebook, threadIdx.x, blockDim.x);
        wait_for_previous();
        return power;
    } else {
        float power;
        const float mine = table_value<Decoder>(table, values, codebook, blockDim.x, [] { __syncthreads(); }, power);
        Decoder::template fill<ONE>(table, mine, threadIdx.x, blockDim.x);
        wait_for_previous();
        return power;
    }
}
