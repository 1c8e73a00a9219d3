"""What each runtime reads of a head: one row a runtime, for writing (`exports`) and for judging (`readers`).

Facts from the sources of the versions named in the rows' titles. Refuses to know files and modules. A *state* is
numbered as in transformers' `hidden_states`: state i enters layer i, and leaves layer i - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from eyas.drafters.eagle3 import SWITCHES
from eyas.layouts import AUX_IDS

NESTED_IDS = f"eagle_config.{AUX_IDS}"
_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")

# Keys of a llama layer's config, with the name of the value that they take (`exports.values`).
_LAYER = {
    "model_type": "model_type", "hidden_size": "width", "intermediate_size": "ffn_width",
    "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "head_dim": "head_dim",
    "num_hidden_layers": "layers", "hidden_act": "act", "rms_norm_eps": "eps", "rope_theta": "rope_theta",
    "rope_scaling": "none", "max_position_embeddings": "context", "vocab_size": "vocabulary",
    "tie_word_embeddings": "no", "torch_dtype": "dtype",
}  # fmt: skip
_NATIVE = {"architectures": "architectures", **_LAYER}
_EAGLE3 = {**_NATIVE, "draft_vocab_size": "draft_vocabulary", "target_hidden_size": "target_width",
           "num_aux_hidden_states": "states"}  # fmt: skip
_SWITCHES = {switch: switch for switch in SWITCHES}
# The usual states under both keys make one folder for SGLang, vLLM, llama.cpp's converter and optimum-intel.
_BOTH_IDS = {AUX_IDS: "usual_entering", NESTED_IDS: "usual_leaving", "eagle_config.use_aux_hidden_state": "yes"}


@dataclass(frozen=True)
class Dialect:
    """A runtime's row."""

    title: str
    architectures: Mapping[str, str]  # of the kinds of head that it serves
    keys: Mapping[str, Mapping[str, str]]  # of config.json, by kind: path -> name of the value
    serve: str  # the command, of {target}, {head} and {ids} (layers that the states leave)
    families: tuple[str, ...] = _LLAMA_LIKE  # of targets whose inner states it hands out
    switches: tuple[str, ...] = ()  # that it knows
    biases: tuple[str, ...] = ()  # that it knows: "fc" (of EAGLE-3), "qkv" (of EAGLE-3), "eagle fc", "eagle qkv"
    most_layers: int = 1
    states: tuple[int, int] = (2, 5)  # least and most
    usual_states_only: bool = False
    embedding_state: bool = True  # state 0 is among them
    prefixes: tuple[str, str] = ("midlayer.", "layers.")  # of a single layer; of several, before their number
    later_norm: str = "input_layernorm"  # before the attention of a layer after the first
    zero_fc_bias: bool = False  # an EAGLE-1 head's fc has a bias in every case
    zero_output_bias: bool = False  # biases anywhere in its attention give o_proj one too
    split_head_dim: bool = True  # head_dim may differ from width / heads
    narrow_rows: bool = True  # a head as wide as its target may bring an embedding of its own
    permuted_vocabulary: bool = False  # a draft vocabulary may be a reordering of the whole vocabulary
    skips_fc: bool = True  # states that together are as wide as the head go around fc
    accepts: tuple[str, ...] = ()  # architectures of EAGLE-3 heads that its reader knows besides; "*": any
    refuses_unknown: bool = False  # a tensor without a place ends the loading; else it is passed over
    strips_model: bool = False  # names may begin with "model."
    old_names: bool = False  # it knows what other writers call some tensors
    believes_layers: bool = True  # it builds num_hidden_layers of them, whatever the tensors
    needs_draft_size: bool = False  # draft_vocab_size has no default
    ids_at_launch: bool = False  # the states are an argument of the server, not of the config
    bounded: bool = True  # its rotary table ends at max_position_embeddings
    ties: bool = False  # tie_word_embeddings puts the embedding in the place of lm_head
    bias_keys: tuple[str, ...] = ("attention_bias", "bias")  # any of them gives q, k and v biases
    # How its reader finds the states: keys in order with what is added to an id; else the usual ones.
    ids: tuple[tuple[str, int], ...] = ()
    # How its reader finds a switch, where that is not by its own key at the top: the first key that is there; else off.
    switch_keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    switch_defaults: Mapping[str, bool] = field(default_factory=dict)


DIALECTS: dict[str, Dialect] = {
    "sglang": Dialect(
        title="SGLang 0.5.23",
        architectures={"eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"},
        keys={
            "eagle": {**_NATIVE, "attention_bias": "qkv_bias"},
            "eagle3": {**_EAGLE3, **_SWITCHES, **_BOTH_IDS, NESTED_IDS: "leaving", "bias": "fc_bias"},
        },
        serve="python -m sglang.launch_server --model-path {target} --speculative-algorithm {method}"
        " --speculative-draft-model-path {head} --speculative-num-steps 3 --speculative-eagle-topk 1"
        " --speculative-num-draft-tokens 4{window}",
        families=(*_LLAMA_LIKE, "gemma3_text"),
        switches=("fc_norm", "norm_output", "norm_before_fc"),
        biases=("fc", "eagle fc", "eagle qkv"),
        most_layers=5,
        prefixes=("midlayer.", "layers."),
        later_norm="hidden_norm",
        zero_fc_bias=True,
        zero_output_bias=True,
        narrow_rows=False,
        permuted_vocabulary=True,
        strips_model=True,
        old_names=True,
        ties=True,
        needs_draft_size=True,
        ids=((NESTED_IDS, 1),),
        switch_keys={
            "fc_norm": ("fc_norm", "use_aux_norm"),
            "norm_before_fc": ("eagle_config.norm_before_fc", "norm_before_fc"),
        },
    ),
    "vllm": Dialect(
        title="vLLM 0.32",
        architectures={"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"},
        keys={
            "eagle": {**_NATIVE, "qkv_bias": "qkv_bias"},
            "eagle3": {**_EAGLE3, **_SWITCHES, **_BOTH_IDS, AUX_IDS: "entering", "attention_bias": "qkv_bias"},
        },
        serve="""vllm serve {target} --speculative-config '{{"method": "{vllm}", "model": "{head}", """
        """"num_speculative_tokens": 3}}'""",
        switches=SWITCHES,
        biases=("qkv", "eagle qkv"),
        most_layers=5,
        states=(1, 5),
        zero_output_bias=True,
        skips_fc=False,
        accepts=("LlamaForCausalLM", "Eagle3LlamaForCausalLM"),
        refuses_unknown=True,
        bounded=False,
        bias_keys=("qkv_bias", "attention_bias", "bias"),
        ids=((AUX_IDS, 0), (NESTED_IDS, 0)),
        switch_keys={"norm_before_fc": ("eagle_config.norm_before_fc", "norm_before_fc")},
    ),
    "speculators": Dialect(
        title="speculators 0.9, served by vLLM 0.32",
        architectures={"eagle3": "Eagle3DraftModel"},
        keys={
            "eagle3": {
                "architectures": "architectures", "speculators_model_type": "eagle3", "speculators_version": "version",
                "draft_vocab_size": "draft_vocabulary", "target_hidden_size": "other_target_width",
                "tie_word_embeddings": "no", "embed_requires_grad": "no", "torch_dtype": "dtype",
                AUX_IDS: "entering", **_SWITCHES,
                **{f"transformer_layer_config.{key}": value for key, value in _LAYER.items()},
                "transformer_layer_config.rope_parameters.rope_type": "default",
                "transformer_layer_config.rope_parameters.rope_theta": "rope_theta",
                "transformer_layer_config.num_aux_hidden_states": "states",
                "transformer_layer_config.attention_bias": "qkv_bias",
                "speculators_config.algorithm": "eagle3", "speculators_config.default_proposal_method": "greedy",
                "speculators_config.proposal_methods": "proposals",
                "speculators_config.verifier.name_or_path": "target",
                "speculators_config.verifier.architectures": "target_architectures",
            },
        },
        serve="""vllm serve {target} --speculative-config '{{"method": "eagle3", "model": "{head}", """
        """"num_speculative_tokens": 3}}'""",
        switches=SWITCHES,
        biases=("qkv",),
        most_layers=5,
        states=(1, 5),
        prefixes=("layers.0.", "layers."),
        zero_output_bias=True,
        skips_fc=False,
        accepts=("*",),
        refuses_unknown=True,
        bounded=False,
        ids=((AUX_IDS, 0),),
        switch_defaults={"norm_before_residual": True},
    ),
    "tensorrt-llm": Dialect(
        title="TensorRT-LLM, PyTorch back end, read in mid-2026 and not run",
        architectures={"eagle3": "EAGLE3LlamaForCausalLM"},
        keys={"eagle3": {**_EAGLE3, "bias": "fc_bias", "fc_norm": "fc_norm", "norm_output": "norm_output",
                         "eagle_config.norm_before_fc": "norm_before_fc",
                         "eagle_config.return_hidden_post_norm": "norm_output"}},  # fmt: skip
        serve="LLM({target!r}, speculative_config=Eagle3DecodingConfig(max_draft_len=3, "
        "speculative_model_dir={head!r}, eagle3_layers_to_capture={ids}))",
        families=(*_LLAMA_LIKE, "gemma3_text"),
        switches=("fc_norm", "norm_output", "norm_before_fc"),
        biases=("fc",),
        most_layers=5,
        prefixes=("midlayer.", "midlayer."),
        later_norm="hidden_norm",
        narrow_rows=False,
        ids_at_launch=True,
        switch_keys={
            "norm_output": ("norm_output", "eagle_config.return_hidden_post_norm"),
            "norm_before_fc": ("eagle_config.norm_before_fc",),
        },
    ),
    "eagle": Dialect(
        title="the official code, commit cb7e084",
        architectures={"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLM"},
        keys={
            "eagle": {**_NATIVE, "bias": "fc_bias", "qkv_bias": "qkv_bias"},
            "eagle3": {**_NATIVE, "draft_vocab_size": "draft_vocabulary", "target_hidden_size": "other_target_width"},
        },
        serve="EaModel.from_pretrained(base_model_path={target!r}, ea_model_path={head!r}, use_eagle3={eagle3})",
        families=("llama", "qwen3"),
        biases=("eagle fc", "eagle qkv"),
        states=(3, 3),
        usual_states_only=True,
        accepts=("*",),
        believes_layers=False,
        needs_draft_size=True,
        bias_keys=("qkv_bias",),
        split_head_dim=False,
        narrow_rows=False,
    ),
    "gguf": Dialect(
        title="llama.cpp of llama-cpp-python 0.3.36",
        architectures={"eagle3": "eagle3"},
        keys={},
        serve="llama-server -m {target} -md {head} --spec-type draft-eagle3 --spec-draft-n-max 3 -np 1",
        families=("llama", "mistral", "qwen3"),
        switches=("norm_before_residual", "norm_before_fc"),
        states=(3, 3),
        permuted_vocabulary=True,
        skips_fc=False,
        accepts=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
        refuses_unknown=True,
        bounded=False,
        strips_model=True,
        needs_draft_size=True,
        ids=((AUX_IDS, 0),),
    ),
    "openvino": Dialect(  # IR: the graph is written, and no reader of a folder is left to judge
        title="OpenVINO GenAI 2026.4.1",
        architectures={"eagle3": "eagle3"},
        keys={},
        serve="LLMPipeline(TARGET, 'CPU', draft_model=draft_model({head!r}, 'CPU')).generate(PROMPT, "
        "num_assistant_tokens=3), where TARGET is what this writes: optimum-cli export openvino -m {target} --task "
        "text-generation-with-past TARGET",
        switches=("norm_before_residual",),
        biases=("qkv",),
        most_layers=5,
        states=(3, 3),
        embedding_state=False,
        permuted_vocabulary=True,
        skips_fc=False,
    ),
}  # fmt: skip
