"""Run a model on the prompts of a data set with Ray Data, with one engine per actor.

    python examples/ray_batch.py IN.jsonl OUT [MODEL] [ACTORS]

Each line of IN has a `prompt` and optional other fields. OUT is a folder of files whose lines also
have `output` and `finish_reason`.
"""

import sys


def main(source: str, out: str, model: str = "forge-tiny", actors: str = "1") -> None:
    import ray  # pyright: ignore[reportMissingImports]

    from forge_jax import SamplingParams
    from forge_serve.integrations.ray import generate

    ray.init(ignore_reinit_error=True)
    params = SamplingParams(temperature=0, max_tokens=128)
    rows = ray.data.read_json(source)
    generate(rows, model, params, num_actors=int(actors)).write_json(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
