// Decoding whole arrays with a decoder of kernels/formats/, on the host.
#pragma once
#include "formats/planes.cuh"

// A read of memory that is not there ends the decoding instead of the process.
inline sigjmp_buf& escape() {
    static sigjmp_buf buffer;
    return buffer;
}
inline void on_bad_read(int) { siglongjmp(escape(), 1); }

// What cannot come from any decoder by chance: octets that are decoded together have to be those that are not.
constexpr unsigned NOT_THE_SAME = 0xdeadbeefu;

template <typename F>
void compare_together(const Planes& planes, float* out) {
    constexpr int COUNT = Together<F>::COUNT, APART = Together<F>::APART;
    if constexpr (COUNT > 1) {
        if (!Asked<F>::together(planes)) return;
        for (long long first = 0; (first + COUNT * APART) * 8 <= planes.size; first += COUNT * APART) {
            for (long long octet = first; octet < first + APART; ++octet) {
                float v[COUNT][8];
                F::decode_together(as_whole(planes), octet, v);
                for (int i = 0; i < COUNT * 8; ++i) {
                    float& alone = out[(octet + i / 8 * APART) * 8 + i % 8];
                    if (std::memcmp(&alone, &v[i / 8][i % 8], sizeof(float)) != 0)
                        alone = __uint_as_float(NOT_THE_SAME);
                }
            }
        }
    }
}

// out  float[members * size]
template <typename F>
__attribute__((noinline)) void decode_octets(const Argument<F>& argument, long long members, float* out) {
    Planes first = argument.planes;
    float table[F::TABLE > 0 ? F::TABLE : 1];
    for (int i = 0; i < F::TABLE; ++i) table[i] = number_of(argument, i);
    first.table = table;
    for (long long member = 0; member < members; ++member, out += first.size) {
        const Planes planes = of_member(first, argument, member);
        const bool aligned = are_aligned(planes);
        for (long long octet = 0; octet * 8 < first.size; ++octet) {
            float v[8];
            if (aligned && octet * 8 + 8 <= first.size) F::decode8(as_whole(planes), octet, v);
            else F::decode8(planes, octet, v);
            for (int e = 0; e < 8 && octet * 8 + e < first.size; ++e) out[octet * 8 + e] = v[e];
        }
        if (aligned) compare_together<F>(planes, out);
    }
}

// Whether all that was read is there.
template <typename F>
int decode_all(const void* argument, long long members, float* out) {
    struct sigaction action = {}, segv, bus;
    action.sa_handler = on_bad_read;
    sigaction(SIGSEGV, &action, &segv);
    sigaction(SIGBUS, &action, &bus);
    const FloatMode before = float_mode();
    volatile int good = 0;
    if (sigsetjmp(escape(), 1) == 0) {
        set_float_mode(FLUSHING_MODE);
        decode_octets(*static_cast<const Argument<F>*>(argument), members, out);
        good = 1;
    }
    set_float_mode(before);
    sigaction(SIGSEGV, &segv, nullptr);
    sigaction(SIGBUS, &bus, nullptr);
    return good;
}
