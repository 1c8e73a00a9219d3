"""(c) More data: does feature regression saturate where EAGLE-3 keeps gaining? 1, 2, 4 and 8 times the answers.

The claim is EAGLE-3's (arXiv 2503.01840, figure 1). One training of each at a constant rate, every answer seen once,
looked at after 1, 2, 4 and 8 parts; EAGLE-3 with a training-time test of two steps.
"""

from __future__ import annotations

from lab import Lab, Panel, draw, finish, main, mean_tau, parser, replayed

from eyas.policies import Chain, Dynamic

TIMES = (1, 2, 4, 8)
HEADS = {"EAGLE-1": {"kind": "eagle", "steps": 1}, "EAGLE-3": {"steps": 2}}


def recipe() -> None:
    lab = Lab(parser(__doc__).parse_args(), largest=max(TIMES))
    rows, taus = [], {}
    for name, settings in HEADS.items():
        for times, arm in zip(TIMES, lab.growing(TIMES, **settings), strict=True):
            recorded = lab.record(arm.drafter, [Chain(4), Dynamic(6, 4, 16)])
            rows.append(
                {"head": name, "times": times, "tokens seen": arm.tokens_seen, "seconds": arm.seconds,
                 "tau, chain of 4": mean_tau(replayed(recorded, Chain(4))),
                 "tau, tree of 16": mean_tau(replayed(recorded, Dynamic(6, 4, 16)))}
            )  # fmt: skip
        taus[name] = [(row["tokens seen"] / 1e6, row["tau, tree of 16"]) for row in rows if row["head"] == name]
    draw(lab, "more_data", [Panel("trees of 16 nodes", "million tokens seen", "tau", taus, logarithmic=True)])
    finish(lab, "more_data", rows, list(rows[0]))


if __name__ == "__main__":
    main(recipe)
