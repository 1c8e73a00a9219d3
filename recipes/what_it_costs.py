"""(i) What it costs: training by steps of the training-time test, and drafting's share of a round by its levels."""

from __future__ import annotations

import time

from lab import Lab, Panel, draw, finish, main, parser, pytorch_threads
from tqdm import tqdm

from eyas import features, initial, train

STEPS = (1, 2, 4, 7)
LEVELS = range(1, 9)


def recipe() -> None:
    lab = Lab(parser(__doc__).parse_args())
    ids_Q, _ = initial.draft_vocabulary(lab.sequences[: lab.asked.sequences], 8192, lab.target.spec.eos_ids)
    trainers = {}
    for steps in STEPS:
        head = initial.new_head("eagle3", lab.eager, ids_Q, steps=steps, window=512)
        config, dtype = train.TrainConfig(), features.states_dtype(lab.target)
        trainers[steps] = train.Trainer(head, lab.states(lab.asked.sequences), config, dtype)
        trainers[steps].train_step()  # the first one is no example
    seconds, tokens = dict.fromkeys(STEPS, 0.0), dict.fromkeys(STEPS, 0)
    with pytorch_threads():
        for _ in tqdm(range(6), desc="steps by turns", unit="round"):
            for steps, trainer in trainers.items():
                begun, before = time.perf_counter(), trainer.tokens_seen
                trainer.train_step()
                seconds[steps] += time.perf_counter() - begun
                tokens[steps] += trainer.tokens_seen - before
    rows: list[dict[str, object]] = [
        {"what": "training", "steps": steps, "tokens/s": tokens[steps] / seconds[steps]} for steps in STEPS
    ]
    price = lab.costs(lab.shipped(), "head")
    shares = []
    for levels in LEVELS:
        draft = price.first + price.level_ms(8) * (levels - 1)
        whole = price.round_ms(24, [8] * (levels - 1))
        shares.append((levels, draft / whole))
        rows.append({"what": "a round of 24 nodes", "levels": levels, "draft ms": draft, "round ms": whole,
                     "share": draft / whole})  # fmt: skip
    rates = [(steps, tokens[steps] / seconds[steps]) for steps in STEPS]
    draw(lab, "what_it_costs", [
        Panel("training", "steps of the training-time test", "tokens/s", {"EAGLE-3": rates}),
        Panel("a round of 24 nodes", "levels", "drafting's share", {"EAGLE-3": shares}),
    ])  # fmt: skip
    finish(lab, "what_it_costs", rows, ["what", "steps", "tokens/s", "levels", "draft ms", "round ms", "share"])


if __name__ == "__main__":
    main(recipe)
