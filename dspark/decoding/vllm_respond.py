"""Answers by vLLM, where it is installed: the same requests as the engine takes, drawn by vLLM's own numbers."""

from collections.abc import Sequence

from dspark.data.dialogue import Finish
from dspark.decoding.answers import Respond, seed_of
from dspark.decoding.engine import Request
from dspark.errors import InputError
from dspark.sections import TargetSettings
from dspark.target_files import resolve

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def vllm_respond(target: TargetSettings, max_length: int, devices: int) -> Respond:
    """Loads the target into vLLM on `devices` GPUs of this process.

    Raises:
        InputError: vLLM is not installed here.
    """
    try:
        import vllm
    except ImportError:
        raise InputError(
            "prepare.via=vllm: vLLM is not installed on the node that answers; install it there, or set "
            "prepare.via=actors, or serve the target elsewhere and set prepare.via=endpoint"
        ) from None
    engine = vllm.LLM(
        model=str(resolve(target)),
        dtype=_DTYPES[target.dtype],
        max_model_len=max_length,
        tensor_parallel_size=devices,
    )

    def respond(requests: Sequence[Request]) -> list[tuple[Sequence[int], Finish]]:
        rules = [
            vllm.SamplingParams(
                temperature=request.sampling.temperature,
                top_p=request.sampling.top_p,
                top_k=request.sampling.top_k or -1,
                min_p=request.sampling.min_p,
                max_tokens=min(request.max_new_tokens, max_length - len(request.prompt)),
                seed=seed_of(request.sampling, request.id),
                detokenize=False,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        found = [result.outputs[0] for result in engine.generate(prompts, rules, use_tqdm=False)]
        return [(one.token_ids, "length" if one.finish_reason == "length" else "stop") for one in found]

    return respond
