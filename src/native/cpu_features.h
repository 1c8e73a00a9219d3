#pragma once

#include <array>

namespace eyas {

struct CpuFeature {
    const char *name;  // as Linux spells it in /proc/cpuinfo
    bool usable;       // the CPU has it and the operating system saves its registers
};

// Vector instruction sets of the CPU that runs this. None is usable on anything but x86.
std::array<CpuFeature, 7> cpu_features();

}  // namespace eyas
