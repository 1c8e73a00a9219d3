#include "cpu_features.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

// The builtin reads CPUID and, for the AVX sets, asks XGETBV whether the operating system saves their
// registers. It takes string literals only, hence a macro.
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#define EYAS_CPU_SUPPORTS(name) (__builtin_cpu_supports(name) != 0)
#else
#define EYAS_CPU_SUPPORTS(name) false
#endif

namespace eyas {

std::array<CpuFeature, 8> cpu_features() {
    // GCC and Clang write avx512bf16 and avx512vnni, Linux puts an underscore in both.
    return {{
        {"avx2", EYAS_CPU_SUPPORTS("avx2")},
        {"fma", EYAS_CPU_SUPPORTS("fma")},
        {"avx512f", EYAS_CPU_SUPPORTS("avx512f")},
        {"avx512bw", EYAS_CPU_SUPPORTS("avx512bw")},
        {"avx512vl", EYAS_CPU_SUPPORTS("avx512vl")},
        {"avx512dq", EYAS_CPU_SUPPORTS("avx512dq")},
        {"avx512_bf16", EYAS_CPU_SUPPORTS("avx512bf16")},
        {"avx512_vnni", EYAS_CPU_SUPPORTS("avx512vnni")},
    }};
}

const Kernels &choose_kernels() {
    bool avx2 = true, avx512 = true;
    for (const CpuFeature &feature : cpu_features()) {
        const std::string name = feature.name;
        if (name == "avx2" || name == "fma") avx2 = avx2 && feature.usable;
        avx512 = avx512 && feature.usable;
    }
    avx2 = avx2 && kAvx2.name;  // compiled for x86 alone
    avx512 = avx512 && kAvx512.name;
    const char *asked = std::getenv("EYAS_KERNELS");
    const std::string name = asked && *asked ? asked : avx512 ? "avx512" : avx2 ? "avx2" : "portable";
    if (name == "portable") return kPortable;
    if (name == "avx2" && avx2) return kAvx2;
    if (name == "avx512" && avx512) return kAvx512;
    throw std::invalid_argument("EYAS_KERNELS is '" + name + "': give portable" + (avx2 ? ", avx2" : "") +
                                (avx512 ? ", avx512" : "") + " on this machine");
}

}  // namespace eyas
