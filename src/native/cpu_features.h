#pragma once

#include <array>

#include "kernels.h"

namespace eyas {

struct CpuFeature {
    const char *name;  // as Linux spells it in /proc/cpuinfo
    bool usable;       // the CPU has it and the operating system saves its registers
};

// Vector instruction sets of the CPU that runs this. None is usable on anything but x86.
std::array<CpuFeature, 8> cpu_features();

// The fastest kernels that this CPU runs, or those that the environment variable EYAS_KERNELS names (portable, avx2,
// avx512).
//
// Throws std::invalid_argument for a name that is unknown or that the CPU cannot run.
const Kernels &choose_kernels();

}  // namespace eyas
