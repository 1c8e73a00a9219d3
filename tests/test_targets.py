"""A tree's forward against plain transformers, node by node."""

from __future__ import annotations

import pytest
import torch
from tiny import FAMILY_SETTINGS, VOCAB, tiny_target
from torch.testing import assert_close

import eyas.targets.eager as eager
from eyas.errors import InputError
from eyas.targets.families import FAMILIES, default_reads, family_of
from eyas.tree import Tree

PROMPT = [1, 8, 4, 4, 30]
TREE = Tree((7, 3, 5, 3, 9), (-1, 0, 0, 1, 3))
READS = (0, 1, 4)


def alone(target: eager.EagerTarget, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and states of the last token, by transformers' own full forward."""
    output = target.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return output.logits[0, -1], torch.stack([output.hidden_states[read][0, -1] for read in READS])


def check_tree(target: eager.EagerTarget, prompt: list[int] = PROMPT) -> None:
    cache = target.new_cache()
    target.verify([(cache, Tree.chain(prompt))], last_only=True)
    target.keep(cache, range(len(prompt)))
    verified = target.verify([(cache, TREE)], READS)[0]
    for node in range(len(TREE)):
        logits_V, hidden_LD = alone(target, prompt + [TREE.tokens[n] for n in TREE.path(node)])
        assert_close(verified.logits_NV[node], logits_V, rtol=0, atol=1e-10)
        assert_close(verified.hidden_NLD[node], hidden_LD, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_every_node_equals_its_path_run_alone(family: str) -> None:
    check_tree(tiny_target(family=family))
    check_tree(tiny_target(family=family), prompt=[(7 * i) % VOCAB for i in range(40)])  # longer than the windows


def test_every_family_has_its_tiny_model() -> None:
    assert FAMILY_SETTINGS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "gemma3_text"])
def test_a_window_over_nodes_instead_of_depths_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_node(caches, trees, window):
        trees = [replace_depths(tree) for tree in trees]
        return window_by_depth(caches, trees, window)

    def replace_depths(tree: Tree) -> Tree:
        copy = Tree(tree.tokens, tree.parents)
        object.__setattr__(copy, "depths", tuple(range(len(tree))))
        return copy

    window_by_depth = eager._window
    monkeypatch.setattr(eager, "_window", by_node)
    with pytest.raises(AssertionError):
        check_tree(tiny_target(family=family), prompt=[(7 * i) % VOCAB for i in range(40)])


def test_a_wrong_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tree, "ancestor_mask", lambda tree: torch.ones(len(tree), len(tree), dtype=torch.bool).tril())
    with pytest.raises(AssertionError):
        check_tree(tiny_target())


def test_wrong_positions_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    tree = TREE
    monkeypatch.setattr("test_targets.TREE", tree)
    object.__setattr__(tree, "depths", (0, 1, 2, 3, 4))  # by node instead of by depth
    try:
        with pytest.raises(AssertionError):
            check_tree(target)
    finally:
        object.__setattr__(tree, "depths", (0, 1, 1, 2, 3))


@pytest.mark.parametrize("path", [[0], [0, 2], [0, 1, 3], [0, 1, 3, 4]])
def test_keep_leaves_exactly_the_accepted_path(path: list[int]) -> None:
    target = tiny_target()
    cache = target.new_cache()
    target.verify([(cache, Tree.chain(PROMPT))])
    target.keep(cache, range(len(PROMPT)))
    target.verify([(cache, TREE)])
    target.keep(cache, path)
    kept = PROMPT + [TREE.tokens[node] for node in path]
    after = target.verify([(cache, Tree.chain([6]))], READS)[0]
    logits_V, hidden_LD = alone(target, [*kept, 6])
    assert_close(after.logits_NV[0], logits_V, rtol=0, atol=1e-10)
    assert_close(after.hidden_NLD[0], hidden_LD, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_many_sequences_in_one_forward_equal_each_alone(family: str) -> None:
    target = tiny_target(family=family)
    prompts = [[1, 9], PROMPT, [1, 2, 3, 4, 5, 6, 7, 8]]
    trees = [TREE, Tree.chain([4]), Tree((2, 6, 7), (-1, 0, 0))]
    caches = [target.new_cache() for _ in prompts]
    target.verify([(cache, Tree.chain(prompt)) for cache, prompt in zip(caches, prompts, strict=True)])
    for cache, prompt in zip(caches, prompts, strict=True):
        target.keep(cache, range(len(prompt)))
    together = target.verify(list(zip(caches, trees, strict=True)), READS)
    for prompt, tree, verified in zip(prompts, trees, together, strict=True):
        for node in range(len(tree)):
            logits_V, hidden_LD = alone(target, prompt + [tree.tokens[n] for n in tree.path(node)])
            assert_close(verified.logits_NV[node], logits_V, rtol=0, atol=1e-10)
            assert_close(verified.hidden_NLD[node], hidden_LD, rtol=0, atol=1e-10)


def test_the_cache_grows_past_its_first_buffer() -> None:
    check_tree(tiny_target(), prompt=[(7 * i) % VOCAB for i in range(250)])


def test_the_prompt_builds_logits_for_its_last_token_alone() -> None:
    target = tiny_target()
    verified = target.verify([(target.new_cache(), Tree.chain(PROMPT))], READS, last_only=True)[0]
    assert verified.logits_NV.shape == (1, VOCAB)
    assert verified.hidden_NLD.shape == (len(PROMPT), len(READS), 32)


@pytest.mark.parametrize(
    ("layers", "reads"), [(30, (2, 15, 27)), (7, (2, 3, 4)), (6, (1, 3, 5)), (4, (1, 2, 3)), (3, (1, 2, 3))]
)
def test_default_reads(layers: int, reads: tuple[int, ...]) -> None:
    assert default_reads(layers) == reads


def test_refuses_families_and_rotary_kinds_that_it_cannot_verify() -> None:
    with pytest.raises(InputError, match="mamba.*supported: llama"):
        family_of("mamba", {})
    with pytest.raises(InputError, match="longrope"):
        family_of("llama", {"rope_type": "longrope"})
    with pytest.raises(InputError, match="dynamic"):
        family_of("gemma3_text", {"full_attention": {"rope_type": "dynamic"}})
    assert family_of("llama", {"rope_type": "llama3"}) is FAMILIES["llama"]
