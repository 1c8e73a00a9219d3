"""(h) Is a draft's confidence the chance that the target accepts? By workload (EAGLE-2, arXiv 2406.16858, section 3.2).

Of candidates at nodes where the target drew, and of path values, which dynamic trees go by.
"""

from __future__ import annotations

from lab import Lab, Panel, draw, finish, main, parser, replayed

from eyas.measure import calibration, path_calibration
from eyas.policies import Dynamic

TREE = Dynamic(6, 8, 24)


def recipe() -> None:
    lab = Lab(parser(__doc__).parse_args())
    rows, lines, paths = [], {}, {}
    for workload, answers in replayed(lab.record(lab.shipped(), [TREE]), TREE).items():
        for found, bins in ((lines, calibration(answers)), (paths, path_calibration(answers))):
            found[workload] = [(own.confidence, own.accepted) for own in bins]
            total = sum(own.count for own in bins)
            error = sum(own.count * abs(own.confidence - own.accepted) for own in bins) / total
            promised = sum(own.count * own.confidence for own in bins) / total
            accepted = sum(own.count * own.accepted for own in bins) / total
            rows.append(
                {"workload": workload, "of": "candidates" if found is lines else "paths", "nodes": total,
                 "promised": promised, "accepted": accepted, "expected error": error}
            )  # fmt: skip
    draw(lab, "calibration", [
        Panel("candidates", "draft confidence", "accepted", lines, diagonal=True),
        Panel("paths", "path value", "whole path accepted", paths, diagonal=True),
    ])  # fmt: skip
    finish(lab, "calibration", rows, list(rows[0]))


if __name__ == "__main__":
    main(recipe)
