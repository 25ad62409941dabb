"""Learn embeddings that make a text likely (prompt tuning, Lester et al. 2021)."""

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

import forge_jax

model = forge_jax.load("forge-tiny", dtype="float32")
tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
target = jnp.array(tokenizer.encode(" The dragon ate the cake.", add_special_tokens=False).ids)


def loss(prompt: jax.Array, model: forge_jax.LoadedModel) -> jax.Array:
    logits = model(inputs_embeds=jnp.concatenate([prompt, model.embed(target)]))
    log_probs = jax.nn.log_softmax(logits[len(prompt) - 1 : -1])
    return -jnp.take_along_axis(log_probs, target[:, None], axis=1).mean()


step = jax.jit(jax.value_and_grad(loss))
prompt, losses = model.embed([1, 5, 6, 7]), list[float]()
for _ in range(40):
    value, gradient = step(prompt, model)
    prompt, losses = prompt - 0.1 * gradient, [*losses, float(value)]
print(f"loss {losses[0]:.2f}, after {len(losses)} steps {losses[-1]:.2f}")
