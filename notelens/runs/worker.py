"""A worker process of a sweep: ``python -m notelens.runs.worker [MODULE...]``. Jobs come in as lines, events go out as lines.

It ends with its parent: when its standard input closes, whatever it is doing. Every record is whole on disk at any moment.
"""

import importlib
import json
import os
import queue
import signal
import sys
import threading

from notelens.runs.cell import Job, OneModel, run_cell
from notelens.runs.launcher import Event, Reporter, as_json


def main() -> None:
    """Run jobs until standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no event

    def emit(event: Event) -> None:
        out.write(as_json(event))
        out.flush()

    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    for module in sys.argv[1:]:
        importlib.import_module(module)
    loader = OneModel()
    while True:
        job = Job(**json.loads(jobs.get()))
        outcome = run_cell(job, Reporter(job.key, emit), loader)
        emit(Event(job.key, "done", outcome=outcome))


if __name__ == "__main__":
    main()
