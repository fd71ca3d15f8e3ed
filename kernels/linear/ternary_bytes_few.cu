// The same with few rows, by thread blocks that leave room for those of the next kernel (linear/ternary_rows_few.cu).
#include "linear/ternary_bytes.cuh"
