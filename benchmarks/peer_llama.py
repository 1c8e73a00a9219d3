"""llama.cpp (through llama-cpp-python) for benchmarks/forward.py and benchmarks/peers.py: JSON lines in and out.

Run by an environment that has llama-cpp-python and not eyas: `python peer_llama.py FILE.gguf THREADS`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np


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
    """Greedy decoding straight on llama.cpp's own calls, without the binding's sampler; the prompt is in the time."""
    model.reset()
    size = model.n_vocab()
    answer: list[int] = []
    begun = time.perf_counter()
    model.eval(tokens)
    batch = llama_cpp.llama_batch_init(1, 0, 1)
    batch.n_tokens, batch.n_seq_id[0], batch.logits[0] = 1, 1, True
    batch.seq_id[0][0] = 0
    while True:
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), shape=(size,))
        answer.append(int(logits.argmax()))
        if answer[-1] in end or len(answer) == max_new_tokens:
            break
        batch.token[0], batch.pos[0] = answer[-1], len(tokens) + len(answer) - 1
        assert llama_cpp.llama_decode(model.ctx, batch) == 0
    llama_cpp.llama_batch_free(batch)
    return {"seconds": time.perf_counter() - begun, "new_tokens": len(answer)}


if __name__ == "__main__":
    main()
