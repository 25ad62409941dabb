"""Find the layers that carry a word: patch its activation from one prompt into another."""

from tokenizers import Tokenizer

import forge_jax

model = forge_jax.load("forge-tiny")
tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
clean = tokenizer.encode("The girl was very sad.").ids
corrupted = tokenizer.encode("The boy was very sad.").ids
word = 2  # the position of "girl" and "boy"
she, he = tokenizer.token_to_id("ĠShe"), tokenizer.token_to_id("ĠHe")

_, source = model(clean, taps="layers.*.resid")
effects: list[float] = []
for point, resid in source.items():
    edit = {point: lambda x, resid=resid: x.at[word].set(resid[word])}
    logits = model(corrupted, edit=edit)[-1]
    effects.append(float(logits[she] - logits[he]))
    print(f"{point:16} logit of She - He: {effects[-1]:+.2f}")
