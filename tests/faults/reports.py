"""Figures of a run: printed, and kept where `ROPEWAY_RESULTS` says."""

import json
import os
from pathlib import Path
from typing import Any


def publish(name: str, report: dict[str, Any]) -> None:
    load = [round(value, 2) for value in os.getloadavg()]
    document = {"report": name, "load_average": load, "processors": os.cpu_count(), **report}
    print(json.dumps(document, indent=1))
    if directory := os.environ.get("ROPEWAY_RESULTS"):
        path = Path(directory) / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1))
