"""`python -m training.forge_tiny`: corpus, tokenizer, train, export and check, in one command.

The draft model (`--draft`) is trained on the same corpus, with the bundled model's tokenizer.
"""

import argparse
import os
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

from flax import nnx
from tokenizers import Tokenizer

from . import BUNDLED, DRAFT, corpus
from .check import check
from .export import export
from .model import DRAFT_MODEL, ModelConfig
from .tokenizer import encode, train_tokenizer
from .train import Progress, Rows, TrainConfig, pack, train

CACHE = Path(__file__).parent / ".cache"
DRAFT_TRAINING = TrainConfig(minutes=18.0, peak_rate=6e-3, checkpoint_minutes=2.0)
TOKENIZER_DOCUMENTS = 60_000
# Each step allocates some hundred MB of buffers. Huge pages make training 1.4 times as fast.
MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=100000000000"


def prepare_tokenizer(config: ModelConfig, seed: int) -> Tokenizer:
    path = CACHE / "tokenizer.json"
    if not path.exists():
        documents = corpus.documents(seed, TOKENIZER_DOCUMENTS)
        texts = (content for document in documents for _, content in document.turns)
        train_tokenizer(texts, config.vocab_size).save(str(path))
    return Tokenizer.from_file(str(path))


def prepare_rows(path: Path, tokenizer: Tokenizer, config: TrainConfig, count: int) -> Rows:
    if not path.exists():
        encoded = encode(tokenizer, corpus.documents(config.seed, count))
        fitting = (pair for pair in encoded if len(pair[0]) <= config.row_length)
        pack(fitting, config.row_length).save(path)
    return Rows.load(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.forge_tiny", description=__doc__)
    parser.add_argument("--draft", action="store_true", help="train the draft model instead")
    parser.add_argument(
        "--minutes",
        type=float,
        help="minutes to train "
        f"(default: {TrainConfig.minutes:g}, draft {DRAFT_TRAINING.minutes:g})",
    )
    parser.add_argument(
        "--documents", type=int, help="documents in the corpus (default: 450000, draft 150000)"
    )
    parser.add_argument("--seed", type=int, default=TrainConfig.seed)
    parser.add_argument("--out", type=Path, help="the folder to export to (default: the model's)")
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
    if args.draft:
        train_draft(args)
    else:
        train_bundled(args)


def train_bundled(args: argparse.Namespace) -> None:
    config = TrainConfig(minutes=args.minutes or TrainConfig.minutes, seed=args.seed)
    out = args.out or BUNDLED
    tokenizer = prepare_tokenizer(ModelConfig(), args.seed)
    rows = prepare_rows(CACHE / "rows.npz", tokenizer, config, args.documents or 450_000)

    def on_checkpoint(state: nnx.State, progress: Progress) -> None:
        export(out, ModelConfig(), tokenizer, state)
        check(out)

    train(ModelConfig(), config, rows, CACHE / "checkpoint.npz", on_checkpoint)


def train_draft(args: argparse.Namespace) -> None:
    minutes = args.minutes or DRAFT_TRAINING.minutes
    config = replace(DRAFT_TRAINING, minutes=minutes, seed=args.seed)
    out = args.out or DRAFT
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    rows = prepare_rows(CACHE / "draft-rows.npz", tokenizer, config, args.documents or 150_000)

    def on_checkpoint(state: nnx.State, progress: Progress) -> None:
        export(out, DRAFT_MODEL, tokenizer, state, drafts=True)

    train(DRAFT_MODEL, config, rows, CACHE / "draft-checkpoint.npz", on_checkpoint)


if __name__ == "__main__":
    main()
