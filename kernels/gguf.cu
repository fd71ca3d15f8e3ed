// Quantizers of GGUF's types whose scales follow from extremes (q4_0 to q8_k, the ternary ones, mxfp4, nvfp4); what a
// lane computes stands in formats/gguf_encoders.cuh, and is decoded by blocks.cu.
//
//     x --16 B a lane, consecutive--> tile in shared memory --32 elements a lane--> registers: extremes, codes
//       --1 to 32 B of each field a lane, consecutive--> planes
//
// A lane has a row of 32 elements for itself, so that a block of 32 is divided for once, and nothing of it crosses
// lanes; eight lanes share the scale of a block of 256.
//
// What limited each version, as a fraction of the copy bandwidth of an H200, float16:
//   - a thread for each block, which read it where it stood: q4_0 .69, q8_0 .77, tq2_0 .33. Loads and stores of a warp
//     lay 16 to 512 bytes apart;
//   - a tile for each warp: .95 and more, but mxfp4 .87, tq2_0 .89, tq1_0 .64, nvfp4 .53. There is time for 18 to 20
//     instructions an element, and these took 14 to 25: tq1_0 divided for each byte, nvfp4 four times for each row;
//   - this one takes 10 to 14 and has two tiles for each warp: .98, tq1_0 .87, and float32 as fast as a copy.
#include "common/tiles.cuh"
#include "formats/gguf_encoders.cuh"

// Of a thread block: threads, and tiles that a warp has.
constexpr int THREADS = 128, TILES = 2, WARPS = THREADS / WARP;
// Thread blocks that a multiprocessor must have registers for; on earlier ones bfloat16 takes more instructions, for
// which the registers of one more are too few.
#if __CUDA_ARCH__ < 900
template <typename T>
constexpr int RESIDENT = 6;
#else
template <typename T>
constexpr int RESIDENT = sizeof(T) == 2 ? 7 : 6;
#endif

// The numbers of a row as they are stored. STRIPED: not those of row `lane`, but of four rows each a quarter: lane j of
// eight has the elements 128 * (j / 4) + 32 * s + 8 * (j % 4) + 0 .. 7 of a block of 256, for s = 0 .. 3.
template <typename T, bool STRIPED>
__device__ __forceinline__ void read_numbers(const Tile<T>& tile, int lane, unsigned (&word)[Tile<T>::WORDS]) {
    if constexpr (STRIPED) {
        constexpr int EACH = Tile<T>::CHUNKS / 4;
#pragma unroll
        for (int c = 0; c < Tile<T>::CHUNKS; ++c)
            to_words(word + 4 * c, tile.chunks[Tile<T>::place(lane / 4 * 4 + c / EACH, lane % 4 * EACH + c % EACH)]);
    } else {
        tile.read_row(lane, word);
    }
}

// A warp has TILES tiles, whose loads are under way at a time: with one, what a warp does once takes too large a part
// (mxfp4 .93, nvfp4 .88); three or four are no faster.
//
// x       T[blocks * E::BLOCK]; a thread block for each THREADS * TILES rows
// blocks  how many
// a to e  the planes of the fields, in their order, and behind them a tensor scale; null where there are fewer
template <typename T, typename E>
__global__ void __launch_bounds__(THREADS, RESIDENT<T>) quantize_gguf(
    const T* x, long long blocks, unsigned char* a, unsigned char* b, unsigned char* c, unsigned char* d,
    unsigned char* e) {
    constexpr int GROUPS = ROW / E::GROUP, CHUNKS = WARP * Tile<T>::CHUNKS, ROWS = WARP * TILES;
    __shared__ __align__(128) uint4 tiles[WARPS][TILES * CHUNKS];
    __shared__ __align__(16) unsigned exchange[WARPS][E::EXCHANGE > 0 ? E::EXCHANGE : 1];
    const int lane = threadIdx.x % WARP, warp = warp_number();
    const long long rows = blocks * (E::BLOCK / ROW), first = (long long)blockIdx.x * (WARPS * ROWS) + warp * ROWS;
    if (first >= rows) return;
    Tile<T> tile{tiles[warp]};
    const bool all = first + ROWS <= rows;
    if (all && is_aligned(x)) {
        const uint4* source = reinterpret_cast<const uint4*>(x + first * ROW) + lane;
#pragma unroll
        for (int t = 0; t < TILES; ++t) Tile<T>{tile.chunks + t * CHUNKS}.load_whole(source + t * CHUNKS, lane);
    } else {
#pragma unroll 1
        for (int t = 0; t < TILES; ++t)
            Tile<T>{tile.chunks + t * CHUNKS}.load_part(x, (first + t * WARP) * ROW, rows * ROW, lane);
    }
    commit_copies();
    Output output{{{a, b, c, d, e}}, exchange[warp], lane, first + lane};
    output.whole = all && output.are_aligned(E::FIELDS);
    wait_copies<0>();
    __syncwarp();
#pragma unroll 1
    for (int t = 0; t < TILES; ++t, output.row += WARP, tile.chunks += CHUNKS) {
        output.there = output.row < rows;
        unsigned word[Tile<T>::WORDS];
        read_numbers<T, E::STRIPED>(tile, lane, word);
        Extremes extremes[GROUPS];
        bool ordinary = true;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            extremes[g] = Numbers<T>::template extremes<E::GROUP>(word, g);
            ordinary &= extremes[g].within_half();
        }
        float v[ROW];
#pragma unroll
        for (int i = 0; i < ROW; ++i) v[i] = Word<T>::get(word[i / Word<T>::COUNT], i % Word<T>::COUNT);
        if constexpr (E::TENSOR_SCALE >= 0) {
            const float* scale = reinterpret_cast<const float*>(output.fields.field[E::TENSOR_SCALE]);
            if (scale) {
                ordinary = false;
                const float inverse = ieee::divide(1.0f, *scale);
#pragma unroll
                for (int i = 0; i < ROW; ++i) v[i] = ieee::multiply(v[i], inverse);
            }
        }
        if (!ordinary) {
#pragma unroll
            for (int i = 0; i < ROW; ++i) v[i] = Source<T>::within_half(v[i]);
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) extremes[g] = extremes_of<E::GROUP>(v, g);
        }
        E::template encode<sizeof(T) == 2>(v, extremes, output);
    }
}

// A tensor scale into its plane: quicker for the host than what CuPy has for one number.
__global__ void store_scale(float* plane, float scale) { *plane = scale; }
