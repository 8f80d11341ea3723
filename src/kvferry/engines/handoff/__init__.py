"""Prefill in one process, decode in another: two child processes that share nothing but a socket.

`run_handoff` does it once, measures it and judges it against the run that was never shipped; a `Session` does it again
and again with the same two processes.
"""

from kvferry.engines.handoff.job import HandoffJob
from kvferry.engines.handoff.result import HandoffResult
from kvferry.engines.handoff.run import Session, run_handoff

__all__ = ["HandoffJob", "HandoffResult", "Session", "run_handoff"]
