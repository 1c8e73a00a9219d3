"""Random flags, files and arguments: whatever a user gives, the answer is right or one plain sentence.

`EYAS_FUZZ=N` runs N cases of each kind (default 40), each a function of its number; a failing one says what it ran.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import eyas
from eyas import checkpoint, model, native
from eyas.cli import main

CASES = int(os.environ.get("EYAS_FUZZ", "40"))
SECONDS = 20  # for one case

NATIVE = native.cpu_features() is not None
SENTENCES_BEFORE = (
    "back end: ",
    "tree: ",
    "the head ",
    "the model's own ",
    "loading the demo ",
    "draft vocabulary: ",
    "kept in ",
)
WRITTEN_BEFORE = ("leave no token", "does not fit the grammar", "too complex", "the grammar: ")  # found while answering

# What may stand anywhere on a command line.
JUNK = [
    "", " ", "0", "-1", "1", "3", "1e9", "1000000000", "99999999999999999999", "1e400", "-1e400", "1e-400", "nan",
    "inf", "-inf", "x", "None", "é€🦅", "\u0663", "\ud800", "\udcff", "\x00", "a\x00b", "\x1b[2J", "a\nb", "\r",
    "\u2028", "x" * 5000, "9" * 5000, "chain:" + "9" * 5000, "/" * 300, "x/" * 3000, "[]", "{}", "--json", "--wings",
    "-", "--", "=", "@", ":", "%s", "%(prog)s", "{0}", "1_0", "0x10", "a/b", "nowhere/nothing", "/dev/null", "/", ".",
    "..",
]  # fmt: skip


class Hang(BaseException):
    """Not an Exception, so that nobody takes it for a broken file."""


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> NoReturn:
        raise Hang(f"no end after {SECONDS} seconds")

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Loading takes longer than all else in a case. Failures are not kept, nor what has no hash."""
    known: dict[object, Any] = {}

    def call(*arguments: Any) -> Any:
        try:
            key = tuple((type(a), id(a) if isinstance(a, eyas.targets.base.Target) else a) for a in arguments)
            hash(key)
        except TypeError:
            return function(*arguments)
        if key not in known:
            known[key] = (function(*arguments), arguments)  # the arguments: an id is good while its object lives
        return known[key][0]

    return call


def no_hub(name: str, **_: object) -> NoReturn:
    raise OSError(f"there is no network here, and no {name!r}")


def no_more(threads: int) -> None:
    """One thread: more of them wait for each other where other work runs."""


def no_demo() -> NoReturn:
    raise eyas.InputError("the demo target is too large for this test")


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load_target", "load_native"):
            function = remembered(getattr(checkpoint, name))
            patch.setattr(checkpoint, name, function)
            patch.setattr(model, name, function)
        for name in ("load_head", "load_native_head"):
            patch.setattr(model, name, remembered(getattr(model, name)))
        patch.setattr(torch, "set_num_threads", no_more)
        if NATIVE:
            native.core().set_num_threads(1)
            patch.setattr(native.core(), "set_num_threads", no_more)
        patch.setattr(checkpoint, "snapshot_download", no_hub)
        patch.setattr(checkpoint, "_demo_gguf", no_demo)
        yield
    native.ask_threads(None)  # what the last command line asked for


@pytest.fixture(scope="module")
def places(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Files by kind, good ones first."""
    root = tmp_path_factory.mktemp("fuzz")

    def written(name: str, content: str | bytes) -> str:
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(root / name)

    target, eagle, eagle3 = (str(folder / name) for name in ("target", "eagle", "eagle3"))
    configs: list[dict[str, object]] = [
        {"hidden_size": 1e400}, {"num_attention_heads": 0}, {"num_attention_heads": "4"}, {"eyas_reads": [9]},
        {"eyas_reads": "x"}, {"eyas_reads": []}, {"vocab_size": None}, {"vocab_size": 261}, {"rms_norm_eps": -1},
        {"eyas_target": 3}, {"eyas_target": {}}, {"eyas_target": {"family": ["x"]}}, {"rope_theta": "y"},
        {"hidden_act": []}, {"rope_scaling": {"type": []}}, {"eagle_config": {"norm_before_fc": 3}}, {"fc_norm": 1},
        {"num_attention_heads": 10**400},
    ]  # fmt: skip
    heads = []
    for i, change in enumerate(configs):
        head = root / f"head{i}"
        shutil.copytree(folder / ("eagle3" if i % 2 else "eagle"), head)
        config = json.loads((head / "config.json").read_text())
        text = json.dumps({**config, **change}).replace("Infinity", "1e400")
        (head / "config.json").write_text(text)
        heads.append(str(head))
    wrong = [torch.zeros(()), torch.zeros(0), torch.zeros(2, 2), torch.full((64, 64), torch.nan), torch.zeros(1).bool()]
    for i, name in enumerate(("lm_head.weight", "fc.weight", "d2t", "midlayer.self_attn.q_proj.weight", "unknown")):
        for j, tensor in enumerate(wrong):
            head = root / f"tensor{i}{j}"
            shutil.copytree(folder / "eagle3", head)
            save_file({**load_file(head / "model.safetensors"), name: tensor}, head / "model.safetensors")
            heads.append(str(head))
    trees = [
        "[[0], [1], [0, 0]]", "[[0]]", "[[5], [300]]", "[]", "", "[[]]", "[[0, 0]]", "[[-1]]", "[[0], [0]]", "{}",
        "[[99999999999999999999]]", "[[4000000000]]", "[[true]]", "[[0.0]]", "[0]", "[" * 9999,
        "[[" + "9" * 5000 + "]]", "null", "\ufeff[[0]]", '[["0"]]', json.dumps([[0] * n for n in range(1, 400)]),
        json.dumps([[n] for n in range(400)]),
    ]  # fmt: skip
    schemas = [
        '{"type": "array", "items": {"type": "boolean"}}', '{"enum": ["yes", "no"]}', "{}", '{"type": "string"}',
        '{"type": "integer", "minimum": 3, "maximum": 7}', "", "[]", "3", "NaN", '{"type": "colour"}', '{"a": NaN}',
        '{"enum": []}', '{"pattern": "(", "type": "string"}', '{"$ref": "#"}', '{"$ref": "http://nowhere/x"}',
        '{"minLength": 1000000000, "type": "string"}', '{"type": "string", "minLength": 9, "maxLength": 3}',
        '{"a": ' * 2000, '{"not": ' * 200 + "{}" + "}" * 200, '{"enum": ["\\ud800"]}', '{"multipleOf": 0}',
        '{"type": "integer", "minimum": 1e400}', '{"type": "number", "multipleOf": 1e-300}', '{"const": null}', "false",
        '{"type": "array", "minItems": 100000000}', '{"enum": ["' + "x" * 9999 + '"]}', '{"pattern": "(a{999}){999}"}',
    ]  # fmt: skip
    workloads = {
        "a.jsonl": '{"id": "a", "turns": ["hello"]}\n{"id": 3, "turns": ["you", "more"]}\n',
        "b.txt": "one\n\ntwo\nthree\n",
        "c.jsonl": '{"id": {"x": [null]}, "turns": ["hello", 3]}\n\n\n',
        "d.jsonl": '{"turns": ["\\ud800"]}', "e.jsonl": '{"turns": ["' + "x" * 999 + '"]}', "f.txt": "x" * 999,
        "g.txt": b"\xff\xfe\x00", "h.jsonl": '{"turns": []}', "i.jsonl": "[]", "j.jsonl": "", "k.txt": "\n \n\t\n",
        "l.txt": "\x00\n\x1b[2J\r\n\u2028x\n", "m.jsonl": "[" * 9999, "n.jsonl": '{"turns": [""]}',
        "o.jsonl": '{"id": NaN, "turns": ["x"]}', "p.jsonl": '{"turns": {"0": "x"}}', "q\n\x1b.txt": "one\n",
        "r.jsonl": '{"id": ' + "9" * 5000 + ', "turns": ["x"]}', "s.txt": "<s></s><turn><pad>\n", "\udcff.txt": "x",
    }  # fmt: skip
    answers = "".join(json.dumps({"prompt_ids": [1, 9, n], "response_ids": [n, 50, 60, 2]}) + "\n" for n in range(4, 9))
    prompts = [b"hello\n", b"", b"\n", b"\xff", b"\x00", "é🦅".encode(), b"x" * 999, b"\xed\xa0\x80", b"\r\n\x1b[2J"]
    small = f"small:{target}"
    return {
        "target": [target],
        "bad target": [str(folder), eagle, str(folder / "other"), str(folder / "nothing"), written("x.gguf", b"GGUF")],
        "head": [eagle, eagle3, "lookup", small, eagle3],
        "bad head": [
            *heads, target, str(folder / "other"), f"small:{folder / 'other'}", "small:", f"small:{eagle}", small * 2,
            "small:small", "smollm2-eagle3", "smollm2-eagle", "smollm2-medusa", "medusa:x", str(folder), "lookup:",
            "none",
        ],
        "tree": ["chain:2", "static", "dynamic", "dynamic:levels=2,top_k=3,nodes=5", "auto", "sampled"],
        "bad tree": [
            *(f"static:{written(f'tree{i}.json', text)}" for i, text in enumerate(trees)), "chain:0",
            "chain:1000000000", "chain:\u0663", "chain:" + "9" * 5000, "dynamic:nodes=0", "dynamic:nodes=999999999",
            "dynamic:top_k=999999999", "chain:999999999",
            "dynamic:levels=999999999", "dynamic:levels=999999999,top_k=999999999,nodes=999999999", "dynamic:,,",
            "dynamic:nodes", "dynamic:nodes=\u0663", "dynamic:levels=9,top_k=40,nodes=400", "sampled:levels=10,width=2",
            "sampled:levels=1,width=1024", "sampled:levels=999999999", "sampled:width=1", "static:", f"static:{root}",
            "static:\x00", "static:\ud800", "bush", "dynamic:nodes=1,nodes=2", "chain:-1", "auto:", "static:/dev/null",
        ],
        "schema": [written(f"schema{i}.json", text) for i, text in enumerate(schemas)],
        "workload": [written(name, text) for name, text in workloads.items()],
        "answers": [written("answers.jsonl", answers)],
        "bad answers": [
            written("answers.jsonl.gz", gzip.compress(answers.encode())[:40]), written("few.jsonl", answers[:60]),
            written("w.jsonl", '{"prompt_ids": [999], "response_ids": [1]}'), str(root), written("y.jsonl", b"\xff"),
        ],
        "prompt": [written(f"prompt{i}", content) for i, content in enumerate(prompts)],
        "root": [str(root)],
    }  # fmt: skip


class Case:
    """Choices of one command line. How much of it is junk differs from case to case: often none."""

    def __init__(self, seed: int, places: dict[str, list[str]]) -> None:
        self.rng = random.Random(seed)
        self.places = places
        self.rate = self.rng.choice([0, 0, 0.03, 0.1, 0.4])

    def value(self, good: list[str], bad: list[str] = []) -> str:  # noqa: B006 (never changed)
        if self.rng.random() < self.rate:
            return self.rng.choice(JUNK)
        return self.rng.choice(bad if bad and self.rng.random() < 0.1 + self.rate else good)

    def place(self, kind: str) -> str:
        return self.value(self.places[kind], self.places.get(f"bad {kind}", []))

    def number(self, good: list[str]) -> str:
        return self.value(good, ["0", "-1", "1e9", "-1e9", "1e400", "nan", "1e-300", "-0.0", "5e-324", "1e-45", "2"])

    def some(self, flags: dict[str, Callable[[], str]], most: int) -> list[str]:
        chosen = self.rng.choices(sorted(flags), k=self.rng.randint(0, most))
        return [part for flag in chosen for part in self.pair(flag, flags[flag]())]

    def pair(self, flag: str, value: str) -> list[str]:
        return [f"{flag}={value}"] if self.rng.random() < 0.2 else [flag, value]

    def common(self) -> list[str]:
        short = ["1", "2", "5", "12", "12", "30"]
        tokens = ["5", "2", "9", "100", "0", "259"]
        numbers = ["2.5", "-1.5", "1e9", "-1e9", "0"]
        flags = {
            "--tree": lambda: self.place("tree"),
            "--backend": lambda: self.value(["auto", "eager"] + ["native"] * NATIVE, ["gpu"]),
            "--dtype": lambda: self.value(
                ["float32", "float64", "bfloat16"] + ["int8"] * NATIVE, ["float16", "int4", "torch.float32", "int32"]
            ),
            "--device": lambda: self.value(["cpu"], ["cuda", "cuda:99", "meta", "cpu:7", "cuda:" + "9" * 30, "mps"]),
            "--threads": lambda: self.value(["1", "2", "1024"], ["0", "1025", "1.5"]),
            "--temperature": lambda: self.number(["0", "0.5", "1", "1.5"]),
            "--top-k": lambda: self.value(["0", "1", "5", "400", "1000000000"], ["-1", "1.5", "9" * 30]),
            "--top-p": lambda: self.number(["1", "0.5", "0.9", "1e-9", "0.999999999999"]),
            "--min-p": lambda: self.number(["0", "0.1", "1", "1e-9"]),
            "--repetition-penalty": lambda: self.number(["1", "1.3", "0.5"]),
            "--presence-penalty": lambda: self.number(["0", "0.5", "-0.5"]),
            "--frequency-penalty": lambda: self.number(["0", "0.5", "-0.5"]),
            "--logit-bias": lambda: self.value(
                [f"{self.rng.choice(tokens)}={self.rng.choice(numbers)}"],
                ["260=1", "-1=1", "5=inf", "5=nan", "5=1e400", "5", "=", "5=", "=1", "5=1=2", "5.0=1", "9" * 30 + "=1"],
            ),
            "--bad-word": lambda: self.value(["a", "hello", " ", "\ufffd", "</s>", "!", "x" * 99], ["", "\ud800"]),
            "--min-new-tokens": lambda: self.value(["0", "3", "30", "99", "1000000000"], ["-1", "1e3"]),
            "--json-schema": lambda: self.place("schema"),
            "--seed": lambda: self.value(["0", "1", "-5", "9223372036854775807"], ["9223372036854775808", "1.5"]),
            "--max-new-tokens": lambda: self.value(short, ["0", "-1", "1000000", "1000001", "1e3"]),
        }
        return self.some(flags, 6)

    def command(self) -> list[str]:
        kind = self.rng.choices(
            ["generate", "bench", "demo", "inspect", "train", "prepare", "expect", "report", "other"],
            [50, 17, 5, 10, 3, 4, 3, 2, 6],
        )[0]
        argv = [kind, *getattr(self, kind)()]
        if self.rng.random() < 0.5:
            argv.append("--json")
        for _ in range(3):
            if self.rng.random() < self.rate / 3:
                argv.insert(self.rng.randint(0, len(argv)), self.rng.choice(JUNK))
        return argv

    def generate(self) -> list[str]:
        texts = ["hello", "x", "é€🦅", "<s></s>", "x" * 250]
        flags = {"--head": lambda: self.place("head"), "--stop": lambda: self.value(["a", "é", "\ufffd", "zz"], [""])}
        argv = ["--max-new-tokens", "12", *self.common(), *self.some(flags, 3)]
        argv += self.pair("--target", self.place("target"))
        if self.rng.random() < 0.8:
            argv += self.pair("--prompt", self.value(texts, ["", "x" * 400, "\x00", "\ud800", "\udcff", "\x1b[2J\n"]))
        else:
            argv += self.pair("--prompt-file", self.value([*self.places["prompt"], "-"], self.places["root"]))
        return argv + self.rng.choice([[], [], ["--raw"], ["--chat"], ["--raw", "--chat"]])

    def bench(self) -> list[str]:
        argv = ["--max-new-tokens", "5", *self.common(), *self.pair("--target", self.place("target"))]
        for _ in range(self.rng.choice([1, 1, 1, 2, 0])):
            argv += self.pair("--workload", self.value(self.places["workload"][:3], self.places["workload"]))
        for _ in range(self.rng.choice([0, 1, 2, 3])):
            tree = self.value(["", "@", "@" + self.place("tree")])
            argv += self.pair("--method", self.place("head") + tree)
        count = ["1", "2", "7", "1000000"]
        flags = {f: lambda: self.value(count, ["0", "-1", "x"]) for f in ("--limit", "--batch", "--trace")}
        flags |= {
            "--turns": lambda: self.value(["first", "all"], ["none"]),
            "--temperatures": lambda: self.value(["0", "0,1", "1,1"], ["", ",", "nan", "0,-1", "inf", "9" * 30]),
            "--repeats": lambda: self.value(["1", "2"], ["0"]),
            "--resume": lambda: self.value(["kept.jsonl"], [*self.places["answers"], *self.places["root"]]),
            "--suite": lambda: self.value(["eagle"], ["hawk"]),
            "--data-dir": lambda: self.value(["."], self.places["root"]),
        }
        return argv + self.some(flags, 3)

    def expect(self) -> list[str]:
        alphas = self.value(["0", "0.7", "1", "0.7,0.2"], ["", ",", "0.7,0.7", "-0.1", "nan", "1e400"])
        files = self.value([*self.places["answers"], *self.places["workload"]], self.places["root"])
        source = self.pair("--alpha", alphas) if self.rng.random() < 0.7 else self.pair("--bench", files)
        return [*source, *self.some({"--tree": lambda: self.place("tree")}, 1)]

    def report(self) -> list[str]:
        return [self.value([*self.places["answers"], *self.places["workload"]], self.places["root"])]

    def demo(self) -> list[str]:
        argv = ["--max-new-tokens", "4", "--limit", "2", *self.common(), "--head", self.place("head")]
        return argv + self.pair("--target", self.place("target"))

    def inspect(self) -> list[str]:
        flags = {
            "--head": lambda: self.place("head"),
            "--target": lambda: self.place("target"),
            "--dtype": lambda: self.value(["float32", "bfloat16", "float64"] + ["int8"] * NATIVE, ["int4", "float16"]),
            "--answers": lambda: self.place("answers"),
            "--limit": lambda: self.value(["1", "3"], ["0", "x", "1000000"]),
        }
        return ["--limit", "2", *self.some(flags, 5), "--answers", self.place("answers")]

    def train(self) -> list[str]:
        flags = {
            "--kind": lambda: self.value(["eagle", "eagle3"]),
            "--dtype": lambda: self.value(["float32", "bfloat16"], ["int8", "float16"]),
            "--limit": lambda: self.value(["1", "3"], ["0"]),
            "--max-length": lambda: self.value(["1", "3", "512"], ["0"]),
            "--features": lambda: self.value(["features"], [*self.places["answers"], *self.places["root"]]),
            "--draft-vocab": lambda: self.value(["64", "260", "8192"], ["1", "0"]),
            "--layers": lambda: self.value(["1", "2"], ["6"]),
            "--ttt-steps": lambda: self.value(["1", "2"], ["0"]),
            "--resume": lambda: "",
            **{
                flag: lambda: self.number(["0.1", "0.5"])
                for flag in ("--noise", "--learning-rate", "--weight-decay", "--clip")
            },
            **{flag: lambda: self.number(["1", "2"]) for flag in ("--warmup", "--sequences", "--checkpoint-every")},
        }
        argv = [part for part in self.some(flags, 5) if part]
        out = self.value(["out"], [*self.places["answers"], *self.places["root"], "out/" * 400, "/dev/null/x"])
        argv += ["--answers", self.place("answers"), "--out", out, "--target", self.place("target")]
        return [*argv, "--steps", self.value(["1", "2"], ["0", "-1", "1e9"])]

    def prepare(self) -> list[str]:
        flags = {
            "--backend": lambda: self.value(["auto", "eager"], ["gpu"]),
            "--dtype": lambda: self.value(["float32", "float64"], ["int4", "float16"]),
            "--limit": lambda: self.value(["1", "3"], ["0", "x"]),
            "--temperatures": lambda: self.value(["0", "0,0.8", "1"], ["", ",", "nan", "0,-1", "inf", "9" * 30]),
            "--max-new-tokens": lambda: self.value(["1", "4"], ["0", "1000001"]),
            "--seed": lambda: self.value(["0", "-5"], ["9223372036854775808", "1.5"]),
            "--batch": lambda: self.value(["1", "3", "1000000"], ["0"]),
            "--show": lambda: self.value(["1", "9"], ["0"]),
            "--keep-answers": lambda: "",
            "--endpoint": lambda: self.value(["localhost", "ftp://x", "http://a b"]),  # none that would be waited for
            "--model": lambda: self.value(["served", ""]),
        }
        argv = [part for part in self.some(flags, 5) if part]
        out = self.value(["made"], [*self.places["answers"], *self.places["root"], "made/" * 400, "/dev/null/x"])
        argv += ["--prompts", self.value(self.places["workload"]), "--out", out, "--target", self.place("target")]
        return ["--max-new-tokens", "4", "--limit", "3", *argv]

    def other(self) -> list[str]:
        """No command at all, one that does not exist, or one without its flags."""
        return self.rng.choices(
            [*JUNK, "expect", "--version", "generate", "bench", "--target"], k=self.rng.randint(0, 4)
        )


def run(argv: list[str], stdin: bytes) -> tuple[int, str, str]:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n") for _ in range(2))
    old = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    try:
        with redirect_stdout(out), redirect_stderr(err), time_limit():
            code = main(argv)
    finally:
        sys.stdin = old
    written = []
    for stream in (out, err):
        stream.flush()
        written.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return code, *written


def no_constant(text: str) -> NoReturn:
    raise AssertionError(f"{text} is no JSON")


def check(argv: list[str], code: int, out: str, err: str) -> None:
    assert code in (0, 2), f"exit code {code}"
    if code == 0:
        if "--json" in argv:
            assert out.endswith("\n") and out.count("\n") == 1, "one line on standard output"
            assert isinstance(json.loads(out, parse_constant=no_constant), dict)
        return
    assert err.endswith("\n"), "a sentence is a line"
    *before, sentence = err[:-1].splitlines()
    assert sentence.startswith("eyas: ") and len(sentence) > len("eyas: x") and sentence.isprintable(), "one sentence"
    assert not any(line.startswith("eyas: ") for line in before), "one sentence alone"
    assert "invalid _" not in sentence, "no names of functions"
    assert len(sentence) < 10_000, "a sentence that can be read"
    late = any(words in sentence for words in WRITTEN_BEFORE)
    assert not out or (late and "--json" not in argv), "nothing on standard output"
    if not late:
        bars = [line for line in before if line and not line.startswith(SENTENCES_BEFORE) and "answer/s" not in line]
        assert not bars, "nothing but messages of loading before the sentence"


@pytest.mark.parametrize("seed", range(CASES))
def test_command_lines(
    seed: int, places: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    case = Case(seed, places)
    if case.rng.random() < 0.02:
        monkeypatch.setenv("EYAS_NUM_THREADS", case.rng.choice(["1", "", "0", "-1", "x", "\u0661", "9" * 5000, "1025"]))
    argv = ["inspect"] if "demo" == (argv := case.command())[0] and "--target" not in " ".join(argv) else argv
    stdin = case.rng.choice([b"hello\n", b"", b"\xff", case.rng.randbytes(40)])
    out = err = ""
    try:
        code, out, err = run(argv, stdin)
        check(argv, code, out, err)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        told = f"{type(error).__name__}: {error}\nseed {seed}, standard input {stdin!r}\neyas.cli.main({argv!r})"
        raise AssertionError(f"{told}\nstandard output: {out[-500:]!r}\nstandard error: {err[-900:]!r}") from error


# -- Python ------------------------------------------------------------------------------------------------------------


class Streamer:
    def put(self, value: object) -> None:
        pass

    def end(self) -> None:
        pass


def anything(rng: random.Random) -> Any:
    return rng.choice([
        None, True, False, 0, -1, 1, 3, 300, 10**9, 10**30, 0.5, -0.0, float("nan"), float("inf"), -1e400, 1e-300, "",
        "x", "\ud800", "é🦅", "\x00", b"x", b"", [], (), {}, set(), [1], [[1]], [[[1]]], ["a"], ["a", 3], [None], [[]],
        [""], [("a", "b")], {1: 2.0}, {1: None}, (1, 2), {1, 2}, object(), range(3), np.array([5, 6]), np.array(3),
        np.float64(0.5), np.int64(3), torch.tensor(1), torch.tensor([5, 6]), torch.tensor([[5]]), torch.tensor([0.5]),
        int, 1j, ..., iter([1, 2]), iter(["a"]), Path("x"), len, lambda *_: None, "9" * 5000, [10**30], [-1], [True],
        [[10**30]], {10**30: 1.0}, {2: 10**400}, {True: 1}, [{}], [{"role": "user", "content": "x"}], [b"x"],
        [{"role": 1, "content": "x"}], [{"role": "x", "content": "\ud800"}, {"role": "user"}], ["x", "\ud800"],
        [range(3)], {"a": 1}, {9: {}}, [[[]]], [len, 3], np.array(["a"]), torch.tensor(True), "native", "none",
    ])  # fmt: skip


def grammar(rng: random.Random) -> dict[str, Any]:
    return rng.choice([
        {"regex": "[a-c]{2,5}"}, {"regex": "("}, {"regex": "\ud800"}, {"regex": "(a{99}){99}"}, {"regex": ""},
        {"regex": "\x00"}, {"lark": 'start: "a" | "b"'}, {"lark": "start: nothing"}, {"lark": ""}, {"lark": "\ud800"},
        {"lark": "start: start start"}, {"json_schema": {"type": "integer"}}, {"json_schema": {"a": object()}},
        {"json_schema": {"enum": [float("nan")]}}, {"json_schema": {1: 2}}, {"json_schema": "{}"}, {"regex": "(?=a)"},
        {"regex": "a", "lark": 'start: "a"'}, {"json_schema": {"enum": ["\ud800"]}}, {"lark": "start: /(/"},
    ])  # fmt: skip


class Arguments:
    """Keyword arguments of one call: each mostly sensible, sometimes anything."""

    def __init__(self, seed: int, places: dict[str, list[str]]) -> None:
        self.rng = random.Random(seed + 10**6)
        self.places = places
        self.rate = self.rng.choice([0, 0.03, 0.1, 0.4])

    def or_anything(self, value: Any) -> Any:
        return anything(self.rng) if self.rng.random() < self.rate else value

    def load(self) -> tuple[tuple[Any, Any], dict[str, Any]]:
        pick = self.rng.choice
        options = {
            "backend": pick(["auto", "eager"] + ["native"] * NATIVE),
            "dtype": pick([None, "float32", "bfloat16", torch.float64, torch.float32] + ["int8"] * NATIVE),
            "tree": pick([*self.places["tree"][:5], eyas.Chain(3), eyas.Sampled(2, 2), eyas.Chain(10**9)]),
            "device": pick([None, "cpu", torch.device("cpu")]),
        }
        chosen = self.rng.sample(sorted(options), k=pick([0, 0, 1, 2]))
        names = (self.or_anything(self.places["target"][0]), self.or_anything(pick([None, *self.places["head"]])))
        return names, {name: self.or_anything(options[name]) for name in chosen}

    def generate(self) -> tuple[Any, dict[str, Any]]:
        pick = self.rng.choice
        options = {
            "temperature": pick([0.0, 0, 0.7, 1, 1e9, 5e-324]), "top_k": pick([0, 1, 5, 10**9]), "seed": pick([0, -5]),
            "top_p": pick([1, 0.5, 1e-300]), "min_p": pick([0, 0.1, 1]), "repetition_penalty": pick([1.3, 1e-300, 1e9]),
            "presence_penalty": pick([0.5, -1e9]), "frequency_penalty": pick([-0.5, 1e9]),
            "logit_bias": pick([{5: 1e9}, [(2, -1e9)], {}, {n: -1e9 for n in range(260)}]),
            "bad_words": pick(["a", ["hello", [5]], [[n] for n in range(260)], ["</s>"], [[9, 9]]]),
            "min_new_tokens": pick([0, 3, 99, 10**9]), "sample": pick([0, 3, 2**63 - 1]),
            "logits_processor": pick([[], None, [lambda ids, scores: scores], (lambda ids, scores: scores / 2,)]),
            "stop": pick(["a", ["b", "\ufffd"], (), ["\ud800"]]), "chat": pick([None, True, False]),
            "n": pick([1, 2, 3]), "logprobs": pick([True, False]), "batch_size": pick([1, 2, 10**9]),
            "streamer": pick([None, Streamer()]),
        }  # fmt: skip
        chosen = self.rng.sample(sorted(options), k=pick([0, 1, 2, 4]))
        given = {"max_new_tokens": self.or_anything(pick([1, 2, 8, 8, 20])), "stop": ()}
        given |= {name: self.or_anything(options[name]) for name in chosen}
        given |= grammar(self.rng) if self.rng.random() < 0.1 else {}
        if isinstance(given.get("n"), int) and given["n"] == 300:
            given["n"] = 3  # these many answers are no bug, but take their time
        prompts = ["hello", [5, 6, 7], ["hello", "you"], [[5], [6, 7]], [{"role": "user", "content": "x"}], ["x"] * 5]
        return self.or_anything(pick(prompts)), given


@pytest.mark.parametrize("seed", range(CASES))
def test_python_arguments(seed: int, places: dict[str, list[str]]) -> None:
    arguments = Arguments(seed, places)
    names, options = arguments.load()
    doing = f"eyas.load(*{names!r}, **{options!r})"
    try:
        with time_limit():
            try:
                loaded = eyas.load(*names, **options)
            except eyas.InputError as error:
                assert len(str(error)) > 5
                return
            for _ in range(2):
                prompt, given = arguments.generate()
                doing += f"\n.generate({prompt!r}, **{given!r})"
                try:
                    answers = loaded.generate(prompt, **given)
                except eyas.InputError as error:
                    assert len(str(error)) > 5
                    continue
                while isinstance(answers, list):
                    answers = answers[-1]
                assert answers.token_ids and answers.finish_reason in ("stop", "length")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise AssertionError(f"{type(error).__name__}: {error}\nseed {seed}\n{doing[:3000]}") from error
