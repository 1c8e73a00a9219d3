"""OpenVINO GenAI for benchmarks/consumers.py: one JSON object in, one out.

Run by an environment that has openvino-genai and not eyas: `python consumer_openvino.py THREADS`. Target and head are
folders of IR. Answers every prompt greedily, without a head and with it.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import openvino as ov
import openvino_genai


def main() -> None:
    request, threads = json.loads(sys.stdin.read()), int(sys.argv[1])
    found: dict[str, object] = {"version": f"OpenVINO GenAI {openvino_genai.__version__}"}
    # in float32, where this CPU would choose bfloat16
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    for way in ("plain", "drafted"):
        more = {}
        if way == "drafted":
            more["draft_model"] = openvino_genai.draft_model(request["head"], "CPU", **settings)
        pipeline = openvino_genai.LLMPipeline(request["target"], "CPU", **more, **settings)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = request["max_new_tokens"], False
        config.stop_token_ids = set(request["end"])
        if way == "drafted":
            config.num_assistant_tokens = request["chain"]
        answers, accepted = [], 0
        for tokens in request["prompts"]:
            result = pipeline.generate(ov.Tensor(np.array([tokens], np.int64)), config)
            answers.append([int(token) for token in result.tokens[0]])
            if way == "drafted":
                accepted += int(result.extended_perf_metrics.get_num_accepted_tokens())
        found[way] = answers
        if way == "drafted":
            # each round gives one token of the target's own beside those accepted; the prompt's forward gives one too
            found["accepted"] = accepted
            found["rounds"] = sum(len(answer) - 1 for answer in answers) - accepted
        del pipeline
    print(json.dumps(found))


if __name__ == "__main__":
    main()
