"""(b) What the fusion of low, middle and high states buys, by depth, beside heads that read one state.

Top-layer features serve the next token; EAGLE-3 says that they are thin evidence for those after it (arXiv 2503.01840,
section 3.1).
"""

from __future__ import annotations

from lab import Lab, Panel, chain_acceptance, draw, finish, main, mean_tau, parser, replayed

from eyas.policies import Chain, Dynamic


def recipe() -> None:
    lab = Lab(parser(__doc__).parse_args())
    layers = lab.target.spec.num_layers
    arms = {"low, middle, high": None, "last state": (layers,), "high state": (layers - 3,)}
    rows, by_depth = [], {}
    for name, reads in arms.items():
        arm = lab.arm(reads=reads)
        recorded = lab.record(arm.drafter, [Chain(8), Dynamic(6, 4, 16)])
        chains = replayed(recorded, Chain(8))
        depths = chain_acceptance(chains)
        by_depth[name] = list(enumerate(depths, start=1))
        rows.append(
            {"states": name, "tokens seen": arm.tokens_seen, "seconds": arm.seconds, "acceptance by depth": depths,
             "tau, chain of 8": mean_tau(chains),
             "tau, tree of 16": mean_tau(replayed(recorded, Dynamic(6, 4, 16)))}
        )  # fmt: skip
    draw(lab, "fused_states", [Panel("a chain's acceptance", "depth", "accepted, of those reached", by_depth)])
    columns = ["states", "tokens seen", "seconds", "acceptance by depth", "tau, chain of 8", "tau, tree of 16"]
    finish(lab, "fused_states", rows, columns)


if __name__ == "__main__":
    main(recipe)
