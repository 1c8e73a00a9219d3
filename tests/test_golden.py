"""Official heads, read from their files, reproduce the numbers of the official implementation (tests/golden).

Tolerances are those of tests/golden/README.md: states, logits, keys and values 2e-5, scores 5e-5, integers exact.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from eyas.drafters.eagle import Eagle
from eyas.drafters.eagle3 import Eagle3
from eyas.formats import build_head, read_head
from eyas.policies import Dynamic, Static, grow, parse_policy
from eyas.tree import Tree

GOLDEN = Path(__file__).parent / "golden"
HEADS = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
LAYOUTS = ["head_bin", "head_safetensors"]


def load(name: str, layout: str = "head_safetensors") -> tuple[Eagle | Eagle3, dict[str, torch.Tensor]]:
    golden = load_file(GOLDEN / name / "golden.safetensors")
    file = read_head(GOLDEN / name / layout)
    target_head = golden.get("target.lm_head.weight")
    embedding = golden.get("target.embed_tokens.weight", file.tensors.get("embed_tokens.weight"))
    assert embedding is not None
    embedding = embedding.float()
    head = build_head(file, embedding, embedding if target_head is None else target_head, default_reads=(0, 1, 2))
    return head.eval(), golden


def states(head: Eagle | Eagle3, hidden: torch.Tensor) -> torch.Tensor:
    """[1, T, L*D] of the golden files as the [T, L, D] of the seam."""
    return hidden[0].unflatten(-1, (len(head.reads), -1))


def logits(head: Eagle | Eagle3, hidden: torch.Tensor) -> torch.Tensor:
    if isinstance(head, Eagle):
        return hidden @ head.head_VD.T
    return head.lm_head(head.norm(hidden))


def near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", HEADS)
def test_extension_and_chain(name: str, layout: str) -> None:
    reproduces(*load(name, layout))


@torch.inference_mode()
def reproduces(head: Eagle | Eagle3, golden: dict[str, torch.Tensor]) -> None:
    state = head.new_state()
    tokens = golden["input.token_ids"][0].tolist()
    hidden_TLD = states(head, golden["input.hidden_states"])
    candidates = head.observe(state, tokens, hidden_TLD, width=4)
    near(state.memories[0].keys_GSC[:, :12], golden["extend.key"][0])
    near(state.memories[0].values_GSC[:, :12], golden["extend.value"][0])
    near(state.hidden_RD, golden["extend.hidden"][0, -1:])
    near(logits(head, state.hidden_RD), golden["extend.logits"][0, -1:])
    if isinstance(head, Eagle3):
        near(head.fc(hidden_TLD.flatten(-2)), golden["extend.fused_hidden"][0])

    # every row of the extension, not only the last: absorbing pair by pair gives the same rows
    single = head.new_state()
    for i, token in enumerate(tokens):
        head.observe(single, [token], hidden_TLD[i : i + 1], width=1)
        near(single.hidden_RD, golden["extend.hidden"][0, i : i + 1])
        near(logits(head, single.hidden_RD), golden["extend.logits"][0, i : i + 1])

    chain = golden["chain.target_ids"].tolist()
    for step in range(3):
        assert int(candidates.tokens_KW[0, 0]) == chain[step]
        candidates = head.expand(state, [step], [chain[step]], width=4)
        near(state.hidden_RD[-1], golden["chain.hidden"][0, step])
        near(logits(head, state.hidden_RD[-1:]), golden["chain.logits"][0, step : step + 1])
    assert int(candidates.tokens_KW[0, 0]) == chain[3]
    near(state.memories[0].keys_GSC[:, 12:15], golden["chain.key"][0])
    near(state.memories[0].values_GSC[:, 12:15], golden["chain.value"][0])


def dynamic_tree(golden: dict[str, torch.Tensor], prefix: str, tree: Tree) -> None:
    """All integers of a golden dynamic tree, and its scores."""
    assert list(tree.tokens) == golden[f"{prefix}.draft_tokens"][0].tolist()
    assert list(tree.parents) == golden[f"{prefix}.node_parents"].tolist()
    assert list(tree.depths) == golden[f"{prefix}.tree_position_ids"].tolist()
    assert tree.ancestor_mask().int().tolist() == golden[f"{prefix}.tree_mask"][0, 0].int().tolist()
    paths = [[node for node in row if node >= 0] for row in golden[f"{prefix}.retrieve_indices"].tolist()]
    assert [tree.path(leaf) for leaf in tree.leaves()] == paths
    near(torch.tensor(tree.scores), golden[f"{prefix}.node_scores"], 5e-5)


@pytest.mark.parametrize(("prefix", "policy"), [("tree_12_3_4", Dynamic(4, 4, 11)), ("tree_26_5_6", Dynamic(6, 6, 25))])
@pytest.mark.parametrize("name", HEADS)
def test_dynamic_tree(name: str, prefix: str, policy: Dynamic) -> None:
    head, golden = load(name)
    state = head.new_state()
    tokens = golden["input.token_ids"][0].tolist()
    first = head.observe(state, tokens, states(head, golden["input.hidden_states"]), policy.width)
    dynamic_tree(golden, prefix, grow(policy, head, state, tokens[-1], first, max_levels=99))

    # the unpruned tree records every candidate, in the order of the official flat index
    state = head.new_state()
    first = head.observe(state, tokens, states(head, golden["input.hidden_states"]), policy.width)
    unpruned = grow(Dynamic(policy.levels, policy.top_k, 10_000), head, state, tokens[-1], first, max_levels=99)
    assert list(unpruned.tokens[1:]) == golden[f"{prefix}.all_tokens"].tolist()
    near(torch.tensor(unpruned.scores[1:]), golden[f"{prefix}.all_scores"], 5e-5)


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_second_round_rebuilds_draft_keys_from_true_features(name: str) -> None:
    head, golden = load(name)
    state = head.new_state()
    tokens = golden["input.token_ids"][0].tolist()
    policy = Dynamic(4, 4, 11)
    first = head.observe(state, tokens, states(head, golden["input.hidden_states"]), policy.width)
    grow(policy, head, state, tokens[-1], first, max_levels=99)  # its keys must not survive into the next round
    fresh = golden["round2.token_ids"][0].tolist()
    first = head.observe(state, fresh, states(head, golden["round2.hidden_states"]), policy.width)
    near(state.hidden_RD, golden["round2.hidden"][0, -1:])
    near(logits(head, state.hidden_RD), golden["round2.logits"][0, -1:])
    tree = grow(policy, head, state, fresh[-1], first, max_levels=99)
    dynamic_tree(golden, "round2.tree_12_3_4", tree)


def test_static_tree() -> None:
    head, golden = load("eagle1_bias")
    policy = parse_policy("static")
    assert isinstance(policy, Static)
    assert [list(p) for p in policy.paths] == json.loads((GOLDEN / "eagle1_bias" / "choices.json").read_text())
    assert (policy.levels, len(policy.paths)) == (5, 25)
    state = head.new_state()
    tokens = golden["input.token_ids"][0].tolist()
    first = head.observe(state, tokens, states(head, golden["input.hidden_states"]), policy.width)
    tree = grow(policy, head, state, tokens[-1], first, max_levels=99)
    assert list(tree.tokens) == golden["static.draft_tokens"][0].tolist()
    assert list(tree.depths) == golden["static.tree_position_ids"].tolist()
    assert tree.ancestor_mask().int().tolist() == golden["static.tree_mask"][0, 0].int().tolist()
    rows = [[node for node in row if node >= 0] for row in golden["static.retrieve_indices"].tolist()]
    assert sorted(tree.path(leaf) for leaf in tree.leaves()) == sorted(rows)
