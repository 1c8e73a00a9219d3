"""(a) Exposure bias: does a head that meets its own guesses in training keep its acceptance at depth?

EAGLE-1 on true features, clean and with noise; the token loss alone, and with a training-time test of 2, 4 and 7 steps
(EAGLE-3, arXiv 2503.01840, section 3). Acceptance by depth of chains; tau of trees and speed of chains against their
levels.
"""

from __future__ import annotations

from lab import Lab, Panel, chain_acceptance, draw, finish, main, mean_tau, parser, replayed, speed

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
        recorded = lab.record(arm.drafter, [Chain(max(LEVELS)), Dynamic(max(LEVELS), 4, 16)])
        price = lab.costs(lab.arm().drafter if arm.head.kind == "eagle3" else arm.drafter, arm.head.kind)
        chains = {levels: replayed(recorded, Chain(levels)) for levels in LEVELS}
        depths = chain_acceptance(chains[max(LEVELS)])
        by_depth[name] = list(enumerate(depths, start=1))
        taus[name] = [(levels, mean_tau(replayed(recorded, Dynamic(levels, 4, 16)))) for levels in LEVELS]
        speeds[name] = [(levels, 1e3 * speed(chains[levels], [1] * (levels - 1), price)) for levels in LEVELS]
        best = max(speeds[name], key=lambda point: point[1])
        rows.append(
            {"arm": name, "tokens seen": arm.tokens_seen, "seconds": arm.seconds, "acceptance by depth": depths,
             "tau by levels": [y for _, y in taus[name]], "tokens/s by levels": [y for _, y in speeds[name]],
             "best chain": best[0]}
        )  # fmt: skip
    draw(lab, "exposure_bias", [
        Panel("a chain's acceptance", "depth", "accepted, of those reached", by_depth),
        Panel("trees of 16 nodes", "levels", "tau", taus),
        Panel("chains", "levels", "tokens/s, from measured costs", speeds),
    ])  # fmt: skip
    finish(lab, "exposure_bias", rows, list(rows[0]))


if __name__ == "__main__":
    main(recipe)
