"""(e) Draft vocabularies of 2,048 to 32,768 tokens: what they cover, tau, and time.

A smaller one makes each level cheaper and can never propose the rest (FR-Spec, arXiv 2502.14856, is the same thought).
A training-time test of two steps.
"""

from __future__ import annotations

from lab import Lab, Panel, draw, finish, main, mean_tau, parser, replayed, speed

from eyas.initial import draft_vocabulary
from eyas.measure import rejected_outside_vocabulary
from eyas.policies import Dynamic

TREE = Dynamic(5, 4, 12)
SIZES = (2048, 4096, 8192, 16384, 32768)


def recipe() -> None:
    lab = Lab(parser(__doc__).parse_args())
    trained = lab.sequences[: lab.asked.sequences]
    rows = []
    for size in SIZES:
        arm = lab.arm(steps=2, vocabulary=size)
        answers = replayed(lab.record(arm.drafter, [TREE]), TREE)
        everything = [answer for own in answers.values() for answer in own]
        price = lab.costs(arm.drafter, f"vocabulary{size}")
        rows.append(
            {"tokens": size, "covered": draft_vocabulary(trained, size, lab.target.spec.eos_ids)[1],
             "seconds of training": arm.seconds, "tau": mean_tau(answers),
             "rejected for being outside": rejected_outside_vocabulary(everything, arm.drafter.can_propose),
             "ms of a level": price.level_ms(4), "tokens/s": 1e3 * speed(answers, [4] * 4, price)}
        )  # fmt: skip
    panels = [
        Panel(str(TREE), "draft vocabulary", y, {y: [(row["tokens"], row[y]) for row in rows]}, logarithmic=True)
        for y in ("covered", "tau", "ms of a level", "tokens/s")
    ]
    draw(lab, "draft_vocabulary", panels)
    finish(lab, "draft_vocabulary", rows, list(rows[0]))


if __name__ == "__main__":
    main(recipe)
