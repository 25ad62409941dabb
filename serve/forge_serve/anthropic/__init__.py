"""Anthropic's Messages API, implemented on top of chats."""
