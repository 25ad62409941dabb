"""Print the most likely next token after each layer (logit lens, nostalgebraist 2020)."""

from tokenizers import Tokenizer

import forge_jax

model = forge_jax.load("forge-tiny")
tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
_, taps = model(tokenizer.encode("Once upon a time").ids, taps=["embed", "layers.*.resid"])
tokens: list[str] = []
for point, resid in taps.items():
    best = int(model.unembed(resid[-1]).argmax())
    tokens.append(tokenizer.decode([best], skip_special_tokens=False))
    print(f"{point:16} {tokens[-1]!r}")
