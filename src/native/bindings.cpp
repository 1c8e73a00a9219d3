#include <nanobind/nanobind.h>

#include "cpu_features.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    m.doc() = "Compiled part of eyas. Reach it through eyas.native: it may be absent.";

    m.def(
        "cpu_features",
        [] {
            nb::dict features;
            for (const eyas::CpuFeature &feature : eyas::cpu_features()) {
                features[feature.name] = feature.usable;
            }
            return features;
        },
        nb::sig("def cpu_features() -> dict[str, bool]"),
        "Which vector instruction sets the CPU and the operating system let us use.");
}
