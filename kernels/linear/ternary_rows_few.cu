// Ternary products with few rows, by thread blocks that leave room for those of the next kernel: these are there, and
// know what to fetch, when the kernel ahead ends.
#include "linear/ternary_rows.cuh"

// The second launch of tokens that are quantized ahead of it. Codes that have no room in stages are brought to the L2
// cache meanwhile, as far as the host says.
template <typename T>
__global__ void __launch_bounds__(ROW_THREADS, 1) rows_ternary_early(
    const unsigned char* a,           // fragments
    const int* token_sum,             // [tokens] sums of their codes
    const float* token_scale,         // [tokens], or [1] if they share it
    const float* __restrict__ scale,  // [channels], or [1] if they share it
    const void* __restrict__ bias,    // [channels] of the type that bias_kind names, or null
    T* __restrict__ y,                // [tokens, channels]
    long long channels, int tokens, int depth, int token_step, int scale_step, int bias_kind, int share, int stages,
    int of_pass, int ahead,
    const __grid_constant__ TensorMap map) {  // of codes: boxes of of_pass x LINE
#if __CUDA_ARCH__ >= 900
    multiply_fragments(
        &map, a, token_sum, token_scale, scale, bias, y, channels, tokens, depth, token_step, scale_step, bias_kind,
        Cut{share, stages, of_pass, ahead});
#endif
}
