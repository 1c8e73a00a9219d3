"""OpenVINO for benchmarks/forward.py and benchmarks/peers.py: JSON lines in and out.

Run by an environment that has openvino-genai and not eyas: `python peer_openvino.py FOLDER THREADS`, where the folder
holds an IR (openvino_model.xml) with its tokenizers, as OpenVINO GenAI saves it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import openvino as ov


class Network:
    """The stateful model itself, for forwards of a given number of rows."""

    def __init__(self, folder: str, threads: int) -> None:
        core = ov.Core()
        compiled = core.compile_model(
            str(Path(folder) / "openvino_model.xml"), "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self.request = compiled.create_infer_request()
        self.names = {name for port in compiled.inputs for name in port.names}
        self.past = 0
        self.kept: list[np.ndarray] = []

    def open(self, tokens: list[int]) -> None:
        self.request.reset_state()
        self.infer(tokens)
        self.past = len(tokens)
        self.kept = [np.array(state.state.data) for state in self.request.query_state()]

    def infer(self, tokens: list[int]) -> float:
        inputs = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, self.past + len(tokens)), np.int64),
            "position_ids": np.arange(self.past, self.past + len(tokens), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        begun = time.perf_counter()
        self.request.infer({name: value for name, value in inputs.items() if name in self.names})
        return time.perf_counter() - begun

    def forward(self, tokens: list[int]) -> float:
        spent = self.infer(tokens)
        for state, kept in zip(self.request.query_state(), self.kept, strict=True):
            state.state = ov.Tensor(kept)
        return spent


def main() -> None:
    folder, threads = sys.argv[1], int(sys.argv[2])
    network = pipeline = None
    for line in sys.stdin:
        request = json.loads(line)
        tokens = request["tokens"]
        if request["do"] == "open":
            network = Network(folder, threads)
            network.open(tokens)
            reply = {"name": f"openvino {Path(folder).name}"}
        elif request["do"] == "forward":
            assert network is not None
            reply = {"seconds": network.forward(tokens)}
        else:
            pipeline = pipeline or make_pipeline(folder, threads)
            reply = generate(pipeline, tokens, request["max_new_tokens"], request["end"])
        print(json.dumps(reply), flush=True)


def make_pipeline(folder: str, threads: int) -> object:
    import openvino_genai

    return openvino_genai.LLMPipeline(folder, "CPU", INFERENCE_NUM_THREADS=threads)


def generate(pipeline: object, tokens: list[int], max_new_tokens: int, end: list[int]) -> dict[str, object]:
    """Greedy decoding, prompt included in the time."""
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.stop_token_ids = max_new_tokens, False, set(end)
    begun = time.perf_counter()
    result = pipeline.generate(ov.Tensor(np.array([tokens], np.int64)), config)
    return {"seconds": time.perf_counter() - begun, "new_tokens": len(result.tokens[0])}


if __name__ == "__main__":
    main()
