// The scales of linear_few (linear/small_batch.cu): those of each warp have a stage beside that of its codes, or two,
// and get there by asynchronous copies or, where they are expanded, through registers.
#pragma once
#include "linear/few_block.cuh"

// Scales on their way to a warp, of 16 rows at a time.
template <typename Kind>
struct FewScales {
    using Decoder = typename Kind::Decoder;
    using Expansion = typename Kind::Expansion;
    static constexpr bool EVEN = Kind::EVEN, TABLE = Kind::TABLE, NESTED = Kind::NESTED, HANDED = Kind::HANDED;
    static constexpr bool MADE_LATE = Kind::MADE_LATE;
    static constexpr int ITEMS = Kind::ITEMS, SCALES = Kind::SCALES, EIGHT = Kind::EIGHT;
    static constexpr unsigned HANDED_TILES = Kind::HANDED_TILES, HANDED_BLOCK = Kind::HANDED_BLOCK;
    const FewBlock<Kind>& here;
    // One of the three has them: they are expanded, copied as they are, or records.
    Expansion spread;
    ScaleCopy copied;
    typename Kind::Records records;
    // Where rows are whole k-tiles: bytes of scales of a row, or records; and what this lane copies next, of `origin`.
    unsigned pitch;
    const char* origin;
    unsigned source = 0;
    // Addresses of this lane in the shared window: the stage of its warp, where it copies to, and where it reads, which
    // the compiler must not work out again in each turn.
    unsigned mine, to, from;
    // Of the ring in which a team hands out blocks of inner scales: how many a row has, the bytes of a tile of them,
    // barriers, blocks; the number of the lane's block of the next tile to load, less than 0 where there is none, and
    // where in a tile it is handed out, 0 for lanes that have none; and where that begins which the lane takes.
    unsigned blocks_of_row, handed_bytes, handed, handed_blocks, next_block = 0, place = 0, taken = 0;

    __device__ __forceinline__ explicit FewScales(const FewBlock<Kind>& here)
        : here(here),
          spread(expansion(here)),
          copied(copy(here)),
          records(
              here.given.absmax, reinterpret_cast<const char*>(here.given.nested_absmax), here.above, here.given.n,
              here.given.k, here.given.block) {
        pitch = row_pitch();
        origin = here.given.absmax + here.above * pitch;
        mine = shared_address(here.scale_stages) + here.warp * Kind::BUFFERS * SCALES;
        if constexpr (NESTED) {
            to = mine + (here.g * ITEMS + here.t) * Decoder::SCALE_BYTES;
            from = opaque(mine + here.my_row * ITEMS * Decoder::SCALE_BYTES + here.t * Decoder::SCALE_STEP);
        } else {
            to = opaque(mine + Expansion::place(here.lane));
            from = opaque(mine + here.my_row * Decoder::SCALE_BYTES);
        }
        // HANDED_TILES have a barrier where all blocks are there and one where all warps have theirs, then come the
        // blocks, HANDED_BLOCK bytes each, with a gap behind each row.
        blocks_of_row = HANDED ? here.given.cut.warps * here.given.cut.items / 2 : 1;
        handed_bytes = HANDED ? ITEM_ROWS * handed_pitch(blocks_of_row) : 0;
        handed = shared_address(here.sums) + here.team * (HANDED ? HANDED_TILES * (16 + handed_bytes) : 0);
        handed_blocks = handed + HANDED_TILES * 16;
        if constexpr (HANDED) {
            const unsigned of_warp = here.mate * here.given.cut.items / 2;
            const unsigned row = MADE_LATE ? here.my_row : Expansion::row(here.lane);
            const unsigned block = MADE_LATE ? of_warp : of_warp + Expansion::block(here.lane);
            taken = opaque(handed_blocks + row * handed_pitch(blocks_of_row) + block * HANDED_BLOCK);
        }
    }

    static __device__ __forceinline__ Expansion expansion(const FewBlock<Kind>& here) {
        const auto& given = here.given;
        Expansion made{given.absmax, given.nested_absmax,    here.own_block + TABLE_AT - 1024, here.above,
                       given.k,      31 - __clz(given.block)};
        if constexpr (!NESTED) made.high = reinterpret_cast<const unsigned short*>(given.nested_offset);
        return made;
    }
    static __device__ __forceinline__ ScaleCopy copy(const FewBlock<Kind>& here) {
        const auto& given = here.given;
        const float* map = reinterpret_cast<const float*>(here.table - 1024);
        return {given.absmax, given.nested_absmax, given.nested_offset,    map, here.above, given.n,
                given.k,      given.cut.width,     31 - __clz(given.block)};
    }
    // Bytes of a row of so many blocks in the ring.
    static __device__ __forceinline__ unsigned handed_pitch(unsigned blocks) { return (blocks + 1) * HANDED_BLOCK; }
    __device__ __forceinline__ unsigned row_pitch() const {
        if constexpr (!NESTED) return unsigned(here.given.k) / Expansion::BLOCK;
        else if constexpr (TABLE) return unsigned(here.given.k) / (ITEM_K / Decoder::SCALE_BYTES);
        else return unsigned(records.per_row);
    }

    // The values of scales that are codes of 8 bits, ahead of the table. All threads are here.
    __device__ __forceinline__ void fill_map() const {
        if (!TABLE || !NESTED || !here.given.nested_absmax) return;
        float* map = reinterpret_cast<float*>(here.table - 1024);
        for (int i = threadIdx.x; i < 256; i += blockDim.x) map[i] = here.given.codebook.map[i];
        __syncthreads();
    }

    __device__ __forceinline__ void init_barriers() const {
        if constexpr (HANDED) {
#pragma unroll
            for (unsigned i = 0; i < 2 * HANDED_TILES; ++i) barrier_init(handed + i * 8, here.given.cut.warps * WARP);
        }
    }

    // The address of those of k-tile i behind `begin`, that of the first.
    static __device__ __forceinline__ unsigned of_item(unsigned begin, int i) {
        if constexpr (MADE_LATE) return begin + i / 2 * HANDED_BLOCK;
        else if constexpr (NESTED) return begin + i * Decoder::SCALE_BYTES;
        else return begin + Expansion::of_item(i);
    }

    // Bytes from those of a row to those of the row 8 below it.
    static __device__ __forceinline__ unsigned eight(const Cut& cut) {
        return MADE_LATE ? 8 * handed_pitch(cut.warps * cut.items / 2) : EIGHT;
    }

    // ---- copies ----

    // What to copy next begins at `row` and k-tile `item`.
    __device__ __forceinline__ void aim(int row, int item) {
        if constexpr (HANDED) aim_block(row);
        else if constexpr (!NESTED)
            source = (row + Expansion::row(here.lane)) * pitch + item / 2 + Expansion::block(here.lane);
        else if constexpr (TABLE) source = (row + here.g) * pitch + (item + here.t) * Decoder::SCALE_BYTES;
        else source = (row + here.g) * pitch + records.of(item + (Decoder::PAIRED ? here.t * ITEMS / 8 * 2 : here.t));
    }
    // ... or so many rows below.
    __device__ __forceinline__ void advance(int down) { source += down * pitch; }

    // Start to copy those of `count` k-tiles from `item` on to the buffer that begins `other` bytes on. `there`:
    // whether there is a tile at all.
    __device__ __forceinline__ void start(bool there, int row, int item, int count, int other) {
        char* const stage = here.scale_stages + here.warp * Kind::BUFFERS * SCALES + other;
        const int t = here.t;
        if constexpr (!TABLE && EVEN) {
            start_records(there, count, other);
        } else if constexpr (!TABLE) {
            if (there && count) records.copy(stage, row, item, here.lane);
        } else if constexpr (Kind::SPREAD) {
            if constexpr (NESTED) {
                if (there) spread.load(row + here.g, item + t, t < count);
            } else if constexpr (!HANDED) {
                const int at = Expansion::block(here.lane);  // others stay zero
                if (there && at < Expansion::BLOCKS && 2 * at < count) spread.load(here.above * pitch + source);
            }
        } else if (EVEN && (!Decoder::SPREAD_SCALES || Kind::ONCE || (NESTED && here.given.cut.width))) {
            constexpr int PIECE = Decoder::SCALE_BYTES < 16 ? Decoder::SCALE_BYTES : 16;
            const unsigned target = to + other;
            const int bytes = t < count ? PIECE : 0;
            if (there && t < ITEMS) {
#pragma unroll
                for (int at = 0; at < Decoder::SCALE_BYTES; at += PIECE) {
                    copy_async_or_zero<PIECE>(target + at, origin + (source + at), bytes);
                    copy_async_or_zero<PIECE>(target + at + EIGHT, origin + (source + 8 * pitch + at), bytes);
                }
            }
        } else if (there && count) {
            if constexpr (NESTED) copied.start<Decoder, ITEMS>(stage, row, item, count, here.lane);
            else spread.copy(stage, row, here.given.n, item, count, here.lane);
        }
    }
    // The same of records of whole k-tiles.
    __device__ __forceinline__ void start_records(bool there, int count, int other) {
        const int t = here.t;
        if constexpr (Decoder::PAIRED) {
            const unsigned row = mine + other + here.g * ITEMS * Decoder::SCALE_BYTES;
            if (there) {
                records.template start_paired<ITEMS>(row, source, t, count);
                records.template start_paired<ITEMS>(row + EIGHT, source + 8 * pitch, t, count);
            }
        } else if (there && t < ITEMS) {
            records.start(to + other, source, t < count);
            records.start(to + other + EIGHT, source + 8 * pitch, t < count);
        }
        if constexpr (Kind::NARROW) {
            records.load(0, source, there && t < count);
            records.load(1, source + 8 * pitch, there && t < count);
        }
    }

    // Scales that have scales of their own are all shifted by a number.
    __device__ __forceinline__ void read_offset() {
        if constexpr (Kind::SPREAD && NESTED)
            if (here.given.nested_absmax) spread.offset = *here.given.nested_offset;
    }
    // Bring what `start` has loaded to registers to its buffer.
    __device__ __forceinline__ void store_spread(int other) const {
        if constexpr (Kind::SPREAD && NESTED)
            if (here.t < ITEMS) spread.store(to + other, EIGHT);
    }
    __device__ __forceinline__ void store_narrow(int other) const {
        if constexpr (Kind::NARROW)
            if (here.t < ITEMS) records.store(0, to + other), records.store(1, to + other + EIGHT);
    }

    // Settle those of the buffer that begins `buffer` bytes on, which are there; all lanes are here.
    __device__ __forceinline__ void settle(int buffer) const {
        if constexpr (Kind::MATRICES) {
            static_assert(Decoder::SCALE_BYTES == 8, "two words of a k-tile, of each of two rows");
            const unsigned own = to + buffer;
            unsigned word[4], suspects = 0;
            to_words(word, shared_at<uint2>(own)), to_words(word + 2, shared_at<uint2>(own + EIGHT));
#pragma unroll
            for (int i = 0; i < 4; ++i) suspects = Decoder::suspects(word[i], suspects);
            if (!__any_sync(FULL_WARP, Decoder::unsettled(suspects))) return;
            if (here.t < ITEMS) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    store_shared(own + i / 2 * EIGHT + i % 2 * 4, __uint_as_float(Decoder::settled(word[i])));
            }
            __syncwarp();
        }
    }

    // ---- inner scales ----

    // Which block of a tile this lane hands out: that of its number in the team, counted row by row. The first tile
    // begins at `row`.
    __device__ __forceinline__ void aim_block(int row) {
        const Cut& cut = here.given.cut;
        const unsigned number = here.mate * WARP + here.lane;
        const unsigned down = divided(cut.items == 2 ? number : number / 2, cut.per_warps, cut.warps);
        const unsigned block = number - down * blocks_of_row;
        const bool there = down < ITEM_ROWS && here.first_item + 2 * int(block) < here.last_item;
        next_block = (row + down) * pitch + here.first_item / 2 + block;
        next_block = opaque(there ? next_block : 1u << 31);
        place = opaque(down < ITEM_ROWS ? handed_blocks + (number + down) * HANDED_BLOCK : 0u);
    }
    // From a block to that of the next tile.
    __device__ __forceinline__ unsigned block_step() const { return here.teams * ITEM_ROWS * pitch; }

    // Load the block that this lane hands out of the next tile, which is `tile`; what is not there stays zero.
    __device__ __forceinline__ void load_block(Expansion& own, unsigned tile) {
        if constexpr (HANDED) {
            if (tile < here.passes && int(next_block) >= 0) own.load(here.above * pitch + next_block);
            next_block += block_step();
        }
    }
    // Hand it out.
    __device__ __forceinline__ void hand_out(const Expansion& own, unsigned tile) const {
        if constexpr (HANDED) {
            if (tile >= here.passes) return;
            const unsigned at = tile % HANDED_TILES;
            barrier_wait(handed + at * 16 + 8, tile / HANDED_TILES & 1 ^ 1);
            if (place) own.template hand_out<MADE_LATE>(place + at * handed_bytes);
            barrier_arrive(handed + at * 16);
        }
    }
    // Whether this lane makes a block of its warp to scales.
    __device__ __forceinline__ bool has_block() const {
        if constexpr (Expansion::BLOCKS * ITEM_ROWS == WARP) return true;
        else return Expansion::block(opaque(threadIdx.x % WARP)) < Expansion::BLOCKS;
    }
    // Take the block of `tile` that this lane makes to scales.
    __device__ __forceinline__ void expand(unsigned tile) const {
        if constexpr (HANDED && !MADE_LATE) {
            if (tile >= here.passes) return;
            const unsigned at = tile % HANDED_TILES;
            const bool has = has_block();
            barrier_wait(handed + at * 16, tile / HANDED_TILES & 1);
            Expansion own{};  // not a copy of what is still on its way
            if (has) own.take(taken + at * handed_bytes);
            barrier_arrive(handed + at * 16 + 8);
            if (has) own.store(to);
        }
    }
    // MADE_LATE: where the lane's blocks of `tile` begin, which are there now; and that it has them all.
    __device__ __forceinline__ unsigned blocks_of(unsigned tile) const {
        const unsigned at = tile % HANDED_TILES;
        barrier_wait(handed + at * 16, tile / HANDED_TILES & 1);
        return taken + at * handed_bytes;
    }
    __device__ __forceinline__ void give_back(unsigned tile) const {
        barrier_arrive(handed + tile % HANDED_TILES * 16 + 8);
    }
    // Make the scales of the first tile, of which this lane has loaded `begin`; two tiles are on their way.
    __device__ __forceinline__ void begin_inner(const Expansion& begin) {
        if constexpr (Kind::SPREAD && !NESTED) {
            if (!HANDED && Expansion::block(here.lane) < Expansion::BLOCKS) begin.store(to);
            hand_out(begin, 0), hand_out(spread, 1);
            expand(0);
        }
    }
    // Make those of the tile behind `pass`, whose own have been used up.
    __device__ __forceinline__ void next_inner(unsigned pass) {
        if constexpr (Kind::SPREAD && !NESTED) {
            __syncwarp();
            if (!HANDED && Expansion::block(here.lane) < Expansion::BLOCKS) spread.store(to);
            hand_out(spread, pass + 2);
            expand(pass + 1);
            load_block(spread, pass + 3);
        }
    }
};
