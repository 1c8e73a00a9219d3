#include "cpu_features.h"

// The builtin reads CPUID and, for the AVX sets, asks XGETBV whether the operating system saves their
// registers. It takes string literals only, hence a macro.
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#define EYAS_CPU_SUPPORTS(name) (__builtin_cpu_supports(name) != 0)
#else
#define EYAS_CPU_SUPPORTS(name) false
#endif

namespace eyas {

std::array<CpuFeature, 7> cpu_features() {
    // GCC and Clang write avx512bf16 and avx512vnni, Linux puts an underscore in both.
    return {{
        {"avx2", EYAS_CPU_SUPPORTS("avx2")},
        {"fma", EYAS_CPU_SUPPORTS("fma")},
        {"avx512f", EYAS_CPU_SUPPORTS("avx512f")},
        {"avx512bw", EYAS_CPU_SUPPORTS("avx512bw")},
        {"avx512vl", EYAS_CPU_SUPPORTS("avx512vl")},
        {"avx512_bf16", EYAS_CPU_SUPPORTS("avx512bf16")},
        {"avx512_vnni", EYAS_CPU_SUPPORTS("avx512vnni")},
    }};
}

}  // namespace eyas
