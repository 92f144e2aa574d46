"""The API of `tinker` clients: unmodified SDK and recipes run against this service.

    client ─► `door.py` (whose it is) ─► body: `bodies.py` (JSON) or `passes.py` (protobuf)
                                             │
       sessions ─► store     training ─► `loop/runs.py`     sampling ─► `loop/samplers.py`
                                             │                    │
                       `futures.py` ◄────────┴────────────────────┘   long polls

| module | routes |
|---|---|
| `sessions.py` | what clients are told, that they are there, how they ended |
| `training.py` | runs and their operations |
| `sampling.py` | samplers and what they are asked |
| `futures.py` | what came of it |
| `records.py` | runs and checkpoints, looked at, published, deleted, copied |
| `downloads.py` | adapters taken away |
| `refused.py` | what this service has not, and what to do instead |

- Facts of the protocol: the SDK itself, 0.38; `docs/tinker.md` says what differs.
- Every id in a body or a path is looked up under the caller's tenant; another's looks like nothing.
- Nothing slow runs on the event loop: protobuf of megabytes goes to threads, files too.
"""
