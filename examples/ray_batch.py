"""Run a model on the prompts of a data set with Ray Data, with one engine per actor.

    python examples/ray_batch.py IN.jsonl OUT [MODEL] [ACTORS]

Each line of IN has a `prompt` and optional other fields. OUT is a folder of files whose lines also
have `output` and `finish_reason`. Each actor uses one GPU if there is any.
"""

import sys
from typing import Any

import numpy as np

MAX_TOKENS = 128
BATCH_SIZE = 256  # rows per call; the engine batches as many of them as fit


class Generate:
    """Generator with its own engine. Ray creates one per actor.

    Args:
      model: the model, as for `LLM`.
      max_tokens: maximum number of output tokens.
      options: options of `LLM`.
    """

    def __init__(self, model: str = "forge-tiny", max_tokens: int = MAX_TOKENS, **options: Any):
        from forge_jax import LLM, SamplingParams

        self._llm = LLM(model, **options)
        self._params = SamplingParams(temperature=0, max_tokens=max_tokens)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Add the columns `output` and `finish_reason`, of shape (rows,), to a batch."""
        prompts = [str(prompt) for prompt in batch["prompt"]]
        outputs = self._llm.generate(prompts, self._params, progress=False)
        batch["output"] = np.array([output.text for output in outputs], dtype=object)
        reasons = [output.outputs[0].finish_reason for output in outputs]
        batch["finish_reason"] = np.array(reasons, dtype=object)
        return batch


def main(source: str, out: str, model: str = "forge-tiny", actors: str = "1") -> None:
    import ray  # pyright: ignore[reportMissingImports]

    ray.init(ignore_reinit_error=True)
    num_gpus = 1 if ray.cluster_resources().get("GPU") else 0
    rows = ray.data.read_json(source)
    answered = rows.map_batches(
        Generate,
        fn_constructor_kwargs={"model": model},
        batch_size=BATCH_SIZE,
        num_gpus=num_gpus,
        compute=ray.data.ActorPoolStrategy(size=int(actors)),
    )
    answered.write_json(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
