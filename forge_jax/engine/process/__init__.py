"""The engine in a process of its own, and its supervisor: a crash is a pause.

`client` is the engine that the server uses. Its parts: `journal` keeps accepted requests and their
tokens, `supervisor` keeps a process running, with `launcher`, `connection`, `watchdog` (when a
process counts as frozen) and `backoff` (how long to wait before a launch), and `calls` awaits
answers. `worker` is the process, `messages` the protocol between the two.
"""
