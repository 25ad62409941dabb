"""`python -m training.forge_tiny`: corpus, tokenizer, train, export and check, in one command."""

import argparse
import os
import sys
from itertools import islice
from pathlib import Path

from flax import nnx
from tokenizers import Tokenizer

from . import corpus
from .check import check
from .export import export
from .model import ModelConfig
from .tokenizer import encode, train_tokenizer
from .train import Progress, Rows, TrainConfig, pack, train

CACHE = Path(__file__).parent / ".cache"
BUNDLED = Path(__file__).parents[2] / "forge_jax" / "bundled" / "forge-tiny"
TOKENIZER_DOCUMENTS = 60_000
# The buffers of a step, some hundred MB, are allocated anew each time: huge pages make training
# 1.4 times as fast.
MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=100000000000"


def prepare_tokenizer(config: ModelConfig, seed: int) -> Tokenizer:
    path = CACHE / "tokenizer.json"
    if not path.exists():
        documents = corpus.documents(seed, TOKENIZER_DOCUMENTS)
        texts = (content for document in documents for _, content in document.turns)
        train_tokenizer(texts, config.vocab_size).save(str(path))
    return Tokenizer.from_file(str(path))


def prepare_rows(tokenizer: Tokenizer, config: TrainConfig, count: int) -> Rows:
    path = CACHE / "rows.npz"
    if not path.exists():
        encoded = encode(tokenizer, corpus.documents(config.seed, count))
        fitting = (pair for pair in encoded if len(pair[0]) <= config.row_length)
        pack(fitting, config.row_length).save(path)
    return Rows.load(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.forge_tiny", description=__doc__)
    parser.add_argument("--minutes", type=float, default=TrainConfig.minutes, help="time to train")
    parser.add_argument("--documents", type=int, default=450_000, help="size of the corpus")
    parser.add_argument("--seed", type=int, default=TrainConfig.seed)
    parser.add_argument("--out", type=Path, default=BUNDLED, help="the folder to export to")
    parser.add_argument("--show", type=int, metavar="N", help="print N documents and stop")
    args = parser.parse_args()
    if args.show:
        for document in islice(corpus.documents(args.seed, args.show), args.show):
            print(
                *(f"<{role}> {content}" for role, content in document.turns), sep="\n", end="\n\n"
            )
        return
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = MALLOC
        os.execv(sys.executable, [sys.executable, "-m", "training.forge_tiny", *sys.argv[1:]])

    CACHE.mkdir(exist_ok=True)
    model_config, config = ModelConfig(), TrainConfig(minutes=args.minutes, seed=args.seed)
    tokenizer = prepare_tokenizer(model_config, args.seed)
    rows = prepare_rows(tokenizer, config, args.documents)

    def on_checkpoint(state: nnx.State, progress: Progress) -> None:
        export(args.out, model_config, tokenizer, state)
        check(args.out)

    train(model_config, config, rows, CACHE / "checkpoint.npz", on_checkpoint)


if __name__ == "__main__":
    main()
