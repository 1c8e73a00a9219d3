"""(a) Exposure bias: does a head that meets its own guesses in training keep its acceptance at depth?

EAGLE-1 on true features, clean and with noise; the token loss alone, and with a training-time test of 2, 4 and 7 steps
(EAGLE-3, arXiv 2503.01840, section 3). Acceptance by depth of chains; tau and speed against the levels of a tree.
"""

from __future__ import annotations

from lab import Lab, Panel, draw, finish, main, mean_tau, parser, replayed, speed

from eyas.measure import alpha_by_depth
from eyas.policies import Chain, Dynamic

LEVELS = range(1, 9)
ARMS = {
    "EAGLE-1, clean": {"kind": "eagle", "steps": 1, "noise": 0.0},
    "EAGLE-1, noise 0.1": {"kind": "eagle", "steps": 1, "noise": 0.1},
    "tokens, 1 step": {"steps": 1},
    "tokens, 2 steps": {"steps": 2},
    "tokens, 4 steps": {"steps": 4},
    "tokens, 7 steps": {"steps": 7},
}


def recipe() -> None:
    lab = Lab(parser(__doc__).parse_args())
    rows, by_depth, taus, speeds = [], {}, {}, {}
    for name, settings in ARMS.items():
        arm = lab.arm(**settings)
        recorded = lab.record(arm.drafter, [Chain(8), Dynamic(8, 4, 16)])
        price = lab.costs(lab.arm().drafter if arm.head.kind == "eagle3" else arm.drafter, arm.head.kind)
        chain = replayed(recorded, Chain(8))
        depths = alpha_by_depth([answer for own in chain.values() for answer in own])
        trees = {levels: replayed(recorded, Dynamic(levels, 4, 16)) for levels in LEVELS}
        by_depth[name] = list(enumerate(depths, start=1))
        taus[name] = [(levels, mean_tau(answers)) for levels, answers in trees.items()]
        speeds[name] = [(levels, 1e3 * speed(trees[levels], [4] * (levels - 1), price)) for levels in LEVELS]
        best = max(speeds[name], key=lambda point: point[1])
        rows.append(
            {"arm": name, "tokens seen": arm.tokens_seen, "seconds": arm.seconds, "acceptance by depth": depths,
             "tau by levels": [y for _, y in taus[name]], "tokens/s by levels": [y for _, y in speeds[name]],
             "best levels": best[0]}
        )  # fmt: skip
    draw(lab, "exposure_bias", [
        Panel("a chain's acceptance", "depth", "accepted, of those reached", by_depth),
        Panel("trees of 16 nodes", "levels", "tau", taus),
        Panel("trees of 16 nodes", "levels", "tokens/s, from measured costs", speeds),
    ])  # fmt: skip
    columns = ["arm", "tokens seen", "seconds", "acceptance by depth", "tau by levels", "best levels"]
    finish(lab, "exposure_bias", rows, columns)


if __name__ == "__main__":
    main(recipe)
