"""Lines of the blocks for a shell that are not run: those that nobody types, and those that need another machine."""

import re
from typing import NamedTuple

from tests.reference.pages import REPOSITORY
from tests.reference.written import Line


class NotRun(NamedTuple):
    """Commands that match from their beginning are left out."""

    pattern: str
    reason: str
    covered_by: str
    """A test (`tests/FILE.py::NAME`) or `make TARGET` that tries the same, by whatever means there are."""


NOT_RUN = (
    NotRun(r"vllm serve ", "vLLM is installed in an environment of its own", "make test-vllm"),
    NotRun(
        r"python -m sglang\.launch_server ",
        "SGLang has no build for this machine",
        "tests/gateway/fleet/engines/test_sglang.py",
    ),
    NotRun(
        r"--enable-hierarchical-cache ",
        "flags of SGLang's server, which has no build for this machine",
        "tests/workers/sglang/test_published_interface.py::test_sglang_makes_one_by_name",
    ),
    NotRun(r"podman (build|run) ", "the base image is in a registry, and podman is not everywhere", "make test-deploy"),
    NotRun(
        r"docker compose ", "images come from registries", "tests/deploy/test_files.py::test_the_compose_file_is_valid"
    ),
    NotRun(r"kubectl ", "there is no cluster", "tests/deploy/test_chart.py::test_objects_are_valid"),
    NotRun(r"helm install ", "there is no cluster", "tests/deploy/test_chart.py::test_objects_are_valid"),
    NotRun(
        r"pip install ",
        "the environment that runs the tests is not changed",
        "tests/architecture/test_arrows.py::test_what_is_imported_is_declared",
    ),
    NotRun(r"make test-faults", "a suite", "make test-faults"),
    NotRun(r"ROPEWAY_CHAOS_\w+=.* pytest -m faults ", "a suite", "make test-faults"),
    NotRun(
        r"ROPEWAY_SHARED=.* python tests/bench/bench_policy_tables\.py ",
        "replays of public traces, hours of them; what it calls is tried on some",
        "make test-traces",
    ),
)

NOT_TYPED = (
    r"examples?:$",
    r"(x-ropeway-[a-z]+): ",
    r"client (─►|◄─)|[│├]",
    r"\{\"whole\": false,|\"(status|workers|samples)\": ",
    r"(first sight|second|up to eight|in a prompt)$|in the cache$|place of passages' own KV",
    r"(one leg|two legs)$|what is left of w_D$",
    r"(computing|pulling|load)$",
    r"cost = wait |price = Lq|\+ (lam|least) ",
    r"llama-3-70b-tp8: |ms to the first token |computing$|out of, over, as$|compute$|memory [a-z0-9-]+ raw$",
    r"\d\d:\d\d:\d\d chaos, seed ",
    r"(Exit codes: |Flags win over |Running gateways follow |Requests that have begun |vLLM binds endpoints )",
    r"(Lines hold the payload |Ctrl-C ends it\.$)",
)
"""Headings, answers and formulas, by how they begin."""


def not_run(line: Line) -> NotRun | None:
    return next((row for row in NOT_RUN if re.match(row.pattern, line.text)), None)


def is_typed(line: Line) -> bool:
    return not any(re.match(pattern, line.text) for pattern in NOT_TYPED)


def exists(covered_by: str) -> bool:
    """Whether there is such a target, or such a test."""
    if covered_by.startswith("make "):
        return re.search(rf"^{covered_by[5:]}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE) is not None
    path, _, name = covered_by.partition("::")
    file = REPOSITORY / path
    return file.is_file() and (
        not name or re.search(rf"^(async )?def {name}\(", file.read_text(), re.MULTILINE) is not None
    )
