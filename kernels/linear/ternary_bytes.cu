// Ternary products of tokens that are int8 already, by thread blocks of which a multiprocessor has one.
#include "linear/ternary_bytes.cuh"
