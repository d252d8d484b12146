"""What Ray's metrics endpoint on this node exports while something runs."""

import re
import threading
import time
import urllib.request
from types import TracebackType

import ray

from tests.conftest import REPORT_MS

_LOOK_S = 0.5


class Endpoint:
    """Gathers names and labels of our numbers, `ray_dspark_...`, and of Ray Data's, while its context is open.

    Ray forgets a gauge some seconds after its process, so one look at the end would miss those of the trainers.
    """

    def __init__(self) -> None:
        (node,) = ray.nodes()
        self.address = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
        self.found: dict[str, set[str]] = {}
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "Endpoint":
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        time.sleep(1.5 * REPORT_MS / 1000)  # for what this process itself has just shown
        self.closed.set()
        self.thread.join()

    def _follow(self) -> None:
        last = False
        while not last:
            last = self.closed.wait(_LOOK_S)
            try:
                with urllib.request.urlopen(self.address, timeout=30) as answer:
                    text = answer.read().decode()
            except OSError:  # a busy agent; the next look sees the same
                continue
            for name, labels in re.findall(r"^(ray_(?:dspark|data_current)\w*)\{([^}]*)\}", text, flags=re.MULTILINE):
                self.found.setdefault(name, set()).update(re.findall(r'(\w+="[^"]*")', labels))
