"""(d) One, two, three and five layers: tau, what a draft level costs, and speed.

A training-time test of two steps. Heads of more than one layer draft in PyTorch on the native back end, and their
costs are measured as they draft.
"""

from __future__ import annotations

from lab import Lab, Panel, draw, finish, main, mean_tau, parser, replayed, speed

from eyas.policies import Dynamic

TREE = Dynamic(5, 4, 12)


def recipe() -> None:
    lab = Lab(parser(__doc__).parse_args())
    rows = []
    for layers in (1, 2, 3, 5):
        arm = lab.arm(steps=2, layers=layers)
        answers = replayed(lab.record(arm.drafter, [TREE]), TREE)
        price = lab.costs(arm.drafter, f"layers{layers}")
        rows.append(
            {"layers": layers, "tokens seen": arm.tokens_seen, "seconds": arm.seconds, "tau": mean_tau(answers),
             "ms of a level": price.level_ms(4), "ms of the target": price.verify_ms(12),
             "tokens/s": 1e3 * speed(answers, [4] * 4, price)}
        )  # fmt: skip
    draw(lab, "layers", [
        Panel(str(TREE), "layers", "tau", {"tau": [(row["layers"], row["tau"]) for row in rows]}),
        Panel(str(TREE), "layers", "tokens/s", {"tokens/s": [(row["layers"], row["tokens/s"]) for row in rows]}),
    ])  # fmt: skip
    finish(lab, "layers", rows, list(rows[0]))


if __name__ == "__main__":
    main(recipe)
