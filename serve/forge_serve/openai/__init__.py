"""OpenAI's protocol: completions, chat, embeddings, tokens and LoRA adapters."""
