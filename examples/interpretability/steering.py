"""Steer a model with the difference of two activations (Turner et al. 2023, arXiv:2308.10248)."""

import jax
from tokenizers import Tokenizer

import forge_jax

POINT = "layers.3.resid"

model = forge_jax.load("forge-tiny")
tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
happy, sad = (
    model(tokenizer.encode(text).ids, taps=POINT)[1][POINT][-1]
    for text in ("She was so happy", "She was so sad")
)
ids = tokenizer.encode("The girl felt very").ids
word, probabilities = tokenizer.token_to_id("Ġhappy"), list[float]()
for strength in (-4.0, 0.0, 4.0):
    logits = model(ids, edit={POINT: lambda x, s=strength: x + s * (happy - sad)})
    probabilities.append(float(jax.nn.softmax(logits[-1])[word]))
    print(f"strength {strength:+.0f}: probability of 'happy' {probabilities[-1]:.3%}")
