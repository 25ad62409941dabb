"""Masks: which tokens a row may sample, a bit for each."""


def mask_width(vocab_size: int) -> int:
    """Words of 32 bits in the mask of a row: token t is bit t % 32 of word t // 32."""
    return -(-vocab_size // 32)
