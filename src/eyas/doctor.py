"""What a head or a target is, whether they fit, what another runtime makes of a head, what rounding costs a target.

Legend: T tokens, L states, D width, P places of a text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from eyas import data, exports, readers
from eyas.checkpoint import LOOKUP, SMALL, head_folder, load_small_target, open_head, target_fingerprint
from eyas.drafters.eagle import Eagle
from eyas.drafters.eagle3 import Eagle3
from eyas.drafters.lookup import LONGEST, Lookup
from eyas.drafters.small_model import SmallModel
from eyas.errors import InputError
from eyas.formats import read_head
from eyas.layouts import layer_count, switches
from eyas.measure import perplexity
from eyas.model import Model, attach_head, choose_policy, load
from eyas.prompts import read_workload
from eyas.readers import FAILS, NOTE, SILENT, Finding, Reading
from eyas.targets.eager import EagerTarget
from eyas.tree import Tree

DEPTH = 3  # drafted tokens in a row that are compared
_ROUNDING = 1e-3  # of a draft logit in float32: what differs by more was computed otherwise
_TEXTS, _ANSWER = 5, 24  # prompts that a head is judged on, and tokens of the target's answer to each


def describe_target(target: EagerTarget, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """A target's figures, by name."""
    spec = target.spec
    return {
        "name": spec.name,
        "family": spec.family,
        "layers": spec.num_layers,
        "width": spec.width,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "vocabulary": spec.vocab_size,
        "context": spec.max_length,
        "end_tokens": list(spec.eos_ids),
        "parameters": sum(p.numel() for p in target.model.parameters()),
        "fingerprint": target_fingerprint(target, tokenizer),
    }


def describe_head(name: str) -> dict[str, object]:
    """A head's figures from its files alone, by name."""
    if name == LOOKUP:
        return {"name": name, "kind": Lookup.kind, "longest_match": LONGEST, "parameters": 0}
    if name.startswith(SMALL):
        target, tokenizer = load_small_target(name, "eager", torch.float32)
        assert isinstance(target, EagerTarget), type(target)
        return describe_target(target, tokenizer) | {"name": name, "kind": SmallModel.kind}
    file = read_head(head_folder(name))
    layered = file.kind == "eagle3"
    rows = file.tensors.get("lm_head.weight", torch.empty(())).shape
    trained = [t for key, t in file.tensors.items() if key not in ("d2t", "t2d", "embed_tokens.weight")]
    return {
        "name": name,
        "kind": file.kind,
        "layers": layer_count(file.tensors) if layered else 1,
        "switches": [switch for switch, on in switches(file.config).items() if on] if layered else [],
        "width": file.config.get("hidden_size"),
        "reads": file.config.get("eyas_reads"),
        "draft_vocabulary": rows[0] if rows else None,
        "vocabulary": file.config.get("vocab_size"),
        "parameters": sum(t.numel() for t in trained),
        "dtypes": sorted({str(t.dtype).removeprefix("torch.") for t in trained}),
        "made_for": file.config.get("eyas_target"),
    }


def fit(name: str, target: EagerTarget, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Does the head fit the target? Raises InputError where it cannot be loaded; else lists what differs."""
    attach_head(name, target, tokenizer)
    if name == LOOKUP or name.startswith(SMALL):
        return {"fits": True, "findings": []}
    made_for = describe_head(name)["made_for"]
    found = target_fingerprint(target, tokenizer)
    if not isinstance(made_for, dict):
        return {"fits": True, "findings": ["the head does not record what it was made for: sizes fit, weights unknown"]}
    findings = [
        f"{key}: the head was made for {made_for.get(key)}, the target has {value}"
        for key, value in found.items()
        if made_for.get(key) != value
    ]
    return {"fits": not any(f.startswith(("weights", "tokenizer")) for f in findings), "findings": findings}


def diagnose(name: str, runtime: str, target: EagerTarget, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """What `runtime` would make of a head: findings, and its drafts beside eyas' own on real prompts.

    A head in eyas' own layout is exported first, and what was exported is judged; other folders as they lie.

    Raises:
        InputError: the files cannot be read, or are those of no head.
    """
    try:
        file, ours, _ = open_head(name, target)
    except InputError as error:
        found = readers.simulate(runtime, head_folder(name), target)
        found.add(NOTE, f"eyas itself refuses these files ({error})", "what that sentence asks for")
        return _verdict(runtime, found)
    with TemporaryDirectory() as scratch:
        folder, found = head_folder(name), Reading()
        try:
            if file.layout == "eyas":
                folder = Path(scratch)
                exports.check(ours, runtime, target.spec)
                # llama.cpp's converter starts from the folder that vLLM reads
                exports.export(ours, "vllm" if runtime == "gguf" else runtime, target.spec, folder, torch.float32, {})
            found = readers.simulate(runtime, folder, target, ours.reads)
        except InputError as error:
            found.add(FAILS, str(error), "another runtime, or another head")
    theirs, record, texts = found.head, {}, _texts(target, tokenizer)
    if theirs is not None:
        found.findings += readers.differences(ours, theirs)
        record = compare(readers.without_window(ours), theirs, target, texts)
        differs = record["largest_difference"] is None or float(str(record["largest_difference"])) > _ROUNDING
        silent = any(finding.effect == SILENT for finding in found.findings)
        if differs and not silent:
            found.add(SILENT, "the draft logits differ, for no reason that eyas knows", "report it, with the folder")
    if isinstance(ours, Eagle3) and "eyas_reads" not in file.config:
        found.findings += doubts(ours, target, texts)
    return _verdict(runtime, found) | record


def _verdict(runtime: str, found: Reading) -> dict[str, object]:
    effects = {finding.effect for finding in found.findings}
    verdict = "fails" if FAILS in effects else "drafts otherwise" if SILENT in effects else "works"
    return {"runtime": runtime, "verdict": verdict, "findings": [asdict(finding) for finding in found.findings]}


def _texts(target: EagerTarget, tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], int]]:
    """Prompts that ship with the target's greedy answers: token ids, and where the answer begins."""
    model = Model(target, tokenizer, None, choose_policy("auto", target.spec, None))
    texts = []
    for item in tqdm(read_workload(Path(str(files("eyas") / "demo.jsonl")), _TEXTS), desc="prompts", unit="prompt"):
        ids = model.encode(item.text)
        texts.append(([*ids, *model.generate(ids, max_new_tokens=_ANSWER).token_ids], len(ids)))
    return texts


@torch.inference_mode()
def compare(
    ours: Eagle | Eagle3, theirs: Eagle | Eagle3, target: EagerTarget, texts: Sequence[tuple[list[int], int]]
) -> dict[str, object]:
    """Two readings of a head on the same texts: the largest difference of a draft logit (null where the draft
    vocabularies differ), and the share of drafted tokens that are the target's own, by depth."""
    heads, accepted, largest = (ours, theirs), [torch.zeros(DEPTH), torch.zeros(DEPTH)], 0.0
    places = 0
    for tokens, start in texts:
        found = [_drafts(head, tokens, start, _states(target, tokens, head.reads)) for head in heads]
        wanted = torch.tensor([tokens[i + 1 : i + 1 + DEPTH] for i in range(start, len(tokens) - DEPTH)])
        for head, logits, total in zip(heads, found, accepted, strict=True):
            total += (_tokens(head, logits) == wanted).long().cumprod(1).sum(0)
        places += len(wanted)
        if found[0].shape == found[1].shape and _same_vocabulary(ours, theirs):
            largest = max(largest, float((found[0] - found[1]).abs().max()))
        else:
            largest = float("inf")
    names = ("acceptance_by_depth", "acceptance_by_depth_there")
    shares = {name: [round(float(n) / places, 4) for n in total] for name, total in zip(names, accepted, strict=True)}
    return {"places": places, "largest_difference": None if largest == float("inf") else largest, **shares}


def _states(target: EagerTarget, tokens: Sequence[int], reads: Sequence[int]) -> Tensor:
    return target.verify([(target.new_cache(), Tree.chain(tokens))], reads, last_only=True)[0].hidden_NLD


def _drafts(head: Eagle | Eagle3, tokens: Sequence[int], start: int, states_TLD: Tensor) -> Tensor:
    """Draft logits at each place of an answer and those after it, fed the answer's own tokens: [P, DEPTH, .]."""
    head = head.to(states_TLD.dtype).eval()
    state, rows = head.new_state(), []
    if start > 1:
        head.observe(state, tokens[1:start], states_TLD[: start - 1], 1)
    for i in range(start, len(tokens) - DEPTH):
        head.observe(state, [tokens[i]], states_TLD[i - 1 : i], 1)
        for step in range(DEPTH):
            if step:
                head.expand(state, [step - 1], [tokens[i + step]], 1)
            out_D = state.hidden_RD[-1]
            rows.append(head.lm_head(head.norm(out_D)) if isinstance(head, Eagle3) else head.head_VD @ out_D)
    return torch.stack(rows).unflatten(0, (-1, DEPTH)).float()


def _tokens(head: Eagle | Eagle3, logits: Tensor) -> Tensor:
    """The best target tokens of draft logits."""
    best, ids_Q = logits.argmax(-1), head.draft_vocabulary_Q if isinstance(head, Eagle3) else None
    return best if ids_Q is None else ids_Q[best]


def _same_vocabulary(ours: Eagle | Eagle3, theirs: Eagle | Eagle3) -> bool:
    ids = [head.draft_vocabulary_Q if isinstance(head, Eagle3) else None for head in (ours, theirs)]
    return ids[0] is ids[1] if None in ids else torch.equal(*ids)  # type: ignore[arg-type]


def doubts(head: Eagle3, target: EagerTarget, texts: Sequence[tuple[list[int], int]]) -> list[Finding]:
    """Would a head whose files are no record of its training draft better one layer lower or higher?"""
    shares = {}
    for shift in (0, -1, 1):
        reads = tuple(read + shift for read in head.reads)
        if min(reads) >= 0 and max(reads) < target.spec.num_layers:
            moved = readers.without_window(head)
            assert isinstance(moved, Eagle3)
            moved.config, moved.reads = replace(moved.config, reads=reads), reads
            shares[reads] = compare(moved, moved, target, texts)["acceptance_by_depth"][0]  # type: ignore[index]
    best = max(shares, key=shares.__getitem__)
    places = sum(max(0, len(tokens) - DEPTH - start) for tokens, start in texts)
    return doubt(head.reads, shares[head.reads], best, shares[best], places)


def doubt(reads: tuple[int, ...], share: float, best: tuple[int, ...], best_share: float, places: int) -> list[Finding]:
    """A finding where the states next to those that a head's files name serve it better by two standard errors."""
    mean = (share + best_share) / 2
    if best_share - share <= 2 * (2 * mean * (1 - mean) / max(places, 1)) ** 0.5:
        return []
    what = (f"the files name the states {list(reads)}, where {share:.0%} of {places} first drafts are right; on "
            f"{list(best)} it is {best_share:.0%}: the layer ids seem to be off by one")  # fmt: skip
    return [Finding(SILENT, what, f"name the states {list(best)}")]


def quality(name: str, answers: Sequence[data.Sequence] | None, limit: int) -> dict[str, object]:
    """What int8 costs: perplexity of answers on the native back end, against bfloat16.

    Without `answers`, the target's own in bfloat16, sampled at temperature 1 on the prompts that eyas ships.

    Raises:
        InputError: the native back end is absent, or does not run the target.
    """
    exact = load(name, backend="native", dtype="bfloat16")
    source = "the answers given"
    if answers is None:
        answers, source = _own_answers(exact), "the target's own, in bfloat16 at temperature 1, on shipped prompts"
    answers = answers[:limit]
    found = {"bfloat16": perplexity(exact.target, answers)}
    found["int8"] = perplexity(load(name, backend="native", dtype="int8").target, answers)
    tokens = sum(len(answer.answer_tokens) for answer in answers)
    difference = 100 * (found["int8"] / found["bfloat16"] - 1)
    return {"perplexity": found, "int8_costs_percent": difference, "answers": source, "tokens": tokens}


def _own_answers(model: Model) -> list[data.Sequence]:
    prompts = [item.text for item in read_workload(Path(str(files("eyas") / "demo.jsonl")), None)]
    answers = []
    for i, prompt in enumerate(tqdm([text for text in prompts for _ in range(4)], desc="answers", unit="answer")):
        ids = model.encode(prompt)
        output = model.generate(ids, max_new_tokens=128, temperature=1.0, sample=i)
        answers.append(data.Sequence((*ids, *output.token_ids), ((len(ids), len(ids) + len(output.token_ids)),)))
    return answers
