"""OpenAI's Responses API, translated to chats: items, events, storage and WebSocket mode."""
