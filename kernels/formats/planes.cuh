// What a decoder is, and what it reads.
//
// A decoder is a struct F of one format, the twin of the format's NumPy reference:
//
//     static constexpr int TABLE                                   numbers of its table; 0: it has none
//     static void decode8(const Planes&, long long octet, float (&v)[8])
//
// decode8 gives elements 8 * octet to 8 * octet + 7 of the flattened array as the float32 numbers that the contract of
// the format names, exactly. At least one of them is in the array; what it gives for those beyond the end does not
// matter, but it must not read past a plane. Loads of two octets are under way together where there are no branches. No
// lane talks to another, so the host's compiler takes it, too, and tests/contract/test_decoders.py compares it with
// NumPy where there is no GPU. kernels/blocks.cu makes kernels of it.
//
// Octets that share bytes or scales may be decoded together, which saves most of the work where all of an array is
// decoded:
//
//     static constexpr int TOGETHER, APART                         how many octets, and their distance; powers of two
//     static void decode_together(const Planes&, long long octet, float (&v)[TOGETHER][8])
//
// It gives octets `octet` + j * APART, all of them whole; `octet` is one of the first APART of each TOGETHER * APART.
// Where that takes more of an array than its format says, it is asked beforehand:
//
//     static bool together(const Planes&)                          whether octets of the array can be decoded together
//
// A table that is the same for all arrays of the format does not come with each of them:
//
//     static const unsigned* entries()                             the bits of TABLE numbers, at a multiple of 16 bytes
#pragma once
#include "common/scalar.cuh"

constexpr int MAX_PLANES = 6, MAX_NUMBERS = 4;

// The planes of one array.
struct Planes {
    const void* plane[MAX_PLANES];  // in the order that the format's decoder names; null: the array has no such plane
    long long number[MAX_NUMBERS];  // integers, their meaning is the decoder's
    long long size;                 // elements of the array
    const float* table;             // F::TABLE numbers in shared memory
    // Whether all planes begin at multiples of 16 bytes and the octet is all in the array. Kernels set it to a
    // constant, and the compiler leaves out what it decides.
    long long whole;

    template <typename V>
    __device__ __forceinline__ const V* at(int i) const {
        return static_cast<const V*>(plane[i]);
    }
};

// Whether F has `entries`.
template <typename F, typename = void>
struct Fixed {
    static constexpr bool TABLE = false;
};
template <typename F>
struct Fixed<F, decltype(void(F::entries()))> {
    static constexpr bool TABLE = true;
};

// The argument of a kernel, passed by value. A stack is `members` arrays of one shape, whose planes lie behind each
// other.
template <typename F>
struct Argument {
    Planes planes;                 // of the first member; no table
    long long stride[MAX_PLANES];  // bytes from the plane of a member to that of the next
    const float* values;           // on the device: what the table begins with instead, or null
    long long value_count;
    float table[F::TABLE > 0 && !Fixed<F>::TABLE ? F::TABLE : 1];
};

// How many octets F decodes together, and their distance; F::TOGETHER and F::APART where it has them.
template <typename F, typename = void>
struct Together {
    static constexpr int COUNT = 1, APART = 1;
};
template <typename F>
struct Together<F, decltype(void(F::TOGETHER))> {
    static constexpr int COUNT = F::TOGETHER, APART = F::APART;
};

// Whether octets of an array can be decoded together.
template <typename F, typename = void>
struct Asked {
    __device__ __forceinline__ static bool together(const Planes&) { return true; }
};
template <typename F>
struct Asked<F, decltype(void(&F::together))> {
    __device__ __forceinline__ static bool together(const Planes& planes) { return F::together(planes); }
};

// The planes of an octet that is whole, see there.
__device__ __forceinline__ Planes as_whole(Planes planes) {
    planes.whole = 1;
    return planes;
}

// Number i of the table of an array.
template <typename F>
__device__ __forceinline__ float number_of(const Argument<F>& argument, int i) {
    if constexpr (Fixed<F>::TABLE) return __uint_as_float(F::entries()[i]);
    else return i < argument.value_count ? argument.values[i] : argument.table[i];
}

// The planes of another member.
template <typename F>
__device__ __forceinline__ Planes of_member(Planes planes, const Argument<F>& argument, long long member) {
#pragma unroll
    for (int i = 0; i < MAX_PLANES; ++i) planes.plane[i] = planes.at<char>(i) + member * argument.stride[i];
    return planes;
}

// Whether all planes begin at multiples of 16 bytes.
__device__ __forceinline__ bool are_aligned(const Planes& planes) {
    bool aligned = true;
#pragma unroll
    for (int i = 0; i < MAX_PLANES; ++i) aligned &= is_aligned(planes.plane[i]);
    return aligned;
}

// Words from an address that is a multiple of their bytes: one load.
template <int WORDS>
__device__ __forceinline__ void load_aligned(const unsigned char* from, unsigned (&word)[WORDS]) {
    static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "one load");
    if constexpr (WORDS == 1) {
        word[0] = __ldg(reinterpret_cast<const unsigned*>(from));
    } else if constexpr (WORDS == 2) {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
        word[0] = two.x, word[1] = two.y;
    } else {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(from));
        word[0] = four.x, word[1] = four.y, word[2] = four.z, word[3] = four.w;
    }
}

// Words of plane i from byte `first`, a multiple of their bytes; what lies at byte `end` or behind it is zero.
template <int WORDS>
__device__ __forceinline__ void load_words(
    const Planes& planes, int i, long long first, long long end, unsigned (&word)[WORDS]) {
    const unsigned char* from = planes.at<unsigned char>(i) + first;
    const bool aligned = (reinterpret_cast<unsigned long long>(from) & (4 * WORDS - 1)) == 0;
    if (planes.whole || (aligned && first + 4 * WORDS <= end)) {
        load_aligned(from, word);
        return;
    }
#pragma unroll
    for (int b = 0; b < 4 * WORDS; ++b) {
        const unsigned byte = first + b < end ? from[b] : 0u;
        word[b / 4] = b % 4 ? word[b / 4] | byte << b % 4 * 8 : byte;
    }
}

// Eight bytes with rows and columns exchanged: bit c of byte r becomes bit r of byte c.
__device__ __forceinline__ unsigned long long transpose8(unsigned long long bits) {
    unsigned long long swap = (bits ^ bits >> 7) & 0x00aa00aa00aa00aaull;
    bits ^= swap ^ swap << 7;
    swap = (bits ^ bits >> 14) & 0x0000cccc0000ccccull;
    bits ^= swap ^ swap << 14;
    swap = (bits ^ bits >> 28) & 0x00000000f0f0f0f0ull;
    return bits ^ swap ^ swap << 28;
}
