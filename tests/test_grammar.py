"""Grammars: masks worked out by hand, a function of the prefix alone, JSON that fits its schema, plain refusals."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_tokenizer
from transformers import BertTokenizerLegacy, PreTrainedTokenizerFast

import eyas
from eyas.errors import InputError
from eyas.grammar import Grammar, Kind, compiled
from eyas.sampling import Prefix, Sampling

EOS, WIDE = 2, 300  # logits are wider than the tokenizer's 260 tokens
SCHEMA = {
    "type": "object",
    "properties": {
        "number": {"type": "integer", "minimum": 0, "maximum": 999},
        "word": {"enum": ["red", "é"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "name": {"type": "string", "maxLength": 4},
    },
    "required": ["number", "word", "flags", "name"],
    "additionalProperties": False,
}


def fits(text: str) -> bool:
    found = json.loads(text)
    return (
        found.keys() == SCHEMA["properties"].keys()
        and type(found["number"]) is int
        and 0 <= found["number"] <= 999
        and found["word"] in ("red", "é")
        and len(found["flags"]) <= 3
        and all(type(flag) is bool for flag in found["flags"])
        and type(found["name"]) is str
        and len(found["name"]) <= 4
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


def grammar(
    tokenizer: PreTrainedTokenizerFast, kind: Kind, source: object, eos_ids: tuple[int, ...] = (EOS,)
) -> Grammar:
    return Grammar(kind, source, tokenizer, WIDE, eos_ids)


def allowed(grammar: Grammar, tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    ids = np.flatnonzero(grammar.allowed(tokenizer.encode(text))).tolist()
    return sorted(tokenizer.convert_ids_to_tokens(ids))


@pytest.mark.parametrize(("kind", "source"), [("regex", "a(b|cd?)"), ("lark", 'start: "a" ("b" | "c" "d"?)')])
def test_masks_by_hand(tokenizer: PreTrainedTokenizerFast, kind: Kind, source: str) -> None:
    rule = grammar(tokenizer, kind, source)
    expected = {"": ["a"], "a": ["b", "c"], "ab": ["</s>"], "ac": ["</s>", "d"], "acd": ["</s>"], "ab</s>": ["</s>"]}
    for text in (*expected, *reversed(expected)):
        assert allowed(rule, tokenizer, text) == expected[text], text
    scores = rule(Prefix([9, 9, *tokenizer.encode("a")], num_prompt=2), torch.arange(WIDE, dtype=torch.float32))
    kept = tokenizer.convert_tokens_to_ids(["b", "c"])
    assert torch.nonzero(scores > -math.inf).flatten().tolist() == kept
    assert scores[kept].tolist() == kept, "scores of what is allowed stay"


def test_every_end_token_ends(tokenizer: PreTrainedTokenizerFast) -> None:
    rule = grammar(tokenizer, "regex", "ab?", eos_ids=(EOS, 3))
    assert allowed(rule, tokenizer, "a") == ["</s>", "<turn>", "b"]
    assert allowed(rule, tokenizer, "ab") == ["</s>", "<turn>"]
    assert allowed(rule, tokenizer, "a<turn>") == ["</s>", "<turn>"]


def random_answers(rule: Grammar, num: int, length: int) -> list[list[int]]:
    draw = np.random.default_rng(1)
    answers: list[list[int]] = []
    for _ in range(num):
        answer: list[int] = []
        while len(answer) < length and EOS not in answer:
            answer.append(int(draw.choice(np.flatnonzero(rule.allowed(answer)))))
        answers.append(answer)
    return answers


@pytest.mark.parametrize(("kind", "source"), [("json_schema", SCHEMA), ("regex", "([a-c]{1,2}[0-9]*,?)*")])
def test_masks_are_a_function_of_the_prefix_alone(
    tokenizer: PreTrainedTokenizerFast, kind: Kind, source: object
) -> None:
    """One object asked about answers in turns, forth and back, against a fresh one each time."""
    shared = grammar(tokenizer, kind, source)
    answers = random_answers(grammar(tokenizer, kind, source), num=4, length=25)
    draw = np.random.default_rng(2)
    prefixes = [answer[:end] for answer in answers for end in range(len(answer) + 1)]
    for place in draw.integers(len(prefixes), size=300):
        fresh = grammar(tokenizer, kind, source)
        np.testing.assert_array_equal(shared.allowed(prefixes[place]), fresh.allowed(prefixes[place]))


def test_json_fits_its_schema(tokenizer: PreTrainedTokenizerFast) -> None:
    """Drawn from noise alone: whatever ends by itself is JSON that fits."""
    for source in (SCHEMA, json.dumps(SCHEMA)):
        rule = grammar(tokenizer, "json_schema", source)
        for seed in range(25):
            sampling, tokens = Sampling(1.0, seed=seed, constraint=rule), [7, 7]
            while tokens[-1] != EOS:
                tokens.append(sampling.draw(torch.zeros(WIDE), Prefix(tokens, num_prompt=2)))
            assert fits(tokenizer.decode(tokens[2:-1])), tokenizer.decode(tokens)


def test_blanks_end(tokenizer: PreTrainedTokenizerFast) -> None:
    rule = grammar(tokenizer, "json_schema", SCHEMA)
    assert "Ġ" in allowed(rule, tokenizer, "{ ")
    assert allowed(rule, tokenizer, "{" + 20 * " ") == ['"']


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("json_schema", "{", "not JSON"),
        ("json_schema", "[1]", "is an object"),
        ("json_schema", {"type": object()}, "not JSON"),
        ("json_schema", {"type": "colour"}, "json_schema: "),
        ("json_schema", {"type": "string", "contentEncoding": 3, "not": {}}, "json_schema: "),
        ("json_schema", None, "is an object"),
        ("regex", "a(b", "regex: "),
        ("regex", 3, "regex must be a text"),
        ("lark", "start: a", "lark: "),
        ("lark", "\ud800", "lark: "),
        ("regex", "\ud800", "regex: "),
        ("json_schema", {"enum": [math.nan]}, "json_schema: "),
        ("json_schema", {"enum": ["\ud800"]}, "json_schema: "),
    ],
)
def test_wrong_grammars_are_refused(kind: Kind, source: object, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        compiled(kind, source)
    assert "\n" not in str(caught.value)


def test_refuses_what_it_cannot_serve(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="end token"):
        grammar(tokenizer, "regex", "a", eos_ids=())
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\na\n")
    with pytest.raises(InputError, match="fast tokenizer"):
        Grammar("regex", "a", BertTokenizerLegacy(str(tmp_path / "vocab.txt")), WIDE, (EOS,))
    rule = grammar(tokenizer, "regex", "ab*")
    with pytest.raises(InputError, match="does not fit the grammar"):
        rule.allowed(tokenizer.encode("abcb"))
    assert allowed(rule, tokenizer, "ab") == ["</s>", "b"], "and goes on"
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=r"pip install 'eyas\[grammar\]'"):
        compiled("regex", "a")


def test_a_grammar_through_the_model(folder: Path) -> None:
    model = eyas.load(str(folder / "target"), str(folder / "eagle3"), dtype="float64")
    plain = eyas.load(str(folder / "target"), dtype="float64")
    reasons = set()
    for seed in range(6):
        settings = {"temperature": 1.0, "seed": seed, "json_schema": SCHEMA, "max_new_tokens": 150}
        answer = model.generate("hello", **settings)
        assert answer.token_ids == plain.generate("hello", **settings).token_ids
        assert answer.finish_reason == "length" or fits(answer.text), answer.text
        reasons.add(answer.finish_reason)
    assert "stop" in reasons
    assert model.generate("hello", regex="(yes|no)").text in ("yes", "no")
    with pytest.raises(InputError, match="one grammar, got json_schema and regex"):
        model.generate("hello", regex="a", json_schema=SCHEMA)
