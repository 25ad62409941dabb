"""The engine in a separate process, and its supervisor. A crash pauses streams but ends none.

The server uses the engine in `client`, which has these parts. `journal` keeps accepted requests and
their tokens. `supervisor` keeps a process running, using `launcher`, `connection`, `watchdog` (when
a process counts as frozen) and `backoff` (the pause before a launch). `calls` matches calls of the
process with its answers. `worker` is the process, and `messages` the protocol.
"""
