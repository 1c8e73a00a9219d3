"""Where training starts: the draft vocabulary, and a head made of the target's own weights.

Refuses to know data's files and the training loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from eyas.data import Sequence
from eyas.drafters.eagle import Eagle, EagleConfig
from eyas.drafters.eagle3 import SWITCHES, Eagle3, Eagle3Config
from eyas.drafters.layers import BlockConfig
from eyas.drafters.medusa import Medusa, MedusaConfig
from eyas.drafters.rollout import TOKEN_LOSSES
from eyas.errors import InputError
from eyas.targets.base import TargetSpec
from eyas.targets.eager import EagerTarget
from eyas.targets.families import default_reads

Head = Eagle | Eagle3 | Medusa
HeadT = TypeVar("HeadT", Eagle, Eagle3)
KINDS = {"eagle": 1, "eagle3": 7, "medusa": 4}  # and the depths that training looks at where none are asked for
_WRITES = ("self_attn.o_proj.weight", "mlp.down_proj.weight")  # what a layer writes to the residual with


def draft_vocabulary(sequences: Seq[Sequence], size: int, special_ids: Seq[int]) -> tuple[Tensor, float]:
    """The `size` most frequent answer tokens, the special ones forced in, ascending; and their share of answer tokens.

    Fewer distinct tokens than `size` are filled up with the lowest ids that are left, so the size is as asked.

    Raises:
        InputError: a size without room for the special tokens.
    """
    if size < max(1, len(special_ids)):
        raise InputError(f"the draft vocabulary needs at least {max(1, len(special_ids))} tokens, got {size}")
    counts = Counter(token for s in sequences for token in s.answer_tokens)
    frequent = sorted(counts, key=lambda token: (-counts[token], token))
    chosen = dict.fromkeys([*special_ids, *frequent][:size])
    filler = (token for token in range(size + len(chosen)) if token not in chosen)
    while len(chosen) < size:
        chosen[next(filler)] = None
    covered = sum(counts[token] for token in chosen) / max(counts.total(), 1)
    return torch.tensor(sorted(chosen)), covered


def new_head(
    kind: str,
    target: EagerTarget,
    vocabulary_Q: Tensor | None = None,
    *,
    steps: int = 0,
    noise: float = 0.1,
    token_loss: str = "ce",
    layers: int = 1,
    window: int = 0,
    reads: Seq[int] | None = None,
    **switches: bool,
) -> Head:
    """An untrained head that starts as near to the target as its kind allows.

    EAGLE heads start from the target's last layer, the fusion of EAGLE-3 from the identity on the highest state; layers
    after the first, and Medusa's blocks, as the identity.

    Arguments:
        kind: one of `KINDS`.
        vocabulary_Q: ids of the draft vocabulary, ascending; None: the target's. EAGLE-1 has none.
        steps: depths that training looks at: steps of the training-time test (EAGLE-3, default 7), of HASS (EAGLE-1,
            default 1: none), heads (Medusa, default 4).
        noise: uniform noise on the features (EAGLE-1).
        token_loss: one of `TOKEN_LOSSES`.
        layers: EAGLE-3's decoder layers, Medusa's blocks.
        window: bounds how far drafting looks back: the length of the texts that it will be trained on; 0: all.
        reads: the states that EAGLE-3 fuses, one to five of them, ascending; None: `default_reads`.
        switches: those of `Eagle3Config`.

    Raises:
        InputError: a setting that the head or its objective cannot take, or a draft vocabulary larger than the
            target's.
    """
    if kind not in KINDS:
        raise InputError(f"a head is one of {', '.join(KINDS)}, got {kind!r}")
    spec, steps = target.spec, steps or KINDS[kind]
    if not 1 <= steps <= 32:
        raise InputError(f"the steps of a head's training must be between 1 and 32, got {steps}")
    if not 0 <= noise <= 10:
        raise InputError(f"the feature noise must be between 0 and 10, got {noise}")
    if token_loss not in TOKEN_LOSSES:
        raise InputError(f"a token loss is one of {', '.join(TOKEN_LOSSES)}, got {token_loss!r}")
    if kind != "eagle3" and any(switches.values()):
        raise InputError(f"norms can be moved in EAGLE-3 heads only, got {switches} for a head of kind {kind}")
    if reads is not None and kind != "eagle3":
        raise InputError(f"which states are read can be chosen for EAGLE-3 heads only, not for the kind {kind}")
    if kind == "eagle" and layers != 1:
        raise InputError(f"an EAGLE-1 head has one layer, got {layers}")
    if vocabulary_Q is not None and len(vocabulary_Q) > spec.vocab_size:
        raise InputError(f"the draft vocabulary has {len(vocabulary_Q)} tokens, the target's only {spec.vocab_size}")
    if kind == "medusa":
        medusa = MedusaConfig(spec.width, spec.vocab_size, (spec.num_layers,), steps, layers, token_loss)
        return _zeroed(Medusa(medusa, target.head_VD, vocabulary_Q))
    block = _block(spec, kind, window)
    if kind == "eagle":
        config = EagleConfig(
            block, (spec.num_layers,), spec.vocab_size, noise=noise, steps=steps, token_loss=token_loss
        )
        return _started(Eagle(config, target.embedding_VD, target.head_VD), _eagle_start(target))
    reads = default_reads(spec.num_layers) if reads is None else _reads(reads, spec.num_layers)
    size = spec.vocab_size if vocabulary_Q is None else len(vocabulary_Q)
    config3 = Eagle3Config(
        block,
        reads,
        spec.width,
        spec.vocab_size,
        size,
        steps=steps,
        token_loss=token_loss,
        layers=layers,
        **{switch: switches.pop(switch, False) for switch in SWITCHES},
    )
    if switches:
        raise InputError(f"an EAGLE-3 head knows the switches {', '.join(SWITCHES)}, got {', '.join(switches)}")
    head = Eagle3(config3, target.embedding_VD, target.head_VD, vocabulary_Q)
    return _started(head, _eagle3_start(target, vocabulary_Q, layers, len(reads)))


def _reads(asked: Seq[int], num_layers: int) -> tuple[int, ...]:
    reads = tuple(asked)
    if not 1 <= len(reads) <= 5 or sorted(set(reads)) != list(reads) or not 0 <= reads[0] <= reads[-1] <= num_layers:
        raise InputError(f"an EAGLE-3 head reads one to five states, ascending, from 0 to {num_layers}, the target's "
                         f"layers; got {', '.join(map(str, reads))}")  # fmt: skip
    return reads


def _block(spec: TargetSpec, kind: str, window: int) -> BlockConfig:
    return BlockConfig(
        width=spec.width,
        attention_width=spec.width if kind == "eagle" else 2 * spec.width,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        ffn_width=spec.ffn_width,
        norm_eps=spec.norm_eps,
        rope_theta=spec.rope_theta,
        window=window,
    )


def _started(head: HeadT, start: Mapping[str, Tensor]) -> HeadT:
    """The head with those of the tensors that it has: no biases, no q/k norms."""
    state = head.state_dict()
    head.load_state_dict({**state, **{key: value for key, value in start.items() if key in state}})
    return head


def _zeroed(head: Medusa) -> Medusa:
    """silu(0) = 0: each block passes on what it reads."""
    with torch.no_grad():
        for weight in head.parameters():
            weight.zero_()
    return head


def _last_layer(target: EagerTarget) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The target's last layer in float32; apart from it, its input norm and the final norm."""
    layer = {key: value.detach().float() for key, value in target.last_layer().items()}
    return layer, layer.pop("input_layernorm.weight"), layer.pop("norm.weight")


def _eagle_start(target: EagerTarget) -> dict[str, Tensor]:
    layer, input_norm_D, final_norm_D = _last_layer(target)
    width, generator = target.spec.width, torch.Generator().manual_seed(0)
    fc = _behind(torch.eye(width), generator)
    # no norm stands before this block's attention: fold the layer's own into its projections, for features of the
    # final norm's size; and start from f_{i+1} = f_i, since the layer writes at the scale of un-normed states
    scale_D = input_norm_D / final_norm_D.square().mean().sqrt()
    layer |= {f"self_attn.{name}_proj.weight": layer[f"self_attn.{name}_proj.weight"] * scale_D for name in "qkv"}
    layer |= {key: torch.zeros_like(layer[key]) for key in _WRITES}
    start = {f"block.{key}": value for key, value in layer.items()}
    return {**start, "fc.weight": fc, "fc.bias": torch.zeros(width)}


def _eagle3_start(target: EagerTarget, vocabulary_Q: Tensor | None, layers: int, num_reads: int) -> dict[str, Tensor]:
    layer, input_norm_D, final_norm_D = _last_layer(target)
    identity_DD, generator = torch.eye(target.spec.width), torch.Generator().manual_seed(0)
    rows = slice(None) if vocabulary_Q is None else vocabulary_Q
    start = {f"block.{key}": value for key, value in layer.items()}
    for name in "qkv":
        key = f"self_attn.{name}_proj.weight"
        start[f"block.{key}"] = _behind(layer[key], generator)
    # each later layer is the target's last one too, and its two writes to the residual begin at zero
    silent = {key: torch.zeros_like(layer[key]) for key in _WRITES}
    for n in range(layers - 1):
        start |= {f"later.{n}.block.{key}": value for key, value in {**layer, **silent}.items()}
        start[f"later.{n}.norm.weight"] = input_norm_D
    return {
        **start,
        "fc.weight": torch.cat((*[torch.zeros_like(identity_DD)] * (num_reads - 1), identity_DD), dim=1),
        "hidden_norm.weight": input_norm_D,
        "norm.weight": final_norm_D,
        "lm_head.weight": target.head_VD[rows].detach().float(),
    }


def _behind(weight: Tensor, generator: torch.Generator) -> Tensor:
    """A projection of the hidden half of [embedding, hidden]; small weights on the embedding, which it never read."""
    return torch.cat((torch.randn(weight.shape, generator=generator) * 0.01, weight), dim=1)


def copy_of(head: Head, dtype: torch.dtype) -> Head:
    """The same head apart from training, all of it in `dtype`, ready to draft."""
    head_VD = head.head_VD.to(dtype)
    if isinstance(head, Medusa):
        twin: Head = Medusa(head.config, head_VD, head.draft_vocabulary_Q)
    elif isinstance(head, Eagle):
        twin = Eagle(head.config, head.embedding_VD.to(dtype), head_VD)
    else:
        twin = Eagle3(head.config, head.embedding_VD.to(dtype), head_VD, head.draft_vocabulary_Q)
    twin.load_state_dict(head.state_dict())
    return twin.to(head_VD.device, dtype).eval().requires_grad_(False)


def for_training(head: Head, steps: int, noise: float, token_loss: str) -> Head:
    """A trained head with another objective, to be trained on.

    Raises:
        InputError: a Medusa drafter of another number of heads.
    """
    twin = copy_of(head, head.head_VD.dtype).float().requires_grad_(True)
    if isinstance(twin, Medusa):
        if steps != twin.config.heads:
            raise InputError(f"the head has {twin.config.heads} heads, asked for are {steps}")
        twin.config = replace(twin.config, token_loss=token_loss)
    elif isinstance(twin, Eagle):
        twin.config = replace(twin.config, steps=steps, noise=noise, token_loss=token_loss)
    else:
        twin.config = replace(twin.config, steps=steps, token_loss=token_loss)
    return twin
