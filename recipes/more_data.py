"""(c) More data: does feature regression saturate where EAGLE-3 keeps gaining? 1, 2, 4 and 8 times the answers.

The claim is EAGLE-3's (arXiv 2503.01840, figure 1). Each head sees each of its answers once: more data is more steps.
"""

from __future__ import annotations

from lab import Lab, Panel, draw, finish, main, mean_tau, parser, replayed

from eyas.policies import Chain, Dynamic

TIMES = (1, 2, 4, 8)


def recipe() -> None:
    lab = Lab(parser(__doc__).parse_args(), largest=max(TIMES))
    rows, taus = [], {"EAGLE-1": [], "EAGLE-3": []}
    for times in TIMES:
        for name, settings in (("EAGLE-1", {"kind": "eagle", "steps": 1}), ("EAGLE-3", {})):
            arm = lab.arm(**settings, times=times)
            tree = mean_tau(replayed(lab.record(arm.drafter, [Dynamic(6, 4, 16)]), Dynamic(6, 4, 16)))
            chain = mean_tau(replayed(lab.record(arm.drafter, [Chain(4)]), Chain(4)))
            taus[name].append((arm.tokens_seen / 1e6, tree))
            rows.append(
                {"head": name, "times": times, "tokens seen": arm.tokens_seen, "seconds": arm.seconds,
                 "tau, chain of 4": chain, "tau, tree of 16": tree}
            )  # fmt: skip
    draw(lab, "more_data", [Panel("trees of 16 nodes", "million tokens seen", "tau", taus, logarithmic=True)])
    finish(lab, "more_data", rows, list(rows[0]))


if __name__ == "__main__":
    main(recipe)
