"""The native core against slow twins: float64 models, NumPy products, plain decoding bit for bit.

`EYAS_KERNELS` chooses the kernels of a process, so other kernels than this machine's best run in a process of their
own: `test_other_kernels` runs this file again under each.
"""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from test_lossless import PROMPT, NoRepeat, untrained
from tiny import FAMILY_SETTINGS, VOCAB, tiny_target
from torch import Tensor
from transformers import AutoModelForCausalLM

from eyas import native
from eyas.drafters.native import NativeDrafter
from eyas.errors import InputError, Unsupported
from eyas.generate import Memory, Request, Round, generate, generate_many, generate_plain
from eyas.initial import new_head
from eyas.measure import timed
from eyas.policies import Sampled, parse_policy
from eyas.sampling import Sampling
from eyas.targets.base import Target
from eyas.targets.eager import EagerTarget
from eyas.targets.native import NativeTarget, pack_target
from eyas.tree import Tree
from eyas.verify import Stop

if native.cpu_features() is None:
    pytest.skip("this install has no compiled core", allow_module_level=True)

core = native.core()
LONG = [(7 * i) % VOCAB for i in range(85)]  # longer than the windows and than a page of the cache
TREE = Tree((7, 3, 5, 3, 9, 9, 1, 4), (-1, 0, 0, 1, 3, 2, 5, 4))  # paths of several lengths, few nodes in place
READS = (0, 1, 4)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    core.set_num_threads(2)
    yield
    core.set_num_threads(2)


def packed(target: EagerTarget, weights: str) -> NativeTarget:
    made = NativeTarget(*pack_target(target, weights), "tiny")
    core.set_num_threads(2)
    return made


@pytest.mark.parametrize("kernels", ["portable", "avx2"])
def test_other_kernels(kernels: str) -> None:
    """This file again, with kernels that other machines would take."""
    if os.environ.get("EYAS_KERNELS") is not None:
        pytest.skip("this is such a run")
    features = native.cpu_features() or {}
    if kernels == "avx2" and not (features["avx2"] and features["fma"]):
        pytest.skip("this CPU has no AVX2")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"EYAS_KERNELS": kernels, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_unknown_kernels_are_refused() -> None:
    code = "from eyas import native\ntry: native.core()\nexcept ValueError as e: print(e)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"EYAS_KERNELS": "sse9"}, capture_output=True, text=True
    )
    assert "sse9" in done.stdout and "portable" in done.stdout, done.stdout + done.stderr


# -- products, by way of a model of one layer --------------------------------------------------------------------------


def states(target: Target, tree: Tree, prompt: list[int], reads: tuple[int, ...] = READS) -> tuple[Tensor, Tensor]:
    """Logits and states of a tree behind a prompt."""
    cache = target.new_cache()
    target.verify([(cache, Tree.chain(prompt))], last_only=True)
    target.keep(cache, range(len(prompt)))
    verified = target.verify([(cache, tree)], reads)[0]
    return verified.logits_NV, verified.hidden_NLD


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).square().mean().sqrt())


@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_every_family_against_float64(family: str) -> None:
    """bfloat16: no further from the float64 model than torch's bfloat16 is; int8: within a few of its steps."""
    eager = tiny_target(family=family)
    for prompt in (PROMPT, LONG):
        exact, exact_states = states(eager, TREE, prompt)
        rounded = EagerTarget(copy.deepcopy(eager.model).to(torch.bfloat16), "tiny")
        by_torch = error(states(rounded, TREE, prompt)[0], exact)
        ours, our_states = states(packed(eager, "bfloat16"), TREE, prompt)
        assert error(ours, exact) <= 1.15 * by_torch
        assert error(our_states, exact_states) < 0.02 * float(exact_states.std())
        assert error(states(packed(eager, "int8"), TREE, prompt)[0], exact) < 0.12 * float(exact.std())


@pytest.mark.parametrize("weights", native.WEIGHTS)
def test_biases_of_every_projection(weights: str) -> None:
    """Llama's options `attention_bias` and `mlp_bias`, large enough to decide."""
    eager = tiny_target()
    config = copy.deepcopy(eager.model.config)
    config.attention_bias = config.mlp_bias = True
    torch.manual_seed(0)
    biased = EagerTarget(AutoModelForCausalLM.from_config(config).double(), "tiny")
    with torch.no_grad():
        for name, parameter in biased.model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    exact, _ = states(biased, TREE, LONG)
    assert error(states(packed(biased, weights), TREE, LONG)[0], exact) < 0.12 * float(exact.std())


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("weights", native.WEIGHTS)
def test_odd_sizes(family: str, weights: str) -> None:
    """Widths, heads and vocabularies that fill no vector, no block and no group."""
    eager = tiny_target(family=family, width=36, vocab=53, head_dim=10)
    prompt = [token % 53 for token in LONG]
    exact, _ = states(eager, TREE, prompt)
    assert error(states(packed(eager, weights), TREE, prompt)[0], exact) < 0.12 * float(exact.std())


@pytest.mark.parametrize("weights", native.WEIGHTS)
@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_a_row_depends_on_its_path_alone(family: str, weights: str) -> None:
    """To the last bit: in a tree, in a chain, beside other sequences, with one thread or three."""
    target = packed(tiny_target(family=family), weights)
    for prompt in (PROMPT, LONG, LONG[:64], LONG[:63]):
        logits_NV, hidden_NLD = states(target, TREE, prompt)
        for node in range(len(TREE)):
            path = [TREE.tokens[n] for n in TREE.path(node)]
            alone_NV, alone_NLD = states(target, Tree.chain(path), prompt)
            assert torch.equal(logits_NV[node], alone_NV[-1]) and torch.equal(hidden_NLD[node], alone_NLD[-1])
            cache = target.new_cache()  # token after token, as plain decoding goes
            for token in [*prompt, *path]:
                step = target.verify([(cache, Tree.chain([token]))], READS)[0]
                target.keep(cache, [0])
            assert torch.equal(logits_NV[node], step.logits_NV[0]) and torch.equal(hidden_NLD[node], step.hidden_NLD[0])
        for threads in (1, 3):
            core.set_num_threads(threads)
            assert torch.equal(logits_NV, states(target, TREE, prompt)[0])
        core.set_num_threads(2)
    caches = [target.new_cache() for _ in range(3)]
    together = target.verify(
        [(cache, Tree.chain(text)) for cache, text in zip(caches, (LONG, PROMPT, LONG[:70]), strict=True)]
    )
    for verified, text in zip(together, (LONG, PROMPT, LONG[:70]), strict=True):
        assert torch.equal(verified.logits_NV, target.verify([(target.new_cache(), Tree.chain(text))])[0].logits_NV)


@pytest.mark.parametrize("weights", native.WEIGHTS)
@pytest.mark.parametrize("rows", [*range(1, 14), 17, 24, 25, 31, 64, 129, 200])
def test_every_number_of_rows(rows: int, weights: str) -> None:
    """Each has a tiling of its own; all give the chain's own results."""
    target = packed(tiny_target(), weights)
    chain = [(11 * i + 3) % VOCAB for i in range(rows)]
    whole = target.verify([(target.new_cache(), Tree.chain(chain))])[0].logits_NV
    cache = target.new_cache()
    for i, token in enumerate(chain):
        assert torch.equal(target.verify([(cache, Tree.chain([token]))])[0].logits_NV[0], whole[i])
        target.keep(cache, [0])


def test_integer_products_by_hand() -> None:
    """Weights and activations that int8 holds exactly: the largest of each group is 127 steps."""
    k, n = 130, 5  # three groups, the last one of two values
    rng = np.random.default_rng(0)
    weights = rng.integers(-127, 128, (n, k)).astype(np.float32)
    weights[:, 0] = 127
    order = np.array([3, 0, -1, 4, 1], np.int32)
    stored, scales = core.pack("int8", weights, order)
    assert stored.size == 64 * 192 and scales.size == 64
    assert np.array_equal(scales[:5], [1, 1, 0, 1, 1])
    block = stored.reshape(48, 64, 4).astype(np.int64) - 128  # [quad, column, place]
    unpacked = block.transpose(1, 0, 2).reshape(64, 192)
    assert np.array_equal(unpacked[:5, :k], np.where(order[:, None] < 0, 0, weights[order]))
    assert not unpacked[:, k:].any() and not unpacked[5:].any()


def test_packing_bfloat16_by_hand() -> None:
    weights = np.array([[1.0, -2.0, 1.00390625]], np.float32)  # the last one lies between two bf16: to even, 1.0
    stored, scales = core.pack("bfloat16", weights, np.array([0], np.int32))
    words = stored.view(np.uint16).reshape(2, 64, 2)
    assert words[:, 0].reshape(-1).tolist() == [0x3F80, 0xC000, 0x3F80, 0]
    assert not words[:, 1:].any() and scales.size == 0


# -- the cache ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", native.WEIGHTS)
@pytest.mark.parametrize("path", [[0], [0, 2], [0, 1, 3], [0, 2, 5, 6], []])
def test_keep_leaves_exactly_the_accepted_path(path: list[int], weights: str) -> None:
    target = packed(tiny_target(family="gemma3_text"), weights)
    for prompt in (PROMPT, LONG[:63], LONG[:64]):
        cache = target.new_cache()
        target.verify([(cache, Tree.chain(prompt))])
        target.keep(cache, range(len(prompt)))
        target.verify([(cache, TREE)])
        target.keep(cache, path)
        assert cache.length == len(prompt) + len(path)
        after = target.verify([(cache, TREE)])[0].logits_NV
        fresh, _ = states(target, TREE, prompt + [TREE.tokens[node] for node in path])
        assert torch.equal(after, fresh)


def test_what_would_break_memory_is_refused() -> None:
    target = packed(tiny_target(), "bfloat16")
    cache = target.new_cache()
    with pytest.raises(ValueError, match="vocabulary"):
        target.verify([(cache, Tree.chain([VOCAB]))])
    with pytest.raises(ValueError, match="state"):
        target.verify([(cache, Tree.chain([1]))], reads=(5,))
    with pytest.raises(ValueError, match="one tree"):
        target.verify([(cache, Tree.chain([1])), (cache, Tree.chain([2]))])
    target.verify([(cache, TREE)])
    for path in ([len(TREE)], [1, 0], [0, 0], [-1]):
        with pytest.raises(ValueError, match="path"):
            target.keep(cache, path)
    with pytest.raises(ValueError, match="threads"):
        core.set_num_threads(0)
    with pytest.raises(ValueError, match="no such row"):
        core.pack("int8", np.zeros((2, 3), np.float32), np.array([2], np.int32))


def test_what_the_core_does_not_know_is_unsupported() -> None:
    with pytest.raises(InputError, match="float32"):
        pack_target(tiny_target(), "float32")
    for setting, value in (("hidden_act", "relu"), ("final_logit_softcapping", 30.0)):
        target = tiny_target()
        setattr(target.model.config, setting, value)
        with pytest.raises(Unsupported):
            pack_target(target, "bfloat16")


# -- drafting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 2, 30])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_native_head_drafts_as_its_module(kind: str, window: int) -> None:
    """The same candidates and nearly the same confidences, level after level, round after round."""
    eager = tiny_target(torch.float32)
    module = new_head(kind, eager, window=window).eval()
    twin = NativeDrafter(module, "bfloat16")
    hidden_TLD = eager.verify([(eager.new_cache(), Tree.chain(LONG))], module.reads)[0].hidden_NLD
    followers = [*LONG[1:], 9]
    state, twin_state = module.new_state(), twin.new_state()
    for first, end in ((0, 40), (40, 43), (43, 85)):
        theirs = module.observe(state, followers[first:end], hidden_TLD[first:end], 4)
        ours = twin.observe(twin_state, followers[first:end], hidden_TLD[first:end], 4)
        torch.testing.assert_close(ours.logprobs_KW, theirs.logprobs_KW, rtol=0, atol=0.1)
        rows, tokens = [0, 0, 0], theirs.tokens_KW[0, :3].tolist()
        for base in (1, 4):
            theirs = module.expand(state, rows, tokens, 4)
            ours = twin.expand(twin_state, rows, tokens, 4)
            torch.testing.assert_close(ours.logprobs_KW, theirs.logprobs_KW, rtol=0, atol=0.1)
            assert float((ours.tokens_KW == theirs.tokens_KW).float().mean()) > 0.6
            rows, tokens = [base, base, base + 2], [int(theirs.tokens_KW[0, 0]), int(theirs.tokens_KW[0, 1]), 5]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("length", [127, 128, 129, 240])
def test_a_long_prompt_is_absorbed_in_passes(kind: str, length: int) -> None:
    """One call, or the same pairs in several: the candidates are equal."""
    eager = tiny_target(torch.float32)
    module = untrained(kind, eager).float()
    twin = NativeDrafter(module, "int8")
    text = [(7 * i) % VOCAB for i in range(length + 1)]
    hidden_TLD = eager.verify([(eager.new_cache(), Tree.chain(text[:-1]))], module.reads)[0].hidden_NLD
    whole = twin.observe(twin.new_state(), text[1:], hidden_TLD, 5)
    state = twin.new_state()
    for first in range(0, length, 50):
        parts = twin.observe(state, text[1:][first : first + 50], hidden_TLD[first : first + 50], 5)
    assert torch.equal(parts.tokens_KW, whole.tokens_KW) and torch.equal(parts.logprobs_KW, whole.logprobs_KW)
    theirs = module.observe(module.new_state(), text[1:], hidden_TLD, 5)
    torch.testing.assert_close(whole.logprobs_KW, theirs.logprobs_KW, rtol=0, atol=0.3)


def test_an_eagle_head_drafts_over_some_rows_only() -> None:
    eager = tiny_target(torch.float32)
    module = untrained("eagle", eager).float()
    ids_Q = torch.tensor([2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37])
    twin = NativeDrafter(module, "bfloat16", ids_Q)
    hidden_TLD = eager.verify([(eager.new_cache(), Tree.chain(PROMPT))], module.reads)[0].hidden_NLD
    found = twin.observe(twin.new_state(), [*PROMPT[1:], 9], hidden_TLD, 5)
    full = module.observe(module.new_state(), [*PROMPT[1:], 9], hidden_TLD, VOCAB)
    allowed = [token for token in full.tokens_KW[0].tolist() if token in set(ids_Q.tolist())]
    assert found.tokens_KW[0].tolist()[:2] == allowed[:2]
    assert twin.can_propose(11) and not twin.can_propose(12)


def test_candidates_are_the_best_and_equal_ones_go_to_the_lowest_token() -> None:
    eager = tiny_target(torch.float32)
    module = untrained("eagle", eager).float()
    with torch.no_grad():
        module.head_VD[:] = 0  # every token is as likely as every other
    found = NativeDrafter(module, "bfloat16").observe(
        module_state := NativeDrafter(module, "bfloat16").new_state(), [3], torch.ones(1, 1, 32), 7
    )
    assert module_state.length == 1
    assert found.tokens_KW[0].tolist() == list(range(7))
    torch.testing.assert_close(found.logprobs_KW[0], torch.full((7,), -np.log(VOCAB)), rtol=0, atol=1e-5)


# -- losslessness ------------------------------------------------------------------------------------------------------

SETTINGS = [{}, {"top_k": 7, "top_p": 0.8, "min_p": 0.02}, {"repetition_penalty": 1.4, "processors": (NoRepeat(),)}]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_sampled_tree_gets_the_whole_law_of_a_draft(kind: str) -> None:
    eager = tiny_target(torch.float32)
    target = packed(eager, "bfloat16")
    head = untrained(kind, eager).float()
    drafter = NativeDrafter(head, "bfloat16")
    states_TLD = target.verify([(target.new_cache(), Tree.chain(PROMPT))], head.reads)[0].hidden_NLD[:-1]
    found = drafter.observe(drafter.new_state(), PROMPT[1:], states_TLD, Sampled().width)
    assert sorted(found.tokens_KW[0].tolist()) == [token for token in range(VOCAB) if head.can_propose(token)]
    assert float(found.logprobs_KW.double().exp().sum()) == pytest.approx(1, abs=1e-5)
    answer = timed(generate(target, drafter, Sampled(3, 2), PROMPT, Sampling(1.0, seed=1), Stop(40)))
    assert len(answer.tokens) == 40 and any(len(round_.path) > 1 for round_ in answer.rounds)


@pytest.mark.parametrize("weights", native.WEIGHTS)
@pytest.mark.parametrize("family", FAMILY_SETTINGS)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_speculative_equals_plain_bit_for_bit(kind: str, family: str, weights: str) -> None:
    eager = tiny_target(torch.float32, family=family)
    target = packed(eager, weights)
    drafter = NativeDrafter(untrained(kind, eager).float(), weights)
    rounds = itertools.product(("chain:3", "static", "dynamic:levels=4,top_k=3,nodes=11"), (0.0, 0.7, 1.0))
    for number, (policy, temperature) in enumerate(rounds):
        core.set_num_threads(1 + number % 2)
        sampling = Sampling(temperature, seed=number, **SETTINGS[(number + number // 3) % 3])
        plain = timed(generate_plain(target, LONG[:60], sampling, Stop(24)))
        drafted = timed(generate(target, drafter, parse_policy(policy), LONG[:60], sampling, Stop(24)))
        assert drafted.tokens == plain.tokens
        for place in range(len(plain.tokens)):
            assert torch.equal(drafted.logits(place), plain.logits(place)), "not only the tokens are equal"


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_neighbours_and_earlier_turns_change_no_bit(weights: str) -> None:
    """Seven answers in batches of three and of seven, and a second turn on the first one's keys and values."""
    eager = tiny_target()
    target, drafter = packed(eager, weights), NativeDrafter(untrained("eagle3", eager), weights)
    policy = parse_policy("dynamic:levels=4,top_k=3,nodes=20")
    requests = [Request(LONG[i : 20 + 9 * i], Sampling(0.8, sample=i), Stop(4 + 5 * (i % 4))) for i in range(7)]
    alone = [timed(generate_plain(target, r.prompt, r.sampling, r.stop)) for r in requests]
    for slots in (3, 7):  # 7 trees of 21 rows: more than one pass
        for drafts in (drafter, None):
            rounds: list[list[Round]] = [[] for _ in requests]
            for number, round_ in generate_many(target, drafts, policy, requests, slots, with_logits=True):
                rounds[number].append(round_)
            for own, plain in zip(rounds, alone, strict=True):
                assert [token for r in own for token in r.tokens] == plain.tokens
                logits = [
                    torch.cat([r.logits_TV for r in side if r.logits_TV is not None]) for side in (own, plain.rounds)
                ]
                assert torch.equal(*logits)
    memory: Memory = Memory()
    first = timed(generate(target, drafter, policy, LONG, Sampling(), Stop(20), memory=memory))
    turn = [*LONG, *first.tokens, 9, 8]
    again = timed(generate(target, drafter, policy, turn, Sampling(), Stop(20), memory=memory))
    fresh = timed(generate(target, drafter, policy, turn, Sampling(), Stop(20)))
    assert [(r.tree, r.path, r.tokens) for r in again.rounds] == [(r.tree, r.path, r.tokens) for r in fresh.rounds]


def test_a_cache_goes_back_no_further_than_it_went() -> None:
    eager = tiny_target()
    target, drafter = packed(eager, "int8"), NativeDrafter(untrained("eagle3", eager), "int8")
    cache = target.new_cache()
    target.verify([(cache, Tree.chain(PROMPT))])
    with pytest.raises(ValueError, match="length"):
        target.rewind(cache, 1)  # nothing was kept yet
    state = drafter.new_state()
    with pytest.raises(ValueError, match="length"):
        drafter.rewind(state, 1)
    drafter.rewind(state, 0)
    with pytest.raises(ValueError, match="row"):
        drafter.expand(state, [0], [1], 2)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(weights: str, value: float) -> None:
    """Rounding to int8 must not make a number of it: a draw from such logits is refused."""
    eager = tiny_target()
    with torch.no_grad():
        eager.model.get_input_embeddings().weight[5, 3] = value
    target = packed(eager, weights)
    assert states(target, Tree.chain([5]), PROMPT)[0].isnan().all()
    assert states(target, Tree.chain([6]), PROMPT)[0].isfinite().all()
