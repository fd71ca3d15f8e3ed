// Ternary products by thread blocks of which a multiprocessor has one.
#include "linear/ternary_rows.cuh"
