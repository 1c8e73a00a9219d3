"""An unmodified transformers model behind `Target`: one forward verifies a tree.

The tree reaches the model as a 4-D mask (whole prefix, ancestors, itself) and as positions (cache length + depth);
nothing inside the model is patched. Keys and values live in caches of our own (`eager_cache`), which drop rejected
nodes by moving only the accepted rows. Refuses to know drafters, policies and sampling.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from eyas.targets.base import Target, TargetSpec, Verified
from eyas.targets.eager_cache import EagerCache, Forward, bring_together
from eyas.targets.families import family_of, rope_theta_of
from eyas.tree import Tree


class EagerTarget(Target[EagerCache]):
    """A causal language model of transformers."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        config = model.config
        self.family = family_of(config.model_type, config.rope_parameters)
        model.set_attn_implementation("sdpa")  # flash attention takes no 4-D mask
        self.model = model.eval().requires_grad_(False)
        optional = config.to_dict()  # fields that only some families have
        self._window: int | None = optional.get("sliding_window")
        self._softcap: float | None = optional.get("final_logit_softcapping")
        generation = model.generation_config
        eos = generation.eos_token_id if generation else config.eos_token_id
        eos_ids = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
        if not all(type(token) is int for token in eos_ids):
            raise ValueError(f"its end tokens must be token ids, got {eos!r}")
        penalty = generation.repetition_penalty if generation else None
        self.spec = TargetSpec(
            name=name,
            family=config.model_type,
            num_layers=config.num_hidden_layers,
            width=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=optional.get("head_dim") or config.hidden_size // config.num_attention_heads,
            ffn_width=config.intermediate_size,
            vocab_size=config.vocab_size,
            norm_eps=config.rms_norm_eps,
            rope_theta=rope_theta_of(config.rope_parameters),
            max_length=config.max_position_embeddings,
            eos_ids=tuple(token for token in eos_ids if 0 <= token < config.vocab_size),  # no others are ever drawn
            repetition_penalty=1.0 if penalty is None else float(penalty),
            dtype=model.dtype,
            device=model.device,
            backend="eager",
        )
        # typed as plain modules; of these families they are what is said here
        self._head: nn.Linear = model.get_submodule("lm_head")  # type: ignore[assignment]
        self._norm: nn.Module = model.get_submodule("model.norm")
        self._layers: nn.ModuleList = model.get_submodule("model.layers")  # type: ignore[assignment]
        # transformers renamed the argument between the versions that eyas supports
        names = inspect.signature(model.base_model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    def share_out(self, device: torch.device) -> None:
        """Spread the layers over the devices of all processes of `torch.distributed` (FSDP2); a layer's weights are
        gathered while it runs. Embedding and output head, which drafters read, stay whole on each device. All processes
        must call `verify` equally often from here on."""
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in self._layers:
            fully_shard(layer, mesh=mesh)
        nn.Module.to(self.model, device)  # by its own name, whose types transformers' decorators hide
        self.spec = replace(self.spec, device=device)

    def new_cache(self) -> EagerCache:
        return EagerCache()

    @torch.inference_mode()
    def verify(
        self, items: Sequence[tuple[EagerCache, Tree]], reads: Sequence[int] = (), last_only: bool = False
    ) -> list[Verified]:
        if len(items) > 1:
            bring_together([cache for cache, _ in items], max(len(tree) for _, tree in items))
        order = sorted(range(len(items)), key=lambda i: items[i][0].row)
        caches, trees = [items[i][0] for i in order], [items[i][1] for i in order]
        num_nodes = [len(tree) for tree in trees]
        device = self.spec.device
        tokens_BN = torch.zeros(len(items), max(num_nodes), dtype=torch.int64)
        positions_BN = torch.zeros_like(tokens_BN)
        for i, (cache, tree) in enumerate(zip(caches, trees, strict=True)):
            tokens_BN[i, : len(tree)] = torch.tensor(tree.tokens)
            positions_BN[i, : len(tree)] = cache.length + torch.tensor(tree.depths)
            cache.pending = len(tree)
        output = self.model.base_model(
            input_ids=tokens_BN.to(device),
            attention_mask=self._masks(caches, trees),
            position_ids=positions_BN.to(device),
            use_cache=True,
            output_hidden_states=len(reads) > 0,
            **{self._cache_argument: Forward(caches, num_nodes, device)},
        )
        wanted = [slice(n - 1 if last_only else 0, n) for n in num_nodes]
        final = [output.last_hidden_state[i, rows] for i, rows in enumerate(wanted)]
        logits = self._logits(torch.cat(final)).split([len(rows_ND) for rows_ND in final])  # one product for all
        results: list[Verified | None] = [None] * len(items)
        for i, (place, n) in enumerate(zip(order, num_nodes, strict=True)):
            hidden = [output.hidden_states[read][i, :n] for read in reads]
            hidden_NLD = torch.stack(hidden, dim=1) if hidden else final[i].new_empty(n, 0, self.spec.width)
            results[place] = Verified(logits[i], hidden_NLD)
        return [result for result in results if result is not None]

    @torch.inference_mode()
    def keep(self, cache: EagerCache, path: Sequence[int]) -> None:
        assert len(path) <= cache.pending and all(node < cache.pending for node in path), (path, cache.pending)
        old = cache.length
        first_moved = next((i for i, node in enumerate(path) if node != i), len(path))
        if first_moved < len(path):
            source = torch.tensor(path[first_moved:], device=self.spec.device) + old
            for keys, values in cache.layers:
                for buffer in (keys, values):
                    buffer[:, :, old + first_moved : old + len(path)] = buffer[:, :, source]
        cache.length = old + len(path)
        cache.pending = 0

    def rewind(self, cache: EagerCache, length: int) -> None:
        assert 0 <= length <= cache.length, (length, cache.length)
        cache.length, cache.pending = length, 0

    @property
    def embedding_VD(self) -> Tensor:
        return self.model.get_submodule("model.embed_tokens").get_parameter("weight")

    @property
    def head_VD(self) -> Tensor:
        return self._head.weight

    def layer(self, number: int) -> dict[str, Tensor]:
        """A decoder layer's weights by transformers' names."""
        return self._layers[number].state_dict()

    def last_layer(self) -> dict[str, Tensor]:
        """The last decoder layer's weights and the final norm (`norm.weight`), by Llama's names and meanings: what a
        new head starts from."""
        family = self.family
        weights = {**self.layer(-1), "norm.weight": self._norm.get_parameter("weight")}
        weights["post_attention_layernorm.weight"] = weights[f"{family.mlp_norm}.weight"]
        return {name: weight + family.norm_offset if "norm" in name else weight for name, weight in weights.items()}

    def _logits(self, final_ND: Tensor) -> Tensor:
        logits_NV = self._head(final_ND)
        return logits_NV if self._softcap is None else self._softcap * torch.tanh(logits_NV / self._softcap)

    def _masks(self, caches: Sequence[EagerCache], trees: Sequence[Tree]) -> Tensor | dict[str, Tensor]:
        """What the model's layers may look at, in the form that the family's model takes."""
        full = _tree_mask(caches, trees).to(self.spec.device)
        if self.family.masks == "full":
            return full
        windowed = full if self._window is None else full & _window(caches, trees, self._window).to(full.device)
        return windowed if self.family.masks == "window" else {"full_attention": full, "sliding_attention": windowed}


def _tree_mask(caches: Sequence[EagerCache], trees: Sequence[Tree]) -> Tensor:
    """[B, 1, N, past + N] bool, True where a node may look: its whole prefix, its ancestors and itself.

    Padding nodes look at column 0, since a row that sees nothing has no softmax; nobody reads their result.
    """
    rows = max(len(tree) for tree in trees)
    columns = max(cache.length + len(tree) for cache, tree in zip(caches, trees, strict=True))
    mask = torch.zeros(len(trees), 1, rows, columns, dtype=torch.bool)
    for i, (cache, tree) in enumerate(zip(caches, trees, strict=True)):
        n, past = len(tree), cache.length
        mask[i, 0, :n, :past] = True
        mask[i, 0, :n, past : past + n] = tree.ancestor_mask()
        mask[i, 0, n:, 0] = True
    return mask


def _window(caches: Sequence[EagerCache], trees: Sequence[Tree], window: int) -> Tensor:
    """[B, 1, N, past + N] bool: is the column less than `window` positions before the row? Positions go by depth."""
    rows = max(len(tree) for tree in trees)
    columns = max(cache.length + len(tree) for cache, tree in zip(caches, trees, strict=True))
    near = torch.ones(len(trees), 1, rows, columns, dtype=torch.bool)
    for i, (cache, tree) in enumerate(zip(caches, trees, strict=True)):
        positions_N = cache.length + torch.tensor(tree.depths)
        seen = torch.cat((torch.arange(cache.length), positions_N))
        near[i, 0, : len(tree), : len(seen)] = seen > positions_N[:, None] - window
    return near
