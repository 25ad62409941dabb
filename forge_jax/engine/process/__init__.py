"""The engine in a process of its own, and what restarts it: a crash is a pause.

`messages` are what the two processes say to each other, `worker` is the process, `client` the
engine that others see: it keeps all that was accepted and all that was put out, starts the process
again when it dies, and has it go on where it was.
"""
