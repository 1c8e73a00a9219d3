"""What another runtime would make of a head's files: its reader, simulated, as a drafter of eyas' own kind.

A runtime's reader takes what it knows, falls into defaults for what is missing and mostly says nothing. Here each such
step is followed by the runtime's row in `dialects`, and named. Refuses to know a target's weights beyond the rows that
heads share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from eyas.dialects import DIALECTS, NESTED_IDS, Dialect
from eyas.drafters.eagle import Eagle, EagleConfig
from eyas.drafters.eagle3 import MAX_LAYERS, SWITCHES, Eagle3, Eagle3Config
from eyas.drafters.layers import BlockConfig
from eyas.formats import official_names, read_files
from eyas.layouts import AUX_IDS, LAYER_NAME, OTHER_NAMES, layer_count, understand
from eyas.targets.base import Target, TargetSpec
from eyas.targets.families import default_reads

FAILS, SILENT, NOTE = "fails", "silent", "note"
# What transformers' LlamaConfig takes for what a config does not say: all runtimes start from it.
_LLAMA_DEFAULTS: Mapping[str, object] = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "vocab_size": 32000,
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing that a runtime does with a head's files."""

    effect: str  # FAILS: it does not load the head; SILENT: it loads it and drafts otherwise; NOTE: no harm seen
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.effect}: {self.what}. Fix: {self.fix}"


@dataclass
class Reading:
    """A runtime's view of a head."""

    head: Eagle | Eagle3 | None = None  # what it would draft with; None: it loads nothing
    findings: list[Finding] = field(default_factory=list)

    def add(self, effect: str, what: str, fix: str) -> None:
        self.findings.append(Finding(effect, what, fix))

    @property
    def fails(self) -> bool:
        return any(finding.effect == FAILS for finding in self.findings)


def simulate(runtime: str, folder: Path, target: Target, at_launch: tuple[int, ...] = ()) -> Reading:
    """What `runtime` would load from `folder` for `target`; `at_launch` are the states that its server is told,
    where it asks for them.

    Raises:
        InputError: the files cannot be read at all, or are those of no head.
    """
    config, tensors = read_files(folder)
    # the tensors alone say what it is: of the config, the runtime's view counts
    kind = understand(str(folder), {}, tensors).kind
    if runtime == "vllm" and "speculators_model_type" in config:
        runtime = "speculators"  # vLLM sees that by itself
    dialect, found = DIALECTS[runtime], Reading()
    if kind not in dialect.architectures:
        found.add(FAILS, f"{dialect.title} serves {' and '.join(dialect.architectures)} heads only, not {kind}", "none")
        return found
    seen = _config_of(runtime, config, found)
    if found.fails:
        return found
    _judge_architecture(kind, dialect, seen, found)
    _judge_positions(dialect, seen, target.spec, found)
    named = _renamed(kind, dialect, tensors, found)
    build = _eagle if kind == "eagle" else _eagle3
    with torch.device("meta"):  # sizes alone: a config may ask for any
        head = build(dialect, seen, named, target, found)
    if isinstance(head, Eagle3) and dialect.ids_at_launch and len(at_launch) == len(head.reads):
        head.config, head.reads = replace(head.config, reads=at_launch), at_launch
    if head is not None and not found.fails:
        _fill(head, dialect, named, found)
    if not found.fails:
        found.head = head
    return found


def _config_of(runtime: str, config: Mapping[str, object], found: Reading) -> dict[str, object]:
    """The config as the runtime's model sees it."""
    inner = config.get("transformer_layer_config")
    if runtime == "speculators":
        if not isinstance(inner, dict) or "speculators_model_type" not in config:
            found.add(
                FAILS,
                "there is no speculators_model_type and no transformer_layer_config",
                "eyas export --to speculators",
            )
            return {}
        keys = ("draft_vocab_size", "target_hidden_size", AUX_IDS, "architectures", *SWITCHES)
        return {**_LLAMA_DEFAULTS, **inner, **{key: config[key] for key in keys if config.get(key) is not None}}
    if isinstance(inner, dict) and runtime != "gguf":  # llama.cpp's converter flattens
        what = f"the sizes are inside transformer_layer_config, which {DIALECTS[runtime].title} does not read"
        found.add(FAILS, what, f"eyas export --to {runtime}")
    return {**_LLAMA_DEFAULTS, **(inner if isinstance(inner, dict) else {}), **config}


def _judge_architecture(kind: str, dialect: Dialect, seen: Mapping[str, object], found: Reading) -> None:
    wanted = dialect.architectures[kind]
    known = (wanted, *(dialect.accepts if kind == "eagle3" else ()))
    given = seen.get("architectures")
    name = given[0] if isinstance(given, list) and given else None
    if "*" not in known and name not in known:
        found.add(FAILS, f"architectures is {given}, which {dialect.title} does not know as an {kind} head",
                  f"write [{wanted!r}]")  # fmt: skip


def _judge_positions(dialect: Dialect, seen: Mapping[str, object], spec: TargetSpec, found: Reading) -> None:
    context, rope = seen["max_position_embeddings"], seen.get("rope_parameters") or seen.get("rope_scaling")
    if isinstance(context, int) and context < spec.max_length:
        what = f"max_position_embeddings is {context} and the target's {spec.max_length}: past {context} tokens the "
        what += "rotary table ends (garbage, or a crash)" if dialect.bounded else "rotary table of older releases ended"
        found.add(SILENT if dialect.bounded else NOTE, what, f"write {spec.max_length}")
    if "rope_theta" not in seen and not (isinstance(rope, dict) and "rope_theta" in rope):
        what = f"no rope_theta: the runtime takes 10000, and the target's is {spec.rope_theta:g}"
        found.add(NOTE, what, "write the one that the head was trained with")


def _renamed(kind: str, dialect: Dialect, tensors: Mapping[str, Tensor], found: Reading) -> dict[str, Tensor]:
    """The tensors by the names that eyas writes, those only that the runtime finds."""
    prefixed = [name for name in tensors if name.startswith("model.")]
    if prefixed and not dialect.strips_model:
        found.add(FAILS, f"names begin with 'model.' ({prefixed[0]}), and {dialect.title} puts that there itself",
                  "leave it out")  # fmt: skip
    layers = layer_count(name.removeprefix("model.") for name in tensors)
    named, idle = {}, []
    for full, tensor in tensors.items():
        name = full.removeprefix("model.")
        name = OTHER_NAMES.get(name, name) if dialect.old_names else name
        match = LAYER_NAME.fullmatch(name)
        if match:
            number, rest = int(match[1] or 0), match[2]
            if number and rest in ("input_layernorm.weight", "hidden_norm.weight"):
                if rest != f"{dialect.later_norm}.weight":
                    idle.append(full)
                    continue
                rest = "input_layernorm.weight"
            name = f"midlayer.{rest}" if kind == "eagle3" and layers == 1 else f"layers.{number}.{rest}"
        named[name] = tensor
    if idle:
        what = f"{', '.join(idle)}: {dialect.title} norms by {dialect.later_norm} there, which stays as initialised"
        found.add(SILENT, what, f"name it {dialect.later_norm}")
    return named


# -- the module that a config asks for ---------------------------------------------------------------------------------


def _number(seen: Mapping[str, object], key: str, found: Reading, default: object = None) -> float:
    value = seen.get(key) if seen.get(key) is not None else default
    if type(value) not in (int, float) or not 0 < value < 1e15:  # type: ignore[operator]
        found.add(FAILS, f"{key} is {value!r}", "write a positive number")
        return 1
    return float(value)  # type: ignore[arg-type]


def _block(dialect: Dialect, seen: Mapping[str, object], bias: bool, double: bool, found: Reading) -> BlockConfig:
    width = int(_number(seen, "hidden_size", found))
    heads = int(_number(seen, "num_attention_heads", found))
    kv_heads = int(_number(seen, "num_key_value_heads", found, heads))
    shared = width // heads
    head_dim = int(_number(seen, "head_dim", found, shared)) if dialect.split_head_dim else shared
    rope = seen.get("rope_parameters") or seen.get("rope_scaling")
    given = {**(rope if isinstance(rope, dict) else {}), **seen}
    return BlockConfig(
        width=width,
        attention_width=2 * width if double else width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=max(2, head_dim),
        ffn_width=int(_number(seen, "intermediate_size", found)),
        norm_eps=_number(seen, "rms_norm_eps", found),
        rope_theta=_number(given, "rope_theta", found, 10000.0),
        qkv_bias=bias,
    )


def _eagle(
    dialect: Dialect, seen: Mapping[str, object], named: Mapping[str, Tensor], target: Target, found: Reading
) -> Eagle | None:
    spec = target.spec
    _judge_layers(dialect, seen, layer_count(named), found)
    block = _block(dialect, seen, any(seen.get(key) for key in dialect.bias_keys), False, found)
    fc_bias = dialect.zero_fc_bias or ("eagle fc" in dialect.biases and bool(seen.get("bias", True)))
    if block.width != spec.width:
        found.add(
            FAILS, f"the head is {block.width} wide and the target {spec.width}", "none: it is for another target"
        )
    if found.fails:
        return None
    config = EagleConfig(block, (spec.num_layers,), spec.vocab_size, fc_bias)
    return Eagle(config, target.embedding_VD, target.head_VD)


def _judge_layers(dialect: Dialect, seen: Mapping[str, object], layers: int, found: Reading) -> None:
    told = seen["num_hidden_layers"]
    if dialect.believes_layers and told != layers:
        found.add(FAILS, f"num_hidden_layers is {told} and the tensors are of {layers}: the runtime builds {told}, and "
                  f"what has no tensor is left as it was initialised", f"write {layers}")  # fmt: skip
    elif layers > dialect.most_layers:
        found.add(
            FAILS, f"the head has {layers} decoder layers, the runtime's have {dialect.most_layers}", "another runtime"
        )


def _eagle3(
    dialect: Dialect, seen: Mapping[str, object], named: Mapping[str, Tensor], target: Target, found: Reading
) -> Eagle3 | None:
    layers, spec = layer_count(named), target.spec
    _judge_layers(dialect, seen, layers, found)
    bias = "qkv" in dialect.biases and bool(seen.get("attention_bias"))
    block = _block(dialect, seen, bias, True, found)
    reads, count = states_taken(dialect, seen, spec, found)
    target_width = int(_number(seen, "target_hidden_size", found, block.width))
    if target_width != spec.width:
        missing = "" if seen.get("target_hidden_size") else " (target_hidden_size is missing)"
        found.add(FAILS, f"it takes the target's states as {target_width} wide{missing}, and they are {spec.width}",
                  f"write target_hidden_size {spec.width}")  # fmt: skip
    if spec.family not in dialect.families:
        found.add(FAILS, f"it does not hand out the inner states of {spec.family} targets", "another runtime")
    if len(reads) != count:
        found.add(FAILS, f"the runtime hands out {len(reads)} states {list(reads)}, and its fc is made for {count}",
                  f"write num_aux_hidden_states {len(reads)}, and {len(reads)} layer ids")  # fmt: skip
    if dialect.skips_fc and count * target_width == block.width:
        found.add(
            FAILS, "the states together are as wide as the head, and the runtime then leaves fc out", "another runtime"
        )
    if dialect.ties and seen.get("tie_word_embeddings"):
        found.add(FAILS, "tie_word_embeddings is on: the runtime takes embed_tokens for lm_head", "write false")
    ids_Q, draft_size = _draft_vocabulary(dialect, seen, named, found)
    own = _keeps_rows(dialect, named, block.width, target_width, target.embedding_VD, found)
    taken = switches_taken(dialect, seen)
    if taken["fc_norm"] and taken["norm_before_fc"]:
        found.add(FAILS, "fc_norm and norm_before_fc are both on", "write one of them")
    if found.fails:
        return None
    config = Eagle3Config(
        block=block,
        reads=reads,
        target_width=target_width,
        vocab_size=spec.vocab_size,
        draft_vocab_size=draft_size,
        own_embedding=own,
        fc_bias="fc" in dialect.biases and bool(seen.get("bias")),
        layers=min(layers, MAX_LAYERS),
    )
    return Eagle3(replace(config, **taken), target.embedding_VD, target.head_VD, ids_Q)


def states_taken(
    dialect: Dialect, seen: Mapping[str, object], spec: TargetSpec, found: Reading
) -> tuple[tuple[int, ...], int]:
    """The states that the runtime hands out, and the number that its fc is made for."""
    nested = seen.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    inner, count = nested.get(AUX_IDS), seen.get("num_aux_hidden_states")
    num = count if isinstance(count, int) else len(inner) if isinstance(inner, list) and inner else 3
    num = num if dialect.states[0] != dialect.states[1] else dialect.states[0]
    for key, offset in dialect.ids:
        ids = inner if key == NESTED_IDS else seen.get(AUX_IDS)
        if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
            reads = tuple(sorted({i + offset for i in ids}))
            if min(reads) < 0 or max(reads) >= spec.num_layers:
                found.add(FAILS, f"{key} {ids} names what the target of {spec.num_layers} layers does not hand out",
                          "write those that the head was trained on, without the last layer")  # fmt: skip
            return reads, num
    usual = default_reads(max(3, spec.num_layers))
    if dialect.ids:
        wanted = " or ".join(key for key, _ in dialect.ids)
        found.add(NOTE, f"no layer ids where the runtime looks ({wanted}): it falls into the states {list(usual)}",
                  f"write {wanted}")  # fmt: skip
    return usual, 3 if dialect.ids_at_launch else num


def switches_taken(dialect: Dialect, seen: Mapping[str, object]) -> dict[str, bool]:
    """The switches as the runtime reads them; one that it does not know is off."""
    nested = seen.get("eagle_config")
    flat = {**seen, **{f"eagle_config.{k}": v for k, v in (nested if isinstance(nested, dict) else {}).items()}}
    taken = {}
    for switch in SWITCHES:
        keys = dialect.switch_keys.get(switch, (switch,))
        given = [bool(flat[key]) for key in keys if flat.get(key) is not None]
        default = dialect.switch_defaults.get(switch, False)
        taken[switch] = switch in dialect.switches and (given[0] if given else default)
    return taken


def _draft_vocabulary(
    dialect: Dialect, seen: Mapping[str, object], named: Mapping[str, Tensor], found: Reading
) -> tuple[Tensor | None, int]:
    """Target ids of the draft vocabulary, and its size, as the runtime takes them."""
    vocab_size = int(_number(seen, "vocab_size", found))
    told = seen.get("draft_vocab_size")
    if told is None and dialect.needs_draft_size:
        what = "is null: the target's output rows are used" if "draft_vocab_size" in seen else "is missing"
        found.add(FAILS, f"draft_vocab_size {what}", "write the number of rows of lm_head")
    size = int(_number(seen, "draft_vocab_size", found, vocab_size))
    rows = named.get("lm_head.weight")
    if told is None and rows is not None and [size] != list(rows.shape[:1]):
        found.add(FAILS, f"draft_vocab_size is missing and taken as {size}, lm_head has other rows", "write it")
    offsets = named.get("d2t")
    whole = size == vocab_size
    if offsets is None:
        if not whole:
            found.add(SILENT, f"no d2t: draft token i counts as token i, though the head has {size} of {vocab_size}",
                      "write d2t (distances)")  # fmt: skip
            return torch.arange(size, device="cpu"), size
        return None, size
    if whole and dialect.refuses_unknown and not dialect.permuted_vocabulary:
        found.add(FAILS, "d2t is in the file though the vocabularies are of one size, and has no place", "leave it out")
        return None, size
    if offsets.shape != (size,):
        found.add(FAILS, f"d2t has shape {list(offsets.shape)} and draft_vocab_size is {size}", "write them alike")
        return None, size
    ids_Q = torch.arange(size, device="cpu") + offsets.long()
    if int(ids_Q.min()) < 0 or int(ids_Q.max()) >= vocab_size or len(ids_Q.unique()) != size:
        absolute = " It seems to hold tokens, not distances" if len(offsets.unique()) == size else ""
        found.add(FAILS, f"d2t names tokens outside 0 to {vocab_size - 1} or one token twice.{absolute}",
                  "write token - draft token")  # fmt: skip
    return (None if whole and not offsets.any() else ids_Q), size


def _keeps_rows(
    dialect: Dialect,
    named: Mapping[str, Tensor],
    width: int,
    target_width: int,
    embedding_VD: Tensor,
    found: Reading,
) -> bool:
    """Does the runtime draft with an embedding of the head's own?"""
    rows = named.get("embed_tokens.weight")
    if rows is None:
        if width != embedding_VD.shape[1]:
            what = f"the head is {width} wide, the target's rows {embedding_VD.shape[1]}, and the file has none"
            found.add(FAILS, what, "write embed_tokens.weight")
        return False
    if width != target_width:
        return True
    if rows.shape == embedding_VD.shape and _unlike(rows.float(), embedding_VD.float()):
        found.add(SILENT, "embed_tokens.weight bears no likeness to the target's rows: was it ever trained?",
                  "leave it out")  # fmt: skip
    return dialect.narrow_rows


def _unlike(rows_VD: Tensor, target_VD: Tensor) -> bool:
    """Do rows point elsewhere than the target's? Random ones have a cosine near 0."""
    sample = torch.linspace(0, len(rows_VD) - 1, min(512, len(rows_VD)), device="cpu").long()
    return float(torch.cosine_similarity(rows_VD[sample], target_VD[sample], dim=-1).mean()) < 0.5


# -- the tensors -------------------------------------------------------------------------------------------------------


def _fill(head: Eagle | Eagle3, dialect: Dialect, named: Mapping[str, Tensor], found: Reading) -> None:
    """Load what fits; what is missing stays as a module is made, what has no place is judged."""
    names = official_names(head)
    own = {names[key]: key for key in head.state_dict()}
    apart = {"d2t", "t2d", "embed_tokens.weight"}
    if isinstance(head, Eagle):
        apart.add("lm_head.weight")  # the target's is used
    zero_bias = dialect.zero_output_bias
    idle = [
        name for name in sorted(named.keys() - own.keys() - apart)
        if not (zero_bias and name.endswith("o_proj.bias") and not named[name].any())
    ]  # fmt: skip
    if idle and dialect.refuses_unknown:
        found.add(FAILS, f"{', '.join(idle)}: the runtime has no place for them", "leave them out, or another runtime")
    elif idle:
        found.add(SILENT, f"{', '.join(idle)}: the runtime passes them over", "another runtime, or a head without them")
    state: dict[str, Tensor] = {}
    made, missing = head.state_dict(), []
    for name, key in own.items():
        tensor = named.get(name)
        if tensor is None:
            missing.append(name)
        elif tensor.shape != made[key].shape:
            what = f"{name} is {list(tensor.shape)}, by the config the runtime makes it {list(made[key].shape)}"
            found.add(FAILS, what, "make the config's sizes those of the tensors")
        else:
            state[key] = tensor.float().clone()  # in memory of its own, like any parameter
    if "lm_head.weight" in missing and isinstance(head, Eagle3) and made["lm_head.weight"].shape == head.head_VD.shape:
        missing.remove("lm_head.weight")
        state["lm_head.weight"] = head.head_VD  # shared
    if missing:
        found.add(SILENT, f"{', '.join(missing)}: not in the file, left as initialised (norms 1, the rest at random)",
                  "write them; zeros where the head has none")  # fmt: skip
    if not found.fails:
        head.load_state_dict(
            state | {own[name]: _initialised(name, made[own[name]].shape) for name in missing}, assign=True
        )


def _initialised(name: str, shape: torch.Size) -> Tensor:
    """A parameter as torch makes it, roughly: norms at one, the rest uniform within 1 / sqrt(width)."""
    if len(shape) == 1 and not name.endswith("bias"):
        return torch.ones(shape)
    return (2 * torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 1) * shape[-1] ** -0.5


def differences(ours: Eagle | Eagle3, theirs: Eagle | Eagle3) -> list[Finding]:
    """What the runtime drafts with otherwise than eyas: settings that came out differently."""
    found = []
    left, right = ({**asdict(h.config), **asdict(h.config.block)} for h in (ours, theirs))
    for key in left.keys() & right.keys() - _NO_DIFFERENCE:
        if left[key] != right[key]:
            what = f"{_WORDS.get(key, key)}: the runtime takes {_shown(right[key])}, the head is made for "
            fix = _FIXES.get(key, "write it where the runtime looks")
            found.append(Finding(SILENT, what + str(_shown(left[key])), fix))
    return sorted(found, key=lambda finding: finding.what)


# Settings of training or of decoding; and biases and rows, which the tensors' own findings tell of.
_NO_DIFFERENCE = {"block", "steps", "noise", "window", "own_embedding", "fc_bias", "qkv_bias"}
_WORDS = {"reads": "the states that the head reads", "norm_eps": "rms_norm_eps"}
_FIXES = {
    "reads": "write the layer ids in the runtime's own meaning (eyas export)",
    **{switch: "another runtime, or write the switch where it looks (eyas export)" for switch in SWITCHES},
}


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def without_window(head: Eagle | Eagle3) -> Eagle | Eagle3:
    """The head looking back over everything, as runtimes do."""
    block = replace(head.config.block, window=0)
    if isinstance(head, Eagle):
        other: Eagle | Eagle3 = Eagle(replace(head.config, block=block), head.embedding_VD, head.head_VD)
    else:
        other = Eagle3(replace(head.config, block=block), head.embedding_VD, head.head_VD, head.draft_vocabulary_Q)
    other.load_state_dict(head.state_dict())
    return other.eval()
