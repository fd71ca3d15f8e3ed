// Numbers of experts as they came (kbitcupy/products/integer_experts.py): int32 or int64, which kernels take alike.
#pragma once

// Number i of ids of `bytes` bytes each.
__device__ __forceinline__ long long id_at(const void* ids, int bytes, long long i) {
    return bytes == 4 ? static_cast<const int*>(ids)[i] : static_cast<const long long*>(ids)[i];
}
