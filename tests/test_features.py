"""Captured states: batch equals single, stored equals streamed, and a half-finished store goes on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from tiny import VOCAB, tiny_target

import eyas.features
from eyas.data import Sequence, read_answers
from eyas.errors import InputError
from eyas.features import Stored, Streamed, store
from eyas.tree import Tree

SEQUENCES = [Sequence(tuple((7 * i + j) % VOCAB for j in range(5 + i)), ((2 + i % 3, 5 + i),)) for i in range(11)]
READS = (1, 2, 4)


def test_a_batch_captures_what_each_sequence_alone_does() -> None:
    target = tiny_target()
    for example, sequence in zip(Streamed(target, SEQUENCES, READS).batch(range(11)), SEQUENCES, strict=True):
        alone = target.verify([(target.new_cache(), Tree.chain(sequence.tokens))], READS)[0].hidden_NLD
        torch.testing.assert_close(example.states_TLD, alone, rtol=0, atol=1e-10)


def test_a_store_holds_what_is_streamed_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eyas.features, "_SHARD", 4)
    target = tiny_target()
    store(target, SEQUENCES, READS, tmp_path, {})
    (tmp_path / "states-00001.safetensors").unlink()
    (tmp_path / "index.json").unlink()
    kept = (tmp_path / "states-00000.safetensors").stat().st_mtime_ns
    stored = store(target, SEQUENCES, READS, tmp_path, {})
    assert (tmp_path / "states-00000.safetensors").stat().st_mtime_ns == kept
    assert stored.reads == READS
    streamed = Streamed(target, SEQUENCES, READS)
    for number in (0, 5, 10):
        (one,), (other,) = stored.batch([number]), streamed.batch([number])
        assert one.sequence == other.sequence == SEQUENCES[number]
        torch.testing.assert_close(one.states_TLD, other.states_TLD, rtol=0, atol=1e-10)


def test_a_store_of_other_states_is_refused(tmp_path: Path) -> None:
    target = tiny_target(torch.float32)
    store(target, SEQUENCES[:2], READS, tmp_path, {})
    with pytest.raises(InputError, match="reads"):
        store(target, SEQUENCES[:2], (1, 2), tmp_path, {})
    with pytest.raises(InputError, match="sequences"):
        store(target, SEQUENCES[1:3], READS, tmp_path, {})
    with pytest.raises(InputError, match="target"):
        store(target, SEQUENCES[:2], READS, tmp_path, {"weights": "others"})
    (tmp_path / "states-00000.safetensors").unlink()
    with pytest.raises(InputError, match="not a complete feature store"):
        Stored(tmp_path)


def test_answers_are_read_and_cut(tmp_path: Path) -> None:
    lines = [{"prompt_ids": [1, 2], "response_ids": [3, 4, 5]}, {"prompt_ids": [1, 2, 3, 4], "response_ids": [5]}]
    path = tmp_path / "answers.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    assert list(read_answers(path, VOCAB, 4)) == [Sequence((1, 2, 3, 4), ((2, 4),))]
    assert len(list(read_answers(path, VOCAB, 99, limit=1))) == 1


MALFORMED = [
    "{",
    "[]",
    '{"prompt_ids": [1]}',
    '{"prompt_ids": [1], "response_ids": []}',
    '{"prompt_ids": [1], "response_ids": [61]}',
    '{"prompt_ids": "12", "response_ids": [1]}',
    '{"prompt_ids": [1.0], "response_ids": [1]}',
    '{"prompt_ids": [true], "response_ids": [1]}',
    "[" * 100_000,
]


@pytest.mark.parametrize("line", MALFORMED)
def test_malformed_answers_are_named_by_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt_ids": [1], "response_ids": [2]}\n' + line + "\n")
    with pytest.raises(InputError, match="line 2"):
        list(read_answers(path, VOCAB, 99))


def test_unreadable_answers(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl.gz").write_bytes(b"no gzip")
    for name in ("missing.jsonl", "broken.jsonl.gz"):
        with pytest.raises(InputError, match="cannot read"):
            list(read_answers(tmp_path / name, VOCAB, 99))


def test_the_best_token_is_the_target_s_own(tmp_path: Path) -> None:
    """At the places before answer tokens, from the logits of the whole sequence; nowhere else."""
    target = tiny_target()
    sequence = Sequence(tuple(range(3, 15)), ((0, 2), (5, 8), (11, 12)))
    logits_TV = target.verify([(target.new_cache(), Tree.chain(sequence.tokens))])[0].logits_NV
    best = logits_TV.argmax(-1).tolist()
    expected = [best[t] if t in (0, 4, 5, 6, 10) else -1 for t in range(12)]
    streamed = Streamed(target, [sequence], READS)
    assert streamed.batch([0])[0].best_T.tolist() == expected
    assert store(target, [sequence], READS, tmp_path, {}).batch([0])[0].best_T.tolist() == expected
