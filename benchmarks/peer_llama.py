"""llama.cpp (through llama-cpp-python) for benchmarks/forward.py and benchmarks/peers.py: JSON lines in and out.

Run by an environment that has llama-cpp-python and not eyas: `python peer_llama.py FILE.gguf THREADS`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import llama_cpp


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    model = llama_cpp.Llama(
        path, n_ctx=1024, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads, logits_all=False,
        verbose=False,
    )  # fmt: skip
    for line in sys.stdin:
        request = json.loads(line)
        tokens = request["tokens"]
        if request["do"] == "open":
            model.reset()
            model.eval(tokens)
            reply = {"name": f"llama.cpp {Path(path).stem.rpartition('.')[2]}"}
        elif request["do"] == "forward":
            reply = {"seconds": forward(model, tokens)}
        else:
            reply = generate(model, tokens, request["max_new_tokens"], request["end"])
        print(json.dumps(reply), flush=True)


def forward(model: llama_cpp.Llama, tokens: list[int]) -> float:
    """One batch whose every token yields logits, as verification needs them; forgotten afterwards."""
    past = model.n_tokens
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, past + i, 1, True
        batch.seq_id[i][0] = 0
    begun = time.perf_counter()
    code = llama_cpp.llama_decode(model.ctx, batch)
    llama_cpp.llama_synchronize(model.ctx)
    spent = time.perf_counter() - begun
    assert code == 0, code
    llama_cpp.llama_batch_free(batch)
    memory = llama_cpp.llama_get_memory(model.ctx)
    llama_cpp.llama_memory_seq_rm(memory, 0, past, -1)
    return spent


def generate(model: llama_cpp.Llama, tokens: list[int], max_new_tokens: int, end: list[int]) -> dict[str, object]:
    """Greedy decoding, prompt included in the time."""
    model.reset()
    answer: list[int] = []
    begun = time.perf_counter()
    for token in model.generate(tokens, temp=0.0, top_k=1, repeat_penalty=1.0):
        answer.append(int(token))
        if token in end or len(answer) == max_new_tokens:
            break
    return {"seconds": time.perf_counter() - begun, "new_tokens": len(answer)}


if __name__ == "__main__":
    main()
