"""OpenAI's protocol: completions, chats, embeddings, tokenization and LoRA adapters."""
