// Ternary products with few rows, by thread blocks that leave room for those of the next kernel: these are there, and
// know what to fetch, when the kernel ahead ends.
#include "linear/ternary_rows.cuh"
