// Products of integer codes with weights of few tiles: SPLIT thread blocks of a cluster share K, so that a warp has
// less of it, and waits less, at a time. What each of them adds up of a tile stays in its shared memory to the end.
#if __CUDA_ARCH__ >= 900
#define CLUSTER_BOUNDS __cluster_dims__(SPLIT)
#endif
#include "linear/integer_stream.cu"
