"""(f) Precision: heads trained on the states of the bfloat16 and of the int8 target, each on both targets."""

from __future__ import annotations

import argparse

from lab import Lab, Panel, chain_acceptance, draw, finish, main, mean_tau, parser, replayed

from eyas import checkpoint
from eyas.policies import Chain, Dynamic

DTYPES = ("bfloat16", "int8")


def recipe() -> None:
    asked = parser(__doc__).parse_args()
    labs = {dtype: Lab(argparse.Namespace(**{**vars(asked), "dtype": dtype})) for dtype in DTYPES}
    heads = {dtype: lab.arm().head for dtype, lab in labs.items()}
    rows, by_depth = [], {}
    for trained, head in heads.items():
        for served, lab in labs.items():
            recorded = lab.record(checkpoint.serving(head, lab.target), [Chain(8), Dynamic(6, 4, 16)])
            chain = replayed(recorded, Chain(8))
            depths = chain_acceptance(chain)
            by_depth[f"trained on {trained}, serving {served}"] = list(enumerate(depths, start=1))
            rows.append(
                {"trained on": trained, "serving": served, "acceptance by depth": depths,
                 "tau, chain of 8": mean_tau(chain),
                 "tau, tree of 16": mean_tau(replayed(recorded, Dynamic(6, 4, 16)))}
            )  # fmt: skip
    lab = labs[asked.dtype]
    draw(lab, "precision", [Panel("a chain's acceptance", "depth", "accepted, of those reached", by_depth)])
    finish(lab, "precision", rows, list(rows[0]))


if __name__ == "__main__":
    main(recipe)
