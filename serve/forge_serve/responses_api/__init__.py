"""OpenAI's Responses API on top of chats: items, events, storage and WebSocket mode."""
