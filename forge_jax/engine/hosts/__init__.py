"""Several hosts that share one model: one process per host, and a connection to each from host 0.

- `messages.py`: messages between hosts, and the connection that carries them
- `group.py`: `HostGroup`, the meeting of the processes
- `follower.py`: the process of any other host, which performs the operations of host 0
- `service.py`: keeps a follower running
"""
